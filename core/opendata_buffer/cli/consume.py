"""``consume``: the records of a queue or a topic to stdout."""

from __future__ import annotations

import json
import os
import shlex
import stat
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any, BinaryIO, NamedTuple, Protocol

import click
import pyarrow.compute as pc

from opendata_buffer.admin.trim import EARLIEST, Start, Starts
from opendata_buffer.cli import record_format
from opendata_buffer.cli.errors import Failure
from opendata_buffer.cli.options import (
    NATURAL,
    POSITIVE,
    SOON_MS,
    allow_foreign_option,
    create_if_missing_option,
    framing_option,
    max_batch_bytes_option,
    patient_queue_options,
    queue_words,
    recreate_option,
    refuse_together,
)
from opendata_buffer.cli.output import plural
from opendata_buffer.cli.record_format import Render
from opendata_buffer.cli.signals import print_summary
from opendata_buffer.cli.target import Target, require_queue, soon, target_of
from opendata_buffer.cli.terminal import count_progress
from opendata_buffer.concurrency import together
from opendata_buffer.config import ConsumerConfig, GarbageCollectorConfig
from opendata_buffer.consumer.consumer import Consumer
from opendata_buffer.consumer.cursors import BatchDescriptor
from opendata_buffer.consumer.fetch import ArrowBatch, FetchHandle
from opendata_buffer.consumer.isolation import ReadCommitted
from opendata_buffer.consumer.read_ahead import fetch_many
from opendata_buffer.consumer.read_only import ReadOnlyReader
from opendata_buffer.errors import PoisonBatch
from opendata_buffer.formats.manifest import Manifest
from opendata_buffer.framing import FRAMINGS
from opendata_buffer.queue.ownership import check_owner
from opendata_buffer.runtime import Runtime
from opendata_buffer.topic.consumer import REFRESH_S, TopicArrowBatch, TopicConsumer, round_robin
from opendata_buffer.topic.topic import CachedTopic

__all__ = [
    "BatchSource",
    "QueueSource",
    "ReadOnlyPartition",
    "ReadOnlyTopic",
    "RecordWriter",
    "TopicSource",
    "Written",
    "consume",
    "write_out",
]

PROGRAM = "opendata-buffer consume"

GROUP_BATCHES = 100
"""Batches per acknowledgement: one manifest write for all (OpenData RFC 0001, Consumer)."""

READ_AHEAD_BYTES = 64 * 1024 * 1024
"""Stored batches that are held while one is written out."""

PARTITION_ENTRIES = 256
"""Entries of a partition that are read from its manifest at once."""

_GAP_ADVICE = "Start with --from earliest to look at what is left."


