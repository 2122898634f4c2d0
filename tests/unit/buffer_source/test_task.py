"""Reading in a task, and the query ID that it adds to the consumer info."""

from __future__ import annotations

from pathlib import Path

import pytest

from buffer_source import task
from buffer_source.options import PROGRAM, SourceOptions
from buffer_source.planner import PartitionBatch, TaskBatches
from buffer_source.schema import default_schema
from buffer_source.task import RECORD_INTERVAL_S, read_partition, record_query_id
from opendata_buffer import metrics
from opendata_buffer.config import QueueConfig
from opendata_buffer.errors import BatchUnreadable, ForeignLocation
from opendata_buffer.formats.batch import Compression, batch_key, encode_batch
from opendata_buffer.quarantine import list_quarantine, read_copy
from opendata_buffer.queue.consumer_note import read_consumer_info, write_consumer_info
from opendata_buffer.stores.base import Store
from opendata_buffer.stores.open import open_store
from opendata_buffer.testing.runtime import ManualRuntime


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(str(tmp_path))


def options(tmp_path: Path, **given: str) -> SourceOptions:
    return SourceOptions.from_spark({"path": str(tmp_path), **given})


def put(store: Store, runtime: ManualRuntime, *batches: bytes) -> list[PartitionBatch]:
    descriptors = []
    for sequence, data in enumerate(batches):
        location = batch_key("ingest", runtime.ulid())
        store.put(location, data)
        descriptors.append(PartitionBatch(sequence, location))
    return descriptors


def sequences(given: SourceOptions, descriptors: list[PartitionBatch]) -> list[int]:
    pieces = list(read_partition(given, default_schema(), TaskBatches(tuple(descriptors))))
    return [row for piece in pieces for row in piece["sequence"].to_pylist()]


def corrupt_after_good_rows() -> bytes:
    """Return a batch whose last record is corrupt, some arrays after the first."""
    good = encode_batch([b"x" * 1000] * 4000, Compression.NONE)
    block = bytearray(good)
    last = len(good) - 7 - 1004
    block[last : last + 4] = (999).to_bytes(4, "little")
    return bytes(block)


def test_batches_are_read_in_order(tmp_path: Path, store: Store, runtime: ManualRuntime) -> None:
    descriptors = put(store, runtime, *(encode_batch([b"a"] * count) for count in (2, 0, 3)))
    assert sequences(options(tmp_path), descriptors) == [0, 0, 2, 2, 2]


@pytest.mark.parametrize("bad", [b"short", b"x" * 100, corrupt_after_good_rows()])
@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_corrupt_batch_is_quarantined_and_skipped(
    tmp_path: Path,
    store: Store,
    runtime: ManualRuntime,
    monkeypatch: pytest.MonkeyPatch,
    bad: bytes,
    at: int,
) -> None:
    counted: list[int] = []
    monkeypatch.setattr(metrics.batches_quarantined, "add", counted.append)
    data = [encode_batch([b"a"])] * 2
    data.insert(at, bad)
    descriptors = put(store, runtime, *data)
    given = options(tmp_path, corruptBatches="quarantine")
    for _ in range(
        2
    ):  # A repeated attempt of the task finds the copy and does not make another one.
        assert sequences(given, descriptors) == [each for each in range(3) if each != at]
    (report,) = list_quarantine(store, "ingest")
    assert (report.sequence, report.location) == (at, descriptors[at].location)
    assert read_copy(store, "ingest", report) == bad
    assert counted == [1, 1]
    # The object is kept, so that an operator may still repair it.
    assert store.get(descriptors[at].location) is not None


