"""The benchmarks' own parts: a suite that cannot run measures nothing."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from queue import SimpleQueue
from types import ModuleType

import pytest
from rich.console import Console

from benchmarks import growth
from benchmarks.__main__ import measure
from benchmarks.table import Row


def suite(monkeypatch: pytest.MonkeyPatch, rows: Iterator[Row]) -> None:
    module = ModuleType("benchmarks.pretended")
    module.run = lambda: rows  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "benchmarks.pretended", module)


def test_a_suite_that_breaks_keeps_the_lines_before(monkeypatch: pytest.MonkeyPatch) -> None:
    def rows() -> Iterator[Row]:
        yield Row("first", "1")
        raise OSError("the disk is full")

    suite(monkeypatch, rows())
    found = list(measure("pretended", Console(file=io.StringIO())))
    assert [(row.name, row.ok) for row in found] == [("first", None), ("pretended", False)]
    assert found[-1].detail == "OSError: the disk is full"


def test_what_grows_faster_than_its_work_misses_the_line() -> None:
    costs = {1_000: 1.0, 10_000: 9.0, 100_000: 180.0}
    row = growth.line("a trigger", costs, "ms", 1e3)
    assert (row.measured, row.ok) == ("2.00 x the cost of a unit", False)
    assert row.detail == "1,000: 1e+03, 10,000: 9e+03, 100,000: 1.8e+05 ms"
    assert growth.line("a trigger", {10: 5.0, 100: 6.0, 1_000: 70.0}, "ms").ok
    assert not growth.flat("memory", {10: 5.0, 100: 6.0, 1_000: 7.0}, "MiB").ok
    assert growth.flat("memory", {10: 5.0, 100: 7.0, 1_000: 7.0}, "MiB").ok


def test_each_row_about_growth_does_the_work_it_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WAITING", "PARTITIONS", "YEARS"):
        monkeypatch.setattr(growth, name, (2, 4))
    rows = [*growth.batches_waiting(), growth.partitions(), *growth.sidecars(2)]
    assert all("2: " in row.detail and ", 4: " in row.detail for row in rows)
    named = {row.name for row in rows}
    assert named > {
        "_topic.json, by years",
        "log/_log.json, by years",
        "ingest/_owner.json, by years",
    }
    assert growth.cycle(growth.ListingStore(), 10)[1] >= 5
    found: SimpleQueue[dict[int, tuple[float, float]]] = SimpleQueue()
    growth.lives((3, 6), found)
    assert [*found.get()] == [3, 6]
