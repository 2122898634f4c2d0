"""``produce``: put records from stdin or files into a queue or a topic."""

from __future__ import annotations

import json
import os
import sys
import threading
from base64 import b64decode
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, NamedTuple

import click

from opendata_buffer.admin.target import Target
from opendata_buffer.assembly.producer import Producer
from opendata_buffer.assembly.topic_producer import TopicProducer
from opendata_buffer.cli import options
from opendata_buffer.cli.errors import Failure, print_summary
from opendata_buffer.cli.options import LONG_MS, command
from opendata_buffer.cli.target import target_of
from opendata_buffer.config import ProducerConfig
from opendata_buffer.errors import InvalidInput, OpenDataBufferError
from opendata_buffer.formats import MIB
from opendata_buffer.formats.batch import Compression
from opendata_buffer.framing import FRAMINGS, Splitter
from opendata_buffer.hints import Surface
from opendata_buffer.internal_parts import internals
from opendata_buffer.queue.ownership import claim_for_writing
from opendata_buffer.topic import partitioner as partitioners
from opendata_buffer.topic.partitioner import Partitioner

READ_BYTES = MIB
MAX_METADATA_BYTES = 1024 * 1024
"""Longest metadata of a record. It goes into the manifest, which every append writes as a whole."""

_JSON_FACTOR = 6
"""A record of control characters takes this many times its size in JSON (``\\u0000``)."""


@command(timeout_ms=LONG_MS)
@options.queue
@click.option(
    "--compression",
    type=click.Choice(["none", "zstd"], case_sensitive=False),
    default="none",
    help="Compression of stored batches.",
)
@options.framing
@options.flag(
    "--json as_json", "Each line is a record as 'consume --json' prints it, with its metadata."
)
@options.text("--metadata", "TEXT", "Metadata of every record.")
@options.text("--key", "TEXT", "For a topic: the key of every record.")
@options.flag("--key-is-metadata", "For a topic: a record's metadata is also its key.")
@click.option(
    "--partitioner",
    type=click.Choice(["modulo", "rendezvous"]),
    default="modulo",
    help="For a topic: how keys are mapped to partitions. Use the same one for all its producers.",
)
@options.number("--flush-interval-ms", 100, "Write a batch when its oldest record has this age.")
@options.number("--flush-size-bytes", 64 * MIB, "Write a batch earlier when it has this size.")
@click.option(
    "--broker",
    type=click.Choice(["auto", "host", "off"]),
    default="auto",
    help="auto: append through the queue's broker if it has one; host: be the broker unless "
    "another process is; off: append without a broker.",
)
@options.flag(
    "--recreate",
    "Start the queue over if its manifest is gone or was restored. Its batches are not read.",
)
@click.pass_obj
def produce(
    runtime: Any,
    /,
    framing: str,
    compression: str,
    as_json: bool,
    metadata: str | None,
    key: str | None,
    key_is_metadata: bool,
    partitioner: str,
    recreate: bool,
    **queue: Any,
) -> None:
    r"""Put the records of stdin into the queue, by default one for each line.

    Only the newline of a line is removed (a "\r" stays). A record that does not fit --framing
    ends the command with an error that names the record and its first byte; the records before it
    are durable. The command exits 0 only when all records are durable. The last line of stdout is
    then JSON: "records" and "batches" are numbers, "bytes" is the size of the records without
    separators.

    In a topic the key chooses the partition: records of one key stay in order. With --json a
    record may have a "key" or "key_base64". Records without a key go to the partitions round-robin.
    Keys are not stored: put what readers need into the metadata or the record.
    """
    options.refuse_together(**{"--json": as_json, "--framing": framing != "lines"})
    options.refuse_together(**{"--json": as_json, "--metadata": metadata})
    key_options = {"--key": key is not None, "--key-is-metadata": key_is_metadata}
    options.refuse_together(**key_options)
    if sys.stdin is None:
        raise Failure("standard input is closed: pipe the records into the command")
    target = target_of(
        runtime,
        queue,
        ProducerConfig,
        delivery_timeout_ms=queue["timeout_ms"],
        compression=Compression[compression.upper()],
    )
    is_topic = target.topic is not None
    for name, value in key_options.items():
        if value and not is_topic:
            raise click.UsageError(
                f"{name} chooses a partition, and records go to one queue of {target.store.url}: "
                "leave it out; a queue stores metadata with a record (--metadata, --json)"
            )
    if recreate:
        _start_over(target)
    label = os.fsencode(metadata or "")
    fixed_key = None if key is None else os.fsencode(key)
    runs = same_label(label, label if key_is_metadata else fixed_key)
    # A batch stores the length of each record in four more bytes.
    max_input_bytes = target.config.max_batch_bytes - 4
    if as_json:
        runs = JsonRecords(is_topic, fixed_key, key_is_metadata=key_is_metadata).runs
        max_input_bytes = _JSON_FACTOR * target.config.max_batch_bytes
    kind = TopicProducer if is_topic else Producer
    producer = kind(target.config, **internals(store=target.store, runtime=runtime))
    mapping = getattr(partitioners, partitioner)
    input_format = FRAMINGS[framing]
    records = InputProducer(producer, mapping, runs, target.config, input_format.unit)
    try:
        with print_summary(records.summary), producer:
            stdin: Any = sys.stdin.buffer
            records.produce_stream(stdin.read1, input_format.splitter(max_input_bytes))
        records.count_durable()
    except OpenDataBufferError as error:
        with suppress(OpenDataBufferError):
            records.count_durable()
        reason = error.text(Surface.SHELL).removesuffix(".")
        raise Failure(f"{reason}. Of the input, {records.durable_part()}.") from error
    click.echo(json.dumps(records.durable))


