"""A queue or topic through time: rates, when it last moved, and a store that fails for a while."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from opendata_buffer.admin.overview import Overview, QueueLook
from opendata_buffer.errors import OpenDataBufferError
from opendata_buffer.runtime import Runtime

__all__ = ["Flow", "View", "Watch"]

WINDOW_S = 10.0
"""Over which rates are averaged."""

HISTORY = 60
"""Looks of which the backlog is kept."""

WRITERS_S = 60.0
"""For how long a writer is told of after its last batch has left."""


@dataclass(frozen=True, kw_only=True)
class Flow:
    """How a queue moves.

    Attributes:
        arriving: Batches appended per second; None before there were two looks.
        leaving: Batches acknowledged per second, the same.
        arrived_ago: Seconds since one was seen to arrive; None when none was, so far.
        left_ago: Seconds since some were seen to leave, the same.
    """

    arriving: float | None = None
    leaving: float | None = None
    arrived_ago: float | None = None
    left_ago: float | None = None


@dataclass(frozen=True, kw_only=True)
class View:
    """What there is to show at one moment.

    Attributes:
        overview: The last look that succeeded; None before there was one.
        age_seconds: Since then.
        flows: For each queue of it, by name.
        history: The backlog of the last looks, the oldest first.
        writers: Seconds since a batch of each writer was last seen waiting.
        failure: Why looks fail now; None when the last one did not.
        failing_seconds: For how long they do.
    """

    overview: Overview | None
    age_seconds: float
    flows: dict[str, Flow]
    history: tuple[int, ...]
    writers: dict[str, float]
    failure: str | None
    failing_seconds: float

    @property
    def total(self) -> Flow:
        """All queues as one."""
        flows = list(self.flows.values())

        def summed(rates: list[float | None]) -> float | None:
            known = [rate for rate in rates if rate is not None]
            return sum(known) if known else None

        def latest(ages: list[float | None]) -> float | None:
            return min((age for age in ages if age is not None), default=None)

        return Flow(
            arriving=summed([each.arriving for each in flows]),
            leaving=summed([each.leaving for each in flows]),
            arrived_ago=latest([each.arrived_ago for each in flows]),
            left_ago=latest([each.left_ago for each in flows]),
        )

    def as_json(self) -> dict[str, Any]:
        """The look, the rates of each queue, and whether the store fails."""
        found: dict[str, Any] = {} if self.overview is None else self.overview.as_json()
        for queue in found.get("queues", ()):
            flow = self.flows.get(queue["name"], Flow())
            queue["arriving_per_second"] = flow.arriving
            queue["leaving_per_second"] = flow.leaving
        found["arriving_per_second"] = self.total.arriving
        found["leaving_per_second"] = self.total.leaving
        found["failure"] = self.failure
        return found


@dataclass
class _Seen:
    """When a queue was last seen to move, on the clock for intervals."""

    arrived: float | None = None
    left: float | None = None


@dataclass
class _State:
    looks: deque[Overview] = field(default_factory=deque)
    history: deque[int] = field(default_factory=lambda: deque(maxlen=HISTORY))
    seen: dict[str, _Seen] = field(default_factory=dict)
    writers: dict[str, float] = field(default_factory=dict)
    failure: str | None = None
    failing_since: float = 0.0


class Watch:
    """Looks again and again, and keeps what a view needs.

    Whoever shows it calls :meth:`view`, from another thread than the one that looks: a store that
    does not answer must not hold up the screen, nor its end.

    Args:
        look: One look.
        runtime: Clock and thread.
    """

    def __init__(self, look: Callable[[], Overview], runtime: Runtime) -> None:
        self._look = look
        self._runtime = runtime
        self._lock = runtime.condition()
        self._state = _State()
        self._ended = False

    def start(self, interval_s: float) -> None:
        """Look in a thread of its own, so many seconds after the look before, until :meth:`end`."""

        def run() -> None:
            while not self._ended:
                self._runtime.sleep(interval_s)
                self.step()

        self._runtime.spawn(run, "opendata-buffer-watch")

    def end(self) -> None:
        """Look no more. Does not wait for a look that is under way."""
        self._ended = True

    def step(self, *, raises: bool = False) -> None:
        """Look once.

        Args:
            raises: Whether an error is raised instead of kept for the view.

        Raises:
            OpenDataBufferError: As ``look`` does, if it shall.
        """
        try:
            overview = self._look()
        except OpenDataBufferError as error:
            if raises:
                raise
            with self._lock:
                if self._state.failure is None:
                    self._state.failing_since = self._runtime.monotonic()
                self._state.failure = str(error)
            return
        with self._lock:
            self._state.failure = None
            self._take(overview)

    def view(self) -> View:
        """What is known now."""
        with self._lock:
            now = self._runtime.monotonic()
            state = self._state
            overview = state.looks[-1] if state.looks else None
            queues = () if overview is None else overview.queues
            return View(
                overview=overview,
                age_seconds=0.0 if overview is None else now - overview.monotonic,
                flows={each.name: self._flow(each, now) for each in queues},
                history=tuple(state.history),
                writers={name: now - seen for name, seen in state.writers.items()},
                failure=state.failure,
                failing_seconds=now - state.failing_since if state.failure else 0.0,
            )

    def _take(self, overview: Overview) -> None:
        state = self._state
        before = {each.name: each for each in state.looks[-1].queues} if state.looks else {}
        for each in overview.queues:
            last, seen = before.get(each.name), state.seen.setdefault(each.name, _Seen())
            if last is not None and each.next_sequence > last.next_sequence:
                seen.arrived = overview.monotonic
            if last is not None and each.first_sequence > last.first_sequence:
                seen.left = overview.monotonic
            if last is not None and each.next_sequence < last.next_sequence:
                state.looks.clear()  # it was started over: nothing before can be compared
            state.writers.update(dict.fromkeys(each.writers, overview.monotonic))
        oldest = overview.monotonic - WRITERS_S
        state.writers = {name: at for name, at in state.writers.items() if at >= oldest}
        state.looks.append(overview)
        state.history.append(overview.backlog)
        while len(state.looks) > 2 and overview.monotonic - state.looks[1].monotonic >= WINDOW_S:
            state.looks.popleft()

    def _flow(self, queue: QueueLook, now: float) -> Flow:
        seen = self._state.seen[queue.name]
        arriving = leaving = None
        for look in self._state.looks:
            first = next((each for each in look.queues if each.name == queue.name), None)
            seconds = self._state.looks[-1].monotonic - look.monotonic
            if first is not None and seconds > 0:
                arriving = (queue.next_sequence - first.next_sequence) / seconds
                leaving = max(0, queue.first_sequence - first.first_sequence) / seconds
                break
        return Flow(
            arriving=arriving,
            leaving=leaving,
            arrived_ago=None if seen.arrived is None else now - seen.arrived,
            left_ago=None if seen.left is None else now - seen.left,
        )
