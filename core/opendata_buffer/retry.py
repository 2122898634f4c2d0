"""Retries: tenacity with the time and the randomness of a :class:`~.runtime.Runtime`."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import Protocol
from weakref import WeakKeyDictionary

import tenacity

from opendata_buffer.errors import TransientStorageError
from opendata_buffer.runtime import Runtime, remaining

__all__ = ["full_jitter", "queue_retry"]


class BackoffSettings(Protocol):
    """The retry settings of a ``QueueConfig``."""

    @property
    def backoff_base_ms(self) -> int: ...
    @property
    def backoff_max_ms(self) -> int: ...
    @property
    def cas_deadline_ms(self) -> int: ...


class _Backoff:
    """Wait and stop of one policy; tenacity's own read the global clock and random numbers."""

    def __init__(
        self,
        runtime: Runtime,
        base_ms: int,
        max_ms: int,
        deadline_ms: int,
        pause: Callable[[BaseException], float | None] | None,
    ) -> None:
        self._runtime = runtime
        self._pause = pause
        self._base_s = base_ms / 1000
        self._max_s = max_ms / 1000
        self._deadline_s = deadline_ms / 1000
        # Per call, not per policy: one policy may serve several threads at once.
        self._began: MutableMapping[tenacity.RetryCallState, float] = WeakKeyDictionary()

    def before(self, state: tenacity.RetryCallState) -> None:
        if state.attempt_number == 1:
            self._began[state] = self._runtime.monotonic()

    def _left_s(self, state: tenacity.RetryCallState) -> float:
        return self._began[state] + self._deadline_s - self._runtime.monotonic()

    def wait(self, state: tenacity.RetryCallState) -> float:
        # The exponent is capped: 2.0**1024 overflows after some hours of retries.
        step = min(self._max_s, self._base_s * 2.0 ** min(state.attempt_number - 1, 64))
        error = None if state.outcome is None else state.outcome.exception()
        pause = None if error is None or self._pause is None else self._pause(error)
        if pause is None:
            pause = self._runtime.random() * step
        # Cut at the deadline, so that the last attempt is made at it and not given away.
        return min(pause, max(0.0, self._left_s(state)))

    def stop(self, state: tenacity.RetryCallState) -> bool:
        # At the caller's deadline nothing can be tried any more, and the error of the last
        # attempt says more than that time is up.
        around = remaining()
        late = around is not None and state.upcoming_sleep >= around
        return late or self._left_s(state) <= 0


def full_jitter(
    runtime: Runtime,
    *,
    base_ms: int,
    max_ms: int,
    deadline_ms: int,
    retry_on: tuple[type[BaseException], ...],
    pause: Callable[[BaseException], float | None] | None = None,
) -> tenacity.Retrying:
    """A retry policy with full-jitter exponential backoff within a deadline.

    Attempt ``n`` is followed by a sleep drawn from [0, min(max_ms, base_ms * 2**(n-1))). Full
    jitter, because writers that lost one CAS race together would otherwise meet again in the
    next one (failure F14). Call the policy, or iterate over it: ``for attempt in policy: with
    attempt: ...``. It may be used again and by several threads.

    Args:
        runtime: Where sleeping, time and randomness come from.
        base_ms: First backoff step, milliseconds.
        max_ms: Largest backoff step, milliseconds.
        deadline_ms: Milliseconds after the first attempt began when no further one begins. A
            sleep is cut at the deadline, so the last attempt is made about then. No sleep
            lasts until the caller's :func:`~opendata_buffer.runtime.deadline`: it ends the
            retries at once.
        retry_on: Errors that are retried. Any other, and the last of these, is raised as it is.
        pause: Seconds to sleep after an error in place of the backoff; None for the backoff.
    """
    backoff = _Backoff(runtime, base_ms, max_ms, deadline_ms, pause)
    return tenacity.Retrying(
        sleep=runtime.sleep,
        before=backoff.before,
        wait=backoff.wait,
        stop=backoff.stop,
        retry=tenacity.retry_if_exception_type(retry_on),
        reraise=True,
    )


def queue_retry(
    runtime: Runtime,
    config: BackoffSettings,
    *,
    deadline_ms: int | None = None,
    retry_on: tuple[type[BaseException], ...] = (TransientStorageError,),
    pause: Callable[[BaseException], float | None] | None = None,
) -> tenacity.Retrying:
    """:func:`full_jitter` with the backoff of a queue's settings.

    Args:
        runtime: Where sleeping, time and randomness come from.
        config: ``backoff_base_ms``, ``backoff_max_ms`` and ``cas_deadline_ms`` are used.
        deadline_ms: Milliseconds in place of ``cas_deadline_ms``.
        retry_on: Errors that are retried.
        pause: See :func:`full_jitter`.
    """
    return full_jitter(
        runtime,
        base_ms=config.backoff_base_ms,
        max_ms=config.backoff_max_ms,
        deadline_ms=config.cas_deadline_ms if deadline_ms is None else deadline_ms,
        retry_on=retry_on,
        pause=pause,
    )
