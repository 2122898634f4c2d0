"""``consume``: write the records of a queue or a topic to stdout."""

from __future__ import annotations

import json
import logging
import os
import stat
import sys
from base64 import b64encode
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any, BinaryIO, NamedTuple

import click
import pyarrow.compute as pc

from opendata_buffer.admin.queue_status import running_consumer
from opendata_buffer.admin.readers import reader_of, view_of
from opendata_buffer.admin.target import Target
from opendata_buffer.assembly.consumer import Consumer
from opendata_buffer.assembly.topic_consumer import TopicConsumer
from opendata_buffer.cli import options
from opendata_buffer.cli.errors import Failure, print_summary
from opendata_buffer.cli.options import LONG_MS, SOON_MS, command
from opendata_buffer.cli.target import check_start, target_of
from opendata_buffer.cli.text import confirm, format_time
from opendata_buffer.config import DEFAULT_DATA_PATH_PREFIX, PARTITION_NAME, ConsumerConfig
from opendata_buffer.consumer.batches import ArrowBatch
from opendata_buffer.consumer.fetch import FetchHandle, fetch_many
from opendata_buffer.consumer.isolation import ReadCommitted
from opendata_buffer.consumer.pace import PollPace
from opendata_buffer.consumer.place import EARLIEST, Place
from opendata_buffer.consumer.read_only import ReadOnlyReader
from opendata_buffer.errors import BatchMissing, InvalidInput, OpenDataBufferError, PoisonBatch
from opendata_buffer.formats.manifest import BatchDescriptor, Manifest
from opendata_buffer.framing import FRAMINGS, Framing
from opendata_buffer.internal_parts import internals
from opendata_buffer.queue.hints import removed_before
from opendata_buffer.queue.marker import held_batches, skipped_ranges
from opendata_buffer.queue.missing import look_for_missing
from opendata_buffer.runtime import Runtime, in_parallel
from opendata_buffer.topic.cached_topic import REFRESH_S, CachedTopic
from opendata_buffer.topic.consumer import Written
from opendata_buffer.topic.topic import Topic

log = logging.getLogger(__name__)

PROGRAM = "opendata-buffer consume"
AGAIN = "Run it again to read what is left."

GROUP_BATCHES = 100
"""Batches per acknowledgement. One manifest write acknowledges all of them (OpenData RFC 0001,
Consumer)."""

READ_AHEAD_BYTES = 64 * 1024 * 1024  # Stored batches held in memory while one is written out.
PARTITION_ENTRIES = 256  # Entries of a partition that are read from its manifest at once.
POLL_S = 0.5  # Fewest seconds between two reads of an empty queue, with ``--follow``.


