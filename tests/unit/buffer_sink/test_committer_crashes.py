"""A driver killed at any request to the store, a consumer in between: every record once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from buffer_sink.committer import claim
from buffer_sink.options import SinkOptions
from opendata_buffer import outcomes
from opendata_buffer.errors import CommitStateUnknown
from opendata_buffer.stores.base import PutOutcome
from opendata_buffer.stores.memory import MemoryStore
from tests.unit.buffer_sink.target_queue import CONFIG, World


class Killed(Exception):
    """The driver process is gone."""


class Mortal(MemoryStore):
    """Kills its user at one request, before or after it was carried out; loses answers."""

    def __init__(self) -> None:
        super().__init__("mortal")
        self.left: int | None = None
        self.after = False
        self.losses = 0

    def _is_last(self) -> bool:
        if self.left is None:
            return False
        self.left -= 1
        if self.left < 0 and not self.after:
            raise Killed
        return self.left < 0

    def get(self, key: str, **options: Any) -> Any:
        last = self._is_last()
        found = super().get(key, **options)
        if last:
            raise Killed
        return found

    def put(self, key: str, data: bytes | memoryview) -> None:
        last = self._is_last()
        super().put(key, data)
        if last:
            raise Killed

    def put_if(self, key: str, data: bytes, condition: str | None) -> PutOutcome:
        last = self._is_last()
        outcome = super().put_if(key, data, condition)
        if last:
            raise Killed
        if self.losses and self.left is not None:
            self.losses -= 1
            return outcomes.Unknown("the answer was lost")
        return outcome


@dataclass(frozen=True)
class Attempt:
    """One run of a micro-batch."""

    kill: int | None  # requests until the driver dies
    after: bool  # whether the last request is carried out
    losses: int  # conditional writes whose answers are lost
    consume: int  # batches that a consumer takes afterwards
    other: bool  # whether another producer appends afterwards


attempts = st.builds(
    Attempt,
    kill=st.none() | st.integers(0, 14),
    after=st.booleans(),
    losses=st.integers(0, 2),
    consume=st.integers(0, 5),
    other=st.booleans(),
)


class CrashWorld(World):
    def __init__(self) -> None:
        super().__init__(Mortal(), claimed=False)
        self.others = 0

    def run(self, batch: int, attempt: Attempt) -> bool:
        """As Spark does it: a plan, tasks, then a commit by a driver that knows nothing yet."""
        self.store.left = 1_000 if attempt.kill is None else attempt.kill
        self.store.after, self.store.losses = attempt.after, attempt.losses
        try:
            claim(SinkOptions(queue=CONFIG), self.store, self.runtime)
            left, self.store.left = self.store.left, None
            group = self.group(batch, *(f"{batch}.{part}".encode() for part in range(2)))
            self.store.left = left
            self.driver().append(group)
        except (Killed, CommitStateUnknown):
            return False
        finally:
            self.store.left = None
            if attempt.consume:
                self.drain(attempt.consume)
            if attempt.other:
                self.queue().append(self.group(None, b"other").entries)
                self.others += 1
        return True


DRAIN = Attempt(kill=None, after=False, losses=0, consume=5, other=False)


@pytest.mark.parametrize("other", [False, True])
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("kill", range(16))
def test_killed_at_any_request_and_drained_at_once(kill: int, after: bool, other: bool) -> None:
    world = CrashWorld()
    dies = Attempt(kill=kill, after=after, losses=0, consume=5, other=other)
    for batch in range(3):
        done = world.run(batch, dies) and world.run(batch, DRAIN)
        assert done or world.run(batch, DRAIN)
    check(world, 3)


@given(st.lists(st.lists(attempts, min_size=1, max_size=4), min_size=1, max_size=5))
@example([[DRAIN], [Attempt(5, True, 0, 5, False)], [DRAIN]])
def test_every_record_is_read_once_whatever_happens(batches: list[list[Attempt]]) -> None:
    world = CrashWorld()
    for batch, runs in enumerate(batches):
        for attempt in runs:
            # Also a batch that was committed runs again: Spark may not have noted it.
            world.run(batch, attempt)
        if not world.run(batch, Attempt(None, False, 0, 0, False)):
            raise AssertionError("a driver that is left alone does not finish")
    check(world, len(batches))


def check(world: CrashWorld, batches: int) -> None:
    world.drain()
    ours = [record for record in world.read if record != b"other"]
    assert ours == [f"{batch}.{part}".encode() for batch in range(batches) for part in range(2)]
    assert world.read.count(b"other") == world.others
