"""The race that every store must pass detects stores that check first and then write."""

from __future__ import annotations

import pytest

from opendata_buffer.stores.memory import MemoryStore
from tests.races import ROUNDS, ChecksThenWrites, race


@pytest.mark.parametrize("kind", ["create", "replace"])
def test_a_store_that_checks_and_then_writes_is_caught(kind: str) -> None:
    with pytest.raises(AssertionError, match=rf"3 of 3 writers won one {kind} in round 0"):
        race(ChecksThenWrites(3, creating=kind == "create"), "m", rounds=1, writers=3)


def test_a_store_with_atomic_conditional_writes_lets_one_writer_win_each_race() -> None:
    assert race(MemoryStore(), "m") == 2 * ROUNDS