@command(timeout_ms=LONG_MS)
@options.queue
@options.framing
@options.flag(
    "--json as_json",
    "Print each record as a line of JSON, with partition, sequence, index, time, location, "
    "metadata and value. Bytes that are not UTF-8 are in metadata_base64 and value_base64.",
)
@options.text(
    "--from from_",
    "WHERE",
    "Begin at 'earliest', 'latest', a sequence, or a time such as 2026-01-31T03:00:00Z, UTC "
    "without a zone. Default: earliest.",
)
@click.option("--max-batches", type=options.NATURAL, metavar="N", help="Stop after N batches.")
@options.flag("--follow", "Wait for more when the queue is empty.")
@options.flag(
    "--ack",
    "Become the consumer: claim the queue, acknowledge the batches that were "
    "written, and collect garbage.",
)
@click.option(
    "--reader",
    metavar="NAME",
    default="",
    show_default=False,
    help="Begin at the position of this reader of a log; with --ack, read as this reader.",
)
@options.create_if_missing
@options.yes
@click.pass_obj
def consume(
    runtime: Any,
    /,
    framing: str,
    as_json: bool,
    from_: str | None,
    max_batches: int | None,
    follow: bool,
    ack: bool,
    yes: bool,
    **queue: Any,
) -> None:
    """Write the records of the queue to stdout, by default one line each.

    Without --ack nothing changes in the queue, and its consumer is not disturbed. With --ack the
    command becomes the consumer: it fences the present one, and asks first if one seems to run.
    Batches leave the queue after their records are written, so after a crash some may be written
    again. The command ends when it has read everything. Its last line on stderr, also after Ctrl-C,
    is JSON: "records" and "batches" are numbers, "bytes" is the size of the records, and
    "last_sequence" is the sequence of the last batch written.

    For a topic it reads all partitions, each in its order, and only committed transactions. Then
    "last_sequences" has one sequence for each partition, and --json shows the partition.

    For a log it writes everything that the log keeps. With --reader it begins at the position of
    that reader. With --reader and --ack it is that reader, and a new name begins with the oldest
    batch that is kept.
    """
    options.refuse_together(**{"--json": as_json, "--framing": framing != "lines"})
    reader_name = queue["reader"]
    options.refuse_together(**{"--from": from_ is not None, "--reader": bool(reader_name)})
    if (yes or queue["create_if_missing"]) and not ack:
        raise click.UsageError("--yes and --create-if-missing are about --ack: give that, too")
    if ack and from_ is not None:
        raise click.UsageError(
            "--ack takes from the oldest batch on: leave out --from. The command 'trim' deletes "
            "what lies before a place"
        )
    start = Place.parse(EARLIEST if from_ is None else from_)
    target = target_of(runtime, queue, ConsumerConfig, topic_deadline_ms=SOON_MS)
    config, store, is_topic = target.config, target.store, target.topic is not None
    check_start(target, start, "--from")
    if ack:
        others = in_parallel(runtime, _running, target.queues())
        if names := [each for each in others if each]:
            confirm(f"{names[0]} seems to run. It will be fenced and deliver nothing more", yes)
    render = json_lines(config.data_path_prefix) if as_json else as_framing(FRAMINGS[framing])
    writer = RecordWriter(sys.stdout.buffer, render, topic=is_topic)
    is_new_partition = not is_topic and _is_new_partition(target)
    if is_new_partition and not (follow or config.create_if_missing):
        click.echo(writer.summary(), err=True)
        return
    with ExitStack() as stack:
        stack.enter_context(print_summary(writer.summary))
        if is_topic and not ack:
            source = BatchSource(ReadOnlyTopic(target, start).read)
        elif is_topic:
            consumer = TopicConsumer(
                config, **internals(store=store, runtime=runtime), program=PROGRAM
            )
            source = _topic_source(stack.enter_context(consumer))
        elif not ack:
            reader = target.reader(AGAIN)
            if not is_new_partition:
                reader.manifest()
            if from_ == EARLIEST:
                _warn_of_removed(target, reader)
            reader.seek(_begin_of(target, reader, start))
            source = _queue_source(reader, FetchHandle.of(config, store=store), runtime)
        else:
            owner = Consumer(config, **internals(store=store, runtime=runtime), program=PROGRAM)
            source = _queue_source(stack.enter_context(owner), owner.fetch_handle(), runtime)
        looked = _Follower(runtime, config.idle_poll_ms).looked if follow else None
        try:
            write_out(source, writer, max_batches=max_batches, looked=looked)
        except PoisonBatch as error:
            if ack or config.reader:
                raise
            raise _look_past(target, error) from error
    click.echo(writer.summary(), err=True)


def _is_new_partition(queue: Target) -> bool:
    """Return whether the queue is a partition of a topic that no producer has written yet.

    Then it has no manifest, and nothing is wrong.
    """
    if PARTITION_NAME.fullmatch(queue.prefix) is None or queue.reader().find() is not None:
        return False
    root = replace(queue.config, data_path_prefix=DEFAULT_DATA_PATH_PREFIX, manifest_path="")
    topic = Topic.find(root, store=queue.store, runtime=queue.runtime)
    return topic is not None and queue.prefix in topic.description.names


