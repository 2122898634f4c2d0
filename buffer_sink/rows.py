"""Convert Spark's rows to record blocks: columns, partitions of a topic, metadata ranges, JSON.

With ``valueFormat=json`` all columns together are the value. The objects look like those of Spark's
``to_json``: a null field is left out, also inside structs; a null element of an array or a map is
``null``; binary is Base64; and numbers that JSON does not have are strings (``"NaN"``,
``"Infinity"``). There are two differences. Timestamps are in UTC with microseconds, and
floating-point numbers have their shortest spelling: ``1e+20`` and not ``1.0E20``.
"""

from __future__ import annotations

import base64
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.pandas.types import to_arrow_type
from pyspark.sql.types import ArrayType, BinaryType, DataType, MapType, StructField, StructType

from buffer_sink.committer import TopicWrite
from buffer_sink.options import SinkOptions
from opendata_buffer.errors import InvalidInput
from opendata_buffer.formats import MIB
from opendata_buffer.formats.arrow import encode_arrow_block
from opendata_buffer.formats.manifest import Metadata
from opendata_buffer.runtime import Runtime
from opendata_buffer.topic import partitioner as partitioners

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
_LENGTH_BYTES = 4  # The length that precedes every record in a block.


@dataclass(frozen=True, slots=True)
class Columns:
    """Positions of the input columns; None for a column that is not there.

    Attributes:
        value: The column of records.
        metadata: The payload of the record's metadata range.
        key: Chooses the partition of a topic. Not stored.
        partition: Names the partition of a topic. Not stored.
    """

    value: int
    metadata: int | None
    key: int | None = None
    partition: int | None = None


