"""The benchmarks' own parts: a suite that cannot run measures nothing."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from types import ModuleType

import pytest
from rich.console import Console

from benchmarks import growth, nexmark, start, workloads
from benchmarks.__main__ import measure
from benchmarks.cost import Requests
from benchmarks.peers import Turns
from benchmarks.table import Row
from opendata_buffer.config import StoreOptions
from opendata_buffer.stores.base import ABSENT
from opendata_buffer.stores.memory import MemoryStore
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


def test_what_grows_faster_than_its_work_misses_the_line() -> None:
    costs = {1_000: 1.0, 10_000: 9.0, 100_000: 180.0}
    row = growth.line("a trigger", costs, "ms", 1e3)
    assert (row.measured, row.ok) == ("2.00 x the cost of a unit", False)
    assert row.detail == "1,000: 1e+03, 10,000: 9e+03, 100,000: 1.8e+05 ms"
    assert growth.line("a trigger", {10: 5.0, 100: 6.0, 1_000: 70.0}, "ms").ok
    assert not growth.flat("memory", {10: 5.0, 100: 6.0, 1_000: 7.0}, "MiB").ok
    assert growth.flat("memory", {10: 5.0, 100: 7.0, 1_000: 7.0}, "MiB").ok


def test_pages_of_the_store_for_growth_are_those_of_the_one_in_memory() -> None:
    stores = MemoryStore(now_ms=lambda: 7), growth.ListingStore(now_ms=lambda: 7)
    for store in stores:
        for key in ("b", "a/2", "a/1", "a", "a0", "c"):
            store.put(key, b"x")
        assert store.list("").objects
        store.delete_many(["a/2"])
        store.put("a/3", b"x")
    for prefix, after in (("", ""), ("a/", ""), ("a/", "a/1"), ("a", "a/9"), ("b", "a"), ("d", "")):
        for limit in (None, 1, 2, 6):
            one, other = (s.list(prefix, start_after=after, limit=limit) for s in stores)
            assert one == other


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


def test_imports_and_commands_are_timed_in_turns() -> None:
    rows = [*start.process_rows(1)]
    assert [row.ok is None for row in rows] == [False, False, True, True]


def test_requests_are_priced_by_what_they_are_on_s3() -> None:
    nothing = workloads.dollars_a_month({})
    assert nothing == pytest.approx(0.03 * 900 * 0.023)
    for name, dollars in (("put", 5e-6), ("put_if", 5e-6), ("list", 5e-6), ("get", 4e-7)):
        of_one = workloads.dollars_a_month({name: 1.0}) - nothing
        assert of_one == pytest.approx(365.25 * 24 * 3600 / 12 * dollars)
    assert workloads.dollars_a_month({"delete_many": 1.0}) == nothing


def test_events_of_nexmark_follow_its_rules() -> None:
    events = [json.loads(each) for each in nexmark.events(5_000)]
    kinds = [next(iter(each)) for each in events]
    assert kinds[:50] == ["person"] + ["auction"] * 3 + ["bid"] * 46 == kinds[-50:]
    persons, auctions, bids = (
        [each[kind] for each in events if kind in each] for kind in ("person", "auction", "bid")
    )
    assert [each["id"] for each in persons] == [*range(1_000, 1_100)]
    assert [each["id"] for each in auctions] == [*range(1_000, 1_300)]
    assert {each["category"] for each in auctions} == {10, 11, 12, 13, 14}
    assert {each["seller"] for each in auctions} | {each["bidder"] for each in bids} <= {
        each["id"] for each in persons
    }
    hot = sum(each["auction"] % 100 == 0 for each in bids) / len(bids)
    assert 0.45 < hot < 0.6
    assert events[-1]["bid"]["at"] == "2026-01-01T00:00:00.499900Z"
    assert [*nexmark.events(100)] == [*nexmark.events(100)] != [*nexmark.events(100, seed=8)]
