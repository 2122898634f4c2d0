r"""Framings: how a stream of bytes (a file, a pipe, or a socket) is split into records.

==================  ==========================================================  =============
framing             a record in the stream                                      any bytes?
==================  ==========================================================  =============
``lines``           bytes up to a newline; a ``\r`` before it is in the record  no newlines
``ndjson``          one JSON value and a newline                                JSON text
``protobuf-fixed``  magic word, u32 length, the record (Gazette's framing)      yes
``length``          u32 length, the record                                      yes
==================  ==========================================================  =============

All lengths are little-endian. The last line needs no newline. An empty line is an empty record in
``lines``; ``ndjson`` skips it and returns the bytes of other records unchanged. If a writer died in
the middle of a frame, or wrote garbage, the magic word of ``protobuf-fixed`` lets a reader find the
next frame (:func:`unpack_fixed`).
"""

from __future__ import annotations

import json
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from io import BytesIO
from typing import BinaryIO, Literal

import pyarrow as pa
import pyarrow.compute as pc

from opendata_buffer.arguments import check_fields, checked
from opendata_buffer.errors import InvalidInput

__all__ = ["FRAMINGS", "Framing", "Splitter", "unpack_fixed"]

MAX_FRAME_BYTES = 256 * 1024 * 1024

_WORD = b"\x66\x33\x93\x36"
_HEADER = struct.Struct("<4sI")
_LENGTH = struct.Struct("<I")
_READ_BYTES = 64 * 1024

Kind = Literal["frame", "desync", "error"]


class Splitter(ABC):
    """Splits one stream into records. :attr:`Framing.splitter` creates one.

    Feed it pieces of the stream, of any size. Errors name the record, counted from 1, and the byte
    of the stream at which it begins, counted from 0. The records before a broken one are returned
    first; the next call raises the error. A record larger than ``max_bytes`` is refused before any
    memory is allocated for it.
    """

    @checked
    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._record = 1
        self._begin = 0
        self._error: InvalidInput | None = None

    @checked
    def feed(self, chunk: bytes) -> list[bytes]:
        """Take the next piece of the stream.

        Args:
            chunk: The piece, of any size.

        Returns:
            The records that it completes.

        Raises:
            InvalidInput: A record is broken or too large.
        """
        self._raise()
        return self._split(chunk)

    def finish(self) -> list[bytes]:
        """End the stream.

        Returns:
            The records that the end completes.

        Raises:
            InvalidInput: The stream ends in the middle of a record.
        """
        self._raise()
        records = self._end()
        self._raise()
        return records

    @abstractmethod
    def _split(self, chunk: bytes) -> list[bytes]: ...

    @abstractmethod
    def _end(self) -> list[bytes]: ...

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _broken(self, reason: str) -> InvalidInput:
        return InvalidInput(
            f"record {self._record}, at byte {self._begin} of the input: {reason}. The records "
            "before it were accepted. Fix the input, or use the framing it was written with."
        )

    def _too_large(self, size: int) -> InvalidInput:
        return self._broken(
            f"it has {size} bytes or more, and a record may have at most {self._max_bytes}: split "
            "the record"
        )


@checked
def unpack_fixed(
    stream: BinaryIO | bytes, *, max_bytes: int = MAX_FRAME_BYTES
) -> Iterator[tuple[Kind, bytes]]:
    """Yield the frames of a stream in Gazette's fixed framing, and the bytes between them.

    Args:
        stream: A stream, which is read to its end, or all of its bytes.
        max_bytes: Longest content of a frame, in bytes. A longer one is an error before memory is
            allocated.

    Yields:
        ``("frame", bytes)`` for a frame with its header of 8 bytes. ``("desync", bytes)`` for bytes
        that were skipped to find the next magic word; long garbage comes in pieces. ``("error",
        bytes)`` as the last item if the stream ends in the middle of a frame or a frame is too
        long, with the part of it that was read.
    """
    source = BytesIO(stream) if isinstance(stream, bytes) else stream
    held = bytearray()
    while chunk := source.read(_READ_BYTES):
        held += chunk
        while len(held) >= _HEADER.size:
            word, size = _HEADER.unpack_from(held)
            kind: Kind = "frame"
            end = _HEADER.size + size
            if word != _WORD:
                kind = "desync"
                found = held.find(_WORD, 1)
                # The last bytes may be the start of a magic word.
                end = found if found >= 0 else len(held) - (len(_WORD) - 1)
            elif size > max_bytes:
                yield "error", bytes(held)
                return
            elif len(held) < end:
                break
            yield kind, bytes(memoryview(held)[:end])
            del held[:end]
    if held:
        yield "error", bytes(held)