def _look_past(target: Target, error: PoisonBatch) -> PoisonBatch | Failure:
    """Return the error to show for a batch that cannot be delivered.

    A command that only looks at a log cannot skip a batch, so the error says how to look past it.
    For a queue, the error is returned unchanged.
    """
    queue = target.queue(error.partition) if error.partition else target
    if not queue.is_log():
        return error
    missing = None
    if isinstance(error, BatchMissing):
        with suppress(OpenDataBufferError):
            missing = look_for_missing(queue.store, queue.config, queue.runtime, error.sequence)
    reason, after = error.reason, error.sequence + 1
    if missing is not None:
        reason, after = f"{reason}: {missing}", missing.end
    partition = f" --partition {error.partition}" if error.partition else ""
    return Failure(
        f"batch {error.sequence} at {error.location!r} cannot be delivered: {reason}. Restore the "
        "object, or look at what follows with 'opendata-buffer consume "
        f"{options.queue_words()} --from {after}{partition}'"
    )


Render = Callable[[ArrowBatch], bytes | memoryview]
"""Converts a batch to the bytes to write."""


def as_framing(framing: Framing) -> Render:
    """Make a function that writes records with a framing.

    Args:
        framing: The framing.

    Returns:
        A function that returns the bytes of a batch. It raises ``InvalidInput`` for a record that
        the framing cannot write.
    """
    return lambda batch: framing.framed(batch.values, batch.sequence)


def json_lines(queue: str) -> Render:
    """Make the function that writes a JSON object per record and line, for ``produce --json``.

    Args:
        queue: The partition to show for each record. Batches of a topic show their own partition.

    Returns:
        A function that returns the lines of a batch.
    """

    def lines(batch: ArrowBatch) -> Iterator[str]:
        partition = batch.partition or queue
        for index, record in enumerate(batch.records()):
            time_ms = record.ingestion_time_ms
            at = None if time_ms is None else format_time(time_ms, "milliseconds")
            fields: dict[str, Any] = {
                "partition": partition,
                "sequence": batch.sequence,
                "index": index,
                "time": at and at.replace("+00:00", "Z"),
                "location": batch.location,
                **_text_or_base64("metadata", record.metadata),
                **_text_or_base64("value", record.value),
            }
            yield json.dumps(fields, ensure_ascii=False) + "\n"

    return lambda batch: "".join(lines(batch)).encode()


def _text_or_base64(name: str, data: bytes) -> dict[str, str]:
    """Return the field ``name`` with the text, or ``name_base64`` if the bytes are not UTF-8."""
    try:
        return {name: data.decode()}
    except UnicodeDecodeError:
        return {f"{name}_base64": b64encode(data).decode()}


class BatchSource(NamedTuple):
    """The source of batches for :func:`write_out`.

    Attributes:
        read: Returns the next batches, up to a number; nothing if no batch is available yet.
        acknowledge: Called with the batches that were written out, in the order of reading.
    """

    read: Callable[[int], Iterable[ArrowBatch]]
    acknowledge: Callable[[Sequence[Written]], None] = lambda written: None


class RecordWriter:
    """Writes the records of batches to a stream, and counts them.

    Args:
        stream: The stream to write to.
        render: Converts a batch to the bytes to write.
        topic: Whether the batches come from several partitions.

    Attributes:
        total: The counts. "bytes" is the size of the records themselves, in any format.
    """

    def __init__(self, stream: BinaryIO, render: Render, *, topic: bool = False) -> None:
        self._stream = stream
        self._render = render
        last: dict[str, Any] = {"last_sequences": {}} if topic else {"last_sequence": None}
        self.total = {"records": 0, "batches": 0, "bytes": 0, **last}

    def write(self, batch: ArrowBatch) -> None:
        """Write all records of a batch and flush the stream.

        Args:
            batch: The batch.

        Raises:
            InvalidInput: The framing cannot write one of the records. Nothing of the batch was
                written.
        """
        self._stream.write(self._render(batch))
        self._stream.flush()
        size = pc.sum(pc.binary_length(batch.values)).as_py() or 0
        total = self.total
        total["batches"] += 1
        total["records"] += len(batch.values)
        total["bytes"] += size
        if batch.partition:
            total["last_sequences"][batch.partition] = batch.sequence
        else:
            total["last_sequence"] = batch.sequence

    def summary(self) -> str:
        """Return the counts as a line of JSON."""
        return json.dumps(self.total)

    def persist(self) -> None:
        """Sync the stream to disk if it is a file; a pipe needs nothing."""
        try:
            fd = self._stream.fileno()
        except OSError:
            return
        if stat.S_ISREG(os.fstat(fd).st_mode):
            os.fsync(fd)


