"""Reads with ``valueFormat``: their options, and schemas with the fields of records as columns."""

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
from opendata_buffer.option_reader import OptionReader

if TYPE_CHECKING:
    from opendata_buffer.values import ValueOptions

__all__ = [
    "INFERRED", "OWN", "VALUE_OPTIONS", "check_not_inferred", "check_typed_schema", "meant_as_own",
    "record_schema", "value_options",
]  # fmt: skip

_OF_BOTH = ("mode", "columnNameOfCorruptRecord")
_OF_CSV = ("sep", "quote", "escape", "nullValue", "header")
VALUE_OPTIONS = ("valueFormat", *_OF_BOTH, *_OF_CSV)

OWN = {
    f"_{name}": name
    for name in ("sequence", "index", "ingestion_time", "metadata", "location", "partition")
}
"""The columns of a buffer by the names they have beside the fields of records."""

_SCALARS = (
    BinaryType, BooleanType, DateType, NumericType, StringType, TimestampNTZType, TimestampType,
    UserDefinedType,
)  # fmt: skip

INFERRED = "opendata-buffer.inferred"
"""In the metadata of a column that was inferred: the schema, as ``.schema(...)`` takes it."""


def value_options(read: OptionReader) -> ValueOptions | None:
    """How records are read into columns; None for ``valueFormat=bytes``, which reads no columns.

    Raises:
        InvalidInput: An option that the format does not have, or a value that is not accepted.
    """
    value_format = read.choice("valueFormat", ("bytes", "json", "csv"), "bytes")
    for names, formats in ((_OF_BOTH, ("json", "csv")), (_OF_CSV, ("csv",))):
        for name in names:
            if value_format not in formats and read.given(name):
                raise InvalidInput(
                    f"option {name} is given and valueFormat is {value_format}: it says how "
                    f"{' or '.join(formats)} is read, so set valueFormat, or leave it out"
                )
    if value_format == "bytes":
        return None
    sep, quote = read.raw("sep", ","), read.raw("quote", '"')
    escape = read.raw("escape", "")
    for name, value in (("sep", sep), ("quote", quote), ("escape", escape)):
        if len(value.encode()) > 1 or (name == "sep" and not value) or value in ("\n", "\r"):
            raise InvalidInput(
                f"option {name} is {value!r}: use one ASCII character"
                + ("" if name == "sep" else ", or nothing for none")
            )
    # It loads Arrow's compute functions, 40 ms; a query over bytes starts without them.
    from opendata_buffer.values import ValueOptions

    return ValueOptions(
        format=value_format,
        mode=read.choice("mode", ("PERMISSIVE", "DROPMALFORMED", "FAILFAST"), "PERMISSIVE"),
        corrupt_column=read.text("columnNameOfCorruptRecord") or "_corrupt_record",
        sep=sep,
        quote=quote,
        escape=escape,
        null_value=read.raw("nullValue", ""),
        header=read.boolean("header", False),
    )


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
    from opendata_buffer.values import Decoder  # as in value_options

    Decoder(record_schema(to_arrow(schema)), options)


def meant_as_own(name: str) -> str | None:
    """The buffer's column that a name stands for, or nearly; None for a field of records."""
    if not name.startswith("_"):
        return None
    import difflib  # only for names that may be wrong

    near = difflib.get_close_matches(name, OWN, n=1, cutoff=0.8)
    return near[0] if near else None


def _check_not_own(name: str) -> None:
    """Refuse a field with nearly the name of a buffer's column."""
    own = meant_as_own(name)
    if own is not None:
        raise InvalidInput(
            f"schema has the column {name!r}: did you mean {own!r}? The columns of a buffer are "
            f"{', '.join(OWN)}"
        )


def check_not_inferred(schema: StructType) -> None:
    """Refuse an inferred schema for a stream: after a restart other records may be queued.

    Raises:
        InvalidInput: It names the line to add.
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