class PrefixSplitter(Splitter):
    """Splits a stream in which a u32 length, after an optional magic word, precedes each record."""

    @checked
    def __init__(self, max_bytes: int, word: bytes = b"") -> None:
        super().__init__(max_bytes)
        self._word = word
        self._prefix = len(word) + _LENGTH.size
        self._held = bytearray()

    def _split(self, chunk: bytes) -> list[bytes]:
        self._held += chunk
        records: list[bytes] = []
        at = 0
        with memoryview(self._held) as held:
            while len(held) - at >= self._prefix and self._error is None:
                begin = at + self._prefix
                (size,) = _LENGTH.unpack_from(held, begin - _LENGTH.size)
                if held[at : at + len(self._word)] != self._word:
                    found = bytes(held[at : at + 16]).hex(" ")
                    self._error = self._broken(
                        f"it starts with {found} instead of the magic word {self._word.hex(' ')}"
                    )
                elif size > self._max_bytes:
                    self._error = self._too_large(size)
                elif begin + size > len(held):
                    break
                else:
                    records.append(bytes(held[begin : begin + size]))
                    self._record += 1
                    self._begin += self._prefix + size
                    at = begin + size
        del self._held[:at]
        return records

    def _end(self) -> list[bytes]:
        if self._held:
            self._error = self._broken(
                f"the input ends {len(self._held)} bytes into the record and its length"
            )
        return []


def _join(records: Iterable[bytes], word: bytes = b"") -> bytes:
    """Return the records, each after the magic word and its length."""
    pieces: list[bytes] = []
    for record in records:
        pieces += (word, _LENGTH.pack(len(record)), record)
    return b"".join(pieces)


class LineSplitter(Splitter):
    r"""Splits a stream into lines without their newlines; a ``\r`` before one stays in the line."""

    @checked
    def __init__(self, max_bytes: int) -> None:
        super().__init__(max_bytes)
        self._longest = max_bytes
        self._too_long = 0  # Bytes read of a line that is too long; otherwise 0.
        # A list of pieces, because a growing string would be copied for every chunk.
        self._pieces: list[bytes] = []
        self._held = 0

    def _split(self, chunk: bytes) -> list[bytes]:
        return self._records(self._lines(chunk))

    def _end(self) -> list[bytes]:
        return self._records([self._take()] if self._held else [])

    def _records(self, lines: list[bytes]) -> list[bytes]:
        self._record += len(lines)
        if self._too_long:
            self._error = InvalidInput(
                f"line {self._record} has more than {self._max_bytes} bytes: a line is one record "
                "and must fit into a batch. Break the input into shorter lines."
            )
        return lines

    def _lines(self, chunk: bytes) -> list[bytes]:
        """Return the lines that a chunk completes, up to one that is too long."""
        first, *rest = chunk.split(b"\n")
        self._hold(first)
        if not rest or self._too_long:
            return []
        lines = [self._take()]
        for line in rest[:-1]:
            if len(line) > self._longest:
                self._too_long = len(line)
                return lines
            lines.append(line)
        self._hold(rest[-1])
        return lines

    def _hold(self, piece: bytes) -> None:
        self._held += len(piece)
        if self._held > self._longest:
            self._too_long = self._held
        elif piece:
            self._pieces.append(piece)

    def _take(self) -> bytes:
        line = b"".join(self._pieces)
        self._pieces, self._held = [], 0
        return line


