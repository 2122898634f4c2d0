"""Schemas of reads with ``valueFormat``: fields of records, and our columns with underscores."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    DataType,
    DateType,
    MapType,
    NumericType,
    StringType,
    StructType,
    TimestampNTZType,
    TimestampType,
    UserDefinedType,
)

from buffer_source.columns import COLUMNS
from opendata_buffer.errors import InvalidInput

if TYPE_CHECKING:
    from opendata_buffer.values.options import ValueOptions

__all__ = [
    "INFERRED", "OWN", "check_not_inferred", "check_typed_schema", "meant_as_own", "record_schema",
]  # fmt: skip

OWN = {
    f"_{name}": name
    for name in ("sequence", "index", "ingestion_time", "metadata", "location", "partition")
}
"""Our columns by the names they have beside the fields of records."""

_SCALARS = (
    BinaryType, BooleanType, DateType, NumericType, StringType, TimestampNTZType, TimestampType,
    UserDefinedType,
)  # fmt: skip

INFERRED = "opendata-buffer.inferred"
"""In the metadata of a column that nobody asked for: the schema's line to paste."""


def check_typed_schema(
    schema: StructType, options: ValueOptions, to_arrow: Callable[[StructType], pa.Schema]
) -> None:
    """Accept what records can be read into.

    Args:
        schema: The user's.
        options: How records are read.
        to_arrow: Gives the same schema as Arrow has it.

    Raises:
        InvalidInput: A column of a type that is not read, a repeated one, or NOT NULL.
    """
    for field in schema.fields:
        own = OWN.get(field.name)
        if own is None:
            _check_field(field.name, field.dataType, field.nullable)
            if field.name != options.corrupt_column:
                _check_not_own(field.name)
            continue
        column = COLUMNS[own]
        if not isinstance(field.dataType, column.types):
            types = " or ".join(each().simpleString().upper() for each in column.types)
            raise InvalidInput(
                f"schema wants column {field.name!r} as "
                f"{field.dataType.simpleString().upper()}: it is {types}. Cast it after loading."
            )
        if column.nullable and not field.nullable:
            _check_field(field.name, field.dataType, field.nullable)
    from opendata_buffer.values.decoder import Decoder  # 60 ms with all that it reads by

    Decoder(record_schema(to_arrow(schema)), options)


def meant_as_own(name: str) -> str | None:
    """The column of ours that a column of this name is taken for; None for a field of records."""
    if not name.startswith("_"):
        return None
    import difflib  # only for names that may be wrong

    near = difflib.get_close_matches(name, OWN, n=1, cutoff=0.8)
    return near[0] if near else None


def _check_not_own(name: str) -> None:
    """Refuse a field that is nearly called like a column of ours."""
    own = meant_as_own(name)
    if own is not None:
        raise InvalidInput(
            f"schema has the column {name!r}: did you mean {own!r}? Our columns are "
            f"{', '.join(OWN)}"
        )


def check_not_inferred(schema: StructType) -> None:
    """Refuse, for a stream, a schema made of a sample: the next restart may see other records.

    Raises:
        InvalidInput: It says which line to add.
    """
    for field in schema.fields:
        line = (field.metadata or {}).get(INFERRED)
        if line is not None:
            raise InvalidInput(
                "a stream with valueFormat needs a schema, which must not change when it starts "
                "again and other records are queued. The records that are queued now have\n\n"
                f"    .schema({json.dumps(line, ensure_ascii=False)})\n\n"
                "Add that line to readStream, with the types you want"
            )


def record_schema(arrow: pa.Schema) -> pa.Schema:
    """The columns that are filled from records."""
    return pa.schema([each for each in arrow if each.name not in OWN])


def _check_field(name: str, dtype: DataType, nullable: bool) -> None:
    if not nullable:
        raise InvalidInput(
            f"schema wants column {name!r} NOT NULL: a record may lack it, or have something else "
            "there. Leave NOT NULL out, and drop such rows after loading."
        )
    if isinstance(dtype, StructType):
        for field in dtype.fields:
            _check_field(f"{name}.{field.name}", field.dataType, field.nullable)
    elif isinstance(dtype, ArrayType):
        _check_field(f"{name}[]", dtype.elementType, dtype.containsNull)
    elif isinstance(dtype, MapType):
        _check_field(f"{name}{{}}", dtype.valueType, dtype.valueContainsNull)
    elif not isinstance(dtype, _SCALARS):
        # To Arrow some of these are structs of bytes, and all that records have were null there.
        raise InvalidInput(
            f"schema wants column {name!r} as {dtype.simpleString().upper()}, which records are "
            "not read into: read it as STRING and convert it after loading, a variant for example "
            "with parse_json"
        )
