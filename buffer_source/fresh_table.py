"""Read a Delta table together with the records that wait in the log after it.

The problem: a job that loads a log into a table once an hour writes large files, which are fast to
read. But the table is up to an hour old.

The idea: a reader of the log says how far the job is. So a query can read the table, and the rest
from the log::

    log      0 1 2 3 4 5 6 7 8 9        the loader's reader is at 4, and has stored up to 6
    table    0 1 2 3 4 5 6
    tail             4 5 6 7 8 9        read from the log, from the reader's position on
    result   0 1 2 3 4 5 6 7 8 9        the batches 4 to 6 of the tail are in the table already

What can go wrong:

* The loader stores a micro-batch, and its reader moves only later. So the tail may contain batches
  that are in the table, and the result leaves these out. Each row of the table names its batch in
  the column ``sequence``, and a micro-batch has whole batches.
* The loader goes on while the query runs. So the position is read first, then the version of the
  table, and the tail at last. A batch before the position was stored before the reader moved, so it
  is in that version; a batch after it is in the tail.
* The log deletes a batch of the tail before the query reads it. The query then ends with
  ``DataLoss``, and has to be run again. A log that keeps its batches for an hour avoids this.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from buffer_source.options import SourceOptions
from buffer_source.partitions import SourcePartitions, position_of_reader, view_of
from opendata_buffer.errors import InvalidInput
from opendata_buffer.option_reader import in_options
from opendata_buffer.runtime import SystemRuntime, in_parallel
from opendata_buffer.stores.open import open_store

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def _as_it_is(rows: DataFrame) -> DataFrame:
    return rows


@in_options()
def fresh(
    spark: SparkSession,
    table: str,
    queue: str,
    reader: str,
    prepare: Callable[[DataFrame], DataFrame] = _as_it_is,
    *,
    schema: Any = None,
    **options: Any,
) -> DataFrame:
    """Return the rows of a Delta table, and those in the log that its loader has not stored yet.

    The loader is a streaming query that reads the log as ``reader`` and appends each row to the
    table once: with Delta's sink, or in ``foreachBatch`` with ``txnAppId`` and ``txnVersion``. The
    table has the source's column ``sequence``, and for a topic also ``partition``.

    The DataFrame is a snapshot of the table, and reads the log when it is first used. Use it soon:
    it ends with ``DataLoss`` if the log has deleted the batches meanwhile.

    Args:
        spark: The session.
        table: The table in SQL, such as ``main.default.orders`` or ``delta.`/tables/orders` ``.
        queue: The path of the log, or of a topic of logs.
        reader: The name by which the loader reads the log.
        prepare: What the loader does with the source's rows before it appends them, such as parsing
            and filtering. It keeps ``sequence`` and ``partition``, and must not aggregate.
        schema: The schema that the loader gives the source; None for the default columns.
        **options: Options of the source, such as ``region`` or ``valueFormat``.

    Returns:
        The rows, with the columns of the table.

    Raises:
        InvalidInput: An option cannot be used, the log has no such reader, or the table has no
            column ``sequence``.
        CorruptData: The position of the reader cannot be read.
    """
    given = {name: str(value) for name, value in options.items()}
    parsed = SourceOptions.from_spark({"path": queue, "reader": reader, **given})
    runtime = SystemRuntime()
    store = open_store(parsed.queue.store, parsed.queue.store_options)
    partitions = SourcePartitions(parsed, store, runtime)

    def position(name: str) -> int:
        own = partitions.options_of(name)
        view = view_of(own, store, runtime)
        return 0 if view is None else position_of_reader(own, view, store, runtime)

    # The order matters: the positions first, then the version of the table.
    names = partitions.names()
    begins = dict(zip(names, in_parallel(runtime, position, names), strict=True))
    version = spark.sql(f"DESCRIBE HISTORY {table} LIMIT 1").first()
    assert version is not None, "a table has at least one version"
    # Both uses of the table read this version, also if the loader appends between them.
    stored = spark.sql(f"SELECT * FROM {table} VERSION AS OF {version['version']}")
    is_topic = partitions.topic is not None
    keys = ["partition", "sequence"] if is_topic else ["sequence"]
    if missing := [name for name in keys if name not in stored.columns]:
        raise InvalidInput(
            f"table {table} has no column {' and no column '.join(missing)}: it says which batches "
            "of the log the table has. Let the loader store the source's column of this name"
        )
    start = json.dumps(begins) if is_topic else str(next(iter(begins.values())))
    source = spark.read.format("opendata-buffer").options(**given)
    source = source.option("startingOffsets", start)
    tail = prepare((source if schema is None else source.schema(schema)).load(queue))
    known = stored.where(f"sequence >= {min(begins.values())}").select(*keys).distinct()
    return stored.unionByName(tail.join(known, keys, "left_anti").select(*stored.columns))
