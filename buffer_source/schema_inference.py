"""The schema of a read with ``valueFormat`` and without ``.schema(...)``, from queued records."""

from __future__ import annotations

import logging

import pyarrow as pa
from pyspark.sql.pandas.types import from_arrow_schema, from_arrow_type
from pyspark.sql.types import StructField, StructType

from buffer_source.options import SourceOptions
from buffer_source.partitions import SourcePartitions, view_of
from buffer_source.schema import INFERRED, own_column_like
from opendata_buffer.consumer.fetch import FetchHandle
from opendata_buffer.errors import InvalidInput, PoisonBatch
from opendata_buffer.formats.manifest import BatchDescriptor
from opendata_buffer.runtime import Retries, Runtime, queue_retry
from opendata_buffer.stores.base import Store
from opendata_buffer.values import ValueOptions, infer

log = logging.getLogger(__name__)

BATCHES = 8
"""Batches of a sample, over all partitions."""

RECORDS = 1000
"""Records of each of these batches."""


def infer_schema(
    options: SourceOptions, values: ValueOptions, store: Store, runtime: Runtime
) -> StructType:
    """The columns of a sample: the first records of the oldest and the newest batches.

    Each column says in its metadata that it was inferred: a stream refuses such a schema.

    Raises:
        InvalidInput: There is no queue, or nothing in it that shows which columns there are.
        StorageError: The store did not answer.
    """
    retrying = queue_retry(runtime, options.queue)
    partitions = SourcePartitions(options, store, runtime, retrying)
    names = partitions.names()
    records: list[bytes] = []
    for name in names[:BATCHES]:
        own = partitions.options_of(name)
        records += _records(own, store, runtime, max(2, BATCHES // len(names)), retrying)
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
    view = view_of(options, store, runtime)
    entries = [] if view is None else [*view.entries(limit=count)]
    if view is not None and view.entry_count > count:
        newest = view.entries(view.next_sequence - count // 2, count // 2)
        entries = [*entries[: count // 2], *newest]
    handle = FetchHandle.of(options.consumer, store=store)
    records: list[bytes] = []
    for entry in entries:
        try:
            batch = retrying(handle.fetch_arrow, BatchDescriptor.of(entry))
        except PoisonBatch as error:
            log.warning("not in the sample: %s", error)
            continue
        records += batch.values[:RECORDS].to_pylist()
    return records
