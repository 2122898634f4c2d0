"""Retries: tenacity with the time and the randomness of a :class:`~.runtime.Runtime`."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import ParamSpec, TypeVar

import tenacity

from opendata_buffer.config import QueueConfig
from opendata_buffer.errors import TransientStorageError
from opendata_buffer.runtime import Runtime, remaining

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class Retries:
    """A retry policy with full-jitter exponential backoff within a deadline.

    Call it with a function and its arguments; several threads may. Attempt ``n`` is followed by a
    sleep drawn from [0, min(max_ms, base_ms * 2**(n-1))). Full jitter, because writers that lost
    one CAS race together would otherwise meet again in the next one (failure F14).

    Attributes:
        runtime: Where sleeping, time and randomness come from.
        base_ms: First backoff step, milliseconds.
        max_ms: Largest backoff step, milliseconds.
        deadline_ms: No attempt begins later than so many milliseconds after the first one. The last
            sleep is cut short, so that an attempt is made about then. A sleep that would reach the
            caller's :func:`~.runtime.deadline` ends the retries.
        retry_on: Errors that are retried. Any other, and the last of these, is raised as it is.
        pause: Seconds to sleep after an error in place of the backoff; None for the backoff.
        before_pause: Called before each of these sleeps.
        max_attempts: How many attempts are made at most. Default: until the deadline.
    """

    runtime: Runtime
    _: KW_ONLY
    base_ms: int
    max_ms: int
    deadline_ms: int
    retry_on: tuple[type[BaseException], ...]
    pause: Callable[[BaseException], float | None] | None = None
    before_pause: Callable[[], None] | None = None
    max_attempts: int | None = None

    def __call__(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """What the function returns.

        Raises:
            BaseException: What it raised, at once or in the last attempt.
        """
        before_pause = self.before_pause
        until = self.runtime.monotonic() + self.deadline_ms / 1000

        def attempt() -> T:
            try:
                return call(*args, **kwargs)
            except Exception as error:
                _clear_locals(error)
                raise

        try:
            # Most calls succeed at once; tenacity would cost each of them more than the call.
            return attempt()
        except self.retry_on as error:
            first = [error]

        def again() -> T:
            # The attempt that was made above.
            if first:
                raise first.pop()
            return attempt()

        def wait(state: tenacity.RetryCallState) -> float:
            assert state.outcome is not None
            pause = self._pause_after(state.attempt_number, state.outcome.exception())
            # Cut at the deadline, so that the last attempt is made at it.
            return min(pause, max(0.0, until - self.runtime.monotonic()))

        def stop(state: tenacity.RetryCallState) -> bool:
            if state.attempt_number == self.max_attempts:
                return True
            # At the caller's deadline nothing can be tried any more, and the error of the last
            # attempt has more in it than that time is up.
            around = remaining()
            late = around is not None and state.upcoming_sleep >= around
            return late or until <= self.runtime.monotonic()

        return tenacity.Retrying(
            sleep=self.runtime.sleep,
            wait=wait,
            stop=stop,
            before_sleep=None if before_pause is None else lambda _: before_pause(),
            retry=tenacity.retry_if_exception_type(self.retry_on),
            reraise=True,
        )(again)

    def _pause_after(self, failures: int, error: BaseException | None) -> float:
        pause = None if error is None or self.pause is None else self.pause(error)
        if pause is not None:
            return pause
        # The exponent is capped: 2.0**1024 overflows after some hours of retries.
        step_ms = min(self.max_ms, self.base_ms * 2.0 ** min(failures - 1, 64))
        return self.runtime.random() * step_ms / 1000


def _clear_locals(error: BaseException) -> None:
    """Let go of the values of the frames that an error has passed; its traceback stays.

    tenacity, batches and handles keep errors, some of them in reference cycles: the copies of a
    manifest of 64 MiB would stay with each one (failure F35).
    """
    each: BaseException | None = error
    seen: set[int] = set()
    while each is not None and id(each) not in seen:  # a chain may be a circle
        seen.add(id(each))
        traceback.clear_frames(each.__traceback__)
        each = each.__cause__ or each.__context__


def queue_retry(
    runtime: Runtime,
    config: QueueConfig,
    *,
    deadline_ms: int | None = None,
    retry_on: tuple[type[BaseException], ...] = (TransientStorageError,),
    pause: Callable[[BaseException], float | None] | None = None,
    before_pause: Callable[[], None] | None = None,
) -> Retries:
    """:class:`Retries` with the backoff of a queue's settings, by default until its deadline."""
    return Retries(
        runtime,
        base_ms=config.backoff_base_ms,
        max_ms=config.backoff_max_ms,
        deadline_ms=config.cas_deadline_ms if deadline_ms is None else deadline_ms,
        retry_on=retry_on,
        pause=pause,
        before_pause=before_pause,
    )
