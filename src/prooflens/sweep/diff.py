"""Two sweeps, or two runs, side by side: which verdicts changed, and by how much bounds or radii moved."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from prooflens.certificate.store import query_tables, read_run
from prooflens.errors import RunError
from prooflens.sweep.store import HEADER, SweepStore

SAME = ("model", "prompt", "region", "layer", "head", "position", "query")
"""Rows of both with equal values here, and of one ε or token, answer the same question."""


MODELS = "select distinct model from rows"


class Rows(NamedTuple):
    """The rows of a sweep or of a run, and whether they are radii."""

    table: Any
    radii: bool

    @classmethod
    def of(cls, path: Path) -> Rows:
        """Read a sweep's folder, or a run directory, whose text is the prompt of all its rows."""
        if (path / HEADER).is_file():
            store = SweepStore.open(path)
            return cls(store.dataset(), store.holds_radii)
        run = read_run(path)
        prompt = pa.repeat(pa.scalar(run.info.get("text"), pa.string()), run.rows.num_rows)
        return cls(run.rows.append_column("prompt", prompt), run.info["kind"] == "radii")


def diff(first: Rows, second: Rows) -> dict[str, Any]:
    """A summary, the transitions between verdicts, and the rows whose verdict changed.

    Of radii, `lower` is the proved and `upper` the broken one, and the verdict says whether one is proved.

    Args:
        first: rows of one run or sweep.
        second: rows of the other.
    """
    if first.radii != second.radii:
        raise RunError("one of the two holds radii and the other verdicts: they cannot be compared")
    names = [
        set(query_tables({"rows": rows.table}, MODELS).column(0).to_pylist()) for rows in (first, second)
    ]
    if all(names) and not names[0] & names[1]:
        raise RunError(
            f"the two are about different models ({', '.join(sorted(names[0]))} and {', '.join(sorted(names[1]))}): "
            "no row of one answers a question of the other"
        )
    radii = first.radii
    tables = {"first": first.table, "second": second.table}

    def ask(sql: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = query_tables(tables, _joined(radii) + sql).to_pylist()
        return found

    [summary] = ask(
        """select count(*) filter (verdict_a is not null and verdict_b is not null) as common,
                  count(*) filter (verdict_b is null) as only_a,
                  count(*) filter (verdict_a is null) as only_b,
                  count(*) filter (verdict_a <> verdict_b) as changed,
                  count(*) filter (verdict_a is not null and verdict_b is not null
                                   and (lower_a is distinct from lower_b or upper_a is distinct from upper_b)) as moved,
                  max(abs(lower_b - lower_a)) as largest_lower_move, avg(lower_b - lower_a) as mean_lower_move,
                  max(abs(upper_b - upper_a)) as largest_upper_move, avg(upper_b - upper_a) as mean_upper_move
           from both_runs"""
    )
    transitions = ask(
        """select verdict_a, verdict_b, count(*) as rows, avg(lower_b - lower_a) as mean_lower_move
           from both_runs where verdict_a <> verdict_b group by all order by all"""
    )
    keys = ", ".join(_keys(radii))
    rows = ask(f"select * from both_runs where verdict_a <> verdict_b order by {keys}")
    return {"summary": summary, "transitions": transitions, "rows": rows}


def _keys(radii: bool) -> tuple[str, ...]:
    return (*SAME, "token" if radii else "eps")


def _joined(radii: bool) -> str:
    keys = ", ".join(_keys(radii))
    both = ", ".join(f"coalesce(a.{key}, b.{key}) as {key}" for key in _keys(radii))
    same = " and ".join(f"a.{key} is not distinct from b.{key}" for key in _keys(radii))
    found = (
        "if(coalesce(certified, 1) > 0, 'proved', 'not proved') as verdict, certified as lower, attack as upper"
        if radii
        else "verdict, lower, upper"
    )
    return f"""
with a as (select {keys}, engine, {found} from first),
     b as (select {keys}, engine, {found} from second),
     both_runs as (
        select {both}, a.verdict as verdict_a, b.verdict as verdict_b, a.engine as engine_a, b.engine as engine_b,
               a.lower as lower_a, b.lower as lower_b, a.upper as upper_a, b.upper as upper_b
        from a full outer join b on {same})
"""
