"""The benchmarks' own parts: a suite that cannot run measures nothing."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterator
from types import ModuleType

import pytest
from rich.console import Console

from benchmarks.__main__ import measure
from benchmarks.cost import Requests
from benchmarks.peers import Turns
from benchmarks.table import Row
from opendata_buffer.config import StoreOptions
from opendata_buffer.stores.base import ABSENT
from opendata_buffer.stores.s3 import S3Store
from tests.support.s3_server import S3Server


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


def test_competitors_alternate_and_ours_is_compared_with_the_best_of_them() -> None:
    order: list[str] = []

    def measure(name: str, rates: list[float]) -> Callable[[], float]:
        def rate() -> float:
            order.append(name)
            return rates.pop(0)

        return rate

    turns = Turns(
        {
            "ours": measure("ours", [9.0, 6.0, 4.0, 5.0]),
            "plain": measure("plain", [9.0, 1.0, 1.0, 1.0]),
            "tuned": measure("tuned", [9.0, 2.0, 2.5, 3.0]),
        }
    )
    turns.run(rounds=3)
    assert order[:6] == ["ours", "plain", "tuned", "plain", "tuned", "ours"]
    ours, plain, _ = turns.rows("reading", {"ours": (2.5, ("plain", "tuned"))})
    assert (ours.measured, ours.bar, ours.ok) == ("2.00 x", ">= 2.5 x", False)
    assert ours.detail == "5.00 M/s (4.00 to 6.00)"
    assert (plain.measured, plain.ok) == ("1.00 M/s (1.00 to 1.00)", None)


def test_every_request_that_leaves_a_process_is_counted(s3_server: S3Server) -> None:
    store = S3Store("bucket", options=StoreOptions(endpoint_url=s3_server.endpoint))
    counted = Requests(store._client.get())
    store.put("a", b"12345")
    for _ in range(3):
        store.get("a")  # the first through boto3, the others not
    store.put_if("b", b"12", ABSENT)
    assert counted.sent == {"PutObject": 2, "GetObject": 3}
    assert counted.bytes_out == 7
    assert s3_server.count("GET") == 3
