"""How long 10⁵ rows take to write, query and report: `python benchmarks/report_rows.py [rows]`."""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa

import prooflens as pl
from prooflens.certificate.store import RunWriter, query_rows
from prooflens.results import Results
from prooflens.results.record import append, header


def main(rows: int = 100_000) -> None:
    model = pl.load("toy")
    found = pl.certify(model, model.example(1), pl.Ball(0.05), layer=0)
    outcomes = [found.outcomes[i % len(found)] for i in range(rows)]
    assert found.subject is not None
    many = Results.of(outcomes, found.subject)
    # 24 layers × 16 heads × 4 positions, and as many queries as that leaves.
    place = np.arange(rows)
    columns = {
        "layer": pa.array(place // 64 % 24, pa.int32()),
        "head": pa.array(place // 4 % 16, pa.int32()),
        "position": pa.array(place % 4, pa.int32()),
        "query": pa.array(["top1" if n == 0 else f"mass>={n / 1000}" for n in place // 1536]),
    }
    for name, values in columns.items():
        many.table = many.table.set_column(many.table.column_names.index(name), name, values)
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        start = time.perf_counter()
        writer = RunWriter.create(run, header(found.subject, {}))
        append(writer, many)
        writer.finish()
        written = time.perf_counter()
        query_rows(run, "select layer, verdict, count(*) from rows group by all")
        queried = time.perf_counter()
        page = pl.report(run, path=Path(folder) / "report.html")
        done = time.perf_counter()
        size = page.stat().st_size / 1e6
    print(
        f"{rows} rows: write {written - start:.1f} s, query {queried - written:.1f} s, report {done - queried:.1f} s"
    )
    print(f"report of {size:.1f} MB")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
