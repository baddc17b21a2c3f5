"use strict";
(() => {
  const all = (query, root = document) => [...root.querySelectorAll(query)];
  const data = (id) => {
    const element = document.getElementById(id);
    return element ? JSON.parse(element.textContent) : null;
  };
  const figures = (value) => {
    if (value === null || value === undefined) return "–";
    if (typeof value !== "number") return String(value);
    if (value === 0 || Number.isInteger(value)) return String(value);
    const size = Math.abs(value);
    return size >= 1e-3 && size < 1e4 ? String(Number(value.toPrecision(4))) : Number(value.toPrecision(3)).toExponential();
  };

  // Light and dark: the system's choice until the button is used.
  const root = document.documentElement;
  document.getElementById("theme").addEventListener("click", () => {
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme:dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
  });

  // Tips, for the mouse and for the keyboard.
  const tip = document.getElementById("tip");
  const show = (element, x, y) => {
    tip.textContent = element.dataset.tip;
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    tip.style.left = `${Math.max(8, Math.min(x + 14, innerWidth - box.width - 8))}px`;
    tip.style.top = `${y + 18 + box.height > innerHeight ? y - box.height - 12 : y + 18}px`;
  };
  document.addEventListener("mousemove", (event) => {
    const element = event.target.closest("[data-tip]");
    if (element) show(element, event.clientX, event.clientY);
    else tip.hidden = true;
  });
  document.addEventListener("focusin", (event) => {
    const element = event.target.closest("[data-tip]");
    if (!element) return;
    const box = element.getBoundingClientRect();
    show(element, box.left + box.width / 2, box.top + box.height / 2);
  });
  document.addEventListener("focusout", () => { tip.hidden = true; });

  // A table that keeps only the rows in view in the page.
  const HEIGHT = 30;
  class Grid {
    constructor(element) {
      this.element = element;
      this.columns = JSON.parse(element.dataset.columns);
      const packed = data(element.dataset.rows);
      this.rows = packed.rows.map((row) =>
        Object.fromEntries(packed.columns.map((name, i) => [name, packed.texts[name] ? packed.texts[name][row[i]] ?? null : row[i]])));
      this.box = element.querySelector(".grid");
      this.body = element.querySelector("tbody");
      this.status = element.querySelector(".status");
      this.search = element.querySelector("input[type=search]");
      this.filter = null;
      this.order = null;
      this.box.addEventListener("scroll", () => this.draw());
      this.search.addEventListener("input", () => this.choose());
      element.querySelector(".clear").addEventListener("click", () => { this.search.value = ""; this.only(null); });
      all("thead button", element).forEach((button, i) => button.addEventListener("click", () => this.sort(i, button)));
      this.choose();
    }
    only(filter) {
      this.filter = filter;
      this.choose();
    }
    sort(i, button) {
      const name = this.columns[i].name;
      this.order = { name, down: this.order && this.order.name === name ? !this.order.down : false };
      all("th", this.element).forEach((cell) => cell.removeAttribute("aria-sort"));
      button.parentElement.setAttribute("aria-sort", this.order.down ? "descending" : "ascending");
      this.choose();
    }
    choose() {
      const words = this.search.value.trim().toLowerCase();
      const wanted = Object.entries(this.filter || {}).filter(([name]) => this.rows.length && name in this.rows[0]);
      this.shown = this.rows.filter((row) =>
        wanted.every(([name, value]) => (name === "circuit" ? row.circuit !== null : row[name] === value)) &&
        (!words || this.columns.some(({ name }) => figures(row[name]).toLowerCase().includes(words))));
      if (this.order) {
        const { name, down } = this.order;
        const side = down ? -1 : 1;
        this.shown.sort((a, b) => {
          const x = a[name], y = b[name];
          if (x === y) return 0;
          if (x === null) return 1;
          if (y === null) return -1;
          return x < y ? -side : side;
        });
      }
      const chosen = wanted.map(([name, value]) => `${name} ${value}`).join(", ");
      this.status.textContent =
        `${this.shown.length.toLocaleString("en")} of ${this.rows.length.toLocaleString("en")} rows${chosen ? `: ${chosen}` : ""}`;
      this.box.scrollTop = 0;
      this.draw();
    }
    draw() {
      const first = Math.max(0, Math.floor(this.box.scrollTop / HEIGHT) - 8);
      const last = Math.min(this.shown.length, first + Math.ceil(this.box.clientHeight / HEIGHT) + 24);
      const space = (count) => {
        const row = document.createElement("tr");
        const cell = document.createElement("td");
        cell.colSpan = this.columns.length;
        cell.style.cssText = `height:${count * HEIGHT}px;padding:0;border:0`;
        row.setAttribute("aria-hidden", "true");
        row.append(cell);
        return row;
      };
      const rows = this.shown.slice(first, last).map((row) => {
        const line = document.createElement("tr");
        for (const { name } of this.columns) {
          const cell = document.createElement("td");
          cell.textContent = figures(row[name]);
          if (name === "verdict") cell.className = `verdict ${row[name]}`;
          if (name === "checked" && row[name]) cell.className = `checked ${row[name].replace(" ", "-")}`;
          if (name === "reason") cell.className = "reason";
          line.append(cell);
        }
        return line;
      });
      this.body.replaceChildren(
        ...(first ? [space(first)] : []), ...rows, ...(last < this.shown.length ? [space(this.shown.length - last)] : []));
    }
  }
  const grids = all("[data-rows]").map((element) => new Grid(element));

  // A click on a picture filters the tables.
  const filter = (element) => {
    const wanted = JSON.parse(element.dataset.filter);
    grids.forEach((grid) => grid.only(wanted));
    document.getElementById("said").textContent = grids.map((grid) => grid.status.textContent).join("; ");
    const target = grids[0] && grids[0].element;
    if (target && !matchMedia("(prefers-reduced-motion:reduce)").matches) target.scrollIntoView({ behavior: "smooth", block: "nearest" });
  };
  document.addEventListener("click", (event) => {
    const element = event.target.closest("[data-filter]");
    if (element) filter(element);
  });
  document.addEventListener("keydown", (event) => {
    const element = event.target.closest && event.target.closest("[data-filter]");
    if (element && (event.key === "Enter" || event.key === " ")) {
      event.preventDefault();
      filter(element);
    }
    if (event.key === "Escape") grids.forEach((grid) => grid.only(null));
  });

  // One picture of several.
  all("select[data-panels]").forEach((select) => {
    const panels = all(`[data-panel^="${select.dataset.panels}:"]`);
    const choose = () => panels.forEach((panel) => {
      panel.hidden = panel.dataset.panel !== `${select.dataset.panels}:${select.value}`;
    });
    select.addEventListener("change", choose);
    choose();
  });

  // The slider: the same heat map at another radius.
  const maps = data("attention-data");
  const slider = document.getElementById("eps");
  if (maps && slider) {
    const label = document.getElementById("eps-label");
    const VERDICTS = ["holds", "fails", "unknown", "estimated"];
    const move = () => {
      const eps = maps.radii[Number(slider.value)];
      label.textContent = `ε = ${figures(eps)}`;
      slider.setAttribute("aria-valuetext", `ε = ${figures(eps)}`);
      maps.heads.forEach((head, h) => {
        const panel = document.querySelector(`[data-panel="head:${h}"]`);
        const frame = head.frames[Number(slider.value)] || { cells: [], rows: [] };
        const ranges = new Map(frame.cells.map(([row, key, low, high]) => [`${row},${key}`, [low, high]]));
        all("[data-cell]", panel).forEach((cell) => {
          const [low, high] = ranges.get(cell.dataset.cell) || [null, null];
          const from = Number(cell.dataset.from), inner = Number(cell.dataset.inner);
          const bar = cell.querySelector(".bar");
          bar.classList.toggle("off", low === null);
          if (low !== null) {
            bar.setAttribute("x1", from + inner * low);
            bar.setAttribute("x2", from + inner * Math.max(high, low + 0.02));
          }
          const range = low === null ? "nothing" : `[${figures(low)}, ${figures(high)}]`;
          cell.dataset.tip = `${cell.dataset.about}, proved ${range} at ε = ${figures(eps)}`;
          cell.setAttribute("aria-label", cell.dataset.tip);
        });
        all(".at-eps", panel).forEach((text) => { text.textContent = `proved ranges at ε = ${figures(eps)}`; });
        const verdicts = new Map(frame.rows);
        all("[data-mark]", panel).forEach((mark) => {
          const verdict = verdicts.get(Number(mark.dataset.mark));
          VERDICTS.forEach((name) => mark.classList.toggle(name, name === verdict));
          mark.classList.toggle("off", verdict === undefined);
        });
      });
    };
    slider.addEventListener("input", move);
    move();
  }
})();