@click.command()
@patient_queue_options
@framing_option
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Print each record as a line of JSON, with partition, sequence, index, time, location, "
    "metadata and value; bytes that are no UTF-8 are in metadata_base64 and value_base64.",
)
@click.option(
    "--format",
    "template",
    metavar="FORMAT",
    help="Print each record as kcat does, such as '%o %s\\n': %s record, %S its length, %o "
    "sequence, %i index in its batch, %m metadata, %T time in milliseconds, %l location, %p "
    "partition, %R length as 4 bytes. Or 'table': JSON objects as rows with columns.",
)
@click.option(
    "--from",
    "from_",
    metavar="WHERE",
    help="Begin at 'earliest', 'latest', a sequence, or a time such as 2026-01-31T03:00:00Z, UTC "
    "without a zone; in a topic at sequences by partition such as '{\"0\": 42}'. Only --no-ack may "
    "begin behind the oldest batch. Default: earliest.",
)
@click.option("--max-batches", type=NATURAL, metavar="N", help="Stop after N batches.")
@click.option("--follow", is_flag=True, help="Wait for more when the queue is empty.")
@create_if_missing_option
@click.option("--no-ack", is_flag=True, help="Only read: claim nothing, acknowledge nothing.")
@click.option(
    "--last-acked-sequence",
    type=NATURAL,
    metavar="N",
    help="Start after this sequence, and acknowledge those up to it.",
)
@click.option("--gc/--no-gc", default=True, show_default=True, help="Collect garbage meanwhile.")
@click.option(
    "--poll-interval-ms",
    type=POSITIVE,
    default=500,
    show_default=True,
    help="With --follow: between two reads of an empty queue.",
)
@recreate_option
@max_batch_bytes_option
@allow_foreign_option
@click.pass_obj
def consume(
    runtime: Any,
    /,
    framing: str,
    as_json: bool,
    template: str | None,
    from_: str | None,
    max_batches: int | None,
    follow: bool,
    create_if_missing: bool,
    no_ack: bool,
    last_acked_sequence: int | None,
    gc: bool,
    poll_interval_ms: int,
    recreate: bool,
    max_batch_bytes: int,
    allow_foreign_locations: bool,
    **queue: Any,
) -> None:
    """Write the records of the queue to stdout, by default one line each.

    Claims the queue (another consumer is fenced) and acknowledges batches after their records are
    written: after a crash some may be written again. Ends when the queue is empty. With --no-ack
    nothing changes in the queue and its consumer is not disturbed. The last line on stderr, also
    after Ctrl-C, is JSON: "records" and "batches" are numbers, "bytes" is the size of the records,
    "last_sequence" that of the last batch written.

    Of a topic all partitions are read in turn, each in its order, and of transactions only those
    that are committed; "last_sequences" is by partition. --json and the %p of --format show the
    partition.
    """
    refuse_together(**{"--json": as_json, "--format": template, "--framing": framing != "lines"})
    refuse_together(**{"--from": from_, "--last-acked-sequence": last_acked_sequence is not None})
    starts = Starts.parse(EARLIEST if from_ is None else from_)
    target = target_of(
        runtime,
        queue,
        ConsumerConfig,
        topic_deadline_ms=SOON_MS,
        gc=GarbageCollectorConfig(enabled=gc),
        recreate=recreate,
        max_batch_bytes=max_batch_bytes,
        allow_foreign_locations=allow_foreign_locations,
    )
    is_topic = target.topic is not None
    prefix = target.config.data_path_prefix
    render = _render(framing, as_json, template, prefix)
    start_of = target.starts(starts, "--from")
    if is_topic and last_acked_sequence is not None:
        raise click.UsageError(
            f"--last-acked-sequence {last_acked_sequence}: {target.store.url} is a topic, and "
            "partitions count separately: name one with --partition"
        )
    can_check = is_topic or _check_exists(target, runtime, no_ack, create_if_missing)
    if can_check and from_ is not None:
        _check_starts(target, runtime, start_of, starts.text, no_ack)

    stdout = sys.stdout.buffer
    with ExitStack() as stack:
        # The progress ends first, so that it does not hide the summary.
        writer = RecordWriter(stdout, render=render, topic=is_topic)
        stack.enter_context(print_summary(writer.summary))
        writer.advance = stack.enter_context(count_progress("consuming", quiet=stdout.isatty()))
        source: BatchSource
        if is_topic and no_ack:
            source = _read_only_topic(target, runtime, start_of)
        elif is_topic:
            consumer = TopicConsumer(
                target.config, store=target.store, runtime=runtime, program=PROGRAM
            )
            source = TopicSource(stack.enter_context(consumer))
        elif no_ack:
            first = None if last_acked_sequence is None else last_acked_sequence + 1
            start = start_of(prefix) if first is None else first
            source = _read_only_queue(target, runtime, start)
        else:
            owner = Consumer(
                target.config,
                last_acked_sequence,
                store=target.store,
                runtime=runtime,
                program=PROGRAM,
            )
            source = QueueSource(stack.enter_context(owner), owner.fetch_handle(), runtime)
        wait = (lambda: runtime.sleep(poll_interval_ms / 1000)) if follow else None
        write_out(source, writer, max_batches=max_batches, wait=wait)
    click.echo(writer.summary(), err=True)


def _render(framing: str, as_json: bool, template: str | None, partition: str) -> Render:
    if as_json:
        return record_format.as_json(partition)
    if template == "table":
        return record_format.as_table()
    if template is not None:
        return record_format.by_format(template, partition)
    return record_format.by_framing(FRAMINGS[framing])