def check_schema(schema: StructType) -> Columns:
    """Find the input columns by name; like Spark, ignore the case of names.

    Args:
        schema: The schema of the rows.

    Returns:
        The positions of the columns.

    Raises:
        InvalidInput: ``value`` is missing, a type is wrong, or there is any other column.
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
    """Refuse the columns that choose a partition, because a single queue has no partitions.

    Args:
        columns: The columns of the input.

    Raises:
        InvalidInput: The column ``key`` or ``partition`` is there.
    """
    for name, position in (("key", columns.key), ("partition", columns.partition)):
        if position is not None:
            raise InvalidInput(
                f"column {name!r} cannot be written to a single queue, it chooses a partition of "
                f"a topic: write to a topic, drop the column, or {_FIX}"
            )


@dataclass(frozen=True, slots=True)
class Block:
    """The record block of one batch object, not compressed.

    Attributes:
        pieces: The bytes of the block, to be joined.
        records: Records in the block.
        metadata: The metadata ranges of the block.
    """

    pieces: tuple[bytes | memoryview, ...]
    records: int
    metadata: tuple[Metadata, ...]

    @property
    def size(self) -> int:
        """Bytes of the record block."""
        return sum(map(len, self.pieces))


class BlockBuilder:
    """Cuts a task's rows into blocks of at most ``target_batch_bytes``.

    Only a single record that is larger than that makes a larger block, up to ``max_batch_bytes``.

    Args:
        columns: The positions of the input columns.
        options: The options of the sink.
        where: Names the rows in errors.

    Attributes:
        size: Bytes of the block that is not full yet.
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
        """Add rows, and yield each block that they fill.

        Args:
            rows: The rows.
            now_ms: The ingestion time of blocks that begin with these rows, milliseconds since the
                Unix epoch.

        Yields:
            The full blocks, in the order of the rows.

        Raises:
            InvalidInput: A value is null or too large, or metadata changes too often.
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
            # A range ends only where another one begins. So null metadata is written as empty.
            metadata = rows.column(self._columns.metadata).cast(pa.large_binary())
            metadata = metadata.fill_null(b"") if metadata.null_count else metadata
        # The position where each record ends in a block of these values, in bytes.
        sizes = pc.add(pc.binary_length(values).cast(pa.int64()), _LENGTH_BYTES)
        ends = memoryview(pc.cumulative_sum(sizes).buffers()[1]).cast("q")[: len(values)]
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
        """Return the block that is not full yet; None if it has no rows."""
        return self._close() if self._records else None

    def _append_runs(self, metadata: pa.Array | None, start: int, stop: int, now_ms: int) -> None:
        # All ranges of a block get the time of its first rows, because times must not decrease
        # within a block.
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
        if self._ranges > most:  # The manifest keeps every range (failure F35).
            raise InvalidInput(
                f"metadata changes more than {most} times in {self._where}: every run "
                "of equal metadata is kept in the manifest, which each append rewrites. Sort by "
                "metadata, or put it into value."
            )

    def _close(self) -> Block:
        block = Block(tuple(self._pieces), self._records, tuple(self._runs))
        self._clear()
        return block


COALESCED_BYTES = 8 * MIB
"""Bytes of rows that are divided at once. A single batch from Spark may be larger."""


def check_topic(columns: Columns, partitioner: str | None) -> None:
    """Refuse columns and a partitioner that contradict each other.

    Args:
        columns: The positions of the input columns.
        partitioner: The option; None if it is not given.

    Raises:
        InvalidInput: Two of them choose the partition, or the partitioner and the column ``key`` do
            not fit together.
    """
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
    """Yield the same rows in larger batches.

    Dividing rows has a cost per batch and partition. Spark gives 10,000 rows at a time, of which
    each of many partitions would get a few hundred.
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
    """Divides a task's rows among the partitions, with one sort and one copy of each batch.

    Args:
        columns: The positions of the input columns, as :func:`check_topic` allows them.
        partitioner: The option; None for ``random``.
        write: The attempt, which names the partitions.
        task: The task's number, for errors.
        runtime: Random numbers.
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
        """Divide rows among partitions, and keep their order.

        Args:
            rows: The rows.

        Returns:
            The rows of each partition that gets any.

        Raises:
            InvalidInput: A key or a partition is null, or the topic has no such active partition.
        """
        columns, partitioner = self._columns, self._partitioner
        # `random` does not read keys, only their number. Without a column of keys, the values do.
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


_TEXT = pa.large_string()
_ESCAPES = {ord("\\"): r"\\", ord('"'): r"\""} | {
    code: {8: r"\b", 9: r"\t", 10: r"\n", 12: r"\f", 13: r"\r"}.get(code, f"\\u{code:04X}")
    for code in range(32)
}

OWN = ("_metadata", "_key", "_partition")
"""Columns that are not fields of the record. Without ``valueFormat`` they are ``metadata``, ``key``
and ``partition``."""


@dataclass(frozen=True, slots=True)
class Fields:
    """The columns that become fields of a record, and the buffer's own columns.

    Attributes:
        fields: Name and position of each field.
        own: Name, without underscore, and position of each of the buffer's own columns.
    """

    fields: tuple[tuple[str, int], ...]
    own: tuple[tuple[str, int], ...]

    @classmethod
    def of(cls, schema: StructType) -> tuple[Fields, StructType]:
        """Split a schema into the fields of records and the other columns.

        Args:
            schema: The schema of the rows.

        Returns:
            The fields, and the schema in which all of them are one column ``value``.

        Raises:
            InvalidInput: The schema has no fields, two fields have the same name, or JSON cannot
                represent a type.
        """
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
            _check_encodable(field)
            fields.append((field.name, position))
        if not fields:
            raise InvalidInput(
                "option valueFormat is 'json', but there is no column to write: besides "
                f"{', '.join(OWN)} the DataFrame has none"
            )
        return cls(tuple(fields), tuple(own)), StructType(rest)

    def encode(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """Return rows with all fields as one column ``value``, followed by the other columns."""
        fields = [(name, rows.column(position)) for name, position in self.fields]
        values = _object(fields, len(rows)).cast(pa.large_binary())
        own = [rows.column(position) for _, position in self.own]
        return pa.record_batch([values, *own], names=["value", *(name for name, _ in self.own)])


def _check_encodable(field: StructField) -> None:
    """Refuse a column that Spark does not give to a Python sink, or that JSON cannot represent."""
    found = None
    if not _holds_variant(field.dataType):
        with suppress(Exception):  # Versions of Spark raise different errors for unknown types.
            try:
                found = to_arrow_type(field.dataType, timezone="UTC")  # Spark 4.3 needs a zone.
            except TypeError:
                found = to_arrow_type(field.dataType)
    if found is None:
        raise InvalidInput(
            f"column {field.name!r} cannot be written as JSON: a Python sink cannot read type "
            f"{field.dataType.simpleString()}. Cast it, or put it into text with to_json first."
        )
    try:
        _text(pa.nulls(0, found))
    except InvalidInput as error:
        raise InvalidInput(f"column {field.name!r} cannot be written as JSON: {error}") from None


def _holds_variant(kind: DataType) -> bool:
    """Return whether a type is a variant or contains one; names of its fields may be anything."""
    if isinstance(kind, StructType):
        return any(_holds_variant(each.dataType) for each in kind.fields)
    if isinstance(kind, ArrayType):
        return _holds_variant(kind.elementType)
    if isinstance(kind, MapType):
        return _holds_variant(kind.keyType) or _holds_variant(kind.valueType)
    return kind.typeName() == "variant"


class _Text(NamedTuple):
    """Values as JSON, without the text before and after each of them; null if the value is null."""

    inner: pa.Array
    before: str = ""
    after: str = ""


def _object(fields: list[tuple[str, pa.Array]], length: int) -> pa.Array:
    """Return JSON objects, which are never null."""
    # Fields before one that is never null end with a comma. Fields after it begin with a comma.
    certain = next((i for i, (_, values) in enumerate(fields) if not values.null_count), None)
    parts: list[pa.Array | pa.Scalar] = []
    for index, (name, values) in enumerate(fields):
        key = f'"{name.translate(_ESCAPES)}":'
        text = _text(values)
        first = "," if certain is None or index > certain else ""
        last = "," if certain is not None and index < certain else ""
        if values.null_count:
            parts.append(pc.fill_null(_around(first + key, text, last), _scalar("")))
        else:
            parts += [_scalar(first + key + text.before), text.inner, _scalar(text.after + last)]
    if not fields:
        return pa.repeat(_scalar("{}"), length)
    if certain is not None:
        return _joined(_scalar("{"), *parts, _scalar("}"))
    inside = pc.binary_replace_slice(_joined(*parts), 0, 1, "")
    return _joined(_scalar("{"), inside, _scalar("}"))


def _text(values: pa.Array) -> _Text:
    kind = values.type
    if pa.types.is_dictionary(kind):
        return _text(values.dictionary_decode())
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return _Text(_escape(values.cast(_TEXT)), '"', '"')
    is_plain = (pa.types.is_boolean, pa.types.is_integer, pa.types.is_decimal, pa.types.is_null)
    if any(is_of(kind) for is_of in is_plain):
        return _Text(values.cast(_TEXT))
    if pa.types.is_floating(kind):
        return _Text(_floats(values))
    if pa.types.is_timestamp(kind):
        zone = "Z" if kind.tz is not None else ""
        naive = values.cast(pa.timestamp(kind.unit)).cast(_TEXT)
        return _Text(_with_t(naive), '"', zone + '"')
    if pa.types.is_date(kind) or pa.types.is_time(kind):
        return _Text(values.cast(_TEXT), '"', '"')
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return _Text(_base64(values), '"', '"')
    if pa.types.is_struct(kind):
        fields = [(kind.field(i).name, each) for i, each in enumerate(values.flatten())]
        return _Text(_like(values, _object(fields, len(values))))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return _Text(_lists(values, _around("", _text(values.flatten()), "")), "[", "]")
    if pa.types.is_map(kind):
        return _Text(_maps(values), "{", "}")
    raise InvalidInput(f"type {kind} has no form in JSON: cast it, for example to STRING")


def _escape(values: pa.Array) -> pa.Array:
    """Return the contents of JSON strings.

    Most columns have nothing to escape, and are returned unchanged.
    """
    size = int(pc.sum(pc.binary_length(values)).as_py() or 0)
    if not size:
        return values
    offsets = np.frombuffer(values.buffers()[1], np.int64)
    begin = offsets[values.offset]
    data = np.frombuffer(values.buffers()[2], np.uint8)[
        begin : offsets[values.offset + len(values)]
    ]
    if (data > 127).any():
        values = _utf8(values)
    if not ((data < 32).any() or (data == 34).any() or (data == 92).any()):
        return values
    there = np.bincount(data, minlength=128)
    # The backslash comes first: the other escapes contain backslashes.
    for code, escape in _ESCAPES.items():
        if there[code]:
            values = pc.replace_substring(values, chr(code), escape)
    return values


def _utf8(values: pa.Array) -> pa.Array:
    """Replace bytes that are not UTF-8 by U+FFFD; Spark's strings may contain such bytes."""
    raw = values.cast(pa.large_binary())
    try:
        raw.cast(_TEXT)
        return values
    except pa.ArrowInvalid:
        texts = (each and each.decode("utf-8", "replace") for each in raw.to_pylist())
        return pa.array(texts, _TEXT)


