"""Sending again what may be sent again, for clients that repeat nothing by themselves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from opendata_buffer.config import StoreOptions
from opendata_buffer.errors import StorageError, TransientStorageError
from opendata_buffer.retry import full_jitter
from opendata_buffer.runtime import Runtime

__all__ = ["repeated", "with_pause"]

T = TypeVar("T")


def with_pause(error: StorageError, headers: Mapping[str, str]) -> StorageError:
    """The error, with how long its answer asks to wait before the next attempt.

    Args:
        error: Only a transient one is tried again.
        headers: Of the answer. A ``Retry-After`` that is a date is passed by: it would be compared
            with a clock of this machine.
    """
    told = headers.get("retry-after", "")
    if isinstance(error, TransientStorageError) and told.isdecimal() and len(told) < 10:
        error.retry_after_s = float(told)
    return error


def repeated(runtime: Runtime, options: StoreOptions, once: Callable[[], T]) -> T:
    """What ``once`` returns, after at most ``max_attempts`` transient failures.

    Between two attempts it waits as long as the service asked for, but no longer than one attempt
    may take; else it backs off. Where that wait would not end before the caller's deadline, the
    failure is raised at once.

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

    def pause(error: BaseException) -> float | None:
        told = error.error.retry_after_s if isinstance(error, _Again) else None
        # Later by a part of a second, or all that were sent away together would be back together.
        most = options.read_timeout_ms / 1000
        return None if told is None else min(told, most) + runtime.random()

    policy = full_jitter(
        runtime,
        base_ms=100,
        max_ms=2_000,
        deadline_ms=options.read_timeout_ms * options.max_attempts,
        retry_on=(_Again,),
        pause=pause,
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