# ---- checks before anything is claimed


def _check_exists(target: Target, runtime: Runtime, no_ack: bool, create_if_missing: bool) -> bool:
    """Fail where a consumer would create a queue at a mistyped path.

    Returns:
        Whether the manifest can be read: False where --recreate starts the queue over.
    """
    config = soon(target.config)
    # The marker of a queue that lost its manifest shows that the queue existed.
    if config.recreate and not no_ack:
        claim = check_owner(target.store, config, runtime=runtime)
        if claim is not None:
            return False
    if no_ack or not create_if_missing:
        require_queue(target, runtime)
    return True


def _check_starts(
    target: Target, runtime: Runtime, start_of: Callable[[str], Start], text: str, no_ack: bool
) -> None:
    """Check that each queue has its start, and that a consumer begins at the oldest batch.

    The batches before a consumer's start would leave the queue unread.
    """
    before, last = 0, 0
    for config in target.configs():
        start = start_of(config.data_path_prefix)
        if start.is_earliest:
            continue
        reader = ReadOnlyReader(soon(config), store=target.store, runtime=runtime)
        found = reader.find() or Manifest.empty()
        sequence = start.sequence_in(found, config.manifest_path)
        before += sequence - found.first_sequence
        last = sequence - 1
    if before and not no_ack:
        until = "" if target.topic is not None else f", up to sequence {last}"
        raise Failure(
            f"--from {text} would drop {plural(before, 'batch')} unread{until}: look at what is "
            "behind with --no-ack, or drop them with 'opendata-buffer seek "
            f"{queue_words()} --to {shlex.quote(text)}', which keeps a copy"
        )


# ---- writing records out


class Written(NamedTuple):
    """A batch that was written out; its records need not be kept."""

    partition: str
    sequence: int


class BatchSource(Protocol):
    """Where :func:`write_out` takes batches from."""

    def read(self, limit: int) -> Iterable[ArrowBatch]:
        """The next batches, at most ``limit``; none when there are none yet."""
        ...

    def acknowledge(self, written: Sequence[Written]) -> None:
        """These were written out, in the order in which they were read."""
        ...


@dataclass
class Consumed:
    """What was written out; ``bytes`` is the size of the records, however they were written.

    Attributes:
        last_sequence: Of the last batch of a queue.
        last_sequences: Of a topic, by partition; None for a queue.
    """

    records: int = 0
    batches: int = 0
    bytes: int = 0
    last_sequence: int | None = None
    last_sequences: dict[str, int] | None = None

    def as_json(self) -> dict[str, Any]:
        """All fields that a queue, or a topic, has."""
        fields = asdict(self)
        del fields["last_sequence" if self.last_sequences is not None else "last_sequences"]
        return fields


class RecordWriter:
    """Writes the records of batches to a stream, and counts them.

    Args:
        stream: Where they go.
        advance: Called with the bytes and records of each batch.
        render: The bytes that are written for a batch; by default its records as lines.
        topic: Batches are those of a topic.
    """

    def __init__(
        self,
        stream: BinaryIO,
        advance: Callable[[int, int], None] = lambda size, records: None,
        render: Render | None = None,
        *,
        topic: bool = False,
    ) -> None:
        self._stream = stream
        self._render = record_format.by_framing(FRAMINGS["lines"]) if render is None else render
        self.advance = advance
        self.total = Consumed(last_sequences={} if topic else None)

    def write(self, batch: ArrowBatch) -> None:
        """Write all records of a batch and flush the stream.

        Raises:
            InvalidInput: The framing cannot write one of them; nothing of the batch is written.
            BrokenPipeError: The reader of the stream closed it.
            OSError: They were not all written.
        """
        self._stream.write(self._render(batch))
        self._stream.flush()
        size = pc.sum(pc.binary_length(batch.values)).as_py() or 0
        total = self.total
        total.batches += 1
        total.records += len(batch.values)
        total.bytes += size
        total.last_sequence = batch.sequence
        if total.last_sequences is not None and isinstance(batch, TopicArrowBatch):
            total.last_sequences[batch.partition] = batch.sequence
        self.advance(size, len(batch.values))

    def summary(self) -> str:
        """What was written out, as a line of JSON."""
        return json.dumps(self.total.as_json())

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
    wait: Callable[[], None] | None = None,
) -> None:
    """Write records out, then acknowledge them, group by group.

    A group is acknowledged in one manifest write after its last byte was written. After an error
    its complete batches are acknowledged, and the rest is delivered again. After BrokenPipeError
    nothing of the group is acknowledged: how much the reader of the stream got is unknown (failure
    F8).

    Args:
        source: Where batches come from.
        writer: Where their records go; it counts them.
        max_batches: Stop after so many; None for no limit.
        wait: Called when the source has no batch; None ends then.
    """
    while max_batches is None or writer.total.batches < max_batches:
        left = GROUP_BATCHES if max_batches is None else max_batches - writer.total.batches
        if _write_group(source, writer, min(GROUP_BATCHES, left)):
            continue
        if wait is None:
            return
        wait()


