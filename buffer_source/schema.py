"""Schemas of a read: the columns there are, what a user schema may ask for, what records show.

Without ``valueFormat`` a schema is any subset of :data:`COLUMNS`. With it the columns are the
fields of records, and the buffer's own columns have an underscore: :data:`OWN`.
"""

from __future__ import annotations

import difflib
import json
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark.sql.pandas.types import from_arrow_schema, from_arrow_type, to_arrow_schema
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    DataType,
    DateType,
    IntegerType,
    LongType,
    MapType,
    NumericType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
    UserDefinedType,
)

from buffer_source.options import SourceOptions
from buffer_source.partitions import SourcePartitions, view_of
from opendata_buffer.errors import InvalidInput, PoisonBatch
from opendata_buffer.runtime import Retries, Runtime
from opendata_buffer.stores.base import Store

if TYPE_CHECKING:
    from opendata_buffer.values import ValueOptions

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a buffer."""

    types: tuple[type[DataType], ...]  # Types that a user schema may have, the default first.
    nullable: bool = False  # Whether rows that no metadata range covers have null there.
    by_default: bool = True  # Whether a read without ``.schema(...)`` has it.


COLUMNS: dict[str, Column] = {
    "value": Column((BinaryType, StringType)),
    "metadata": Column((BinaryType, StringType), nullable=True),
    # In a topic; in a queue it is the same on every row.
    "partition": Column((StringType,), by_default=False),
    "sequence": Column((LongType,)),
    "index": Column((IntegerType,)),
    "ingestion_time": Column((TimestampType,), nullable=True),
    "location": Column((StringType,), by_default=False),
    # What OpenTelemetry's exporter for OpenData says in the metadata; null for others'.
    "otel_signal": Column((StringType,), nullable=True, by_default=False),
    "otel_encoding": Column((StringType,), nullable=True, by_default=False),
}
"""The columns by name, in the order of a read without ``.schema(...)``."""

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


def default_schema(topic: bool = False) -> StructType:
    """The schema of a read without ``.schema(...)``; of a topic with ``partition``."""
    return StructType(
        [
            StructField(name, column.types[0]())
            for name, column in COLUMNS.items()
            if column.by_default or (topic and name == "partition")
        ]
    )


def check_schema(schema: StructType, values: ValueOptions | None = None) -> None:
    """Refuse columns that there are not; with ``values`` fields of records are allowed, too."""
    if values is not None:
        _check_typed_schema(schema, values)
        return
    seen: set[str] = set()
    for field in schema.fields:
        name = field.name.lower()
        column = COLUMNS.get(name)
        if column is None:
            near = difflib.get_close_matches(name.removeprefix("record_"), COLUMNS, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise InvalidInput(
                f"schema has the column {field.name!r}, which an opendata-buffer does not have."
                f"{hint} Columns: {', '.join(COLUMNS)}. To read records into columns, set the "
                "option valueFormat to json or csv, or use from_json(value, schema) after loading."
            )
        if name in seen:
            raise InvalidInput(f"schema has the column {field.name!r} twice")
        seen.add(name)
        _check_type(field, column)
        if column.nullable and not field.nullable:
            raise InvalidInput(
                f"schema wants column {field.name!r} NOT NULL: records that were written without "
                "metadata have null there. Leave NOT NULL out, and drop such rows after loading."
            )
    if not seen:
        raise InvalidInput(f"schema has no column: use any of {', '.join(COLUMNS)}")


def arrow_schema(schema: StructType) -> pa.Schema:
    """The schema of the record batches that Spark takes; it compares, and not by name only."""
    try:
        return to_arrow_schema(schema, timezone="UTC")
    except TypeError:  # Spark 4.1, where it is UTC anyway
        return to_arrow_schema(schema)


def record_schema(arrow: pa.Schema) -> pa.Schema:
    """The columns that are filled from records."""
    return pa.schema([each for each in arrow if each.name not in OWN])


def own_column_like(name: str) -> str | None:
    """The buffer's column that a name stands for, or nearly; None for a field of records."""
    if not name.startswith("_"):
        return None
    near = difflib.get_close_matches(name, OWN, n=1, cutoff=0.8)
    return near[0] if near else None


def check_not_inferred(schema: StructType) -> None:
    """Refuse an inferred schema for a stream: after a restart other records may be queued."""
    for field in schema.fields:
        line = (field.metadata or {}).get(INFERRED)
        if line is not None:
            raise InvalidInput(
                "a stream with valueFormat needs a schema, which must not change when it starts "
                "again and other records are queued. The records that are queued now have\n\n"
                f"    .schema({json.dumps(line, ensure_ascii=False)})\n\n"
                "Add that line to readStream, with the types you want"
            )


