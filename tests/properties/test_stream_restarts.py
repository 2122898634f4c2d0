"""The streaming source under Spark's protocol, with crashes between any two of its steps.

A model of Spark's two micro-batch engines calls the driver's side of the source. The normal engine
writes its offset and commit logs in step. With asynchronous progress tracking the logs lag. Logged
entries survive a crash, and everything else is lost.
"""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Iterable
from uuid import UUID

import pytest

from buffer_source.commit_log import Tracking
from buffer_source.micro_batch_stream import MicroBatchStream
from buffer_source.options import SourceOptions
from buffer_source.partitions import SourceOffset
from opendata_buffer.config import QueueConfig
from opendata_buffer.formats.batch import Transaction, batch_key, encode_batch
from opendata_buffer.formats.manifest import Manifest, Metadata, NewEntry
from opendata_buffer.queue.queue import Queue
from opendata_buffer.stores.base import read_bytes
from opendata_buffer.stores.memory import MemoryStore
from opendata_buffer.testing.runtime import ManualRuntime

LIMITS = {
    "maxBatchesPerTrigger": (1, 2, 7),
    "maxBytesPerTrigger": (1, 30, 60),
    "maxOffsetsPerTrigger": (1, 3),
    "minPartitions": (1, 3),
}


class Crash(Exception):
    """The driver died."""


class CheckpointedQuery:
    """A queue with writers, some of which repeat batches, and the logs and output of a query."""

    OPTIONS = {"createIfMissing": "true"}  # noqa: RUF012

    def __init__(self, seed: int, *, losses: bool = False) -> None:
        """With ``losses`` some appends land after their objects were collected (failure F5)."""
        self.random = random.Random(seed)
        self._losses = losses
        self._late: list[int] = []
        self.rewritten = 0
        self.crashes = 0
        self.runtime = ManualRuntime()
        self.store = MemoryStore(now_ms=self.runtime.now_ms)
        config = QueueConfig(store="/store")
        self._queue = Queue(self.store, config, runtime=self.runtime, role="producer")
        self._transactions: list[list[bytes]] = []
        self.written: list[bytes] = []
        self.offsets: dict[int, SourceOffset] = {}
        self.commits: set[int] = set()
        self.output: dict[int, list[bytes]] = {}

    def maybe_crash(self) -> None:
        if self.random.random() < 0.1:
            self.crashes += 1
            raise Crash

    def produce(self, pauses: Iterable[float] = (0, 1, 90)) -> None:
        for _ in range(self.random.choice((0, 0, 1, 1, 2, 5))):
            kind = self.random.choice(("plain", "transaction", "repeat"))
            if self._losses and self.random.random() < 0.3:
                kind = self.random.choice(("late", "rewrite"))
            if kind == "late":
                self._late.append(len(self._transactions))
                values = [b"late%d" % len(self._late)] * self.random.randint(1, 4)
                txn = Transaction("app", len(self._transactions))
                self.put("ingest", values, txn=txn, gone=True)
                self._transactions.append([])
                continue
            if kind == "rewrite":
                self.rewrite()
                continue
            if kind == "repeat" and self._transactions:
                batch = self.random.randrange(len(self._transactions))
                if not self._transactions[batch]:
                    continue
                self.put("ingest", self._new(1))  # A writer that repeats a batch leaves a gap.
                self.put("ingest", self._transactions[batch], txn=Transaction("app", batch))
                continue
            values = self._new(self.random.randint(1, 4))
            if kind == "plain":
                self.put("ingest", values)
            else:
                self.put("ingest", values, txn=Transaction("app", len(self._transactions)))
                self._transactions.append(values)
        self.runtime.advance(self.random.choice(tuple(pauses)))

    def rewrite(self) -> None:
        """Write the records of a late append again, as its writer does if its objects are gone."""
        if self._late:
            batch = self._late.pop(0)
            self.put("ingest", self._new(1))
            self._transactions[batch] = self._new(self.random.randint(1, 4))
            self.put("ingest", self._transactions[batch], txn=Transaction("app", batch))
            self.rewritten += 1

    def _new(self, count: int) -> list[bytes]:
        values = [b"%d" % (len(self.written) + index) for index in range(count)]
        self.written += values
        return values

    def put(
        self,
        prefix: str,
        values: list[bytes],
        *,
        txn: Transaction | None = None,
        message: UUID | None = None,
        gone: bool = False,
    ) -> None:
        """Append one batch for each value, or an empty one; with ``gone``, without its objects."""
        entries = []
        for records in [[value] for value in values] or [[]]:
            location = batch_key(prefix, self.runtime.ulid(), txn, message)
            if not gone:
                self.store.put(location, encode_batch(records))
            entries.append(NewEntry(location, (Metadata(0, 0, b"".join(records)),)))
        self._queue_of(prefix).append(entries)

    def _queue_of(self, prefix: str) -> Queue:
        return self._queue

    def driver(self) -> MicroBatchStream:
        options = {"path": "/store", "gcEnabled": "false", **self.OPTIONS}
        if self._losses:
            options["failOnDataLoss"] = "false"
        for name, values in LIMITS.items():
            if self.random.random() < 0.3:
                options[name] = str(self.random.choice(values))
        return MicroBatchStream(SourceOptions.from_spark(options), self.store, self.runtime)

    def settle(self) -> None:
        """End everything that writers have left open, which is nothing here."""

    def manifest(self) -> Manifest:
        return Manifest.parse(read_bytes(self.store, "ingest/manifest"))

    def queued(self) -> int:
        return self.manifest().entry_count

    def run(self, triggers: int | None) -> None:
        """Run a normal query. None means AvailableNow to the end, without crashes or new data."""
        driver = self.driver()
        if triggers is None:
            driver.prepare_available_now()
        batch = max(self.offsets, default=-1)
        if batch >= 0 and batch not in self.commits:
            self._finish(driver, batch, crashes=triggers is not None)
        while triggers is None or triggers > 0:
            if triggers is not None:
                triggers -= 1
                self.produce()
                self.maybe_crash()
            start = self.offsets.get(batch)
            end = driver.latest_offset(recorded(start))
            driver.report()
            if end == start:
                if triggers is None:
                    return
                continue
            batch += 1
            self.offsets[batch] = end
            if triggers is not None:
                self.maybe_crash()
            if start is not None:
                driver.commit(start)
            self._finish(driver, batch, crashes=triggers is not None)

    def _finish(self, driver: MicroBatchStream, batch: int, crashes: bool) -> None:
        if crashes:
            self.maybe_crash()
        rows = read(driver, self.offsets.get(batch - 1), self.offsets[batch])
        assert self.output.get(batch, rows) == rows, "a replay equals the first run"
        self.output[batch] = rows
        if crashes:
            self.maybe_crash()
        self.commits.add(batch)