def write_out(
    source: BatchSource,
    writer: RecordWriter,
    *,
    max_batches: int | None = None,
    looked: Callable[[bool], None] | None = None,
) -> None:
    """Write records out, then acknowledge them, group by group.

    One manifest write acknowledges a group, after its last byte was written. After an error, the
    complete batches of the group are acknowledged, and the rest is delivered again. After a
    BrokenPipeError, nothing of the group is acknowledged, because it is unknown how much the reader
    of the stream received (failure F8).

    Args:
        source: The source of the batches.
        writer: Writes the records.
        max_batches: Stop after this many batches; None for no limit.
        looked: Called after each look at the source, with whether it had a batch. It may wait. None
            to return when there is no batch.
    """
    most = sys.maxsize if max_batches is None else max_batches
    while left := most - writer.total["batches"]:
        written: list[Written] = []
        try:
            for batch in source.read(min(GROUP_BATCHES, left)):
                writer.write(batch)
                written.append(Written(batch.partition, batch.sequence))
        except BrokenPipeError:
            written.clear()
            raise
        finally:
            if written:
                writer.persist()
                source.acknowledge(written)
        if looked is not None:
            looked(bool(written))
        elif not written:
            return


class _Follower:
    """Waits between two looks at an empty queue."""

    def __init__(self, runtime: Runtime, longest_ms: int) -> None:
        self._runtime = runtime
        self._pace = PollPace(longest_ms, first_s=POLL_S)
        self._began = runtime.monotonic()

    def looked(self, found: bool) -> None:
        self._pace.looked(found, self._began, self._runtime.monotonic())
        if self._pace.pause_s:
            self._runtime.sleep(self._pace.pause_s)
        self._began = self._runtime.monotonic()


def _queue_source(
    reader: Consumer | ReadOnlyReader, handle: FetchHandle, runtime: Runtime
) -> BatchSource:
    """Return one queue as a source. A read-only reader acknowledges nothing in the queue."""
    return BatchSource(
        lambda limit: _fetched(handle, reader.next_descriptors(limit), runtime),
        lambda written: reader.ack_through(written[-1].sequence),
    )


def _fetched(
    handle: FetchHandle, wanted: Sequence[BatchDescriptor], runtime: Runtime
) -> Iterator[ArrowBatch]:
    return fetch_many(
        handle.fetch_arrow, wanted, max_in_flight_bytes=READ_AHEAD_BYTES, runtime=runtime
    )


def _running(queue: Target) -> str:
    """Describe the consumer that ``--ack`` would fence; return "" if none seems to be running."""
    if not queue.config.reader:
        return running_consumer(queue)
    with suppress(InvalidInput):  # The queue or the name is new.
        found = reader_of(queue, view_of(queue), queue.config.reader)
        return f"reader {found.name!r} ({found.who})" if found.runs else ""
    return ""


def _warn_of_removed(queue: Target, reader: ReadOnlyReader) -> None:
    """Warn that the earliest batch of a queue is not the first one that was produced."""
    view = reader.view()
    if isinstance(view, Manifest) and view.first_sequence:
        url, config = queue.store.url, queue.config
        skipped = skipped_ranges(queue.store, config, queue.runtime)
        count = held_batches(view.first_sequence, skipped)
        log.warning("%s", removed_before(count, url, config, "this command"))


