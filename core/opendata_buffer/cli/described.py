"""The metadata of records that ``produce`` reads: one for all, a line for each, or in JSON.

A producer takes metadata with a call, for all of its records. So records are given on in runs
that share theirs.
"""

from __future__ import annotations

import json
from base64 import b64decode
from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any, BinaryIO, Protocol

from opendata_buffer.errors import InvalidInput

__all__ = ["Described", "FromJson", "FromLines", "Same"]

MAX_METADATA_BYTES = 1024 * 1024
"""Longest line of metadata: it goes into the manifest, which every append writes anew."""

Run = tuple[list[bytes], bytes]
"""Records, and the metadata that all of them have."""


class Described(Protocol):
    """Gives records their metadata."""

    def runs(self, records: Sequence[bytes]) -> Iterator[Run]:
        """The records in order, in runs of equal metadata.

        Raises:
            InvalidInput: One of them has none; the runs before it were given.
        """
        ...

    def finish(self) -> None:
        """All records were given.

        Raises:
            InvalidInput: There is metadata left.
        """
        ...


class Same:
    """All records have this metadata."""

    def __init__(self, metadata: bytes) -> None:
        self._metadata = metadata

    def runs(self, records: Sequence[bytes]) -> Iterator[Run]:
        """One run."""
        if records:
            yield list(records), self._metadata

    def finish(self) -> None:
        """Nothing is left."""


class FromLines:
    """Line N of a file is the metadata of record N."""

    def __init__(self, file: BinaryIO, name: str) -> None:
        self._file = file
        self._name = name
        self._lines = 0

    def runs(self, records: Sequence[bytes]) -> Iterator[Run]:
        """A run for each stretch of equal lines."""
        return _runs((record, self._next()) for record in records)

    def finish(self) -> None:
        """Refuses a file with more lines than there were records: the two do not belong together.

        Raises:
            InvalidInput: It has more.
        """
        if self._file.readline(1):
            raise InvalidInput(
                f"{self._name!r} has more lines of metadata than the input has records, "
                f"{self._lines}: give it one line for each record"
            )

    def _next(self) -> bytes:
        line = self._file.readline(MAX_METADATA_BYTES + 2)
        if not line:
            raise InvalidInput(
                f"{self._name!r} ends after {self._lines} lines, and record {self._lines + 1} has "
                "no metadata: give it one line for each record"
            )
        self._lines += 1
        line = line.removesuffix(b"\n")
        if len(line) > MAX_METADATA_BYTES:
            raise InvalidInput(
                f"line {self._lines} of {self._name!r} has more than {MAX_METADATA_BYTES} bytes: "
                "metadata goes into the manifest, so put large data into the record"
            )
        return line


class FromJson:
    """Each record is a line of JSON, as ``consume --json`` prints it, and brings its metadata."""

    def __init__(self) -> None:
        self._lines = 0

    def runs(self, records: Sequence[bytes]) -> Iterator[Run]:
        """A run for each stretch of equal metadata. Lines of white space are passed over."""
        return _runs(self._decoded(records))

    def finish(self) -> None:
        """Nothing is left."""

    def _decoded(self, lines: Sequence[bytes]) -> Iterator[tuple[bytes, bytes]]:
        for line in lines:
            self._lines += 1
            if line.strip():
                yield self._decode(line)

    def _decode(self, line: bytes) -> tuple[bytes, bytes]:
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise self._bad(f"it is no JSON ({error})") from None
        if not isinstance(fields, dict):
            raise self._bad("it is no JSON object")
        value = self._bytes(fields, "value")
        if value is None:
            raise self._bad("it has neither 'value' nor 'value_base64'")
        metadata = self._bytes(fields, "metadata") or b""
        if len(metadata) > MAX_METADATA_BYTES:
            raise self._bad(f"its metadata has more than {MAX_METADATA_BYTES} bytes")
        return value, metadata

    def _bytes(self, fields: dict[str, Any], name: str) -> bytes | None:
        encoded = fields.get(f"{name}_base64")
        text = fields.get(name)
        if encoded is not None and text is not None:
            raise self._bad(f"it has both '{name}' and '{name}_base64'")
        try:
            if encoded is not None:
                return b64decode(encoded, validate=True)
            return None if text is None else text.encode()
        except (ValueError, TypeError, AttributeError):
            wrong = f"'{name}'" if encoded is None else f"'{name}_base64'"
            raise self._bad(f"{wrong} is not {'text' if encoded is None else 'base64'}") from None

    def _bad(self, reason: str) -> InvalidInput:
        return InvalidInput(
            f"line {self._lines} is no record as 'consume --json' prints it: {reason}. Use "
            '{"value": "text"} or {"value_base64": "..."}, with "metadata" if you like; records '
            "that are JSON themselves go through --framing ndjson."
        )


def _runs(pairs: Iterator[tuple[bytes, bytes]]) -> Iterator[Run]:
    for metadata, run in groupby(pairs, key=itemgetter(1)):
        records: list[bytes] = []
        try:
            for record, _ in run:
                records.append(record)
        except InvalidInput:
            # Those before the bad one are taken; asked for the next run, it raises again.
            if records:
                yield records, metadata
            raise
        yield records, metadata