def _write_group(source: BatchSource, writer: RecordWriter, limit: int) -> int:
    """Write out and acknowledge some batches; returns how many."""
    written: list[Written] = []
    try:
        for batch in source.read(limit):
            writer.write(batch)
            partition = batch.partition if isinstance(batch, TopicArrowBatch) else ""
            written.append(Written(partition, batch.sequence))
    except BrokenPipeError:
        written.clear()
        raise
    finally:
        if written:
            writer.persist()
            source.acknowledge(written)
    return len(written)


# ---- where batches come from


class QueueSource:
    """One queue, by its consumer or by a read-only reader.

    Args:
        reader: Hands out descriptors. A read-only reader acknowledges nothing in the queue.
        handle: Fetches batches.
        runtime: Threads of the read-ahead.
    """

    def __init__(
        self, reader: Consumer | ReadOnlyReader, handle: FetchHandle, runtime: Runtime
    ) -> None:
        self._reader = reader
        self._handle = handle
        self._runtime = runtime

    def read(self, limit: int) -> Iterable[ArrowBatch]:
        """The next batches; raises as the reader's ``next_descriptors``."""
        return fetch_many(
            self._handle.fetch_arrow,
            self._reader.next_descriptors(limit),
            max_in_flight_bytes=READ_AHEAD_BYTES,
            runtime=self._runtime,
        )

    def acknowledge(self, written: Sequence[Written]) -> None:
        """Raises as the reader's ``ack_through``."""
        self._reader.ack_through(written[-1].sequence)


def _read_only_queue(target: Target, runtime: Runtime, start: Start | int) -> QueueSource:
    reader = ReadOnlyReader(target.config, store=target.store, runtime=runtime, advice=_GAP_ADVICE)
    if isinstance(start, Start):
        start = start.sequence_in(reader.manifest(), target.config.manifest_path)
    reader.seek(start)
    return QueueSource(reader, FetchHandle.of(target.config, store=target.store), runtime)


class TopicSource:
    """A topic, by its consumer."""

    def __init__(self, consumer: TopicConsumer) -> None:
        self._consumer = consumer

    def read(self, limit: int) -> Iterator[ArrowBatch]:
        """The next batches, partition by partition; raises as ``TopicConsumer.next_batch``."""
        count = 0
        while count < limit and (batch := self._consumer.next_arrow_batch()) is not None:
            count += 1
            yield batch
        if not count:
            # Nothing to read: acknowledgements need not wait for more.
            self._consumer.flush()

    def acknowledge(self, written: Sequence[Written]) -> None:
        """Raises as ``TopicConsumer.ack``."""
        for each in written:
            self._consumer.ack(each)


