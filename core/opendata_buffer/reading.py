"""Read a queue, a topic, or a log as Arrow record batches, without consuming it.

:func:`read` claims and writes nothing, so the consumer of the queue does not notice it. It reads
the manifests once, and then the batches that were queued at that moment::

    read()                  finds the range of each queue, and returns the reader
    read_next_batch()       the bytes of some batches, fetched ahead
                            pieces of these batches
                            one record batch of several pieces

Batches are fetched in groups, and one group is fetched ahead in the background. A group ends by
itself, so a reader that is not read to its end leaves no thread waiting. Arrow does not tell a
reader's source that the reader was closed. Batches of local files are not fetched ahead, because
reading them hardly waits.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import chain, islice
from os import PathLike
from typing import Any

import pyarrow as pa

from opendata_buffer.admin.readers import reader_of, view_of
from opendata_buffer.admin.target import Target
from opendata_buffer.arguments import checked
from opendata_buffer.config import ConsumerConfig, QueueConfig, StoreOptions, check_reader_name
from opendata_buffer.consumer.batches import OWN, check_batch_columns
from opendata_buffer.consumer.fetch import (
    AdaptiveConcurrency,
    FetchHandle,
    PooledBatch,
    fetch_many,
    or_poison,
)
from opendata_buffer.consumer.isolation import ReadCommitted, Repeats
from opendata_buffer.consumer.opening import warn_data_loss
from opendata_buffer.consumer.place import EARLIEST, LATEST, Place, PlaceLike
from opendata_buffer.consumer.read_only import committed_entries
from opendata_buffer.consumer.rows import COLUMN_TYPES, Piece, RowBuilder, default_columns
from opendata_buffer.errors import (
    BatchMissing,
    DataLoss,
    InvalidInput,
    OpenDataBufferError,
    PoisonBatch,
)
from opendata_buffer.familiar_names import SETTINGS
from opendata_buffer.formats import MIB
from opendata_buffer.formats.manifest import BatchDescriptor, Manifest
from opendata_buffer.hints import Action, Hint
from opendata_buffer.queue.hints import removed_before
from opendata_buffer.queue.log_view import LogView
from opendata_buffer.queue.marker import held_batches, skipped_ranges
from opendata_buffer.queue.not_found import no_such_queue
from opendata_buffer.runtime import Runtime, SystemRuntime, Task, in_parallel
from opendata_buffer.stores.base import Store
from opendata_buffer.stores.open import open_store
from opendata_buffer.topic.places import TopicPlaces
from opendata_buffer.topic.topic import Topic
from opendata_buffer.values import ValueOptions

log = logging.getLogger(__name__)

FETCHED_BYTES = 32 * MIB
"""Stored bytes of a group of batches that is fetched at once. Two groups are in memory."""
FETCHED_BATCHES = 256
"""Most batches of a group."""

ROWS_BYTES = 4 * MIB
"""Bytes of records in one record batch, unless a single record has more."""
TYPED_ROWS_BYTES = 8 * MIB
"""The same for records that are read into columns. Arrow's threads share the work of one record
batch, so a larger one keeps more of them busy."""
MOST_ROWS = 256 * 1024
"""Most rows of a record batch."""


@checked
def read(
    url: QueueConfig | str | PathLike[str],
    schema: pa.Schema | None = None,
    *,
    start: PlaceLike | Mapping[str | int, PlaceLike] | None = None,
    end: PlaceLike | Mapping[str | int, PlaceLike] | None = None,
    reader: str | None = None,
    columns: Sequence[str] | None = None,
    options: ValueOptions | None = None,
    allow_data_loss: bool = False,
    store_options: StoreOptions | None = None,
    data_path_prefix: str | None = None,
    manifest_path: str | None = None,
    **unknown: Any,
) -> pa.RecordBatchReader:
    """Read the committed records of a queue, a topic, or a log, without consuming them.

    ::

        table = read("s3://bucket/orders").read_all()
        recent = read("s3://bucket/orders", start=datetime.now(UTC) - timedelta(hours=3))
        duckdb.sql("SELECT count(*) FROM recent")

    It claims and writes nothing, so a running consumer is not disturbed. It reads the batches that
    are queued when it is called, or that a log keeps then. Batches of a partition come in order.
    Some tens of megabytes are in memory at a time.

    Without a schema, the columns are ``value``, ``metadata``, ``sequence``, ``index`` (the number
    of the record in its batch) and ``ingestion_time``, and for a topic ``partition``.

    Args:
        url: The URL of the queue or topic, or a :class:`.QueueConfig`.
        schema: The names and types of the fields to read from JSON or CSV records. It may also name
            the columns ``_sequence``, ``_index``, ``_location``, ``_ingestion_time``, ``_metadata``
            and ``_partition``, and one for the text of malformed records.
        start: Where to begin: ``"earliest"`` (default), ``"latest"``, a sequence, a ``datetime``
            with a time zone, or a :class:`.Position`, after which reading begins. For a topic it
            may be a dict of these by the name or number of the partition.
        end: Where to end, in the same forms. The batch with this sequence, or with the first record
            of this time, is not read. Default: the end of the queue at the time of the call.
        reader: Begin where this reader of a log would continue. Its position does not move.
        columns: Which columns to return, in this order. Without a schema it may also name
            ``location``, ``partition``, ``otel_signal`` and ``otel_encoding``.
        options: How to read records into columns; JSON by default. Requires a schema.
        allow_data_loss: Skip lost entries and missing batches with a warning, instead of raising.
            Default false.
        store_options: How to reach a cloud.
        data_path_prefix: Prefix of the queue's batches. Default ``ingest``.
        manifest_path: Key of the queue's manifest. Default ``<data_path_prefix>/manifest``.
        **unknown: Refused.

    Returns:
        The rows. ``read_all()`` makes a table of them, ``read_pandas()`` (there is no
        ``to_pandas()``) a DataFrame of pandas, and a loop gets one record batch at a time. These
        may raise ``PoisonBatch`` for a batch that cannot be delivered, ``MalformedRecord`` in the
        mode FAILFAST, ``DataLoss``, and ``StorageError``.

    Raises:
        InvalidInput: The queue, the reader or a column does not exist, or an argument cannot be
            used.
        DataLoss: The queue begins after ``start``.
        QueueReset: A position belongs to another queue, or the manifest is missing.
        StorageError: The store did not answer.
    """
    given: dict[str, Any] = {
        "store_options": store_options,
        "data_path_prefix": data_path_prefix,
        "manifest_path": manifest_path,
    }
    settings = {name: value for name, value in given.items() if value is not None}
    if unknown:
        raise _no_argument(next(iter(unknown)), given)
    config = QueueConfig.of(url, settings)
    request = Request(start, end, reader, allow_data_loss)
    request.check()
    _check_columns(schema, columns, options)
    runtime = SystemRuntime()
    store = open_store(config.store, config.store_options)
    return read_from(store, config, runtime, request, schema, columns, options)


def _no_argument(name: str, settings: Iterable[str]) -> InvalidInput:
    """Return the error about an argument of :func:`read` that does not exist."""
    if name in ("limit", "max_records", "n", "head", "max_messages"):
        fix = "leave it out, and stop reading: 'for batch in read(url)' reads piece by piece"
    elif (advice := SETTINGS.get(name)) is not None and not advice.isidentifier():
        fix = advice
    else:
        names = ["start", "end", "reader", "columns", "options", "allow_data_loss", *settings]
        fix = f"use {', '.join(names)}"
    return InvalidInput(f"read() has no argument {name!r}: {fix}")


@dataclass(frozen=True)
class Request:
    """Which batches to read; the arguments of :func:`read` with the same names."""

    start: PlaceLike | Mapping[str | int, PlaceLike] | None = None
    end: PlaceLike | Mapping[str | int, PlaceLike] | None = None
    reader: str | None = None
    allow_data_loss: bool = False

    def check(self) -> None:
        """Check everything that can be checked without the queue.

        Raises:
            InvalidInput: A value is not a place, or two values contradict each other.
        """
        for name, given in (("start", self.start), ("end", self.end)):
            for place in given.values() if isinstance(given, Mapping) else [given]:
                if place is not None:
                    Place.of(place, name)
        if self.reader is not None:
            check_reader_name(self.reader)
            if self.start is not None:
                raise InvalidInput(
                    f"start is {self.start!r} and reader is {self.reader!r}, and both say where to "
                    "begin: leave one out"
                )


def read_from(
    store: Store,
    config: QueueConfig,
    runtime: Runtime,
    request: Request,
    schema: pa.Schema | None = None,
    columns: Sequence[str] | None = None,
    options: ValueOptions | None = None,
) -> pa.RecordBatchReader:
    """Read as :func:`read` does, from an opened store.

    Args:
        store: The opened store.
        config: The queue.
        runtime: Clock and threads.
        request: Which batches to read.
        schema: The fields to read from records.
        columns: Which columns to return.
        options: How to read records into columns.

    Returns:
        The rows.

    Raises:
        InvalidInput: As :func:`read`.
        DataLoss: As :func:`read`.
        QueueReset: As :func:`read`.
    """
    config = _consumer_config(config)
    target = Target(store, config, runtime)
    if config.manifest_path == QueueConfig(store=config.store).manifest_path:
        target = Target(store, config, runtime, Topic.find(config, store=store, runtime=runtime))
    builder = _builder(target, schema, columns, options)
    ranges = _ranges(target, request)
    handle = FetchHandle.of(config, store=store)
    is_topic = target.topic is not None
    fetches = _Fetches(
        _entries(ranges, request.allow_data_loss),
        {each.partition: handle._within(each.partition) if is_topic else handle for each in ranges},
        config,
        runtime,
        handle.adaptive_concurrency(),
    )
    limit = ROWS_BYTES if schema is None else TYPED_ROWS_BYTES
    rows = _rows(fetches, builder, limit, allow_data_loss=request.allow_data_loss)
    if columns is None:
        return pa.RecordBatchReader.from_batches(builder.schema, rows)
    chosen = pa.schema([builder.schema.field(name) for name in columns])
    return pa.RecordBatchReader.from_batches(chosen, (batch.select(columns) for batch in rows))


# ---- columns


def _check_columns(
    schema: pa.Schema | None, columns: Sequence[str] | None, options: ValueOptions | None
) -> None:
    if schema is None and options is not None:
        raise InvalidInput(
            "options say how to read records into columns: give a schema, too, such as "
            "pa.schema([('id', pa.int64())])"
        )
    if schema is not None:
        check_batch_columns(schema)
    if columns is None:
        return
    if not columns:
        raise InvalidInput("columns is empty: name at least one, or leave it out")
    known = [*COLUMN_TYPES] if schema is None else schema.names
    for name in columns:
        if name not in known:
            near = difflib.get_close_matches(name.removeprefix("_"), known, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            where = "" if schema is None else ", which the schema does not have"
            raise InvalidInput(
                f"columns has {name!r}{where}.{hint} Columns: {', '.join(known)}. To read fields "
                "of records, name them in the schema."
            )
        if columns.count(name) > 1:
            raise InvalidInput(f"columns has {name!r} twice")


def _builder(
    target: Target,
    schema: pa.Schema | None,
    columns: Sequence[str] | None,
    options: ValueOptions | None,
) -> RowBuilder:
    if schema is None:
        names = columns or default_columns(partition=target.topic is not None)
        wanted = pa.schema([(name, COLUMN_TYPES[name]) for name in names])
        return RowBuilder(wanted, {name: name for name in names})
    own = {name: OWN[name] for name in schema.names if name in OWN}
    return RowBuilder(schema, own, options or ValueOptions(), threads=True)


# ---- which batches


@dataclass(frozen=True)
class _Range:
    """The batches to read from one queue."""

    queue: Target
    partition: str
    view: Manifest | LogView
    begin: int
    until: int


def _consumer_config(config: QueueConfig) -> ConsumerConfig:
    return ConsumerConfig(
        store=config.store,
        data_path_prefix=config.data_path_prefix,
        manifest_path=config.manifest_path,
        store_options=config.store_options,
    )


def _ranges(target: Target, request: Request) -> list[_Range]:
    """Read all manifests, and find the range to read in each of them."""
    begin, until = request.start or EARLIEST, LATEST if request.end is None else request.end
    if request.start == 0:
        begin = 0
    if target.topic is None:
        places = Place.of(_for_queue("start", begin)), Place.of(_for_queue("end", until), "end")
        return [_range(target, "", *places, request, must_exist=True)]
    names = target.topic.description.names_for(request.reader or "")
    starts, ends = TopicPlaces(begin, names, "start"), TopicPlaces(until, names, "end")

    def range_of(name: str) -> _Range:
        start, end = starts.at(name) or Place(EARLIEST), ends.at(name) or Place(LATEST)
        return _range(target.queue(name), name, start, end, request, must_exist=False)

    return in_parallel(target.runtime, range_of, names)


def _for_queue(name: str, given: Any) -> Any:
    if isinstance(given, Mapping):
        raise InvalidInput(
            f"{name} is a dict of partitions, and this is a queue and not a topic. Give one place, "
            f"such as {name}=42"
        )
    return given


def _range(
    queue: Target, partition: str, start: Place, end: Place, request: Request, *, must_exist: bool
) -> _Range:
    config, store, runtime = queue.config, queue.store, queue.runtime
    source = queue.reader()
    if (manifest := source.find()) is None:
        if must_exist:
            raise no_such_queue(store, config)
        return _Range(queue, partition, Manifest.empty(), 0, 0)
    view: Manifest | LogView
    if request.reader is not None:
        view = log_ = view_of(queue)
        begin = reader_of(queue, log_, request.reader).next_sequence
        # The log may have deleted batches that an expired reader did not read.
        begin = min(max(begin, view.first_sequence), view.next_sequence)
    else:
        view = source.view(manifest=manifest)
        begin = _sequence(queue, view, start, request)
    until = view.next_sequence if end.is_latest else _end(queue, view, end)
    if request.start == EARLIEST and isinstance(view, Manifest) and view.first_sequence:
        count = held_batches(view.first_sequence, skipped_ranges(store, config, runtime))
        log.warning("%s", removed_before(count, store.url, config, "this read"))
    return _Range(queue, partition, view, begin, until)


def _sequence(queue: Target, view: Manifest | LogView, place: Place, request: Request) -> int:
    """Return the sequence of a start, or report that the batches from there on are gone."""
    first = view.first_sequence
    if (wanted := place.named_sequence) is None or wanted >= first:
        return _resolved(queue, view, place)
    key = queue.config.manifest_path
    if not request.allow_data_loss:
        raise DataLoss(key, wanted, first, Hint(Action.ACCEPT_LOSS, queue.name))
    warn_data_loss(key, wanted, first)
    return first


def _end(queue: Target, view: Manifest | LogView, place: Place) -> int:
    # Nothing is lost if all batches before the end are gone: it is the start that asks for them.
    wanted, first = place.named_sequence, view.first_sequence
    return first if wanted is not None and wanted < first else _resolved(queue, view, place)


def _resolved(queue: Target, view: Manifest | LogView, place: Place) -> int:
    claim = queue.owner() if place.position is not None else None
    queue_id = "" if claim is None else claim.queue_id
    return place.sequence_in(view, queue.config, queue.store.url, queue_id)


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A batch to fetch."""

    partition: str
    entry: BatchDescriptor

    @property
    def size(self) -> int | None:
        return self.entry.size