def _floats(values: pa.Array) -> pa.Array:
    text = values.cast(_TEXT)
    fraction = pc.or_(pc.match_substring(text, "."), pc.match_substring(text, "e"))
    if pc.all(fraction).as_py() is False:
        text = pc.if_else(fraction, text, _joined(text, _scalar(".0")))
    finite = pc.is_finite(values)
    if pc.all(finite, min_count=0).as_py() is not False:
        return text
    infinite = pc.if_else(pc.greater(values, 0), _scalar('"Infinity"'), _scalar('"-Infinity"'))
    return pc.if_else(finite, text, pc.if_else(pc.is_nan(values), _scalar('"NaN"'), infinite))


def _with_t(text: pa.Array) -> pa.Array:
    """Put a T between date and time of day."""
    if pc.all(pc.equal(pc.binary_length(text), len("2024-01-02 03:04:05.000000"))).as_py():
        return pc.binary_replace_slice(text, 10, 11, "T")
    return pc.replace_substring(text, " ", "T", max_replacements=1)


def _base64(values: pa.Array) -> pa.Array:
    texts = (each and base64.b64encode(each).decode("ascii") for each in values.to_pylist())
    return pa.array(texts, _TEXT)


def _lists(values: pa.Array, elements: pa.Array) -> pa.Array:
    """Return the elements of each list, joined by commas."""
    lengths = pc.fill_null(pc.list_value_length(values), 0).cast(pa.int64())
    ends = np.cumsum(lengths.to_numpy(zero_copy_only=False), dtype=np.int64)
    offsets = pa.array(np.concatenate([np.zeros(1, np.int64), ends]))
    filled = pc.fill_null(elements, _scalar("null"))
    lists = pa.LargeListArray.from_arrays(offsets, filled)
    return _like(values, pc.binary_join(lists, _scalar(",")))


