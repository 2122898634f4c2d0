"""Converts Spark's rows to record blocks: columns, partitions of a topic, metadata ranges."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from buffer_sink.committer import TopicWrite
from buffer_sink.options import SinkOptions
from opendata_buffer.errors import InvalidInput
from opendata_buffer.formats import MIB
from opendata_buffer.formats.arrow import encode_arrow_block
from opendata_buffer.formats.manifest import Metadata
from opendata_buffer.runtime import Runtime
from opendata_buffer.topic import partitioner as partitioners

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

_FIX = (
    "write all columns as one JSON object with .option('valueFormat', 'json'), put the row into "
    "`value` first, df.selectExpr('to_json(struct(*)) AS value'), or select what a buffer takes: "
    "`value` and optionally `metadata`, each BINARY or STRING"
)
_TYPES = {
    "value": ("binary", "string"),
    "metadata": ("binary", "string"),
    "key": ("binary", "string"),
    "partition": ("string",),
}
_LENGTH_BYTES = 4  # of every record in a block


@dataclass(frozen=True, slots=True)
class Columns:
    """Positions of the input columns.

    ``metadata`` is the payload of the record's metadata range. ``key`` chooses a topic's partition,
    ``partition`` names it; these two are not stored.
    """

    value: int
    metadata: int | None
    key: int | None = None
    partition: int | None = None


def check_schema(schema: StructType) -> Columns:
    """Find the input columns by name, in any case as Spark resolves names.

    InvalidInput if ``value`` is missing, a type is wrong, or there is any other column.
    """
    found: dict[str, int] = {}
    for position, field in enumerate(schema.fields):
        name = field.name.lower()
        if name not in _TYPES:
            raise InvalidInput(
                f"column {field.name!r} ({field.dataType.simpleString()}) cannot be written to a "
                f"buffer: {_FIX}"
            )
        if name in found:
            raise InvalidInput(f"column {name!r} is there twice: drop or rename one")
        if field.dataType.typeName() not in _TYPES[name]:
            fix = f"cast it, or {_FIX}" if name in ("value", "metadata") else "cast it"
            raise InvalidInput(
                f"column {field.name!r} has type {field.dataType.simpleString()}, not "
                f"{' or '.join(_TYPES[name]).upper().replace(' OR ', ' or ')}: {fix}"
            )
        found[name] = position
    if "value" not in found:
        raise InvalidInput(f"column 'value' is missing: {_FIX}")
    return Columns(found["value"], found.get("metadata"), found.get("key"), found.get("partition"))


def check_one_queue(columns: Columns) -> None:
    """Refuse, by InvalidInput, the columns that choose a partition: a single queue has none."""
    for name, position in (("key", columns.key), ("partition", columns.partition)):
        if position is not None:
            raise InvalidInput(
                f"column {name!r} cannot be written to a single queue, it chooses a partition of "
                f"a topic: write to a topic, drop the column, or {_FIX}"
            )


@dataclass(frozen=True, slots=True)
class Block:
    """The record block of one batch object, in pieces, and its metadata ranges; not compressed."""

    pieces: tuple[bytes | memoryview, ...]
    records: int
    metadata: tuple[Metadata, ...]

    @property
    def size(self) -> int:
        """Bytes of the record block."""
        return sum(map(len, self.pieces))


class BlockBuilder:
    """Cuts a task's rows into blocks of at most ``target_batch_bytes``.

    Only a single record larger than that makes a larger block, up to ``max_batch_bytes``. ``where``
    names the rows in messages; ``size`` is the bytes of the block that is not full yet.
    """

    def __init__(self, columns: Columns, options: SinkOptions, where: str) -> None:
        self._columns = columns
        self._options = options
        self._where = where
        self._rows = 0
        self._ranges = 0
        self._clear()

    def _clear(self) -> None:
        self.size = 0
        self._pieces: list[bytes | memoryview] = []
        self._records = 0
        self._runs: list[Metadata] = []

    def add(self, rows: pa.RecordBatch, now_ms: int) -> Iterator[Block]:
        """Add rows and give back each block that they fill.

        ``now_ms`` is the ingestion time of blocks that begin with these rows. InvalidInput for a
        value that is null or too large, or metadata that changes too often.
        """
        values = rows.column(self._columns.value)
        if values.null_count:
            row = self._rows + pc.index(pc.is_null(values), True).as_py()
            raise InvalidInput(
                f"value is null in row {row} of {self._where} (counted from 0): a "
                "buffer has no null. Filter such rows, df.where('value IS NOT NULL'). Where a null "
                "means something, as Kafka's tombstones do, write columns as JSON, which leaves "
                "the field out: df.select('key', 'value') with .option('valueFormat', 'json')."
            )
        metadata = None
        if self._columns.metadata is not None:
            # A range ends only where another one begins, so null metadata is written as empty.
            metadata = rows.column(self._columns.metadata).cast(pa.large_binary())
            metadata = metadata.fill_null(b"") if metadata.null_count else metadata
        ends = _ends(values)
        start = done = 0
        while start < len(values):
            target = self._options.target_batch_bytes
            stop = bisect_right(ends, done + target - self.size, start)
            if stop == start:
                if self._records:
                    yield self._close()
                    continue
                stop = start + 1
                size, limit = ends[start] - done, self._options.max_batch_bytes
                if size > limit:
                    raise InvalidInput(
                        f"value has {size - _LENGTH_BYTES} bytes in row {self._rows + start} of "
                        f"{self._where} (counted from 0), more than the {limit} that a batch "
                        "may have. Make it smaller"
                    )
            self._append_runs(metadata, start, stop, now_ms)
            self._pieces.append(encode_arrow_block(values.slice(start, stop - start))[0])
            self._records += stop - start
            self.size += ends[stop - 1] - done
            start, done = stop, ends[stop - 1]
        self._rows += len(values)

    def finish(self) -> Block | None:
        """The block that is not full yet; None when it has no rows."""
        return self._close() if self._records else None

    def _append_runs(self, metadata: pa.Array | None, start: int, stop: int, now_ms: int) -> None:
        # All ranges of a block have the time of its first rows: within one, times never fall.
        time_ms = self._runs[0].ingestion_time_ms if self._runs else now_ms
        if metadata is None:
            if not self._runs:
                self._runs.append(Metadata(0, time_ms, b""))
            return
        runs = pc.run_end_encode(metadata.slice(start, stop - start))
        begin = self._records
        payloads = runs.values.to_pylist()
        for payload, end in zip(payloads, runs.run_ends.to_pylist(), strict=True):
            if not self._runs or self._runs[-1].payload != payload:
                self._runs.append(Metadata(begin, time_ms, payload))
                self._ranges += 1
            begin = self._records + end
        most = self._options.max_metadata_ranges
        if self._ranges > most:  # each of them is kept in the manifest (failure F35)
            raise InvalidInput(
                f"metadata changes more than {most} times in {self._where}: every run "
                "of equal metadata is kept in the manifest, which each append rewrites. Sort by "
                "metadata, or put it into value."
            )

    def _close(self) -> Block:
        block = Block(tuple(self._pieces), self._records, tuple(self._runs))
        self._clear()
        return block


def _ends(values: pa.Array) -> memoryview:
    """Where each record ends in a block of these values, in bytes."""
    sizes = pc.add(pc.binary_length(values).cast(pa.int64()), _LENGTH_BYTES)
    return memoryview(pc.cumulative_sum(sizes).buffers()[1]).cast("q")[: len(values)]


COALESCED_BYTES = 8 * MIB
"""Bytes of rows that are divided at once. A single batch of Spark's may be larger."""


