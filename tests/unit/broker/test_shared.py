"""The committer of a process: one for all its producers, whatever way it appends."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

import pytest

from opendata_buffer.broker.discovery_record import Lease
from opendata_buffer.producer.group_commit import Committer, GroupCommitter, open_committer
from opendata_buffer.runtime import SystemRuntime, Task
from opendata_buffer.stores.memory import MemoryStore
from tests.unit.broker.local import CONFIG, RUNTIME, entries, eventually, queued, soon

HOST = replace(CONFIG, broker="host")


def announced(store: MemoryStore) -> bool:
    found = Lease(store, CONFIG, RUNTIME).read()
    return found is not None and found.serves


def test_producers_of_a_process_share_one_and_the_last_one_ends_it() -> None:
    store = MemoryStore()
    first = open_committer(store, CONFIG, RUNTIME, None)
    second = open_committer(store, CONFIG, RUNTIME, None)
    assert first is second
    first.close()
    assert second.append(entries("a"), begin_by=soon()) == 0
    second.close()
    third = open_committer(store, CONFIG, RUNTIME, None)
    assert third is not first
    third.close()


def test_a_process_that_hosts_serves_and_leaves_when_its_last_producer_closes() -> None:
    store = MemoryStore()
    ours = open_committer(store, HOST, RUNTIME, None)
    eventually(lambda: announced(store))
    for number in range(3):
        ours.append(entries(str(number)), begin_by=soon())
    assert len(queued(store)) == 3
    ours.close()
    # It waits for the broker's last word for some seconds only.
    eventually(lambda: not announced(store))


def test_off_asks_nobody() -> None:
    ours = open_committer(MemoryStore(), replace(CONFIG, broker="off"), RUNTIME, None)
    assert isinstance(ours, GroupCommitter)
    ours.close()


class Exhausted(SystemRuntime):
    """Has no thread for the first who asks for one."""

    def __init__(self) -> None:
        self.refused = False

    def spawn(self, target: Callable[[], None], name: str) -> Task:
        if not self.refused:
            self.refused = True
            raise RuntimeError("can't start new thread")
        return super().spawn(target, name)


def test_where_the_first_producer_of_a_process_fails_the_next_one_does_not_wait_for_it() -> None:
    store, runtime = MemoryStore(), Exhausted()
    with pytest.raises(RuntimeError, match="new thread"):
        open_committer(store, HOST, runtime, None)
    made: list[Committer] = []

    def open_next() -> None:
        made.append(open_committer(store, HOST, runtime, None))

    threading.Thread(target=open_next, daemon=True).start()
    eventually(lambda: made)
    made[0].close()
