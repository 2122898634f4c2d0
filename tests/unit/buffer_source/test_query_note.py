"""The query's id in the note of who reads a queue."""

from __future__ import annotations

import itertools

from buffer_source.query_note import INTERVAL_S, PROGRAM, QueryNotes, add_query
from opendata_buffer.config import QueueConfig
from opendata_buffer.queue.consumer_info import read_consumer_info, write_consumer_info
from opendata_buffer.stores.memory import MemoryStore
from opendata_buffer.testing.runtime import ManualRuntime

_names = itertools.count()


def query_of(store: MemoryStore, config: QueueConfig, runtime: ManualRuntime) -> str | None:
    found = read_consumer_info(store, config, runtime)
    return None if found is None else found.query


def queue() -> tuple[MemoryStore, QueueConfig]:
    name = f"note-{next(_names)}"
    return MemoryStore.named(name), QueueConfig(store=f"memory://{name}")


def test_a_task_adds_its_query_to_a_note_that_has_none() -> None:
    (store, config), runtime = queue(), ManualRuntime()
    add_query(store, config, runtime, "q")
    assert query_of(store, config, runtime) is None
    write_consumer_info(store, config, runtime, 1, program=PROGRAM)
    add_query(store, config, runtime, "q")
    add_query(store, config, runtime, "another")
    assert query_of(store, config, runtime) == "q"


def test_the_note_of_another_program_is_left_alone() -> None:
    (store, config), runtime = queue(), ManualRuntime()
    write_consumer_info(store, config, runtime, 1, program="opendata-buffer consume")
    add_query(store, config, runtime, "q")
    assert query_of(store, config, runtime) == ""


class Inline(ManualRuntime):
    """Runs at once what it is to run in the background, and counts it."""

    spawned = 0

    def spawn(self, target, name):  # type: ignore[no-untyped-def]
        self.spawned += 1
        target()


def test_it_is_done_once_a_minute_so_that_a_restarted_query_is_noted_too() -> None:
    (store, config), runtime = queue(), Inline()
    notes = QueryNotes(runtime)
    write_consumer_info(store, config, runtime, 1, program=PROGRAM)
    notes.tell(config, "q")
    notes.tell(config, "q")
    assert (runtime.spawned, query_of(store, config, runtime)) == (1, "q")
    write_consumer_info(store, config, runtime, 2, program=PROGRAM)
    assert query_of(store, config, runtime) == ""
    runtime.advance(INTERVAL_S)
    notes.tell(config, "q")
    assert (runtime.spawned, query_of(store, config, runtime)) == (2, "q")


def test_a_note_that_cannot_be_read_disturbs_no_task() -> None:
    (store, config), runtime = queue(), Inline()
    store.put("ingest/_consumer.json", b"garbage")
    QueryNotes(runtime).tell(config, "q")
    assert runtime.spawned == 1
