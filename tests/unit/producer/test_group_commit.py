"""The committer of one process. What every committer promises: tests/contract/test_committer.py."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from opendata_buffer import outcomes
from opendata_buffer.config import QueueConfig
from opendata_buffer.errors import (
    CommitStateUnknown,
    InvalidInput,
    QueueFull,
    TransientStorageError,
)
from opendata_buffer.formats.entries import NewEntry
from opendata_buffer.producer.group_commit import GroupCommitter, shared_committer
from opendata_buffer.runtime import SystemRuntime
from opendata_buffer.stores.base import Absent, IfVersion, PutOutcome
from opendata_buffer.stores.memory import MemoryStore
from opendata_buffer.testing.runtime import ManualRuntime
from tests.unit.producer.world import WAIT_S, entries

CONFIG = QueueConfig(store="memory://unused")


def entry(n: int, prefix: str = "ingest") -> NewEntry:
    return NewEntry(f"{prefix}/01J5T4R3KXBMZ7QV9N2WG8Y{n:03d}.batch")


def queued(store: MemoryStore) -> list[str]:
    return [each.location for each in entries(store)]


class Held(MemoryStore):
    """The first manifest write waits until it is let through."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = threading.Event()
        self.go_on = threading.Event()
        self.writes = 0

    def put_if(self, key: str, data: bytes, condition: Absent | IfVersion) -> PutOutcome:
        self.writes += 1
        if self.writes == 1:
            self.begun.set()
            assert self.go_on.wait(WAIT_S)
        return super().put_if(key, data, condition)


class Callers:
    """Threads that append, and what comes of it."""

    def __init__(self, store: MemoryStore, config: QueueConfig = CONFIG) -> None:
        self.store = store
        self.runtime = SystemRuntime()
        self.committer = shared_committer(store, config, self.runtime)
        self.outcomes: dict[int, int | BaseException] = {}
        self._threads: list[threading.Thread] = []

    def append(self, n: int, count: int = 1, within: float = 1e6, prefix: str = "ingest") -> None:
        def call() -> None:
            new = [entry(n + i, prefix) for i in range(count)]
            try:
                self.outcomes[n] = self.committer.append(
                    new, begin_by=self.runtime.monotonic() + within
                )
            except BaseException as error:
                self.outcomes[n] = error

        thread = threading.Thread(target=call)
        thread.start()
        self._threads.append(thread)

    def hold(self, *numbers: int) -> None:
        """One append is on its way until :attr:`Held.go_on`, and the others wait behind it."""
        assert isinstance(self.store, Held)
        self.append(0)
        assert self.store.begun.wait(WAIT_S)
        for n in numbers:
            self.append(n)
        self.await_waiting(len(numbers))

    def await_waiting(self, count: int) -> None:
        while len(self.committer._waiting) < count:
            threading.Event().wait(0.001)

    def join(self) -> None:
        for thread in self._threads:
            thread.join(WAIT_S)
            assert not thread.is_alive()
        self.committer.close()


def test_appends_that_come_while_one_is_on_its_way_share_the_next_write() -> None:
    store = Held()
    callers = Callers(store)
    callers.hold()
    for n in range(1, 9):
        callers.append(10 * n, count=2)
    callers.await_waiting(8)
    store.go_on.set()
    callers.join()
    assert store.writes == 2
    assert callers.committer.conflicts == 0
    everything = queued(store)
    assert len(everything) == 17
    for n in range(1, 9):
        sequence = callers.outcomes[10 * n]
        assert isinstance(sequence, int)
        assert everything[sequence : sequence + 2] == [
            entry(10 * n).location,
            entry(10 * n + 1).location,
        ]


def test_f2_nobody_joins_a_write_whose_answer_was_lost() -> None:
    class Lossy(Held):
        def put_if(self, key: str, data: bytes, condition: Absent | IfVersion) -> PutOutcome:
            if self.writes:
                return super().put_if(key, data, condition)
            self.writes = 1
            self.begun.set()
            assert self.go_on.wait(WAIT_S)
            return outcomes.Unknown("connection reset")

    store = Lossy()
    callers = Callers(store)
    callers.hold(1)
    store.go_on.set()
    callers.join()
    # It may have landed alone: with the other one in it, nobody could tell any more.
    assert callers.outcomes == {0: 0, 1: 1}
    assert queued(store) == [entry(0).location, entry(1).location]


def test_what_waits_for_its_turn_for_too_long_is_refused_and_never_written() -> None:
    store = Held()
    callers = Callers(store)
    callers.hold()
    callers.append(1, within=0.05)
    while 1 not in callers.outcomes:
        threading.Event().wait(0.001)
    assert isinstance(callers.outcomes[1], TransientStorageError)
    store.go_on.set()
    callers.join()
    assert queued(store) == [entry(0).location]


def test_what_is_too_late_when_its_turn_comes_does_not_hold_up_the_others() -> None:
    store = MemoryStore()
    callers = Callers(store)
    callers.append(0, within=-1.0)
    callers.append(1)
    callers.join()
    assert isinstance(callers.outcomes[0], TransientStorageError)
    assert queued(store) == [entry(1).location]


