"""Sending again what boto3 does not: writes that met another one, reads whose body broke off."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import botocore.exceptions as boto
import urllib3.exceptions

from opendata_buffer.config import StoreOptions
from opendata_buffer.retry import full_jitter
from opendata_buffer.runtime import Runtime

__all__ = ["BODY_LOST", "BodyLost", "Busy", "until_whole", "while_busy"]

BODY_LOST = (
    boto.FlexibleChecksumError,
    boto.IncompleteReadError,
    boto.ResponseStreamingError,
    boto.ReadTimeoutError,
    urllib3.exceptions.HTTPError,
)
"""Errors of an answer that began and whose body did not come through."""

T = TypeVar("T")


class Busy(Exception):
    """409: not applied, another write was under way."""

    def __init__(self, error: boto.ClientError) -> None:
        super().__init__(str(error))
        self.error = error


class BodyLost(Exception):
    """The answer began and its body broke off.

    Args:
        error: What is raised when no further attempt is made.
    """

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


def while_busy(runtime: Runtime, once: Callable[[], T]) -> T:
    """Repeat a write that was answered with 409, for two seconds.

    409 means that another operation was under way and this one was not applied: the same put may
    simply be sent again (failure F3).

    Raises:
        Busy: Of the last attempt.
    """
    policy = full_jitter(runtime, base_ms=20, max_ms=200, deadline_ms=2_000, retry_on=(Busy,))
    return policy(once)


def until_whole(runtime: Runtime, options: StoreOptions, once: Callable[[], T]) -> T:
    """Repeat a read that raises :class:`BodyLost`, for as long as all its attempts may take; so is
    repeated one whose bytes do not have the checksum that the store told (failure F36).

    Raises:
        BodyLost: Of the last attempt.
    """
    policy = full_jitter(
        runtime,
        base_ms=50,
        max_ms=1_000,
        deadline_ms=options.read_timeout_ms * options.max_attempts,
        retry_on=(BodyLost,),
    )
    return policy(once)
