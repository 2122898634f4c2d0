"""How ``consume`` shows a record: as JSON, or by a format in the manner of kcat.

Both show what belongs to the record besides its bytes: where it is in the queue, and the metadata
and time of the ``produce()`` call that it came with.
"""

from __future__ import annotations

import json
import re
from base64 import b64encode
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from opendata_buffer.consumer.fetch import ArrowBatch
from opendata_buffer.errors import InvalidInput
from opendata_buffer.formats.entries import Metadata
from opendata_buffer.topic.consumer import TopicArrowBatch

__all__ = ["TOKENS", "Render", "as_json", "by_format", "text_or_base64"]

Render = Callable[[ArrowBatch], bytes | memoryview]
"""From a batch to the bytes that its records are written as."""

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class _Record:
    """One record and all that can be said of it."""

    value: bytes
    index: int
    batch: ArrowBatch
    metadata: Metadata | None
    partition: str


def _records(batch: ArrowBatch, partition: str) -> Iterator[_Record]:
    ranges = sorted(batch.metadata, key=lambda each: each.start_index)
    if isinstance(batch, TopicArrowBatch):
        partition = batch.partition
    at = 0
    current: Metadata | None = None
    for index, value in enumerate(batch.values.to_pylist()):
        while at < len(ranges) and ranges[at].start_index <= index:
            current = ranges[at]
            at += 1
        yield _Record(value, index, batch, current, partition)


# ---- JSON


def as_json(partition: str) -> Render:
    """A JSON object on a line for each record; ``produce --json`` reads it.

    Args:
        partition: The queue's data prefix, shown with each record; batches of a topic have their
            own.
    """

    def render(batch: ArrowBatch) -> bytes:
        return b"".join(_json_line(each) for each in _records(batch, partition))

    return render


def _json_line(record: _Record) -> bytes:
    metadata = record.metadata
    fields: dict[str, Any] = {
        "partition": record.partition,
        "sequence": record.batch.sequence,
        "index": record.index,
        "time": None if metadata is None else _time(metadata.ingestion_time_ms),
        "location": record.batch.location,
        **text_or_base64("metadata", b"" if metadata is None else metadata.payload),
        **text_or_base64("value", record.value),
    }
    return json.dumps(fields, ensure_ascii=False).encode() + b"\n"


def text_or_base64(name: str, data: bytes) -> dict[str, str]:
    """The field ``name`` with the text, or ``name_base64`` where the bytes are no UTF-8."""
    try:
        return {name: data.decode()}
    except UnicodeDecodeError:
        return {f"{name}_base64": b64encode(data).decode()}


def _time(milliseconds: int) -> str | None:
    """ISO 8601 in UTC; None beyond the calendar."""
    try:
        at = _EPOCH + timedelta(milliseconds=milliseconds)
    except OverflowError:
        return None
    return at.isoformat(timespec="milliseconds").replace("+00:00", "Z")


# ---- a format

TOKENS: dict[str, tuple[str, Callable[[_Record], bytes]]] = {
    "s": ("the record", lambda each: each.value),
    "S": ("its length in bytes", lambda each: b"%d" % len(each.value)),
    "R": (
        "its length as 4 bytes, big-endian",
        lambda each: len(each.value).to_bytes(4, "big"),
    ),
    "o": ("sequence of its batch", lambda each: b"%d" % each.batch.sequence),
    "i": ("index in the batch", lambda each: b"%d" % each.index),
    "m": ("metadata", lambda each: b"" if each.metadata is None else each.metadata.payload),
    "M": (
        "length of the metadata in bytes",
        lambda each: b"%d" % (0 if each.metadata is None else len(each.metadata.payload)),
    ),
    "T": (
        "time of production, milliseconds since 1970, or -1",
        lambda each: b"%d" % (-1 if each.metadata is None else each.metadata.ingestion_time_ms),
    ),
    "p": ("partition, or the data prefix of a queue", lambda each: each.partition.encode()),
    "l": ("location of the batch object", lambda each: each.batch.location.encode()),
    "%": ("a percent sign", lambda each: b"%"),
}
"""What may follow a ``%``: what it shows, and how."""

_ESCAPES = {"n": b"\n", "r": b"\r", "t": b"\t", "\\": b"\\", "0": b"\0"}
_PIECE = re.compile(r"%(.?)|\\(?:x([0-9A-Fa-f]{2})|(.?))", re.DOTALL)


def by_format(template: str, partition: str) -> Render:
    """Each record by a format, without an end of line that is not asked for.

    Args:
        template: Text with the tokens of :data:`TOKENS` and the escapes ``\\n``, ``\\r``, ``\\t``,
            ``\\0``, ``\\xNN`` and ``\\\\``.
        partition: The queue's data prefix; batches of a topic have their own.

    Raises:
        InvalidInput: It has another token or escape, or none at all.
    """
    pieces = _parse(template)

    def render(batch: ArrowBatch) -> bytes:
        return b"".join(
            piece if isinstance(piece, bytes) else piece(record)
            for record in _records(batch, partition)
            for piece in pieces
        )

    return render


def _parse(template: str) -> Sequence[bytes | Callable[[_Record], bytes]]:
    pieces: list[bytes | Callable[[_Record], bytes]] = []
    at, tokens = 0, 0
    for found in _PIECE.finditer(template):
        pieces.append(template[at : found.start()].encode(errors="surrogateescape"))
        at = found.end()
        token, hexadecimal, escape = found.groups()
        if token is not None:
            if token not in TOKENS:
                raise InvalidInput(_unknown(template, found[0]))
            pieces.append(TOKENS[token][1])
            tokens += 1
        elif hexadecimal is not None:
            pieces.append(bytes.fromhex(hexadecimal))
        elif escape in _ESCAPES:
            pieces.append(_ESCAPES[escape])
        else:
            raise InvalidInput(_unknown(template, found[0]))
    pieces.append(template[at:].encode(errors="surrogateescape"))
    if not tokens:
        raise InvalidInput(_unknown(template, template))
    return [piece for piece in pieces if piece != b""]


def _unknown(template: str, piece: str) -> str:
    shown = ", ".join(f"%{token} {what}" for token, (what, _) in TOKENS.items())
    return (
        f"format {template!r}: {piece!r} shows nothing of a record. Use {shown}; and \\n, \\r, "
        "\\t, \\0, \\xNN or \\\\, for example '%o %s\\n'"
    )