def _entries(ranges: Sequence[_Range], allow_data_loss: bool) -> Iterator[_Wanted]:
    """Yield the batches to deliver, partition by partition."""
    for part in ranges:
        queue = part.queue
        key = queue.config.manifest_path

        def lost(at: int, oldest: int, key: str = key) -> None:
            if not allow_data_loss:
                cause = "Another client took them off the manifest."
                raise DataLoss(key, at, oldest, cause, Hint(Action.ACCEPT_LOSS))
            warn_data_loss(key, at, oldest)

        if part.begin >= part.until:
            continue
        repeats = Repeats(queue.store, queue.config, queue.runtime, "")
        repeats.load()
        rule = ReadCommitted(queue.prefix)
        found = committed_entries(
            part.view, part.begin, part.until, rule=rule, repeats=repeats, lost=lost
        )
        for entry in found:
            yield _Wanted(part.partition, entry)


# ---- rows


class _Fetches:
    """Fetches batches in groups, in order. One group is fetched ahead of the caller."""

    def __init__(
        self,
        entries: Iterator[_Wanted],
        handles: Mapping[str, FetchHandle],
        config: QueueConfig,
        runtime: Runtime,
        adaptive: AdaptiveConcurrency,
    ) -> None:
        self.handles = handles
        self._entries = entries
        self._retrying = config.retries(runtime)
        self._runtime = runtime
        self._adaptive = adaptive
        self._mean = 1.0
        """Mean size of a batch, in bytes."""

    def __iter__(self) -> Iterator[tuple[_Wanted, PooledBatch | PoisonBatch]]:
        if self._adaptive.near:
            for wanted in self._entries:
                yield wanted, or_poison(self._fetch)(wanted)
            return
        ahead = _Background(self._runtime, self._group)
        while group := ahead.result():
            ahead = _Background(self._runtime, self._group)
            yield from group

    def _fetch(self, wanted: _Wanted) -> PooledBatch:
        return self.handles[wanted.partition]._fetch_pooled(wanted.entry, self._retrying)

    def _group(self) -> list[tuple[_Wanted, PooledBatch | PoisonBatch]]:
        count = max(1, min(FETCHED_BATCHES, int(FETCHED_BYTES / self._mean)))
        wanted = [*islice(self._entries, count)]
        found: list[tuple[_Wanted, PooledBatch | PoisonBatch]] = []
        size = 0
        results = fetch_many(
            or_poison(self._fetch),
            wanted,
            max_in_flight_bytes=FETCHED_BYTES,
            runtime=self._runtime,
            adaptive=self._adaptive,
        )
        with closing(results):
            while size < FETCHED_BYTES and len(found) < len(wanted):
                batch = next(results)
                found.append((wanted[len(found)], batch))
                size += 0 if isinstance(batch, PoisonBatch) else batch.nbytes
        self._entries = chain(wanted[len(found) :], self._entries)
        self._mean = max(1.0, size / max(1, len(found)))
        return found


