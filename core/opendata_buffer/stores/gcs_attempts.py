"""Sending a conditional write again that GCS refused for its rate: one a second is let through."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from opendata_buffer.retry import full_jitter
from opendata_buffer.runtime import Runtime

__all__ = ["SlowDown", "until_let_through"]

_PATIENCE_MS = 5_000

T = TypeVar("T")


class SlowDown(Exception):
    """A write was refused for its rate: it was not done, and may be sent again."""


def until_let_through(runtime: Runtime, once: Callable[[], T]) -> T:
    """Repeat a write that raises :class:`SlowDown`, for five seconds.

    Evenly: the next write is let through within a second, and whoever waits longer after each
    refusal, as after other errors, comes seconds too late.

    Raises:
        SlowDown: Of the last attempt.
    """
    policy = full_jitter(
        runtime,
        base_ms=100,
        max_ms=400,
        deadline_ms=_PATIENCE_MS,
        retry_on=(SlowDown,),
        pause=lambda _: 0.1 + 0.3 * runtime.random(),
    )
    return policy(once)
