"""Records as lines, of any text or bytes.

A record ends at ``\\n`` and only there: a ``\\r`` before it belongs to the record, so binary data
without ``\\n`` passes unchanged. The last line needs no ``\\n``. An empty line is an empty record.
"""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from opendata_buffer.errors import InvalidInput

__all__ = ["LineSplitter", "join_lines"]


class LineSplitter:
    """Cuts a stream of chunks into lines, holding no more than one unfinished line.

    Args:
        max_bytes: Longest line accepted; longer ones would have no batch to go into.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        # Pieces, not one growing string: a line of n chunks would be copied n times.
        self._pieces: list[bytes] = []
        self._held = 0
        self._lines = 0
        self._too_long = False

    def feed(self, chunk: bytes) -> list[bytes]:
        """Take the next chunk and return the lines it completes, newlines stripped.

        Raises:
            InvalidInput: A line is longer than ``max_bytes``. It is raised by the call after
                the one that returned the lines before it.
        """
        self._raise_too_long()
        first, *rest = chunk.split(b"\n")
        self._hold(first)
        if not rest or self._too_long:
            return []
        lines = [self._take()]
        for line in rest[:-1]:
            if len(line) > self._max_bytes:
                self._too_long = True
                break
            lines.append(line)
        else:
            self._hold(rest[-1])
        self._lines += len(lines)
        return lines

    def finish(self) -> list[bytes]:
        """The last line when the stream does not end in a newline; else nothing.

        Raises:
            InvalidInput: A line is longer than ``max_bytes``.
        """
        self._raise_too_long()
        return [self._take()] if self._held else []

    def _hold(self, piece: bytes) -> None:
        self._held += len(piece)
        self._too_long = self._held > self._max_bytes
        if piece and not self._too_long:
            self._pieces.append(piece)

    def _take(self) -> bytes:
        line = b"".join(self._pieces)
        self._pieces, self._held = [], 0
        return line

    def _raise_too_long(self) -> None:
        if self._too_long:
            raise InvalidInput(
                f"line {self._lines + 1} has more than {self._max_bytes} bytes: a line is one "
                "record and must fit into a batch. Break the input into lines, or raise "
                "--max-batch-bytes here and at the consumer."
            )


def join_lines(records: pa.BinaryArray, end: bytes = b"\n") -> memoryview:
    """The records as lines, each with its ending; no Python object per record."""
    # 64-bit offsets: the newlines may take the text past what 32-bit ones reach.
    wide = records.cast(pa.large_binary())
    empty, newline = (pa.scalar(each, pa.large_binary()) for each in (b"", end))
    joined = pc.binary_join_element_wise(wide, empty, newline)
    data = joined.buffers()[2]
    return memoryview(data)[: _end(joined)] if len(joined) else memoryview(b"")


def _end(values: pa.LargeBinaryArray) -> int:
    """Where the last value ends; buffers may be longer than what they hold."""
    offsets = memoryview(values.buffers()[1]).cast("q")
    return offsets[len(values)]
