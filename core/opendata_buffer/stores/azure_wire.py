"""Answers of Azure, read no further than they may be long: the SDK reads each to its end."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

from opendata_buffer.stores.extras import load
from opendata_buffer.stores.wire import MOST_OF_A_PAGE, MOST_OF_AN_ERROR, TooLong, limited

__all__ = ["bounded_answer"]

_RANGE = re.compile(r"bytes=(\d{1,18})-(\d{1,18})")


def bounded_answer(build: Callable[[Any, Any], Any], request: Any, raw: Any) -> Any:
    """What an adapter of requests makes of an answer, bounded by what was asked for.

    Args:
        build: The adapter's own ``build_response``.
        request: Of requests.
        raw: The answer, of urllib3.

    Raises:
        ConnectionError: Of requests: by its header the body is too long. The SDK would take memory
            for all of it at once.
    """
    asked = _RANGE.fullmatch(request.headers.get("x-ms-range") or "")
    most = int(asked[2]) - int(asked[1]) + 1 if asked else MOST_OF_A_PAGE
    if raw.status >= 300:
        most = MOST_OF_AN_ERROR
    told = raw.headers.get("content-length", "")
    if told.isdecimal() and int(told[:20]) > most and request.method != "HEAD":
        raw.close()
        error = load("requests.exceptions", scheme="az", extra="azure").ConnectionError
        raise error(TooLong(f"the answer has {told[:20]} bytes, more than the {most} it may have"))
    raw.enforce_content_length = True  # as the SDK would set it, which does not get at it any more
    response = build(request, raw)
    response.raw = _Bounded(raw, most)
    return response


class _Bounded:
    """A body of urllib3 that ends in an error where it is too long."""

    def __init__(self, raw: Any, most: int) -> None:
        self._raw = raw
        self._most = most

    def stream(self, *how: Any, **more: Any) -> Iterator[bytes]:
        return limited(self._raw.stream(*how, **more), self._most)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._raw, name)