class ReadOnlyPartition:
    """The committed batches of one partition, without consuming it.

    Args:
        reader: Of the partition.
        handle: Fetches its batches.
        start: Where to begin.
    """

    def __init__(self, reader: ReadOnlyReader, handle: FetchHandle, start: Start) -> None:
        self.name = reader.config.data_path_prefix
        self.ready: deque[BatchDescriptor] = deque()
        self.pace = handle.adaptive_concurrency()
        self._reader = reader
        self._handle = handle
        self._start = start
        self._filter = ReadCommitted(self.name)
        self._begin: int | None = None

    def read(self) -> bool:
        """Put the next committed batches into :attr:`ready`; whether there were new entries.

        Raises:
            DataLoss: The topic's consumer took entries that were not read here.
            InvalidInput: The partition does not have the sequence to begin with.
        """
        if self.ready:
            return True
        if self._begin is None:
            manifest = self._reader.find()
            if manifest is None:
                self._start = Start(EARLIEST)  # All that it will have is produced after this.
                return False
            # Entries before the start pass the filter, too: they may belong to a transaction that
            # an acknowledgement behind the start commits.
            self._begin = self._start.sequence_in(manifest, self._reader.config.manifest_path)
        found = self._reader.next_descriptors(PARTITION_ENTRIES)
        for each in found:
            for sequence in self._filter.offer(each.sequence, each.location, self._replay):
                if sequence >= self._begin:
                    self.ready += self._reader.entries(sequence, sequence + 1)
        return bool(found)

    def _replay(self, begin: int, stop: int) -> list[tuple[int, str]]:
        return [(each.sequence, each.location) for each in self._reader.entries(begin, stop)]

    def fetch(self, descriptor: BatchDescriptor) -> TopicArrowBatch:
        """Fetch one batch; from any thread. Errors name the partition."""
        try:
            found = self._handle.fetch_arrow(descriptor)
        except PoisonBatch as error:
            raise error.of(self.name) from error
        return TopicArrowBatch(
            found.values, found.sequence, found.location, found.metadata, partition=self.name
        )


class ReadOnlyTopic:
    """A topic without consuming it, partitions in turn.

    Args:
        listed: The topic's partitions as they are now.
        opened: Makes the reader of one of them; told whether it was added after the first read.
        runtime: Threads.
    """

    def __init__(
        self,
        listed: Callable[[], Sequence[str]],
        opened: Callable[[str, bool], ReadOnlyPartition],
        runtime: Runtime,
    ) -> None:
        self._listed = listed
        self._opened = opened
        self._runtime = runtime
        self._partitions: dict[str, ReadOnlyPartition] = {}
        self._last: str | None = None

    def read(self, limit: int) -> Iterable[ArrowBatch]:
        """The next batches; raises as :meth:`ReadOnlyPartition.read`."""
        partitions = self._partitions
        added = bool(partitions)
        for name in self._listed():
            if name not in partitions:
                partitions[name] = self._opened(name, added)
        # Entries of undecided transactions are read and give no batch: then read on.
        while any(together(self._runtime, ReadOnlyPartition.read, partitions.values())):
            ready = {name: each.ready for name, each in partitions.items() if each.ready}
            if ready:
                break
        else:
            return []
        group = round_robin(ready, self._last, limit)
        owners = {id(descriptor): partitions[name] for name, descriptor in group}
        for name, _ in group:
            partitions[name].ready.popleft()
            self._last = name
        return fetch_many(
            lambda descriptor: owners[id(descriptor)].fetch(descriptor),
            [descriptor for _, descriptor in group],
            max_in_flight_bytes=READ_AHEAD_BYTES,
            runtime=self._runtime,
            size_of=lambda batch: batch.values.nbytes,
            adaptive=partitions[group[0][0]].pace,  # All partitions are in one store.
        )

    def acknowledge(self, written: Sequence[Written]) -> None:
        """Does nothing: the batches stay in the topic."""


def _read_only_topic(
    target: Target, runtime: Runtime, start_of: Callable[[str], Start]
) -> ReadOnlyTopic:
    topic = target.topic
    assert topic is not None
    current = CachedTopic(topic, runtime, REFRESH_S)

    def opened(name: str, added: bool) -> ReadOnlyPartition:
        config = topic.config_of(name, target.config)
        return ReadOnlyPartition(
            ReadOnlyReader(config, store=target.store, runtime=runtime, advice=_GAP_ADVICE),
            FetchHandle.of(config, store=target.store),
            Start(EARLIEST) if added else start_of(name),
        )

    return ReadOnlyTopic(lambda: current.get().names, opened, runtime)
