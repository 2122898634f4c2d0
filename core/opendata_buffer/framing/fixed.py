"""Gazette's fixed framing, ``application/x-protobuf-fixed``.

::

    frame   magic word 66 33 93 36 | length u32, little-endian | that many bytes

The magic word lets a reader that lost its place, because a writer died in the middle of a frame
or somebody wrote garbage, find the next frame. What it passes over is reported, never hidden.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from io import BytesIO
from typing import BinaryIO, Literal

from opendata_buffer.errors import InvalidInput
from opendata_buffer.framing.splitter import broken, too_large

__all__ = ["FixedSplitter", "join_fixed", "unpack_fixed"]

WORD = b"\x66\x33\x93\x36"
HEADER = struct.Struct("<4sI")
READ_BYTES = 64 * 1024

MAX_FRAME_BYTES = 256 * 1024 * 1024

Kind = Literal["frame", "desync", "error"]


def unpack_fixed(
    stream: BinaryIO | bytes, *, max_bytes: int = MAX_FRAME_BYTES
) -> Iterator[tuple[Kind, bytes]]:
    """Frames of a stream, and what lies between them.

    Args:
        stream: Read to its end; or all its bytes.
        max_bytes: Longest content of a frame. A longer one is an error before memory is taken.

    Yields:
        ``("frame", bytes)``: a frame with its header of 8 bytes; ``("desync", bytes)``: bytes
        that were passed over to find the next magic word, long garbage in pieces;
        ``("error", bytes)``: the last item, where the stream ends in the middle of a frame or
        a frame is too long: what there is of it.
    """
    source = BytesIO(stream) if isinstance(stream, bytes) else stream
    frames = _Frames(max_bytes)
    while chunk := source.read(READ_BYTES):
        yield from frames.feed(chunk)
        if frames.failed:
            return
    yield from frames.finish()


class _Frames:
    """The framing as a machine: bytes in, frames and gaps out."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._held = bytearray()
        self.failed = False
        self.size = 0
        """Length of the frame at the front, where its header is complete."""

    def feed(self, chunk: bytes) -> Iterator[tuple[Kind, bytes]]:
        """What ``chunk`` completes."""
        self._held += chunk
        while len(self._held) >= HEADER.size and not self.failed:
            word, self.size = HEADER.unpack_from(self._held)
            if word != WORD:
                yield "desync", self._take(self._garbage())
            elif self.size > self._max_bytes:
                self.failed = True
                yield "error", self._take(len(self._held))
            elif len(self._held) < HEADER.size + self.size:
                return
            else:
                yield "frame", self._take(HEADER.size + self.size)

    def finish(self) -> Iterator[tuple[Kind, bytes]]:
        """What the end of the stream leaves: nothing where it ends behind a frame."""
        if self._held:
            self.failed = True
            yield "error", self._take(len(self._held))

    def _garbage(self) -> int:
        """Bytes before the next magic word, or before what may be the beginning of one."""
        found = self._held.find(WORD, 1)
        return found if found >= 0 else len(self._held) - (len(WORD) - 1)

    def _take(self, size: int) -> bytes:
        taken = bytes(memoryview(self._held)[:size])
        del self._held[:size]
        return taken


class FixedSplitter:
    """Cuts a stream of fixed frames into records, without their headers.

    Args:
        max_bytes: Largest record.
    """

    def __init__(self, max_bytes: int) -> None:
        self._frames = _Frames(max_bytes)
        self._max_bytes = max_bytes
        self._record = 1
        self._begin = 0
        self._error: InvalidInput | None = None

    def feed(self, chunk: bytes) -> list[bytes]:
        """The records that ``chunk`` completes."""
        self._raise()
        return self._records(self._frames.feed(chunk))

    def finish(self) -> list[bytes]:
        """Nothing, where the stream ends behind a frame."""
        self._raise()
        records = self._records(self._frames.finish())
        self._raise()
        return records

    def _records(self, items: Iterator[tuple[Kind, bytes]]) -> list[bytes]:
        records = []
        for kind, data in items:
            if kind == "frame":
                records.append(data[HEADER.size :])
                self._record += 1
                self._begin += len(data)
                continue
            self._error = self._error_of(kind, data)
            break
        return records

    def _error_of(self, kind: Kind, data: bytes) -> InvalidInput:
        if kind == "desync":
            reason = f"no magic word {WORD.hex(' ')} but {data[:16].hex(' ')}"
            return broken(self._record, self._begin, reason)
        if len(data) >= HEADER.size and self._frames.size > self._max_bytes:
            return too_large(self._record, self._begin, self._frames.size, self._max_bytes)
        reason = f"the input ends {len(data)} bytes into the frame"
        return broken(self._record, self._begin, reason)

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error


def join_fixed(records: Iterable[bytes]) -> bytes:
    """The records as frames."""
    pieces: list[bytes] = []
    for record in records:
        pieces += (HEADER.pack(WORD, len(record)), record)
    return b"".join(pieces)
