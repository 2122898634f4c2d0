"""The records of one batch as a table with columns."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from opendata_buffer.errors import InvalidInput, MalformedRecord
from opendata_buffer.formats.manifest import Metadata
from opendata_buffer.values import DROPMALFORMED, FAILFAST, Decoder, ValueOptions, infer

__all__ = ["records_to_table"]

SAMPLE = 1000
_HEAD = 64
_OWN: dict[str, tuple[pa.DataType, ...]] = {
    "_sequence": (pa.int64(),),
    "_index": (pa.int32(), pa.int64()),
    "_location": (pa.string(),),
    "_ingestion_time": (pa.timestamp("us", "UTC"), pa.timestamp("ms", "UTC")),
    "_metadata": (pa.binary(), pa.string()),
}


def records_to_table(
    values: pa.BinaryArray,
    sequence: int,
    location: str,
    metadata: tuple[Metadata, ...],
    schema: pa.Schema | None,
    options: ValueOptions,
) -> pa.Table:
    """See :meth:`opendata_buffer.consumer.batches.ArrowBatch.to_table`."""
    if schema is None:
        schema = infer(values[:SAMPLE], options)
        if not schema.names:
            raise InvalidInput(
                f"batch {sequence} has no record that shows which columns there are: name them, "
                "to_table(pa.schema([('id', pa.int64())]))"
            )
    for each in schema:
        if each.name in _OWN and each.type not in _OWN[each.name]:
            types = " or ".join(map(str, _OWN[each.name]))
            raise InvalidInput(f"column {each.name!r} is of type {each.type}: make it {types}")
    fields = [each for each in schema if each.name not in _OWN]
    decoded = Decoder(pa.schema(fields), options).decode(values)
    if decoded.malformed and options.mode == FAILFAST:
        row = min(decoded.malformed)
        head = values[row].as_py()[:_HEAD]
        raise MalformedRecord(sequence, row, location, decoded.malformed[row], head)
    columns = {each.name: array for each, array in zip(fields, decoded.arrays, strict=True)}
    for each in schema:
        if each.name in _OWN:
            columns[each.name] = _own(each, len(values), sequence, location, metadata)
    table = pa.table([columns[each.name] for each in schema], schema=schema)
    dropped = list(decoded.headers)
    if options.mode == DROPMALFORMED:
        dropped += decoded.malformed
    if not dropped:
        return table
    kept = np.ones(len(values), np.bool_)
    kept[dropped] = False
    return table.filter(pa.array(kept))


def _own(
    field: pa.Field, count: int, sequence: int, location: str, metadata: tuple[Metadata, ...]
) -> pa.Array:
    if field.name == "_sequence":
        return pa.repeat(pa.scalar(sequence, field.type), count)
    if field.name == "_location":
        return pa.repeat(pa.scalar(location, field.type), count)
    if field.name == "_index":
        return pa.array(np.arange(count), field.type)
    found: list[Any] = [None] * count
    for each in metadata:  # Each covers what is behind its start, until the next one does.
        begin = min(each.start_index, count)
        if field.name == "_metadata":
            value: Any = each.payload
            if pa.types.is_string(field.type):
                value = each.payload.decode("utf-8", "replace")
        else:
            value = each.ingestion_time_ms * (1000 if field.type.unit == "us" else 1)
        found[begin:] = [value] * (count - begin)
    return pa.array(found, field.type)