def join_lines(records: pa.BinaryArray) -> memoryview:
    """Return the records as lines with newlines, without a Python object per record."""
    # 64-bit offsets, because with newlines the text may exceed the range of 32-bit offsets.
    wide = records.cast(pa.large_binary())
    empty, newline = (pa.scalar(text, pa.large_binary()) for text in (b"", b"\n"))
    joined = pc.binary_join_element_wise(wide, empty, newline)
    if not len(joined):
        return memoryview(b"")
    # The buffer may be longer than its values.
    return memoryview(joined.buffers()[2])[: pc.sum(pc.binary_length(joined)).as_py()]


class NdjsonSplitter(LineSplitter):
    """Splits a stream into JSON values, one per line. Empty lines are skipped."""

    @checked
    def __init__(self, max_bytes: int) -> None:
        super().__init__(max_bytes)
        self._longest = max_bytes + 1  # A "\r" is not part of the record.

    def _records(self, lines: list[bytes]) -> list[bytes]:
        records: list[bytes] = []
        for line in lines:
            if fault := _json_fault(line):
                self._error = self._broken(fault)
                return records
            self._begin += len(line) + 1
            if record := line.removesuffix(b"\r"):
                self._record += 1
                records.append(record)
        if self._too_long:
            self._error = self._too_large(self._too_long)
        return records


def _json_fault(line: bytes) -> str:
    """Return why a line is not a JSON value; empty if it is one, or only white space."""
    text = line.strip(b" \t\r")
    try:
        if text:
            json.loads(text, parse_int=str)  # int() rejects more than 4300 digits.
    except RecursionError:
        return "JSON that is nested too deeply"
    except json.JSONDecodeError as error:
        return f"it is not a JSON value: {error.msg} at character {error.pos}"
    except UnicodeDecodeError as error:
        return f"it is not UTF-8 text ({error.reason} at byte {error.start})"
    return ""


@dataclass(frozen=True)
class Framing:
    """One way to split a stream into records and to join records into a stream.

    Attributes:
        name: Its name on the command line.
        unit: The plural noun for records in messages.
        splitter: Takes the largest size of a record in bytes and returns a new splitter.
        join: Takes records and returns the bytes of a stream.
        checks: Whether some bytes are not a valid record; :meth:`framed` refuses those.
    """

    name: str
    unit: str
    splitter: Callable[[int], Splitter]
    join: Callable[[pa.BinaryArray], bytes | memoryview]
    checks: bool = False

    def __post_init__(self) -> None:
        check_fields(self)

    @checked
    def framed(self, records: pa.BinaryArray, sequence: int) -> bytes | memoryview:
        """Frame the records of a batch, and check that a reader would get them back.

        Args:
            records: The records of the batch.
            sequence: Sequence of the batch, for the error.

        Returns:
            The bytes of the stream.

        Raises:
            InvalidInput: A record would not be read back unchanged, because it is empty or is not
                one JSON value on one line. The caller must then write nothing of the batch.
        """
        data = self.join(records)
        if not self.checks:
            return data
        expected = records.to_pylist()
        reason = ""
        found: list[bytes] = []
        try:
            splitter = self.splitter(len(data))
            found += splitter.feed(bytes(data))
            found += splitter.finish()
        except InvalidInput as error:
            reason = f": {error}"
        if found != expected:
            pairs = enumerate(zip(found, expected, strict=False))
            number = next((n for n, (one, other) in pairs if one != other), len(found))
            raise InvalidInput(
                f"record {number} of batch {sequence} cannot be written as {self.name}{reason} "
                "Nothing of the batch was written or acknowledged; records of any bytes go "
                "through --framing length."
            )
        return data


FRAMINGS = {
    framing.name: framing
    for framing in (
        Framing("lines", "lines", LineSplitter, join_lines),
        Framing("ndjson", "records", NdjsonSplitter, join_lines, checks=True),
        Framing(
            "protobuf-fixed",
            "records",
            lambda most: PrefixSplitter(most, _WORD),
            lambda each: _join(each.to_pylist(), _WORD),
        ),
        Framing("length", "records", PrefixSplitter, lambda each: _join(each.to_pylist())),
    )
}
