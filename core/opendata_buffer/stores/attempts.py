"""Sending again what may be sent again, for clients that repeat nothing by themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from opendata_buffer.config import StoreOptions
from opendata_buffer.errors import TransientStorageError
from opendata_buffer.retry import full_jitter
from opendata_buffer.runtime import Runtime

__all__ = ["repeated"]

T = TypeVar("T")


def repeated(runtime: Runtime, options: StoreOptions, once: Callable[[], T]) -> T:
    """What ``once`` returns, after at most ``max_attempts`` transient failures.

    Args:
        runtime: Backoff.
        options: How many attempts, and how long each may take.
        once: A read, a listing, a deletion or an unconditional write: what does the same when it
            is done twice.

    Raises:
        TransientStorageError: Of the last attempt.
        Exception: Anything else that ``once`` raises, at once.
    """
    left = options.max_attempts

    def attempt() -> T:
        nonlocal left
        left -= 1
        try:
            return once()
        except TransientStorageError as error:
            if left > 0:
                raise _Again(error) from error
            raise

    policy = full_jitter(
        runtime,
        base_ms=100,
        max_ms=2_000,
        deadline_ms=options.read_timeout_ms * options.max_attempts,
        retry_on=(_Again,),
    )
    try:
        return policy(attempt)
    except _Again as again:  # no time is left for another attempt
        raise again.error from again.error.__cause__


class _Again(Exception):
    """What failed and may be tried again."""

    def __init__(self, error: TransientStorageError) -> None:
        super().__init__(str(error))
        self.error = error