def check_topic(columns: Columns, partitioner: str | None) -> None:
    """Refuse columns and a partitioner (None where the option is not given) that contradict."""
    if columns.partition is not None:
        if partitioner is not None or columns.key is not None:
            other = f"option partitioner ({partitioner!r})" if partitioner else "column 'key'"
            raise InvalidInput(
                f"column 'partition' and {other} both choose the partition: leave out one of them"
            )
    elif partitioner in ("modulo", "rendezvous"):
        if columns.key is None:
            raise InvalidInput(
                f"column 'key' is missing: partitioner {partitioner!r} chooses the partition by "
                "it. Select it, BINARY or STRING, or use the partitioner 'random'."
            )
    elif columns.key is not None:
        raise InvalidInput(
            "column 'key' is there, and the partitioner is 'random': rows of one key would go "
            "anywhere, and lose their order. Set option partitioner to 'modulo' or 'rendezvous', "
            "or drop the column."
        )


def coalesced(rows: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The same rows in larger batches, since dividing rows has a cost per batch and partition.

    Spark gives 10,000 rows at a time, of which many partitions would get a few hundred each.
    """
    waiting: list[pa.RecordBatch] = []
    size = 0
    for batch in rows:
        waiting.append(batch)
        size += batch.nbytes
        if size >= COALESCED_BYTES:
            yield from pa.Table.from_batches(waiting).combine_chunks().to_batches()
            waiting, size = [], 0
    if waiting:
        yield from pa.Table.from_batches(waiting).combine_chunks().to_batches()


class PartitionRouter:
    """Divides a task's rows among the partitions: by one sort and one copy of each batch.

    ``columns`` are checked by :func:`check_topic`; ``partitioner`` is the option, None for
    ``random``. ``task`` is the task's number, for messages.
    """

    def __init__(
        self,
        columns: Columns,
        partitioner: str | None,
        write: TopicWrite,
        *,
        task: int,
        runtime: Runtime,
    ) -> None:
        self._columns = columns
        self._write = write
        self._task = task
        choices: dict[str, partitioners.Partitioner] = {
            "modulo": partitioners.modulo,
            "rendezvous": partitioners.rendezvous,
            "random": partial(partitioners.random, source=runtime.random),
        }
        self._partitioner = choices[partitioner or "random"]
        self._rows = 0

    def split(self, rows: pa.RecordBatch) -> dict[str, pa.RecordBatch]:
        """The rows of each partition that gets some, in the order in which they came.

        InvalidInput for a key or a partition that is null, or a partition that there is not.
        """
        columns, partitioner = self._columns, self._partitioner
        # `random` reads no key: without a column of keys the values serve, as they are as many.
        keys = rows.column(columns.value if columns.key is None else columns.key)
        if columns.partition is not None:
            keys, partitioner = rows.column(columns.partition), self._chosen
        elif columns.key is not None and keys.null_count:
            raise InvalidInput(
                f"key is null in {self._row(pc.is_null(keys))}: a row without a key belongs to no "
                "partition. Let the value choose one, df.selectExpr('coalesce(key, value) AS key', "
                "...), or filter such rows, df.where('key IS NOT NULL')."
            )
        parts = partitioners.split(rows, keys, self._write.active, partitioner)
        self._rows += len(rows)
        return parts

    def _chosen(self, names: Any, partitions: Sequence[str]) -> Any:
        found = pc.index_in(names, value_set=pa.array(partitions, names.type))
        if not found.null_count:
            return found.to_numpy(zero_copy_only=False)
        wrong = pc.is_null(found)
        name = names[pc.index(wrong, True).as_py()].as_py()
        if name is None:
            why = "null"
        elif name in self._write.draining:
            why = f"{name!r}, which is being drained"
        else:
            why = f"{name!r}, which the topic does not have"
        raise InvalidInput(
            f"partition is {why}, in {self._row(wrong)}: use one of {_listed(self._write.active)}, "
            "or leave out the column and let option partitioner choose"
        )

    def _row(self, where: pa.Array) -> str:
        row = self._rows + pc.index(where, True).as_py()
        return f"row {row} of task {self._task} (counted from 0)"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names if len(names) <= 4 else [names[0], names[1], "...", names[-1]])
