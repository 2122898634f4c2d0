"""Metadata and keys of records that ``produce`` reads: one for all, a line for each, or in JSON.

A producer takes metadata with a call, for all of its records. So records are given on in runs
that share theirs. A key chooses the partition of a topic, and is not kept.
"""

from __future__ import annotations

import json
from base64 import b64decode
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any, BinaryIO, NamedTuple, Protocol

from opendata_buffer.errors import InvalidInput

__all__ = ["Described", "FromJson", "FromLines", "Keyed", "Lines", "Run", "Same"]

MAX_METADATA_BYTES = 1024 * 1024
"""Longest line of metadata: it goes into the manifest, which every append writes anew."""


class Run(NamedTuple):
    """Records, the metadata that all of them have, and a key for each or none at all."""

    records: list[bytes]
    metadata: bytes
    keys: list[bytes] | None = None


class _One(NamedTuple):
    record: bytes
    metadata: bytes
    key: bytes | None = None


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
            yield Run(list(records), self._metadata)

    def finish(self) -> None:
        """Nothing is left."""


class Lines:
    """A file whose line N belongs to record N.

    Args:
        file: The file.
        name: Its name, for messages.
        noun: What its lines are.
    """

    def __init__(self, file: BinaryIO, name: str, noun: str) -> None:
        self._file = file
        self._name = name
        self._noun = noun
        self._lines = 0

    def finish(self) -> None:
        """Refuses a file with more lines than there were records: the two do not belong together.

        Raises:
            InvalidInput: It has more.
        """
        if self._file.readline(1):
            raise InvalidInput(
                f"{self._name!r} has more lines of {self._noun} than the input has records, "
                f"{self._lines}: give it one line for each record"
            )

    def next(self) -> bytes:
        """The line of the next record.

        Raises:
            InvalidInput: There is none, or it is too long.
        """
        line = self._file.readline(MAX_METADATA_BYTES + 2)
        if not line:
            raise InvalidInput(
                f"{self._name!r} ends after {self._lines} lines, and record {self._lines + 1} has "
                f"no {self._noun}: give it one line for each record"
            )
        self._lines += 1
        line = line.removesuffix(b"\n")
        if len(line) > MAX_METADATA_BYTES:
            raise InvalidInput(
                f"line {self._lines} of {self._name!r} has more than {MAX_METADATA_BYTES} bytes: "
                f"{self._noun} is to be small, so put large data into the record"
            )
        return line


class FromLines:
    """Line N of a file is the metadata of record N."""

    def __init__(self, lines: Lines) -> None:
        self._lines = lines

    def runs(self, records: Sequence[bytes]) -> Iterator[Run]:
        """A run for each stretch of equal lines."""
        return _runs(_One(record, self._lines.next()) for record in records)

    def finish(self) -> None:
        """Raises as :meth:`Lines.finish`."""
        self._lines.finish()


class Keyed:
    """Records with a key for each, which may come from their metadata.

    Args:
        described: Gives them their metadata.
        key: From a record's metadata to its key; called for each record, in order.
        finish: Called when all records were given.
    """

    def __init__(
        self,
        described: Described,
        key: Callable[[bytes], bytes],
        finish: Callable[[], None] = lambda: None,
    ) -> None:
        self._described = described
        self._key = key
        self._finish = finish

    def runs(self, records: Sequence[bytes]) -> Iterator[Run]:
        """Those of the metadata, with keys."""
        for run in self._described.runs(records):
            keys: list[bytes] = []
            try:
                for _ in run.records:
                    keys.append(self._key(run.metadata))
            except InvalidInput:
                if keys:
                    yield Run(run.records[: len(keys)], run.metadata, keys)
                raise
            yield Run(run.records, run.metadata, keys)

    def finish(self) -> None:
        """Raises as that of the metadata, or of the keys."""
        self._described.finish()
        self._finish()


class FromJson:
    """Each record is a line of JSON, as ``consume --json`` prints it, and brings its metadata.

    Args:
        keyed: It may bring a key, too: as ``key`` or ``key_base64``.
    """

    def __init__(self, *, keyed: bool = False) -> None:
        self._keyed = keyed
        self._lines = 0

    def runs(self, records: Sequence[bytes]) -> Iterator[Run]:
        """A run for each stretch of equal metadata, and of records with or without a key.

        Lines of white space are passed over.
        """
        return _runs(self._decoded(records))

    def finish(self) -> None:
        """Nothing is left."""

    def _decoded(self, lines: Sequence[bytes]) -> Iterator[_One]:
        for line in lines:
            self._lines += 1
            if line.strip():
                yield self._decode(line)

    def _decode(self, line: bytes) -> _One:
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
        return _One(value, metadata, self._bytes(fields, "key") if self._keyed else None)

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


def _runs(described: Iterator[_One]) -> Iterator[Run]:
    for (metadata, keyed), group in groupby(described, lambda one: (one[1], one[2] is not None)):
        records: list[bytes] = []
        keys: list[bytes] = []
        run = Run(records, metadata, keys if keyed else None)
        try:
            for record, _, key in group:
                records.append(record)
                if key is not None:
                    keys.append(key)
        except InvalidInput:
            # Those before the bad one are taken; asked for the next run, it raises again.
            if records:
                yield run
            raise
        yield run
