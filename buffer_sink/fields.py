"""Rows of any columns as JSON: with ``valueFormat=json`` all columns together are the value."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa

from opendata_buffer.errors import InvalidInput
from opendata_buffer.values.encode import check_encodable, encode_objects

if TYPE_CHECKING:
    from pyspark.sql.types import DataType, StructField, StructType

__all__ = ["OWN", "Fields"]

OWN = ("_metadata", "_key", "_partition")
"""Columns that are no fields of the record: what ``metadata``, ``key`` and ``partition`` are
without ``valueFormat``."""


@dataclass(frozen=True, slots=True)
class Fields:
    """Where the fields of a record, and the buffer's own columns, are in the rows.

    Attributes:
        names: Of the fields, in order.
        positions: Of their columns.
        own: Positions of the other columns, with the names they then have.
    """

    names: tuple[str, ...]
    positions: tuple[int, ...]
    own: tuple[tuple[str, int], ...]

    @classmethod
    def of(cls, schema: StructType) -> tuple[Fields, StructType]:
        """The fields of a schema, and what is left of it once they are one column ``value``.

        Raises:
            InvalidInput: There is no field, two have one name, or a type has no form in JSON.
        """
        from pyspark.sql.types import BinaryType, StructField, StructType

        fields: list[tuple[str, int]] = []
        own: list[tuple[str, int]] = []
        rest = [StructField("value", BinaryType())]
        for position, field in enumerate(schema.fields):
            if field.name.lower() in OWN:
                name = field.name.lower().removeprefix("_")
                own.append((name, position))
                rest.append(StructField(name, field.dataType, field.nullable))
                continue
            if field.name in (name for name, _ in fields):
                raise InvalidInput(
                    f"column {field.name!r} is there twice, and JSON has one field of a name: drop "
                    "or rename one"
                )
            check_encodable(field.name, _arrow_type(field))
            fields.append((field.name, position))
        if not fields:
            raise InvalidInput(
                "option valueFormat is 'json', but there is no column to write: besides "
                f"{', '.join(OWN)} the DataFrame has none"
            )
        names, positions = zip(*fields, strict=True)
        return cls(names, positions, tuple(own)), StructType(rest)

    def encode(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """The rows with all fields as one column ``value``, and the other columns behind it."""
        fields = [
            (name, rows.column(position))
            for name, position in zip(self.names, self.positions, strict=True)
        ]
        values = encode_objects(fields, len(rows))
        own = [rows.column(position) for _, position in self.own]
        return pa.record_batch([values, *own], names=["value", *(name for name, _ in self.own)])


def _arrow_type(field: StructField) -> pa.DataType:
    """What Spark gives a Python sink for a column.

    Raises:
        InvalidInput: Nothing, or a variant's own bytes.
    """
    from pyspark.sql.pandas.types import to_arrow_type

    kind = field.dataType.simpleString()
    found = None
    if not _holds_variant(field.dataType):
        with suppress(Exception):  # each version of Spark has its own for a type it cannot do
            try:
                found = to_arrow_type(field.dataType, timezone="UTC")  # Spark 4.3 asks for one
            except TypeError:
                found = to_arrow_type(field.dataType)
    if found is None:
        raise InvalidInput(
            f"column {field.name!r} cannot be written as JSON: a Python sink cannot read type "
            f"{kind}. Cast it, or put it into text with to_json first."
        )
    return found


def _holds_variant(kind: DataType) -> bool:
    """Whether a type is a variant or holds one. The names of its fields may be anything."""
    from pyspark.sql.types import ArrayType, MapType, StructType

    if isinstance(kind, StructType):
        return any(_holds_variant(each.dataType) for each in kind.fields)
    if isinstance(kind, ArrayType):
        return _holds_variant(kind.elementType)
    if isinstance(kind, MapType):
        return _holds_variant(kind.keyType) or _holds_variant(kind.valueType)
    return kind.typeName() == "variant"
