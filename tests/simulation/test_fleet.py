"""Producers, workers and brokers as they are in production, and everything that happens to them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from opendata_buffer.broker.worker import ClaimedBatch
from tests.simulation.fleet import Fleet, Member, simulate
from tests.support.simulation import SimulationFailed

SHARE = 0.5
DEFAULT_SEEDS = 200


def test_nothing_is_lost_and_nothing_is_done_twice_for_no_reason(seed: int) -> None:
    # Three brokers, and small enough for many seeds: three to a dozen deeds in five seconds.
    fleet = simulate(Fleet(seed, producers=3, workers=3, run_s=5, work_s=0.05))
    assert len(fleet.durable) > 20
    assert sum(fleet.done.values()) > 20
    assert sum(fleet.deeds.values()) > 2


@dataclass
class Robbed(Fleet):
    """Claims are lost though nothing was done to their workers."""

    torments: tuple[str, ...] = ("deny",)
    asked: bool = False
    robbed: bool = False

    def _handed_out(self, batch: ClaimedBatch, member: Member, now: float) -> None:
        super()._handed_out(batch, member, now)
        if self.asked and self.robbed:
            return
        self.robbed = True
        claim = batch._claim
        claim.token += 1_000_000
        claim.asked = self.asked
        # Longer ago than a claim lasts: the worker is not sure of it.
        claim.beaten = replace(claim.beaten, monotonic=claim.beaten.monotonic - 60)


def test_a_claim_that_is_lost_for_no_reason_fails_the_run() -> None:
    fleet = Robbed(0, hosts=1, producers=1, workers=1, run_s=5)
    with pytest.raises(SimulationFailed, match=r"worker0#\d+ lost batch \d+ for no reason"):
        fleet.run()


def test_a_claim_may_be_lost_that_an_attempt_without_an_answer_may_have_ended() -> None:
    fleet = simulate(Robbed(0, hosts=1, producers=1, workers=1, run_s=5, asked=True))
    assert fleet.lost_claims == 1
    assert sum(fleet.done.values()) > 5
