"""Schemas of a read: the existing columns, checks of user schemas, and inferred schemas.

Without ``valueFormat`` a schema is any subset of :data:`COLUMNS`. With it, the columns are the
fields of records, and the buffer's own columns have names with an underscore: :data:`OWN`.
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
from opendata_buffer.consumer.batches import OWN
from opendata_buffer.errors import InvalidInput, PoisonBatch
from opendata_buffer.runtime import Retries, Runtime
from opendata_buffer.stores.base import Store

if TYPE_CHECKING:
    from opendata_buffer.values import ValueOptions

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a buffer."""

    types: tuple[type[DataType], ...]  # Types that a user schema may use, the default first.
    nullable: bool = False  # Whether rows without a metadata range have null.
    by_default: bool = True  # Whether a read without ``.schema(...)`` has it.


COLUMNS: dict[str, Column] = {
    "value": Column((BinaryType, StringType)),
    "metadata": Column((BinaryType, StringType), nullable=True),
    # Varies only in a topic; a single queue has the same value in every row.
    "partition": Column((StringType,), by_default=False),
    "sequence": Column((LongType,)),
    "index": Column((IntegerType,)),
    "ingestion_time": Column((TimestampType,), nullable=True),
    "location": Column((StringType,), by_default=False),
    # From the metadata that OpenTelemetry's exporter for OpenData writes; null for other metadata.
    "otel_signal": Column((StringType,), nullable=True, by_default=False),
    "otel_encoding": Column((StringType,), nullable=True, by_default=False),
}
"""The columns by name, in the order of a read without ``.schema(...)``."""

_KAFKA_COLUMNS = {
    "key": ["metadata"],
    "headers": ["metadata"],
    "offset": ["sequence", "index"],
    "timestamp": ["ingestion_time"],
    "topic": ["partition"],
}
"""Columns of Spark's Kafka source, and those that have their meaning here."""

_SCALARS = (
    BinaryType, BooleanType, DateType, NumericType, StringType, TimestampNTZType, TimestampType,
    UserDefinedType,
)  # fmt: skip

INFERRED = "opendata-buffer.inferred"
"""A key in the metadata of an inferred column. Its value is the schema, as ``.schema(...)`` takes
it."""


def default_schema(topic: bool = False) -> StructType:
    """Return the schema of a read without ``.schema(...)``; for a topic with ``partition``."""
    return StructType(
        [
            StructField(name, column.types[0]())
            for name, column in COLUMNS.items()
            if column.by_default or (topic and name == "partition")
        ]
    )


def check_schema(schema: StructType, values: ValueOptions | None = None) -> None:
    """Refuse columns that do not exist; with ``values``, also accept fields of records.

    Args:
        schema: The schema of the query.
        values: How records are read into columns; None if they are not.

    Raises:
        InvalidInput: A column is unknown, is there twice, has another type, or is NOT NULL although
            it may have nulls. Or the schema has no columns.
    """
    if values is not None:
        _check_typed_schema(schema, values)
        return
    seen: set[str] = set()
    for field in schema.fields:
        name = field.name.lower()
        column = COLUMNS.get(name)
        if column is None:
            near = _KAFKA_COLUMNS.get(name) or difflib.get_close_matches(
                name.removeprefix("record_"), COLUMNS, n=1
            )
            hint = f" Did you mean {' and '.join(map(repr, near))}?" if near else ""
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
    """Return the schema of the record batches that Spark accepts; Spark compares types as well."""
    try:
        return to_arrow_schema(schema, timezone="UTC")
    except TypeError:  # Spark 4.1 always uses UTC.
        return to_arrow_schema(schema)


def record_schema(arrow: pa.Schema) -> pa.Schema:
    """Return the columns that are filled from records."""
    return pa.schema([each for each in arrow if each.name not in OWN])


def own_column_like(name: str) -> str | None:
    """Return the buffer's column that a name stands for, or almost; None for a field of records."""
    if not name.startswith("_"):
        return None
    near = difflib.get_close_matches(name, OWN, n=1, cutoff=0.8)
    return near[0] if near else None


def check_not_inferred(schema: StructType) -> None:
    """Refuse an inferred schema for a stream.

    A stream needs a fixed schema: after a restart, other records may be queued.

    Args:
        schema: The schema of the stream.

    Raises:
        InvalidInput: The schema was inferred.
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
    from opendata_buffer.values import Decoder  # Loaded late, as in options.py.

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
        # Arrow takes some of these types for structs of bytes, and would read every record as null.
        raise InvalidInput(
            f"schema wants column {name!r} as {dtype.simpleString().upper()}, which records are "
            "not read into: read it as STRING and convert it after loading, a variant for example "
            "with parse_json"
        )


BATCHES = 8  # Batches of a sample, over all partitions.
RECORDS = 1000  # Records from each of these batches.


def infer_schema(
    options: SourceOptions, values: ValueOptions, store: Store, runtime: Runtime
) -> StructType:
    """Infer the columns from a sample: the first records of the oldest and the newest batches.

    The metadata of each column says that it was inferred, so a stream refuses such a schema.

    Args:
        options: The source's options.
        values: How records are read into columns.
        store: The opened store.
        runtime: Clock and threads.

    Returns:
        The columns of the records.

    Raises:
        InvalidInput: The queue does not exist, or no queued record shows which columns it has.
    """
    retrying = options.queue.retries(runtime)
    partitions = SourcePartitions(options, store, runtime)
    names = partitions.names()
    records: list[bytes] = []
    for name in names[:BATCHES]:
        own = partitions.options_of(name)
        records += _records(own, store, runtime, max(2, BATCHES // len(names)), retrying)
    from opendata_buffer.values import infer  # Loaded late, as in options.py.

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
    """Return the schema without fields whose names stand for columns of a buffer."""
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
    """Return the name of a type in ``.schema(...)``."""
    if pa.types.is_list(dtype):
        return f"ARRAY<{_ddl(dtype.value_type)}>"
    if pa.types.is_struct(dtype):
        members = ", ".join(f"{_name(each.name)}: {_ddl(each.type)}" for each in dtype)
        return f"STRUCT<{members}>"
    return from_arrow_type(dtype, prefer_timestamp_ntz=True).simpleString().upper()


def _records(
    options: SourceOptions, store: Store, runtime: Runtime, count: int, retrying: Retries
) -> list[bytes]:
    """Return the first records of up to ``count`` batches of a queue, the oldest and the newest."""
    from opendata_buffer.consumer.fetch import FetchHandle  # Loaded late, as in planner.py.

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
