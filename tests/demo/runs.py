"""A run of the demo that never was: small, and with all that its report can show."""

from __future__ import annotations

from datetime import date, timedelta

from notebooks.demo import plot
from notebooks.demo.findings import NAMES, Carrier, Delay, Figure, Proof
from notebooks.demo.page import Run
from notebooks.demo.progress import Mark, Sample

DAYS = [Delay(date(2013, 1, 1) + timedelta(i), 100, 10.0 + i % 7) for i in range(365)]
CARRIERS = [Carrier("Frontier & <Sons>", 682, 20.2, 17, 29.4), Carrier("Envoy Air", 9, 1.5, 5, 3)]
MARKS = [
    Mark(10.0, plot.READY, "the first 1,500 rows are in Parquet"),
    Mark(30.0, plot.STOPPED, "in the middle of a batch"),
    Mark(36.0, plot.AGAIN, "with 47,000 rows to catch up"),
    Mark(60.0, "all in Parquet", "50 s of replay"),
]


def samples() -> list[Sample]:
    found = []
    for i in range(301):
        seconds = i / 5
        durable = 1_500 if seconds < 10 else min(336_776, int(1_500 + (seconds - 10) * 7_500))
        behind = 9_000 if seconds < 30 else max(9_000, int(60_000 - (seconds - 36) * 3_000))
        written = 0 if seconds < 10 else max(1_500, durable - behind)
        found.append(Sample(seconds, durable, written if i < 300 else durable, behind / 7_500))
    return found


RUN = Run("a queue in a directory", "./run demo", samples(), MARKS, 19)


def proof(missing: int = 0) -> Proof:
    """Exact, or with so many rows missing."""
    wanted = (336_776, 336_776, 1, 336_776, 56_709_205_476, 723_623_913_586_397)
    figures = tuple(map(Figure, NAMES, (336_776 - missing, *wanted[1:]), wanted))
    return Proof({"EWR": figures, "all": figures})