def _start_over(target: Target) -> None:
    """Start the queue over if its manifest is gone or went backwards.

    For a topic, this applies to each active partition that was ever used.
    """
    topic = target.topic
    for queue in target.written():
        if topic is None or queue.prefix in topic.description.active:
            claim_for_writing(target.store, queue.config, runtime=target.runtime, recreate=True)


class Run(NamedTuple):
    """Records with the same metadata, and with a key for each record or without keys.

    A ``produce()`` call takes one metadata for all of its records, so records are produced in runs.
    """

    records: list[bytes]
    metadata: bytes
    keys: list[bytes] | None = None


Runs = Callable[[Sequence[bytes]], Iterable[Run]]
"""Converts records of the input to runs. If a record is invalid, InvalidInput is raised after the
runs of all earlier records."""


def same_label(metadata: bytes, key: bytes | None) -> Runs:
    """Return a function that makes one run with the given metadata and key."""

    def runs(records: Sequence[bytes]) -> Iterable[Run]:
        return [Run(list(records), metadata, None if key is None else [key] * len(records))]

    return runs


@dataclass
class JsonRecords:
    """Decodes records from lines of JSON, as ``consume --json`` prints them."""

    with_keys: bool = False  # Also read 'key' or 'key_base64'.
    key: bytes | None = None  # Replaces the records' own keys.
    key_is_metadata: bool = False
    lines: int = 0  # Lines read so far.

    def runs(self, lines: Sequence[bytes]) -> Iterable[Run]:
        """Return the records of some lines; see :data:`Runs`. Skip lines of white space."""
        decoded: list[tuple[bytes, bytes, bytes | None]] = []
        fault = None
        try:
            for line in lines:
                self.lines += 1
                if line.strip():
                    decoded.append(self._decode(line))
        except InvalidInput as error:
            fault = error
        for (metadata, no_keys), group in groupby(decoded, lambda each: (each[1], each[2] is None)):
            run = list(group)
            keys = None if no_keys else [key or b"" for _, _, key in run]
            yield Run([value for value, _, _ in run], metadata, keys)
        if fault is not None:
            raise fault

    def _decode(self, line: bytes) -> tuple[bytes, bytes, bytes | None]:
        """Return value, metadata and key of a line."""
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise self._invalid(f"it is no JSON ({error})") from None
        if not isinstance(fields, dict):
            raise self._invalid("it is no JSON object")
        value = self._bytes(fields, "value")
        if value is None:
            raise self._invalid("it has neither 'value' nor 'value_base64'")
        metadata = self._bytes(fields, "metadata") or b""
        if len(metadata) > MAX_METADATA_BYTES:
            raise self._invalid(f"its metadata has more than {MAX_METADATA_BYTES} bytes")
        own_key = self._bytes(fields, "key") if self.with_keys else None
        if self.key_is_metadata:
            return value, metadata, metadata
        return value, metadata, own_key if self.key is None else self.key

    def _bytes(self, fields: dict[str, Any], name: str) -> bytes | None:
        encoded = fields.get(f"{name}_base64")
        text = fields.get(name)
        if encoded is not None and text is not None:
            raise self._invalid(f"it has both '{name}' and '{name}_base64'")
        try:
            if encoded is not None:
                return b64decode(encoded, validate=True)
            return None if text is None else text.encode()
        except (ValueError, TypeError, AttributeError):
            wrong = f"'{name}' is not text" if encoded is None else f"'{name}_base64' is not base64"
            raise self._invalid(wrong) from None

    def _invalid(self, reason: str) -> InvalidInput:
        return InvalidInput(
            f"line {self.lines} is not a record as 'consume --json' prints it: {reason}. Use "
            '{"value": "text"} or {"value_base64": "..."}, with "metadata" if you like; records '
            "that are JSON themselves go through --framing ndjson."
        )


