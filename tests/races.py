"""Races of conditional writes: only one of several simultaneous writers may win."""

from __future__ import annotations

import os
import random
import threading
import time
from typing import Protocol

from opendata_buffer import outcomes
from opendata_buffer.stores.base import Blob, ConditionalPut, Get, PutOutcome
from opendata_buffer.stores.memory import MemoryStore

WRITERS = 8
ROUNDS = int(os.environ.get("OPENDATA_BUFFER_RACE_ROUNDS", "3"))
"""Rounds of creating and replacing an object; 200 at night."""


class _Raced(Get, ConditionalPut, Protocol):
    """The methods of a store that a race needs."""


def increment(store: _Raced, key: str, times: int, seed: int) -> None:
    """Add one to the number in an object, ``times`` times, by compare-and-swap.

    Other processes also run this, so this module imports little.
    """
    rng = random.Random(seed)
    for _ in range(times):
        while True:
            found = store.get(key)
            assert isinstance(found, Blob)
            after = str(int(found.data) + 1).encode()
            if isinstance(store.put_if(key, after, found.version), outcomes.Applied):
                break
            time.sleep(rng.random() * 0.02)


def race(store: _Raced, key: str, rounds: int = ROUNDS, writers: int = WRITERS) -> int:
    """In each round, let writers create an object together, and then replace it together.

    Returns:
        The number of decided races: exactly one writer was told that it won, and wrote the object.

    Raises:
        AssertionError: Several writers were told that they won, or the object is not the winner's.
    """
    decided = 0
    for turn in range(rounds):
        condition: str | None = None
        for kind in ("create", "replace"):
            results = _together(store, f"{key}-{turn}", kind.encode(), condition, writers)
            won = [
                (outcome, data)
                for outcome, data in results
                if isinstance(outcome, outcomes.Applied)
            ]
            lost = [outcome for outcome, _ in results if isinstance(outcome, outcomes.Unknown)]
            assert len(won) <= 1, f"{len(won)} of {writers} writers won one {kind} in round {turn}"
            assert won or lost, f"no writer won the {kind} in round {turn}: {results}"
            found = store.get(f"{key}-{turn}")
            assert isinstance(found, Blob)
            if won:
                ((outcome, data),) = won
                assert isinstance(outcome, outcomes.Applied)
                assert (found.data, found.version) == (data, outcome.value)
                decided += 1
            condition = found.version
    return decided


def _together(
    store: ConditionalPut, key: str, kind: bytes, condition: str | None, writers: int
) -> list[tuple[PutOutcome, bytes]]:
    ready = threading.Barrier(writers)
    results: list[tuple[PutOutcome, bytes]] = []
    errors: list[BaseException] = []

    def write(data: bytes) -> None:
        try:
            ready.wait(300)
            results.append((store.put_if(key, data, condition), data))
        except BaseException as error:  # reported by the thread of the test
            errors.append(error)

    threads = [
        threading.Thread(target=write, args=(b"%s by %d" % (kind, number),))
        for number in range(writers)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    assert len(results) == writers
    return results


class ChecksThenWrites(MemoryStore):
    """A store that checks conditions before it writes, in two steps.

    It honours every condition of a single writer, such as the first writes of a probe. If several
    writers arrive together, all of them pass the check.

    Args:
        writers: Number of writers that pass the check before the first one writes.
        creating: Whether writes that create an object are affected, or writes that replace one.
    """

    def __init__(self, writers: int, *, creating: bool) -> None:
        super().__init__()
        self._creating = creating
        self._checked = threading.Barrier(writers)
        self._writing = threading.Lock()

    def put_if(self, key: str, data: bytes, condition: str | None) -> PutOutcome:
        if data == b"probe" or (condition is None) is not self._creating:
            return super().put_if(key, data, condition)
        self._checked.wait(300)  # all writers have seen the same object
        with self._writing:
            self.delete_many([key])
            return super().put_if(key, data, None)
