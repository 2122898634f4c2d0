"""The committer of one process. tests/contract/test_committer.py tests all committers alike."""

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
from opendata_buffer.formats.manifest import NewEntry
from opendata_buffer.producer.sharing import shared_committer
from opendata_buffer.runtime import SystemRuntime
from opendata_buffer.stores.base import PutOutcome
from opendata_buffer.stores.memory import MemoryStore
from opendata_buffer.testing.runtime import ManualRuntime
from tests.support.tuned import tuned
from tests.unit.broker.local import eventually
from tests.unit.producer.in_memory import WAIT_S, entries

CONFIG = QueueConfig(store="memory://unused")


def entry(n: int, prefix: str = "ingest") -> NewEntry:
    return NewEntry(f"{prefix}/01J5T4R3KXBMZ7QV9N2WG8Y{n:03d}.batch")


def queued(store: MemoryStore) -> list[str]:
    return [each.location for each in entries(store)]


class Held(MemoryStore):
    """Holds the first manifest write until the test releases it."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = threading.Event()
        self.go_on = threading.Event()
        self.writes = 0

    def put_if(self, key: str, data: bytes, condition: str | None) -> PutOutcome:
        self.writes += 1
        if self.writes == 1:
            self.begun.set()
            assert self.go_on.wait(WAIT_S)
            return self.first(key, data, condition)
        return self.later(key, data, condition)

    def first(self, key: str, data: bytes, condition: str | None) -> PutOutcome:
        return super().put_if(key, data, condition)

    def later(self, key: str, data: bytes, condition: str | None) -> PutOutcome:
        return super().put_if(key, data, condition)


class Callers:
    """Threads that append, and their outcomes."""

    def __init__(self, store: MemoryStore, **settings: int) -> None:
        self.runtime = SystemRuntime()
        config = tuned(QueueConfig, store="memory://unused", **settings)
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

    def await_outcomes(self, count: int) -> None:
        eventually(lambda: len(self.outcomes) >= count)

    def join(self) -> None:
        for thread in self._threads:
            thread.join(WAIT_S)
            assert not thread.is_alive()
        self.committer.close()


def held(store: Held, *numbers: int, **settings: int) -> Callers:
    """Start one append that lasts until :attr:`Held.go_on`, with these waiting for it in order."""
    callers = Callers(store, **settings)
    callers.append(0)
    assert store.begun.wait(WAIT_S)
    for n in numbers:
        wait_in_order(callers, n)
    return callers


def wait_in_order(callers: Callers, n: int, **how: Any) -> None:
    waiting = len(callers.committer._waiting)
    callers.append(n, **how)
    eventually(lambda: len(callers.committer._waiting) > waiting)


def test_appends_that_arrive_during_a_write_share_the_next_write() -> None:
    store = Held()
    callers = held(store)
    for n in range(1, 9):
        wait_in_order(callers, 10 * n, count=2)
    store.go_on.set()
    callers.join()
    assert store.writes == 2
    assert callers.committer.conflicts == 0
    everything = queued(store)
    assert len(everything) == 17
    for n in range(10, 90, 10):
        at = callers.outcomes[n]
        assert isinstance(at, int)
        assert everything[at : at + 2] == [entry(n).location, entry(n + 1).location]


def test_f2_no_append_joins_a_write_whose_answer_was_lost() -> None:
    class Lossy(Held):
        def first(self, key: str, data: bytes, condition: str | None) -> PutOutcome:
            return outcomes.Unknown("connection reset")

    store = Lossy()
    callers = held(store, 1)
    store.go_on.set()
    callers.join()
    # The append may have landed alone. A repeated write with another append could not find it.
    assert callers.outcomes == {0: 0, 1: 1}
    assert queued(store) == [entry(0).location, entry(1).location]


def test_an_append_that_waits_too_long_is_refused_without_delaying_others() -> None:
    store = Held()
    callers = held(store)
    callers.append(1, within=0.05)
    callers.await_outcomes(1)
    wait_in_order(callers, 3)
    store.go_on.set()
    callers.await_outcomes(3)
    callers.append(2, within=-1.0)
    callers.join()
    for n in (1, 2):
        assert isinstance(callers.outcomes[n], TransientStorageError)
    assert queued(store) == [entry(0).location, entry(3).location]


def test_f35_appends_that_fit_alone_succeed_although_their_group_does_not_fit() -> None:
    store = Held()
    # 22 bytes and 59 per entry, so six entries fit.
    callers = held(store, *range(1, 9), max_manifest_bytes=400)
    store.go_on.set()
    callers.join()
    assert queued(store) == [entry(n).location for n in range(6)]
    full = [n for n, outcome in callers.outcomes.items() if isinstance(outcome, QueueFull)]
    assert sorted(full) == [6, 7, 8]


def test_an_entry_that_no_manifest_can_store_fails_only_its_own_caller() -> None:
    store = Held()
    callers = held(store)
    # Half a surrogate pair, which JSON that is sent to a broker may contain.
    wait_in_order(callers, 7, prefix="ingest/\ud800")
    for n in (1, 2, 3):
        wait_in_order(callers, n)
    store.go_on.set()
    callers.join()
    assert isinstance(callers.outcomes.pop(7), InvalidInput)
    assert queued(store) == [entry(n).location for n in range(4)]
    assert callers.outcomes == {n: n for n in range(4)}


@pytest.mark.parametrize("bug", [RuntimeError("a bug"), SystemExit()])
def test_an_error_of_the_store_reaches_every_caller_and_the_next_append_succeeds(
    bug: BaseException,
) -> None:
    class Buggy(Held):
        def later(self, key: str, data: bytes, condition: str | None) -> PutOutcome:
            if self.writes == 2 and isinstance(bug, RuntimeError):
                raise bug
            outcome = super().later(key, data, condition)
            if self.writes == 2:
                raise bug
            return outcome

    store = Buggy()
    callers = held(store, 1, 2)
    store.go_on.set()
    callers.await_outcomes(3)
    callers.append(3)
    callers.join()
    found = {type(callers.outcomes[n]) for n in (1, 2)}
    if isinstance(bug, RuntimeError):
        assert found == {RuntimeError}
        assert queued(store) == [entry(n).location for n in (0, 3)]
    else:
        # The writing thread is interrupted, and the other threads cannot know whether it wrote.
        assert found == {SystemExit, CommitStateUnknown}
        assert len(queued(store)) == 4


def test_an_append_waits_for_the_rate_limit_of_the_store() -> None:
    class Paced(MemoryStore):
        due = 0.0

        def write_due(self, key: str) -> float:
            assert key == "ingest/manifest"
            return self.due

    store, runtime = Paced(), ManualRuntime()
    committer = shared_committer(store, CONFIG, runtime)
    assert committer.append([entry(0)], begin_by=1e6) == 0
    for due in (10.0, 6.0):
        store.due = due
        assert committer.pause() == due
    store.due = 0.0
    assert committer.pause() <= 0
    assert committer.append([entry(1), entry(2)], begin_by=1e6) == 1
    assert committer.attempts == 2
    committer.close()
