"""Every record is read once, even if the driver is killed at any request and a consumer drains."""

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
from tests.unit.buffer_sink.target_queue import CONFIG, TargetQueue


class Killed(Exception):
    """The driver process is gone."""


class Mortal(MemoryStore):
    """Kills its user at one request, before or after it is carried out, and loses answers."""

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
    consume: int  # batches that a consumer drains afterwards
    other: bool  # whether another producer appends afterwards


attempts = st.builds(
    Attempt,
    kill=st.none() | st.integers(0, 14),
    after=st.booleans(),
    losses=st.integers(0, 2),
    consume=st.integers(0, 5),
    other=st.booleans(),
)


class CrashingTarget(TargetQueue):
    def __init__(self) -> None:
        super().__init__(Mortal(), claimed=False)
        self.others = 0

    def run(self, batch: int, attempt: Attempt) -> bool:
        """Run a batch like Spark: a plan, the tasks, and a commit by a new driver."""
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
def test_a_batch_is_read_once_after_a_kill_at_any_request_and_an_immediate_drain(
    kill: int, after: bool, other: bool
) -> None:
    target = CrashingTarget()
    dies = Attempt(kill=kill, after=after, losses=0, consume=5, other=other)
    for batch in range(3):
        done = target.run(batch, dies) and target.run(batch, DRAIN)
        assert done or target.run(batch, DRAIN)
    assert_every_record_was_read_once(target, 3)


@given(st.lists(st.lists(attempts, min_size=1, max_size=4), min_size=1, max_size=5))
@example([[DRAIN], [Attempt(5, True, 0, 5, False)], [DRAIN]])
def test_every_record_is_read_once_after_any_mix_of_kills_losses_and_drains(
    batches: list[list[Attempt]],
) -> None:
    target = CrashingTarget()
    for batch, runs in enumerate(batches):
        for attempt in runs:
            # A committed batch also runs again, because Spark may not have noted the commit.
            target.run(batch, attempt)
        if not target.run(batch, Attempt(None, False, 0, 0, False)):
            raise AssertionError("an undisturbed driver does not finish")
    assert_every_record_was_read_once(target, len(batches))


def assert_every_record_was_read_once(target: CrashingTarget, batches: int) -> None:
    target.drain()
    ours = [record for record in target.read if record != b"other"]
    assert ours == [f"{batch}.{part}".encode() for batch in range(batches) for part in range(2)]
    assert target.read.count(b"other") == target.others