@dataclass
class InputProducer:
    """Produces the records of an input, and counts those that are durable.

    The producer's buffers bound the memory. Each piece of the input is a ``produce()`` call, so
    slow input is flushed by age and fast input by size.
    """

    producer: Producer | TopicProducer
    partitioner: Partitioner  # For records with keys, in a topic.
    runs: Runs
    config: ProducerConfig
    unit: str  # The word for records in messages, in the plural.
    durable: dict[str, int] = field(
        default_factory=lambda: {"records": 0, "batches": 0, "bytes": 0}
    )  # Always a prefix of the input; "bytes" is the size of the records.
    _pending: deque[tuple[Any, int, int]] = field(default_factory=deque)
    _last: dict[str, int] = field(default_factory=dict)
    _counting: threading.Lock = field(default_factory=threading.Lock)

    def produce_stream(self, read: Callable[[int], bytes], splitter: Splitter) -> None:
        """Produce until the stream ends.

        Args:
            read: Returns available bytes, up to a number; nothing at the end.
            splitter: Splits the bytes into records.

        Raises:
            InvalidInput: A record does not fit into a batch or does not fit the framing. All
                earlier records were produced.
        """
        while chunk := read(READ_BYTES):
            self.produce(splitter.feed(chunk))
        self.produce(splitter.finish())

    def produce(self, records: Sequence[bytes]) -> None:
        """Produce whole records, and count those that have become durable.

        Args:
            records: The records, without their framing.

        Raises:
            InvalidInput: As :meth:`produce_stream`.
        """
        for run in self.runs(records):
            for part in _calls(run.records, self.config):
                group, options = run.records[part], dict[str, Any]()
                if run.keys is not None:
                    options = {"keys": run.keys[part], "partitioner": self.partitioner}
                handle = self.producer.produce(group, metadata=run.metadata, **options)
                self._pending.append((handle, len(group), sum(map(len, group))))
        self.count_durable()

    def count_durable(self) -> None:
        """Count the records that have become durable; may be called from any thread."""
        with self._counting:
            self._count()

    def summary(self) -> str:
        """Describe how much of the input is durable, for a command that a signal ends."""
        # With a timeout, because the interrupted thread may hold the lock forever.
        if self._counting.acquire(timeout=0.5):
            with suppress(OpenDataBufferError):
                self._count()
            self._counting.release()
        return f"ended by a signal: of the input, {self.durable_part()}"

    def _count(self) -> None:
        while self._pending:
            handle, records, size = self._pending[0]
            if not handle.done():
                return
            done = handle.result()
            self._pending.popleft()
            self.durable["records"] += records
            self.durable["bytes"] += size
            parts = done if isinstance(done, Mapping) else {"": done}
            for name, each in parts.items():
                # Calls that share a batch follow each other, because batches keep produce order.
                self.durable["batches"] += each.sequence != self._last.get(name)
                self._last[name] = each.sequence

    def durable_part(self) -> str:
        """Describe which records of the input are durable."""
        count = self.durable["records"]
        if not count:
            return f"not one {self.unit.removesuffix('s')} is known to be durable"
        # Records in other partitions than a lost record may be durable.
        others = "" if isinstance(self.producer, Producer) else "; of those behind some may be"
        return f"{self.unit} 1 to {count} are durable{others}"


def _calls(records: Sequence[bytes], config: ProducerConfig) -> Iterator[slice]:
    """Cut records into ``produce()`` calls.

    A call ends when it is larger than a flush, and never exceeds a batch.
    """
    begin = size = 0
    for at, record in enumerate(records):
        stored = len(record) + 4
        is_full = size > config.flush_size_bytes or size + stored > config.max_batch_bytes
        if is_full and at > begin:
            yield slice(begin, at)
            begin, size = at, 0
        size += stored
    if records:
        yield slice(begin, len(records))
