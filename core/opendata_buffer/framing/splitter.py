"""What every framing offers: pieces of a stream in, whole records out."""

from __future__ import annotations

from typing import Protocol

from opendata_buffer.errors import InvalidInput

__all__ = ["Splitter", "broken", "too_large"]


class Splitter(Protocol):
    """Cuts one stream into records.

    Errors name the record, counted from 1, and the byte of the stream at which it begins,
    counted from 0. The records before a broken one are given back first: the error is raised by
    the next call.
    """

    def feed(self, chunk: bytes) -> list[bytes]:
        """The records that ``chunk`` completes.

        Raises:
            InvalidInput: A record is broken, or larger than allowed.
        """
        ...

    def finish(self) -> list[bytes]:
        """What the end of the stream completes.

        Raises:
            InvalidInput: The stream ends in the middle of a record.
        """
        ...


def broken(record: int, begin: int, reason: str) -> InvalidInput:
    """The error of a record that is not what the framing says."""
    return InvalidInput(
        f"record {record}, at byte {begin} of the input: {reason}. The records before it were "
        "taken; mend the input, or choose the framing it was written with."
    )


def too_large(record: int, begin: int, size: int, limit: int) -> InvalidInput:
    """The error of a record that fits into no batch."""
    return broken(
        record,
        begin,
        f"it has {size} bytes or more, and a record may have {limit}: raise the limit on a "
        "batch's size here and at the consumer, or split the record",
    )
