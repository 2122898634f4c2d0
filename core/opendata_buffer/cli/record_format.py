"""How ``consume`` writes a batch: by a framing, as JSON, by a format like kcat's, or as a table.

JSON and formats also show what belongs to a record besides its bytes: its position in the queue,
and the metadata and time of the ``produce()`` call that it came with.
"""

from __future__ import annotations

import io
import json
import re
from base64 import b64encode
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from opendata_buffer.consumer.fetch import ArrowBatch
from opendata_buffer.errors import InvalidInput
from opendata_buffer.formats.entries import Metadata
from opendata_buffer.framing import Framing
from opendata_buffer.topic.consumer import TopicArrowBatch

__all__ = ["TOKENS", "Render", "as_json", "as_table", "by_format", "by_framing", "text_or_base64"]

Render = Callable[[ArrowBatch], bytes | memoryview]
"""From a batch to the bytes that are written for it."""

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def by_framing(framing: Framing) -> Render:
    """Records as a framing writes them.

    The function raises InvalidInput for a batch with a record that the framing cannot write.
    """
    return lambda batch: framing.framed(batch.values, batch.sequence)


@dataclass(frozen=True, slots=True)
class _Record:
    """One record and what belongs to it."""

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
    """A line with a JSON object for each record; ``produce --json`` reads it.

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
"""The tokens after a ``%``: what each shows, and how."""

_ESCAPES = {"n": b"\n", "r": b"\r", "t": b"\t", "\\": b"\\", "0": b"\0"}
_PIECE = re.compile(r"%(.?)|\\(?:x([0-9A-Fa-f]{2})|(.?))", re.DOTALL)


def by_format(template: str, partition: str) -> Render:
    """Each record by a format. Only the format ends a line.

    Args:
        template: Text with the tokens of :data:`TOKENS` and the escapes ``\\n``, ``\\r``, ``\\t``,
            ``\\0``, ``\\xNN`` and ``\\\\``.
        partition: The queue's data prefix; batches of a topic have their own.

    Raises:
        InvalidInput: It has an unknown token or escape, or no token.
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
                raise _unknown(template, found[0])
            pieces.append(TOKENS[token][1])
            tokens += 1
        elif hexadecimal is not None:
            pieces.append(bytes.fromhex(hexadecimal))
        elif escape in _ESCAPES:
            pieces.append(_ESCAPES[escape])
        else:
            raise _unknown(template, found[0])
    pieces.append(template[at:].encode(errors="surrogateescape"))
    if not tokens:
        raise _unknown(template, template)
    return [piece for piece in pieces if piece != b""]


def _unknown(template: str, piece: str) -> InvalidInput:
    tokens = ", ".join(f"%{token} {what}" for token, (what, _) in TOKENS.items())
    return InvalidInput(
        f"format {template!r}: {piece!r} shows nothing of a record. Use {tokens}; and \\n, \\r, "
        "\\t, \\0, \\xNN or \\\\, for example '%o %s\\n'"
    )


# ---- a table

WIDEST = 40
"""Characters of a value that are shown."""


def as_table() -> Render:
    """JSON objects as rows under the names of their fields.

    The first batch with an object decides about the columns. A record that is no object is shown
    as text in the last column.
    """
    columns: list[str] = []
    widths: dict[str, int] = {}
    header_shown = False

    def render(batch: ArrowBatch) -> bytes:
        nonlocal header_shown
        objects = [_object(value) for value in batch.values.to_pylist()]
        if not columns and any(objects):
            columns.extend(dict.fromkeys(name for each in objects for name in each))
            header_shown = False
        names = ["_sequence", "_index", *columns, "_corrupt_record"]
        rows = []
        for index, (value, fields) in enumerate(zip(batch.values, objects, strict=True)):
            row: dict[str, Any] = {"_sequence": batch.sequence, "_index": index, **fields}
            if not fields:
                row["_corrupt_record"] = value.as_py().decode(errors="replace")
            rows.append([row.get(name) for name in names])
        if not rows:
            return b""
        table = Table(box=None, pad_edge=False, show_header=not header_shown, header_style="")
        for name, column in zip(names, zip(*rows, strict=True), strict=True):
            is_number = any(type(each) in (int, float) for each in column)
            if name not in widths:
                widths[name] = max(len(name), *(len(_cell(each)) for each in column))
            table.add_column(
                name,
                justify="right" if is_number else "left",
                min_width=min(widths[name], WIDEST),
                max_width=WIDEST,
                no_wrap=True,
            )
        for cells in rows:
            table.add_row(*(Text(_cell(each)) for each in cells))
        header_shown = True
        console = Console(file=io.StringIO(), width=(WIDEST + 2) * len(names), color_system=None)
        with console.capture() as printed:
            console.print(table)
        return "".join(f"{line.rstrip()}\n" for line in printed.get().splitlines()).encode()

    return render


def _object(value: bytes) -> dict[str, Any]:
    """The fields of a JSON object; none of anything else."""
    try:
        found = json.loads(value)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _cell(value: Any) -> str:
    """A value on one line, without control characters, which could change the terminal."""
    if value is None:
        return ""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return "".join(each if each.isprintable() else "\ufffd" for each in text)