def recorded(offset: SourceOffset | None) -> SourceOffset | None:
    return (
        None if offset is None else SourceOffset.from_json(json.loads(json.dumps(offset.to_json())))
    )


def read(driver: MicroBatchStream, start: SourceOffset | None, end: SourceOffset) -> list[bytes]:
    until = recorded(end)
    assert until is not None
    return [
        batch.metadata[0].payload
        for task in driver.plan_input_partitions(recorded(start), until)
        for batch in task.batches
    ]


@pytest.mark.parametrize("seed", range(40))
def test_every_record_is_in_exactly_one_micro_batch(seed: int) -> None:
    query = CheckpointedQuery(seed)
    for _ in range(query.random.randint(1, 6)):
        with contextlib.suppress(Crash):
            query.run(query.random.randint(1, 6))
    query.run(None)
    assert [row for _, rows in sorted(query.output.items()) for row in rows] == query.written
    assert query.queued() == 0


def test_records_written_again_after_a_loss_are_in_exactly_one_micro_batch() -> None:
    rewritten = 0
    for seed in range(60):
        query = CheckpointedQuery(seed, losses=True)
        for _ in range(query.random.randint(1, 6)):
            with contextlib.suppress(Crash):
                query.run(query.random.randint(1, 6))
        while query._late:
            query.rewrite()
        query.run(None)
        read = [row for _, rows in sorted(query.output.items()) for row in rows]
        assert read == query.written, f"seed {seed}"
        assert query.queued() == 0
        rewritten += query.rewritten
    assert rewritten > 60


