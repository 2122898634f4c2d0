"""Who is silent for too long loses its claim; who may not have been heard does not."""

from __future__ import annotations

from opendata_buffer.broker.claims import LATE_S, MOST_TOKENS, ClaimHolder, Heartbeats
from opendata_buffer.testing.runtime import ManualRuntime

HOLDER = ClaimHolder("w", token=5, timeout_ms=1_000)


class World:
    def __init__(self) -> None:
        self.steady_since = float("-inf")
        self.heartbeats = Heartbeats(ManualRuntime().condition(), lambda: self.steady_since)
        self.heartbeats.begin({7: HOLDER}, now=100.0)


def test_a_claim_lapses_when_its_time_is_over_without_a_heartbeat() -> None:
    world = World()
    assert world.heartbeats.lapses == {7: 101.0}
    assert world.heartbeats.until(7, HOLDER, now=101.0) is None


def test_a_heartbeat_gives_the_time_from_when_it_was_heard() -> None:
    world = World()
    world.heartbeats.hear([5], now=100.75)
    assert world.heartbeats.until(7, HOLDER, now=101.0) == 101.75
    world.heartbeats.drop(5)
    assert world.heartbeats.until(7, HOLDER, now=101.0) is None


def test_who_looks_late_gives_the_whole_time_once() -> None:
    world = World()
    late = 101.0 + 2 * LATE_S
    until = world.heartbeats.until(7, HOLDER, now=late)
    assert until == late + 1
    world.heartbeats.landed({7: until})
    assert world.heartbeats.until(7, HOLDER, now=until + 2 * LATE_S) is None


def test_a_pause_of_the_broker_counts_for_nobody() -> None:
    world = World()
    world.steady_since = 100.5
    assert world.heartbeats.until(7, HOLDER, now=101.0) == 101.5


def test_what_landed_is_looked_at_then_and_what_ended_no_more() -> None:
    world = World()
    world.heartbeats.landed({8: 105.0, 7: None, 9: None})
    assert world.heartbeats.lapses == {8: 105.0}
    world.heartbeats.end()
    assert world.heartbeats.lapses == {}


def test_tokens_that_nobody_holds_do_not_pile_up() -> None:
    world = World()
    world.heartbeats.hear(range(MOST_TOKENS + 1), now=100.5)
    assert len(world.heartbeats._alive) == MOST_TOKENS
    world.heartbeats.forget({7: HOLDER})
    assert world.heartbeats._alive == {5: 100.5}


def test_tokens_do_not_pile_up_either_where_nothing_is_forgotten_and_the_last_heard_are_known() -> (
    None
):
    world = World()
    for each in range(4):
        world.heartbeats.hear(
            range(1_000 + each * MOST_TOKENS, 1_000 + (each + 1) * MOST_TOKENS), 0.0
        )
        world.heartbeats.hear([5], now=100.75)
    assert len(world.heartbeats._alive) == 2 * MOST_TOKENS
    assert world.heartbeats.until(7, HOLDER, now=101.0) == 101.75
