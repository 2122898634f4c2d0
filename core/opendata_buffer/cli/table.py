"""How ``consume --format table`` shows records: JSON objects as rows under their fields' names."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pyarrow as pa

from opendata_buffer.consumer.batches import ArrowBatch
from opendata_buffer.values import ValueOptions, infer

__all__ = ["as_table"]

SAMPLE = 1000
WIDEST = 40
"""Characters of a value that are shown."""


def as_table() -> Callable[[ArrowBatch], bytes]:
    """Rows with the columns that were inferred from the first batch with a JSON object.

    Fields that are not among these columns are not shown. A record that does not fit their types is
    shown as text in the last column.
    """
    options = ValueOptions()
    schema: pa.Schema | None = None
    widths: list[int] = []

    def render(batch: ArrowBatch) -> bytes:
        nonlocal schema, widths
        first = schema is None
        if schema is None:
            found = infer(batch.values[:SAMPLE], options)
            fields = [each for each in found if each.name != options.corrupt_column]
            own = [pa.field("_sequence", pa.int64()), pa.field("_index", pa.int32())]
            corrupt = pa.field(options.corrupt_column, pa.string())
            schema = pa.schema([*own, *fields, corrupt])
            if not fields:  # A batch without a JSON object: its texts, and look at the next one.
                shown, schema = pa.schema([*own, pa.field("_", pa.string()), corrupt]), None
                return _lines(batch, shown, options, [], True)
            widths = []
        return _lines(batch, schema, options, widths, first)

    return render


def _lines(
    batch: ArrowBatch, schema: pa.Schema, options: ValueOptions, widths: list[int], head: bool
) -> bytes:
    names = [each for each in schema.names if each != "_"]
    rows = [
        [_text(row[name]) for name in names] for row in batch.to_table(schema, options).to_pylist()
    ]
    shown = [names, *rows] if head else rows
    if not widths:
        widths.extend(max(map(len, column)) for column in zip(*shown, strict=True))
    right = [pa.types.is_primitive(schema.field(name).type) for name in names]
    lines = []
    for row in shown:
        cells = [
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(row, widths, right, strict=True)
        ]
        lines.append("  ".join(cells).rstrip() + "\n")
    return "".join(lines).encode()


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, (dict, list)):
        value = json.dumps(value, ensure_ascii=False, default=str)
    text = "".join(each if each.isprintable() else "\ufffd" for each in str(value))
    return text if len(text) <= WIDEST else text[: WIDEST - 1] + "…"