def test_a_gap_inside_a_transaction_loses_nothing_after_it() -> None:
    """Each transaction is longer than a micro-batch, and entries disappear between two runs."""
    torn = 0
    for seed in range(40):
        query = CheckpointedQuery(seed)
        expected: list[bytes] = []
        found: list[bytes] = []
        position: SourceOffset | None = None
        for batch in range(5):
            values = [b"%d-%d" % (batch, index) for index in range(5)]
            query.put("ingest", values, txn=Transaction("app", batch))
            options = {"path": "/store", "gcEnabled": "false", "failOnDataLoss": "false"}
            options["maxBatchesPerTrigger"] = str(query.random.randint(1, 3))
            parsed = SourceOptions.from_spark(options)
            driver = MicroBatchStream(parsed, query.store, query.runtime)
            at = 0
            for _ in range(query.random.randint(0, 2)):
                end = driver.latest_offset(recorded(position))
                if end != position:
                    rows = read(driver, position, end)
                    found += rows
                    position, at = end, at + len(rows)
            expected += values[:at]
            lost = query.random.randint(0, 5 - at) if at < 5 else 0
            if lost:
                dropped = query.manifest().drop_through(batch * 5 + at + lost - 1)
                query.store.put("ingest/manifest", dropped.raw)
            torn += at > 0 and at + lost < 5 and lost > 0
            expected += values[at + lost :]
            driver = MicroBatchStream(parsed, query.store, query.runtime)
            while (end := driver.latest_offset(recorded(position))) != position:
                found += read(driver, position, end)
                position = end
        assert found == expected, f"seed {seed}"
    assert torn > 10


class LaggingLog:
    """Logs that another thread writes while the query continues."""

    def __init__(self, query: CheckpointedQuery) -> None:
        self._query = query
        self._waiting: list[tuple[int, SourceOffset | None]] = []
        self._last = -1
        self.ready: list[SourceOffset] = []

    @property
    def busy(self) -> bool:
        return bool(self._waiting)

    def add(self, batch: int, offset: SourceOffset | None) -> None:
        """Queue an offset to write later, or a commit if there is no offset."""
        self._waiting.append((batch, offset))

    def write(self, count: int) -> None:
        for _ in range(min(count, len(self._waiting))):
            batch, offset = self._waiting.pop(0)
            if offset is None:
                self._query.commits.add(batch)
                continue
            self._query.offsets[batch] = offset
            if self._last < 0:
                self._last = before(self._query, batch)
            if batch and self._last >= 0:
                self.ready.append(self._query.offsets[self._last])
            self._last = batch


def before(query: CheckpointedQuery, batch: int) -> int:
    return max((batch_id for batch_id in query.offsets if batch_id < batch), default=-1)


def run_asynchronously(query: CheckpointedQuery, triggers: int, seen: list[bytes]) -> None:
    driver, log, first = query.driver(), LaggingLog(query), True
    batch = max(query.offsets, default=-1)
    start = query.offsets.get(batch)
    if start is not None and batch not in query.commits:
        seen += read(driver, query.offsets.get(before(query, batch)), start)
        query.maybe_crash()
        log.add(batch, None)
        first = False
    for _ in range(triggers):
        query.produce((0, 0.2) if log.busy else (0, 0.2, 90))
        log.write(query.random.choice((0, 0, 1, 5)))
        end = driver.latest_offset(recorded(start))
        driver.report()
        query.maybe_crash()
        if end == start:
            continue
        batch += 1
        written = first or query.random.random() < 0.4
        if written:
            log.add(batch, end)
        if query.random.random() < 0.02:
            log.write(5)  # The race: written just before the query looks for commits.
        while log.ready:
            driver.commit(log.ready.pop(0))
        seen += read(driver, start, end)
        query.maybe_crash()
        if written:
            log.add(batch, None)
        first, start = False, end


def run_with_a_lagging_log(query: CheckpointedQuery) -> set[bytes]:
    """Return the rows of a query with lagging logs that crashed, and of its normal successor."""
    seen: list[bytes] = []
    for _ in range(query.random.randint(2, 6)):
        with contextlib.suppress(Crash):
            run_asynchronously(query, query.random.randint(1, 12), seen)
    query.settle()
    last = max(query.offsets, default=-1)
    if last >= 0 and last not in query.commits and (previous := before(query, last)) >= 0:
        query.offsets[last - 1] = query.offsets[previous]
    query.run(None)
    return {*seen, *(row for rows in query.output.values() for row in rows)}


def test_with_a_lagging_log_no_record_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    drivers: list[MicroBatchStream] = []
    make = CheckpointedQuery.driver
    monkeypatch.setattr(
        CheckpointedQuery, "driver", lambda query: (drivers.append(make(query)), drivers[-1])[1]
    )
    crashes = 0
    for seed in range(40):
        query = CheckpointedQuery(seed)
        assert run_with_a_lagging_log(query) == set(query.written), f"seed {seed}"
        assert query.queued() == 0, f"seed {seed}"
        crashes += query.crashes
    assert crashes > 40
    lagging = [driver for driver in drivers if driver._log.tracking is Tracking.ASYNCHRONOUS]
    assert len(lagging) > 40
