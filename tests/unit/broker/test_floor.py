"""Who has the floor: one guest at a time, for a bounded time, in the order in which they came."""

from __future__ import annotations

from collections.abc import Callable

from opendata_buffer.broker.broker import PAUSE_S, PauseRequest, WritePauses
from tests.support.simulation import SimRuntime, Simulation


class Desk:
    """A thread that gives the floor, and guests that say when they are through."""

    def __init__(self) -> None:
        self.simulation = Simulation(0)
        self.runtime: SimRuntime = self.simulation.process("broker")
        self.condition = self.runtime.condition()
        self.floor: WritePauses = WritePauses(self.runtime, self.condition)
        self.told: list[tuple[str, int, float]] = []
        self.leaving = False

    def ask(self, client: str, number: int = 1) -> bool:
        with self.condition:
            return self.floor.ask(PauseRequest(client, number))

    def end(self, client: str) -> PauseRequest | None:
        with self.condition:
            return self.floor.end(client)

    def give(self) -> tuple[bool, float]:
        """Give it once: whether to somebody, and for how long."""
        began = self.simulation.now
        with self.condition:
            given = self.floor.grant(self.tell, lambda: self.leaving)
        return given, self.simulation.now - began

    def tell(self, guest: PauseRequest) -> None:
        self.told.append((guest.client, guest.number, self.simulation.now))

    def later(self, seconds: float, work: Callable[[], object]) -> None:
        def wait() -> None:
            self.runtime.sleep(seconds)
            work()

        self.runtime.spawn(wait, "later")


def run(test: Callable[[Desk], None]) -> None:
    desk = Desk()
    desk.simulation.run(lambda: test(desk))


def test_each_guest_has_it_until_it_is_through_and_who_came_first_is_first() -> None:
    def test(desk: Desk) -> None:
        assert desk.give() == (False, 0)
        assert desk.ask("a", 7)
        assert desk.ask("b", 8)
        desk.later(0.5, lambda: desk.end("a"))
        given, seconds = desk.give()
        assert (given, round(seconds, 3)) == (True, 0.5)
        desk.later(0.25, lambda: desk.end("b"))
        given, seconds = desk.give()
        assert (given, round(seconds, 3)) == (True, 0.25)
        assert [(client, number) for client, number, _ in desk.told] == [("a", 7), ("b", 8)]
        assert not desk.floor.is_wanted
        assert desk.floor.granted == 2

    run(test)


def test_a_guest_that_says_nothing_has_it_for_two_seconds() -> None:
    def test(desk: Desk) -> None:
        desk.ask("a")
        given, seconds = desk.give()
        assert (given, round(seconds, 3)) == (True, PAUSE_S)
        # What it says later is about nothing, and it may ask again.
        assert desk.end("a") is None
        assert desk.ask("a")

    run(test)


def test_a_client_waits_in_line_once_and_not_while_it_has_it() -> None:
    def test(desk: Desk) -> None:
        assert desk.ask("a")
        assert not desk.ask("a")
        refused: list[bool] = []
        desk.later(0.1, lambda: refused.append(not desk.ask("a")))
        desk.later(0.2, lambda: desk.end("a"))
        assert desk.give()[0]
        assert refused == [True]

    run(test)


def test_who_leaves_the_line_is_not_told_and_the_next_one_is() -> None:
    def test(desk: Desk) -> None:
        desk.ask("a", 3)
        desk.ask("b")
        gone = desk.end("a")
        assert gone is not None
        assert (gone.client, gone.number) == ("a", 3)
        desk.later(0.1, lambda: desk.end("b"))
        assert desk.give()[0]
        assert [client for client, _, _ in desk.told] == ["b"]

    run(test)


def test_a_broker_that_leaves_waits_for_nobody() -> None:
    def test(desk: Desk) -> None:
        def leave() -> None:
            with desk.condition:
                desk.leaving = True
                desk.condition.notify_all()

        desk.ask("a")
        desk.ask("b")
        desk.later(0.3, leave)
        given, seconds = desk.give()
        assert (given, round(seconds, 3)) == (True, 0.3)
        with desk.condition:
            assert [each.client for each in desk.floor.clear()] == ["b"]
        assert not desk.floor.is_wanted

    run(test)