class _Background:
    """One call in a thread of its own."""

    def __init__(self, runtime: Runtime, call: Any) -> None:
        self._call = call
        self._value: Any = None
        self._error: BaseException | None = None
        self._task: Task | None = None
        try:
            self._task = runtime.spawn(self._run, "opendata-buffer-read")
        except RuntimeError:  # The process cannot start a thread.
            self._run()

    def _run(self) -> None:
        try:
            self._value = self._call()
        except BaseException as error:
            self._error = error

    def result(self) -> Any:
        """Wait for the call.

        Returns:
            Its result, or raises its error.
        """
        if self._task is not None:
            self._task.join()
        if self._error is not None:
            raise self._error
        return self._value


def _rows(
    fetches: _Fetches, builder: RowBuilder, limit: int, *, allow_data_loss: bool
) -> Iterator[pa.RecordBatch]:
    """Yield record batches of about ``limit`` bytes of records."""
    pieces: list[Piece] = []
    size = rows = 0
    try:
        for wanted, batch in fetches:
            for piece in _pieces(fetches, builder, wanted, batch, allow_data_loss):
                pieces.append(piece)
                size += piece.values.nbytes
                rows += len(piece.values)
                if size >= limit or rows >= MOST_ROWS:
                    full, pieces, size, rows = pieces, [], 0, 0
                    yield from _built(builder, full)
            del batch
    except OpenDataBufferError:
        # Deliver the rows before the error first.
        yield from _built(builder, pieces)
        raise
    yield from _built(builder, pieces)


def _pieces(
    fetches: _Fetches,
    builder: RowBuilder,
    wanted: _Wanted,
    batch: PooledBatch | PoisonBatch,
    allow_data_loss: bool,
) -> Iterator[Piece]:
    if isinstance(batch, BatchMissing) and allow_data_loss:
        log.warning("data loss allowed: %s", batch)
        return
    if isinstance(batch, PoisonBatch):
        raise batch
    records = fetches.handles[wanted.partition]._records(batch, builder.piece_bytes)
    yield from builder.cut(records, wanted.partition)


def _built(builder: RowBuilder, pieces: list[Piece]) -> Iterator[pa.RecordBatch]:
    if pieces:
        yield builder.build(pieces)