def test_f35_of_what_does_not_fit_together_each_append_gets_in_that_fits() -> None:
    store = Held()
    # 22 bytes and 59 for each: six fit.
    callers = Callers(store, QueueConfig(store="memory://unused", max_manifest_bytes=400))
    callers.hold()
    for n in range(1, 9):
        callers.append(n)
        callers.await_waiting(n)
    store.go_on.set()
    callers.join()
    assert queued(store) == [entry(n).location for n in range(6)]
    full = [n for n, outcome in callers.outcomes.items() if isinstance(outcome, QueueFull)]
    assert sorted(full) == [6, 7, 8]


def test_an_entry_that_no_manifest_can_hold_fails_its_own_caller_and_no_other() -> None:
    store = Held()
    callers = Callers(store)
    callers.hold()
    # Half a surrogate pair: what a broker is sent as JSON may have one.
    callers.append(7, prefix="ingest/\ud800")
    callers.await_waiting(1)
    for n in (1, 2, 3):
        callers.append(n)
        callers.await_waiting(1 + n)
    store.go_on.set()
    callers.join()
    assert isinstance(callers.outcomes.pop(7), InvalidInput)
    assert queued(store) == [entry(n).location for n in range(4)]
    assert callers.outcomes == {n: n for n in range(4)}


def test_an_error_of_the_store_reaches_every_caller_and_the_next_append_goes_on() -> None:
    class Buggy(Held):
        def put_if(self, key: str, data: bytes, condition: Absent | IfVersion) -> PutOutcome:
            if self.writes == 1:
                self.writes += 1
                raise RuntimeError("a bug")
            return super().put_if(key, data, condition)

    store = Buggy()
    callers = Callers(store)
    callers.hold(1, 2)
    store.go_on.set()
    while len(callers.outcomes) < 3:
        threading.Event().wait(0.001)
    assert isinstance(callers.outcomes[1], RuntimeError)
    assert callers.outcomes[2] is callers.outcomes[1]
    callers.append(3)
    callers.join()
    assert queued(store) == [entry(0).location, entry(3).location]


def test_a_thread_that_is_interrupted_while_it_writes_leaves_nobody_waiting() -> None:
    class Interrupted(Held):
        def put_if(self, key: str, data: bytes, condition: Absent | IfVersion) -> PutOutcome:
            outcome = super().put_if(key, data, condition)
            if self.writes == 2:
                raise SystemExit
            return outcome

    store = Interrupted()
    callers = Callers(store)
    callers.hold(1, 2)
    store.go_on.set()
    while len(callers.outcomes) < 3:
        threading.Event().wait(0.001)
    callers.append(3)
    callers.join()
    kinds = {type(callers.outcomes[n]) for n in (1, 2)}
    assert kinds == {SystemExit, CommitStateUnknown}
    assert isinstance(callers.outcomes[3], int)


def test_one_committer_per_store_and_manifest() -> None:
    store, runtime = MemoryStore(), SystemRuntime()
    other = QueueConfig(store="memory://unused", manifest_path="other/manifest")
    first = shared_committer(store, CONFIG, runtime)

    def joins(*key: Any) -> bool:
        committer = shared_committer(*key)
        committer.close()
        return committer is first

    assert joins(store, CONFIG, runtime)
    assert not joins(store, other, runtime)
    assert not joins(MemoryStore(), CONFIG, runtime)
    first.close()


def test_a_committer_whose_last_caller_left_takes_no_new_one() -> None:
    store, runtime = MemoryStore(), SystemRuntime()
    first = shared_committer(store, CONFIG, runtime)
    first.close()
    assert not first.join()
    second = shared_committer(store, CONFIG, runtime)
    assert second is not first
    assert isinstance(second, GroupCommitter)
    second.close()


@pytest.mark.parametrize("count", [2, 8])
def test_threads_that_ask_at_once_get_one_committer(count: int) -> None:
    store, runtime = MemoryStore(), SystemRuntime()
    for _ in range(50):
        together = threading.Barrier(count)
        found: list[GroupCommitter] = []

        def ask(together: threading.Barrier = together, found: list[Any] = found) -> None:
            together.wait(WAIT_S)
            found.append(shared_committer(store, CONFIG, runtime))

        threads = [threading.Thread(target=ask) for _ in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
        assert len(set(map(id, found))) == 1
        for committer in found:
            committer.close()


class OneInTen(MemoryStore):
    """Takes a write of an object every ten seconds."""

    def __init__(self) -> None:
        super().__init__()
        self.due = 0.0

    def write_due(self, key: str) -> float:
        assert key == "ingest/manifest"
        return self.due


def test_an_append_waits_for_the_stores_pace_and_takes_what_comes_meanwhile_with_it() -> None:
    store, runtime = OneInTen(), ManualRuntime()
    committer = shared_committer(store, CONFIG, runtime)
    assert committer.append([entry(0)], begin_by=1e6) == 0
    store.due = 10.0
    assert committer.pause() == 10.0
    runtime.advance(4.0)
    store.due = 6.0
    assert committer.pause() == 6.0
    store.due = 0.0
    assert committer.pause() <= 0
    assert committer.append([entry(1), entry(2)], begin_by=1e6) == 1
    assert committer.attempts == 2
    committer.close()