def _begin_of(queue: Target, reader: ReadOnlyReader, start: Place) -> int:
    """Return the sequence to begin at: a position in the queue, or that of a named reader."""
    view, name = reader.view(), queue.config.reader
    if not name:
        return start.sequence_in(view, queue.config, queue.store.url)
    return max(reader_of(queue, view_of(queue), name).next_sequence, view.first_sequence)


def _topic_source(consumer: TopicConsumer) -> BatchSource:
    def read(limit: int) -> Iterator[ArrowBatch]:
        count = 0
        while count < limit and (batch := consumer.next_arrow_batch()) is not None:
            count += 1
            yield batch
        if not count:
            consumer.flush()  # Nothing to read, so acknowledge now.

    def acknowledge(written: Sequence[Written]) -> None:
        for each in written:
            consumer.ack(each)

    return BatchSource(read, acknowledge)


class ReadOnlyPartition:
    """Reads the committed batches of one partition without consuming it."""

    def __init__(self, queue: Target, start: Place) -> None:
        self.ready: deque[BatchDescriptor] = deque()  # Committed, but not fetched yet.
        self._queue = queue
        self._reader = queue.reader(AGAIN)
        self._handle = FetchHandle.of(queue.config, store=queue.store)._within(queue.prefix)
        self._start = start
        self._filter = ReadCommitted(queue.prefix)
        self._begin: int | None = None

    def read(self) -> bool:
        """Put the next committed batches into :attr:`ready`.

        Returns:
            Whether batches were ready already, or new entries were read.
        """
        if self.ready:
            return True
        if self._begin is None:
            if self._reader.find() is None:
                self._start = Place(EARLIEST)  # All its batches will be newer than this.
                return False
            # Entries before the start also pass the filter: they may belong to a transaction that
            # an acknowledgement after the start commits.
            self._begin = _begin_of(self._queue, self._reader, self._start)
        found = self._reader.next_entries(PARTITION_ENTRIES)
        for each in found:
            if each.repeats is not None:
                continue
            for sequence in self._filter.offer(each.sequence, each.location, self._replay):
                if sequence >= self._begin:
                    self.ready += self._reader.entries(sequence, sequence + 1)
        return bool(found)

    def _replay(self, begin: int, stop: int) -> list[tuple[int, str]]:
        return [(each.sequence, each.location) for each in self._reader.entries(begin, stop)]

    def fetch(self, wanted: Sequence[BatchDescriptor]) -> Iterator[ArrowBatch]:
        """Fetch batches that were ready."""
        return _fetched(self._handle, wanted, self._queue.runtime)


class ReadOnlyTopic:
    """Reads a topic without consuming it, partition by partition."""

    def __init__(self, target: Target, start: Place) -> None:
        assert target.topic is not None
        self._topic = CachedTopic(target.topic, target.runtime, REFRESH_S)
        self._target = target
        self._start = start
        self._partitions: dict[str, ReadOnlyPartition] = {}

    def read(self, limit: int) -> Iterator[ArrowBatch]:
        """Yield the next batches, up to ``limit``."""
        partitions = self._partitions
        # All batches of a partition that is added later were produced after the start.
        start = Place(EARLIEST) if partitions else self._start
        for name in self._topic.get().names:
            if name not in partitions:
                partitions[name] = ReadOnlyPartition(self._target.queue(name), start)
        # Entries of undecided transactions do not make a batch ready: continue reading.
        while any(in_parallel(self._target.runtime, ReadOnlyPartition.read, partitions.values())):
            if any(each.ready for each in partitions.values()):
                break
        for name, partition in list(partitions.items()):
            wanted = [partition.ready.popleft() for _ in range(min(limit, len(partition.ready)))]
            if wanted:
                partitions[name] = partitions.pop(name)  # Last in the next read.
                limit -= len(wanted)
                yield from partition.fetch(wanted)