def _maps(values: pa.Array) -> pa.Array:
    entries = pa.StructArray.from_arrays([values.keys, values.items], names=["key", "value"])
    lists = pa.ListArray.from_buffers(
        pa.list_(entries.type),
        len(values),
        values.buffers()[:2],
        offset=values.offset,
        children=[entries],
    )
    flat = lists.flatten()
    keys, items = flat.field("key"), flat.field("value")
    names = _around('"', _Text(_names(keys)), '":')
    written = pc.fill_null(_around("", _text(items), ""), _scalar("null"))
    return _lists(lists, _joined(names, written))


def _names(keys: pa.Array) -> pa.Array:
    """Return the contents of JSON names made from keys: JSON only has strings as names."""
    text = _text(keys)
    if pa.types.is_nested(keys.type):  # The key's JSON, as a string.
        return _escape(_around("", text, ""))
    inner = text.inner
    if pa.types.is_floating(keys.type):  # Numbers that JSON does not have are quoted already.
        inner = pc.replace_substring(inner, '"', "")
    return _around(text.before.removeprefix('"'), _Text(inner), text.after.removesuffix('"'))


def _around(before: str, text: _Text, after: str) -> pa.Array:
    before, after = before + text.before, text.after + after
    if not before and not after:
        return text.inner
    return _joined(_scalar(before), text.inner, _scalar(after))


def _joined(*parts: pa.Array | pa.Scalar) -> pa.Array:
    return pc.binary_join_element_wise(*parts, _scalar(""))


def _like(values: pa.Array, text: pa.Array) -> pa.Array:
    """Return the text with null where the value is null."""
    if not values.null_count:
        return text
    return pc.if_else(values.is_valid(), text, pa.scalar(None, _TEXT))


def _scalar(text: str) -> pa.Scalar:
    return pa.scalar(text, _TEXT)