def test_a_corrupt_batch_that_tasks_share_is_quarantined_by_all_and_counted_once(
    tmp_path: Path, store: Store, runtime: ManualRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[int] = []
    monkeypatch.setattr(metrics.batches_quarantined, "add", counted.append)
    (batch,) = put(store, runtime, corrupt_after_good_rows())
    given = options(tmp_path, corruptBatches="quarantine")
    assert [sequences(given, [part]) for part in batch.shared_by(3)] == [[], [], []]
    assert len(list_quarantine(store, "ingest")) == 1
    assert counted == [1]


@pytest.mark.parametrize("bad", [b"x" * 100, corrupt_after_good_rows()])
def test_a_corrupt_batch_fails_the_query_by_default_and_the_error_names_the_option(
    tmp_path: Path, store: Store, runtime: ManualRuntime, bad: bytes
) -> None:
    descriptors = put(store, runtime, encode_batch([b"a"]), bad)
    with pytest.raises(BatchUnreadable, match=r"batch 1 at .* corruptBatches set to quarantine"):
        sequences(options(tmp_path), descriptors)
    assert list_quarantine(store, "ingest") == []


def test_a_foreign_batch_is_neither_read_nor_copied(
    tmp_path: Path, store: Store, runtime: ManualRuntime
) -> None:
    store.put("elsewhere/secret", b"secret")
    foreign = [PartitionBatch(0, "elsewhere/secret")]
    given = options(tmp_path, corruptBatches="quarantine", failOnDataLoss="false")
    with pytest.raises(ForeignLocation):
        sequences(given, foreign)
    assert list_quarantine(store, "ingest") == []


def test_a_task_of_a_query_that_owns_the_queue_records_its_id(
    tmp_path: Path, store: Store, runtime: ManualRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded: list[tuple[str, str]] = []
    monkeypatch.setattr(task, "_query_id", lambda: "q")
    monkeypatch.setattr(
        task,
        "record_query_id",
        lambda config, query, _: recorded.append((config.manifest_path, query)),
    )
    descriptors = put(store, runtime, encode_batch([b"a"]))
    assert sequences(options(tmp_path), descriptors) == [0]
    assert recorded == [("ingest/manifest", "q")]
    assert sequences(options(tmp_path, acknowledge="false"), descriptors) == [0]
    monkeypatch.setattr(task, "_query_id", lambda: "")  # a batch read
    assert sequences(options(tmp_path), descriptors) == [0]
    assert len(recorded) == 1


class Inline(ManualRuntime):
    """Runs background tasks at once, and counts them."""

    spawned = 0

    def spawn(self, target, name):  # type: ignore[no-untyped-def]
        self.spawned += 1
        target()


@pytest.fixture
def config(tmp_path: Path) -> QueueConfig:
    return QueueConfig(store=str(tmp_path))


def query_of(store: Store, config: QueueConfig, runtime: ManualRuntime) -> str | None:
    found = read_consumer_info(store, config, runtime)
    return None if found is None else found.query


def test_a_missing_query_id_is_recorded_at_most_once_a_minute(
    store: Store, config: QueueConfig
) -> None:
    runtime = Inline()
    record_query_id(config, "too early", runtime)
    assert query_of(store, config, runtime) is None
    write_consumer_info(store, config, runtime, 1, program=PROGRAM)
    record_query_id(config, "q", runtime)
    record_query_id(config, "q", runtime)
    record_query_id(config, "another", runtime)
    assert (runtime.spawned, query_of(store, config, runtime)) == (3, "q")
    # A restarted query is recorded too.
    write_consumer_info(store, config, runtime, 2, program=PROGRAM)
    runtime.advance(RECORD_INTERVAL_S)
    record_query_id(config, "q", runtime)
    assert (runtime.spawned, query_of(store, config, runtime)) == (4, "q")


def test_a_consumer_info_that_is_damaged_or_of_another_program_is_not_changed(
    store: Store, config: QueueConfig
) -> None:
    runtime = Inline()
    write_consumer_info(store, config, runtime, 1, program="opendata-buffer consume")
    record_query_id(config, "q", runtime)
    assert query_of(store, config, runtime) == ""
    store.put("ingest/_consumer.json", b"garbage")
    runtime.advance(RECORD_INTERVAL_S)
    record_query_id(config, "q", runtime)
    assert runtime.spawned == 2
