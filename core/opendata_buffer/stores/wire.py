"""How much is read of an answer: a server that sends without end must not fill the memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from urllib3.exceptions import ProtocolError

__all__ = ["MOST_OF_AN_ERROR", "MOST_OF_A_PAGE", "PIECE", "TooLong", "limited"]

MOST_OF_A_PAGE = 64 * 1024**2
"""Of any answer but an object. The longest are pages of Azure's listings: 5,000 blobs, which may
each have 8 KiB of metadata that others gave them."""

MOST_OF_AN_ERROR = 64 * 1024

PIECE = 64 * 1024


class TooLong(ProtocolError):
    """An answer has more bytes than it may."""


def limited(parts: Iterable[bytes], most: int) -> Iterator[bytes]:
    """The parts of a body, until they are more than ``most`` bytes together.

    Raises:
        TooLong: They are.
    """
    left = most
    for part in parts:
        left -= len(part)
        if left < 0:
            raise TooLong(f"the answer has more than the {most} bytes that it may have")
        yield part
