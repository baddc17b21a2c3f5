"""The report in a real browser: Debian's chromium, driven by playwright. Skipped, saying so, where it cannot be had."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from prooflens.report import ReportData, render

BROWSER = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))),
    None,
)
playwright = pytest.importorskip(
    "playwright.sync_api", reason="playwright is not installed: pip install playwright"
)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no chromium on this machine: apt install chromium")


class Visit:
    """A page that was opened, and everything it said or asked for."""

    def __init__(self, browser: Any, path: Path, scheme: str = "light", width: int = 1280) -> None:
        self.page = browser.new_page(color_scheme=scheme, viewport={"width": width, "height": 720})
        self.said: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("dialog", self._dismiss)
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(path.as_uri())

    def _dismiss(self, dialog: Any) -> None:
        self.said.append(dialog.message)
        dialog.dismiss()

    def check(self, path: Path) -> None:
        assert self.said == []
        assert {url.partition("#")[0] for url in self.asked} == {path.as_uri()}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def path(data: ReportData, tmp_path_factory: pytest.TempPathFactory) -> Path:
    page = tmp_path_factory.mktemp("page") / "report.html"
    page.write_text(render(data), encoding="utf-8")
    return page


def test_pictures_are_there_and_nothing_complains(browser: Any, path: Path) -> None:
    visit = Visit(browser, path)
    for section in ("radius", "attention", "curve", "circuit", "strip"):
        assert visit.page.locator(f"#{section} svg.figure").first.is_visible(), section
    assert visit.page.locator("#verdicts tbody tr").count() > 0
    visit.check(path)


def test_the_slider_moves_the_proved_ranges(browser: Any, path: Path) -> None:
    visit = Visit(browser, path)
    bar = visit.page.locator('#attention [data-panel="head:0"] .bar').first

    def width() -> float:
        return float(bar.get_attribute("x2")) - float(bar.get_attribute("x1"))

    before, label = width(), visit.page.locator("#eps-label").inner_text()
    visit.page.locator("#eps").focus()
    visit.page.keyboard.press("End")
    assert visit.page.locator("#eps-label").inner_text() != label
    assert width() > before
    visit.check(path)


def test_a_click_filters_the_table_and_escape_shows_all(browser: Any, path: Path, data: ReportData) -> None:
    visit = Visit(browser, path)
    status = visit.page.locator("#verdicts .status")
    everything = status.inner_text()
    visit.page.locator("#radius .hit").first.click()
    assert status.inner_text() != everything
    assert "head 0" in status.inner_text()
    heads = visit.page.locator("#verdicts tbody tr td:nth-child(2)").all_inner_texts()
    assert set(heads) == {"0"}
    visit.page.keyboard.press("Escape")
    assert status.inner_text() == everything
    visit.check(path)


def test_the_keyboard_reaches_and_filters(browser: Any, path: Path) -> None:
    visit = Visit(browser, path)
    visit.page.locator("#circuit .hit").first.focus()
    assert visit.page.locator("#tip").is_visible()
    assert "top1" in visit.page.locator("#tip").inner_text()
    visit.page.keyboard.press("Enter")
    assert "query top1" in visit.page.locator("#verdicts .status").inner_text()
    visit.check(path)


def test_hover_shows_numbers_and_the_heads_name(browser: Any, path: Path) -> None:
    visit = Visit(browser, path)
    visit.page.locator("#radius .hit").first.hover()
    assert "head 0.0" in visit.page.locator("#tip").inner_text()
    visit.check(path)


def test_lists_choose_the_picture_and_tables_sort(browser: Any, path: Path) -> None:
    visit = Visit(browser, path)
    visit.page.locator("#choose-head").select_option("1")
    assert visit.page.locator('[data-panel="head:1"]').is_visible()
    assert not visit.page.locator('[data-panel="head:0"]').is_visible()
    visit.page.locator("#verdicts thead button", has_text="clean").click()
    column = visit.page.locator("#verdicts thead button").all_inner_texts().index("clean") + 1
    cells = visit.page.locator(f"#verdicts tbody td:nth-child({column})").all_inner_texts()
    shown = [float(cell) for cell in cells if cell]
    assert shown == sorted(shown)
    visit.page.locator("#verdicts input[type=search]").fill("fails")
    assert set(visit.page.locator("#verdicts td.verdict").all_inner_texts()) == {"fails"}
    visit.check(path)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_light_and_dark_can_be_read(browser: Any, path: Path, scheme: str) -> None:
    visit = Visit(browser, path, scheme)

    def lightness() -> list[float]:
        colours = visit.page.evaluate(
            "() => { const s = getComputedStyle(document.body); return [s.color, s.backgroundColor]; }"
        )
        return [sum(int(v) for v in c.strip("rgb()").split(",")[:3]) for c in colours]

    ink, ground = lightness()
    assert (ink < ground) is (scheme == "light")
    visit.page.locator("#theme").click()
    ink, ground = lightness()
    assert (ink > ground) is (scheme == "light")
    visit.check(path)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 768, 1280])
def test_verdicts_are_in_sight_at_every_width(browser: Any, path: Path, width: int, scheme: str) -> None:
    visit = Visit(browser, path, scheme, width)
    assert visit.page.evaluate("document.documentElement.scrollWidth") == width
    visit.page.locator('nav.jump a[href="#verdicts"]').click()
    cell = visit.page.locator("#verdicts td.verdict").first
    cell.wait_for(state="visible")
    place = cell.bounding_box()
    assert place["x"] >= 0
    assert place["x"] + place["width"] <= width
    assert cell.inner_text() in ("holds", "fails", "unknown", "estimated")
    tops = [visit.page.locator(f"#{name}").bounding_box()["y"] for name in ("verdicts", "radius")]
    assert (tops[0] < tops[1]) is (width == 360)  # on a phone the table stands before the maps
    visit.check(path)


def test_hostile_tokens_run_nothing(browser: Any, hostile: ReportData, tmp_path: Path) -> None:
    page = tmp_path / "hostile.html"
    page.write_text(render(hostile), encoding="utf-8")
    visit = Visit(browser, page)
    assert "alert(1)" in visit.page.locator(".prompt").inner_text()
    assert "U+202E" in visit.page.locator(".prompt").inner_text()
    visit.check(page)


def test_it_prints(browser: Any, path: Path) -> None:
    visit = Visit(browser, path)
    assert len(visit.page.pdf()) > 10_000
    visit.check(path)