def _check_type(field: StructField, column: Column) -> None:
    if not isinstance(field.dataType, column.types):
        types = " or ".join(each().simpleString().upper() for each in column.types)
        raise InvalidInput(
            f"schema wants column {field.name!r} as "
            f"{field.dataType.simpleString().upper()}: it is {types}. Cast it after loading."
        )


def _check_typed_schema(schema: StructType, options: ValueOptions) -> None:
    """Refuse names and types that records cannot be read into."""
    for field in schema.fields:
        own = OWN.get(field.name)
        if own is None:
            _check_field(field.name, field.dataType, field.nullable)
            near = own_column_like(field.name)
            if near is not None and field.name != options.corrupt_column:
                raise InvalidInput(
                    f"schema has the column {field.name!r}: did you mean {near!r}? The columns of "
                    f"a buffer are {', '.join(OWN)}"
                )
            continue
        column = COLUMNS[own]
        _check_type(field, column)
        if column.nullable and not field.nullable:
            _check_field(field.name, field.dataType, field.nullable)
    from opendata_buffer.values import Decoder  # as in options.py

    Decoder(record_schema(arrow_schema(schema)), options)


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


BATCHES = 8  # of a sample, over all partitions
RECORDS = 1000  # of each of these batches


def infer_schema(
    options: SourceOptions, values: ValueOptions, store: Store, runtime: Runtime
) -> StructType:
    """The columns of a sample: the first records of the oldest and the newest batches.

    Each column says in its metadata that it was inferred: a stream refuses such a schema.
    InvalidInput where there is no queue, or nothing in it that shows which columns there are.
    """
    retrying = options.queue.retries(runtime)
    partitions = SourcePartitions(options, store, runtime)
    names = partitions.names()
    records: list[bytes] = []
    for name in names[:BATCHES]:
        own = partitions.options_of(name)
        records += _records(own, store, runtime, max(2, BATCHES // len(names)), retrying)
    from opendata_buffer.values import infer  # as in options.py

    schema = _without_own(infer(pa.array(records, pa.binary()), values), values)
    if not schema.names:
        raise InvalidInput(
            f"valueFormat is {values.format}, there is no schema, and "
            + ("no record" if not records else f"none of {len(records)} records read")
            + " shows which columns there are: say it, for example "
            ".schema('id BIGINT, name STRING, at TIMESTAMP')"
        )
    ddl = ", ".join(f"{_name(each.name)} {_ddl(each.type)}" for each in schema)
    log.warning("columns were inferred from %d records: .schema(%r)", len(records), ddl)
    inferred = from_arrow_schema(schema, prefer_timestamp_ntz=True).fields
    return StructType(
        [StructField(each.name, each.dataType, each.nullable, {INFERRED: ddl}) for each in inferred]
    )


def _without_own(schema: pa.Schema, values: ValueOptions) -> pa.Schema:
    """The schema without fields named as columns of a buffer."""
    left_out = {
        each: own
        for each in schema.names
        if each != values.corrupt_column and (own := own_column_like(each)) is not None
    }
    if left_out:
        log.warning(
            "fields of records are left out of the schema, for their names stand for columns of "
            "the queue: %s. Read value as it is, and use from_json, to have them",
            ", ".join(f"{name!r} ({own})" for name, own in left_out.items()),
        )
    return pa.schema([each for each in schema if each.name not in left_out])


def _name(name: str) -> str:
    plain = name.isascii() and name.isidentifier()
    return name if plain else "`" + name.replace("`", "``") + "`"


def _ddl(dtype: pa.DataType) -> str:
    """What ``.schema(...)`` calls a type."""
    if pa.types.is_list(dtype):
        return f"ARRAY<{_ddl(dtype.value_type)}>"
    if pa.types.is_struct(dtype):
        members = ", ".join(f"{_name(each.name)}: {_ddl(each.type)}" for each in dtype)
        return f"STRUCT<{members}>"
    return from_arrow_type(dtype, prefer_timestamp_ntz=True).simpleString().upper()


def _records(
    options: SourceOptions, store: Store, runtime: Runtime, count: int, retrying: Retries
) -> list[bytes]:
    """The first records of some batches of one queue, the oldest and the newest."""
    from opendata_buffer.consumer.fetch import FetchHandle  # as in planner.py

    view = view_of(options, store, runtime)
    entries = [] if view is None else [*view.entries(limit=count)]
    if view is not None and view.entry_count > count:
        newest = view.entries(view.next_sequence - count // 2, count // 2)
        entries = [*entries[: count // 2], *newest]
    handle = FetchHandle.of(options.consumer, store=store)
    records: list[bytes] = []
    for entry in entries:
        try:
            batch = retrying(handle.fetch_arrow, entry)
        except PoisonBatch as error:
            log.warning("not in the sample: %s", error)
            continue
        records += batch.values[:RECORDS].to_pylist()
    return records
