"""The race that every store is put through finds stores that check first and write then."""

from __future__ import annotations

import threading

import pytest

from opendata_buffer.stores.base import Absent, IfVersion, PutOutcome
from opendata_buffer.stores.memory import MemoryStore
from tests.races import ROUNDS, race


class ChecksThenWrites(MemoryStore):
    """Honours every condition alone; of writers that come together all pass the check.

    Args:
        writers: How many it lets pass before the first one writes.
        on: Which condition it is careless with.
    """

    def __init__(self, writers: int, on: type[Absent | IfVersion]) -> None:
        super().__init__()
        self._on = on
        self._checked = threading.Barrier(writers)
        self._writing = threading.Lock()

    def put_if(self, key: str, data: bytes, condition: Absent | IfVersion) -> PutOutcome:
        if not isinstance(condition, self._on):
            return super().put_if(key, data, condition)
        self._checked.wait(300)  # all have seen the same object by now
        with self._writing:
            self.delete_many([key])
            return super().put_if(key, data, Absent())


@pytest.mark.parametrize(("careless", "kind"), [(Absent, "create"), (IfVersion, "replace")])
def test_a_store_that_checks_and_then_writes_is_caught(
    careless: type[Absent | IfVersion], kind: str
) -> None:
    with pytest.raises(AssertionError, match=rf"3 of 3 writers won one {kind} in round 0"):
        race(ChecksThenWrites(3, careless), "m", rounds=1, writers=3)


def test_a_store_that_does_not_lets_one_win_each_time() -> None:
    assert race(MemoryStore(), "m") == 2 * ROUNDS
