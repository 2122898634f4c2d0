"""Adding v1 consumers to a log: places that are refused, and commands that are interrupted."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest

from opendata_buffer import InvalidInput, Topic, TransientStorageError
from opendata_buffer.config import QueueConfig
from opendata_buffer.formats.manifest import SEALED_EPOCH, Manifest, NewEntry
from opendata_buffer.queue.log import Log
from opendata_buffer.queue.ownership import claim_for_writing
from opendata_buffer.queue.reader_admin import register_readers, unregister
from opendata_buffer.queue.reader_positions import ReaderPosition
from opendata_buffer.queue.v1_admin import add_v1_reader, check_v1_place
from opendata_buffer.stores.base import DeleteFailure
from opendata_buffer.stores.memory import MemoryStore
from opendata_buffer.testing.runtime import ManualRuntime
from tests.support.log_fixture import KEY, URL, LogFixture, read, small
from tests.support.v1_consumer import V1Consumer

__all__ = ["small"]

QUEUE = "other/manifest"


def add(fixture: LogFixture, prefix: str = "other", name: str = "other", start: int = 0) -> int:
    return add_v1_reader(
        fixture.store,
        fixture.view,
        name,
        prefix,
        lambda view: max(start, view.first_sequence),
    )


def queue_of(fixture: LogFixture) -> Manifest:
    return Manifest.parse(fixture.store.get(QUEUE).data)


class Killed(Exception):
    pass


def kill_at(fixture: LogFixture, number: int) -> Callable[[], None]:
    """Let the conditional write of this number, and all later ones, fail. Return the end of it."""
    write, count = fixture.store.put_if, 0

    def put_if(key: str, data: bytes, condition: Any) -> Any:
        nonlocal count
        count += 1
        if count > number:
            raise Killed
        return write(key, data, condition)

    fixture.store.put_if = put_if  # type: ignore[method-assign]

    def end() -> None:
        fixture.store.put_if = write  # type: ignore[method-assign]

    return end


@pytest.mark.parametrize("writes", range(5))
def test_adding_again_completes_an_addition_that_was_killed(writes: int) -> None:
    fixture = LogFixture()
    fixture.append(20)
    end = kill_at(fixture, writes)
    with pytest.raises(Killed):
        add(fixture)
    end()
    fixture.append(5)
    if "other" not in fixture.index().v1:  # The last write is that of the owner marker's count.
        fixture.collect()
        assert add(fixture) == 0
    index = fixture.index()
    assert (index.readers, index.v1) == (("other",), {"other": "other"})
    assert queue_of(fixture).next_sequence == 0
    position = ReaderPosition.from_json(fixture.store.get("ingest/_readers/other.json").data)
    assert (position.next, position.v1) == (0, "other")


def test_a_reader_begins_later_if_the_collector_was_faster() -> None:
    fixture = LogFixture()
    python = fixture.reader("python")
    fixture.append(20)
    assert read(python, 10) == [*range(10)]
    write = fixture.store.put_if

    def put_if(key: str, data: bytes, condition: Any) -> Any:
        if key == QUEUE:
            fixture.store.put_if = write  # type: ignore[method-assign]
            fixture.collector().run_once()
        return write(key, data, condition)

    fixture.store.put_if = put_if  # type: ignore[method-assign]
    assert add(fixture) == 10
    assert fixture.index().floor == 10
    assert queue_of(fixture).next_sequence == 10


def test_the_prefix_of_a_deleted_consumer_is_not_used_again() -> None:
    fixture = LogFixture()
    fixture.append(3)
    add(fixture)
    unregister(fixture.store, Log(fixture.store, fixture.config, fixture.runtime), "other")
    assert queue_of(fixture).epoch == SEALED_EPOCH
    with pytest.raises(InvalidInput, match="was used by a reader that was deleted"):
        add(fixture)
    assert add(fixture, "other-2") == 0


def test_deleting_again_completes_a_deletion_that_was_killed() -> None:
    fixture = LogFixture()
    fixture.append(3)
    add(fixture)
    log = Log(fixture.store, fixture.config, fixture.runtime)
    end = kill_at(fixture, 1)
    with pytest.raises(Killed):
        unregister(fixture.store, log, "other")
    end()
    assert queue_of(fixture).epoch == SEALED_EPOCH
    assert fixture.index().v1 == {"other": "other"}
    unregister(fixture.store, log, "other")
    assert fixture.index().v1 == {}


def test_a_position_that_could_not_be_deleted_fails_the_deletion() -> None:
    fixture = LogFixture()
    fixture.append(3)
    read(fixture.reader("python"))
    log, delete = Log(fixture.store, fixture.config, fixture.runtime), fixture.store.delete_many

    def refuse(keys: Iterable[str]) -> list[DeleteFailure]:
        return [DeleteFailure(key, "slow down") for key in keys]

    fixture.store.delete_many = refuse  # type: ignore[method-assign]
    with pytest.raises(TransientStorageError, match="was not deleted: slow down"):
        unregister(fixture.store, log, "python")
    assert fixture.index().readers == ("python",)
    fixture.store.delete_many = delete  # type: ignore[method-assign]
    unregister(fixture.store, log, "python")
    assert fixture.index().readers == ()


@pytest.mark.parametrize("found", [b"rubbish", b"", b"x" * 100_000])
def test_a_damaged_queue_is_closed_when_its_reader_is_deleted(found: bytes) -> None:
    fixture = LogFixture()
    add(fixture)
    fixture.store.put(QUEUE, found)
    unregister(fixture.store, Log(fixture.store, fixture.config, fixture.runtime), "other")
    assert (fixture.index().readers, fixture.index().v1) == ((), {})
    assert (queue_of(fixture).epoch, queue_of(fixture).entry_count) == (SEALED_EPOCH, 0)


def test_a_queue_that_is_gone_is_created_closed_when_its_reader_is_deleted() -> None:
    fixture = LogFixture()
    add(fixture)
    fixture.store.delete_many([QUEUE])
    unregister(fixture.store, Log(fixture.store, fixture.config, fixture.runtime), "other")
    assert queue_of(fixture).epoch == SEALED_EPOCH


@pytest.mark.parametrize(
    ("prefix", "why"),
    [
        ("ingest", "overlaps the data prefix 'ingest' of the log"),
        ("ingest/other", "overlaps the data prefix 'ingest' of the log"),
        ("busy", "there is 'busy/01J5.batch'"),
        ("early", "started too early"),
        ("queue", "there is 'queue/_owner.json'|prefix 'queue' belongs to|there is a queue"),
        ("queue/inside", "lies inside the data prefix 'queue' of another queue"),
        ("around", "lies around the data prefix 'around/queue' of another queue"),
        ("/bad", "prefix is .*relative name"),
    ],
)
def test_a_prefix_that_others_use_is_refused(prefix: str, why: str) -> None:
    fixture = LogFixture()
    for name in ("queue", "around/queue"):
        config = QueueConfig(store=URL, data_path_prefix=name)
        claim_for_writing(fixture.store, config, runtime=fixture.runtime)
    fixture.store.put("busy/01J5.batch", b"")
    V1Consumer(fixture.store, "early").claim()
    with pytest.raises(InvalidInput, match=why):
        add(fixture, prefix)
    assert fixture.index().v1 == {}


def log_at(prefix: str) -> tuple[MemoryStore, QueueConfig]:
    return MemoryStore("x"), QueueConfig(store=URL, data_path_prefix=prefix)


@pytest.mark.parametrize(
    ("own", "prefix", "why"),
    [
        ("ingest/otel/logs/data", "ingest/otel/logs", "overlaps"),
        ("ingest/otel/logs/data", "ingest", "overlaps"),
        ("orders", "ingest", "where clients look for the manifest of 'orders'"),
        ("p-00000-04pn", "other", "is a partition of a topic"),
    ],
)
def test_a_prefix_that_confuses_clients_of_the_log_is_refused(
    own: str, prefix: str, why: str
) -> None:
    with pytest.raises(InvalidInput, match=why):
        check_v1_place(*log_at(own), prefix)


def test_a_prefix_next_to_the_log_of_an_exporter_is_accepted() -> None:
    store, config = (
        MemoryStore("x"),
        QueueConfig(
            store=URL,
            data_path_prefix="ingest/otel/logs/data",
            manifest_path="ingest/otel/logs/manifest",
        ),
    )
    found = check_v1_place(store, config, "ingest/otel/logs/clickhouse")
    assert found.manifest_path == "ingest/otel/logs/clickhouse/manifest"


def test_a_prefix_in_a_store_with_a_topic_is_refused() -> None:
    runtime = ManualRuntime()
    store = MemoryStore("topic", now_ms=runtime.now_ms)
    Topic.create("memory://topic", 2, store=store, runtime=runtime)
    config = QueueConfig(store="memory://topic", data_path_prefix="ingest")
    with pytest.raises(InvalidInput, match="there is a topic"):
        check_v1_place(store, config, "other")


def test_names_and_prefixes_of_other_readers_are_refused() -> None:
    fixture = LogFixture()
    fixture.append(3)
    add(fixture)
    read(fixture.reader("python"))
    with pytest.raises(InvalidInput, match="there is a reader 'other' already"):
        add(fixture, "other-2")
    with pytest.raises(InvalidInput, match="there is a reader 'python' already"):
        add(fixture, "other-2", "python")
    with pytest.raises(InvalidInput, match="belongs to reader 'other' of the log"):
        add(fixture, name="second")
    log = Log(fixture.store, fixture.config, fixture.runtime)
    register_readers(log, ["gone"], "test")
    log.change(lambda before: before and before.without_readers(["gone"]))
    with pytest.raises(InvalidInput, match="'gone' was used by another reader"):
        add(fixture, "other-2", "gone")


def test_a_reader_begins_after_a_gap_of_the_log() -> None:
    fixture = LogFixture()
    fixture.append(4)
    fixture.store.put(KEY, fixture.manifest().drop_through(1).raw)
    fixture.append(30)
    assert fixture.index().lost
    assert add(fixture) == fixture.index().lost[0][1]


def test_a_queue_with_foreign_entries_is_not_taken() -> None:
    fixture = LogFixture()
    end = kill_at(fixture, 2)
    with pytest.raises(Killed):
        add(fixture)
    end()
    fixture.store.put(QUEUE, queue_of(fixture).append([NewEntry("x")]).raw)
    with pytest.raises(InvalidInput, match="Use another prefix"):
        add(fixture)
