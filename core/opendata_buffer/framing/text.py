"""Records of text: JSON values in lines (``ndjson``), and rows of RFC 4180 (``csv``).

A record keeps the bytes it has in the stream, without its line ending: it is checked, and not
written anew, so what goes in comes out.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator

from opendata_buffer.errors import InvalidInput
from opendata_buffer.framing.splitter import broken, too_large

__all__ = ["CsvSplitter", "NdjsonSplitter", "join_csv", "join_ndjson"]


class _Lines:
    """A stream's complete lines, with their newlines, and what is left of the last one."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self.held = 0

    def feed(self, chunk: bytes) -> list[bytes]:
        *lines, rest = chunk.split(b"\n")
        complete = [line + b"\n" for line in lines]
        if complete:
            complete[0] = self.take() + complete[0]
        if rest:
            # Pieces, not one growing string: a line of n chunks would be copied n times.
            self._pieces.append(rest)
            self.held += len(rest)
        return complete

    def take(self) -> bytes:
        line = b"".join(self._pieces)
        self._pieces, self.held = [], 0
        return line


class _TextSplitter:
    """What both framings share: lines that are put together until they are one record.

    Args:
        max_bytes: Largest record.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._lines = _Lines()
        self._open: list[bytes] = []
        self._open_size = 0
        self._record = 1
        self._begin = 0
        self._error: InvalidInput | None = None

    def feed(self, chunk: bytes) -> list[bytes]:
        """The records that ``chunk`` completes."""
        self._raise()
        records = list(self._records(self._lines.feed(chunk)))
        self._check_size(self._open_size + self._lines.held)
        return records

    def finish(self) -> list[bytes]:
        """The last record, where its line does not end in a newline."""
        self._raise()
        rest = self._lines.take()
        records = list(self._records([rest] if rest else []))
        self._raise()
        if self._open:
            raise broken(self._record, self._begin, "the input ends inside a quoted field")
        return records

    def _records(self, lines: Iterable[bytes]) -> Iterator[bytes]:
        for line in lines:
            self._open.append(line)
            self._open_size += len(line)
            self._check_size(self._open_size)
            if self._error is not None:
                return
            if not self._ends(line):
                continue
            data = b"".join(self._open)
            try:
                self._check(data)
            except ValueError as error:
                self._error = broken(self._record, self._begin, str(error))
                return
            self._open, self._open_size = [], 0
            self._begin += len(data)
            record = data.removesuffix(b"\n").removesuffix(b"\r")
            if record:
                self._record += 1
                yield record

    def _ends(self, line: bytes) -> bool:
        """Whether the record ends with this line of it; asked of each line once, in order."""
        return True

    def _check(self, data: bytes) -> None:
        """Raise ValueError when a whole record, with its line ending, is none."""
        raise NotImplementedError

    def _check_size(self, size: int) -> None:
        if size > self._max_bytes + 2 and self._error is None:  # Two for the line ending.
            self._error = too_large(self._record, self._begin, size, self._max_bytes)

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error


class NdjsonSplitter(_TextSplitter):
    """Cuts a stream into JSON values, one a line. Empty lines are passed over."""

    def _check(self, data: bytes) -> None:
        text = data.strip(b" \t\r\n")
        if not text:
            return
        try:
            json.loads(text, parse_int=str)  # int() refuses more than 4300 digits.
        except RecursionError:
            raise ValueError("JSON that is nested too deeply") from None
        except UnicodeDecodeError as error:
            raise ValueError(f"no UTF-8 text ({error.reason} at byte {error.start})") from None
        except json.JSONDecodeError as error:
            raise ValueError(f"no JSON value: {error.msg} at character {error.pos}") from None


class CsvSplitter(_TextSplitter):
    """Cuts a stream into rows of comma-separated values. Empty lines are passed over."""

    def __init__(self, max_bytes: int) -> None:
        super().__init__(max_bytes)
        # The library's own limit on a field, 128 KiB, holds for the whole process; a record's
        # size is bounded here.
        csv.field_size_limit(max(csv.field_size_limit(), max_bytes))
        self._quotes = 0

    def _ends(self, line: bytes) -> bool:
        # Inside a quoted field the quotes so far are odd in number. Counting them, a field of
        # many lines is parsed once and not at each of its lines.
        self._quotes += line.count(b'"')
        return self._quotes % 2 == 0

    def _check(self, data: bytes) -> None:
        self._quotes = 0
        try:
            list(csv.reader([data.decode()], strict=True))
        except UnicodeDecodeError as error:
            raise ValueError(f"no UTF-8 text ({error.reason} at byte {error.start})") from None
        except csv.Error as error:
            raise ValueError(f"no CSV row: {error}") from None


def join_ndjson(records: Iterable[bytes]) -> bytes:
    """The records as lines."""
    return b"".join(record + b"\n" for record in records)


def join_csv(records: Iterable[bytes]) -> bytes:
    """The records as rows, with the line ending that RFC 4180 asks for."""
    return b"".join(record + b"\r\n" for record in records)
