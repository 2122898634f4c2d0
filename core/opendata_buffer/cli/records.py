"""Records in, records out: ``produce`` and ``consume``."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from opendata_buffer.cli.ending import last_words
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
    queue_fields_of,
    queue_words,
    recreate_option,
)
from opendata_buffer.cli.words import plural
from opendata_buffer.errors import InvalidInput
from opendata_buffer.formats import MIB

if TYPE_CHECKING:
    from opendata_buffer.admin.start import Start
    from opendata_buffer.cli.pipe import Reader
    from opendata_buffer.cli.rendering import Render
    from opendata_buffer.formats.manifest import Manifest

__all__ = ["consume", "produce"]


@click.command()
@patient_queue_options
@click.option(
    "--compression",
    type=click.Choice(["none", "zstd"], case_sensitive=False),
    default="none",
    show_default=True,
)
@framing_option
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Each line is a record as 'consume --json' prints it, with its metadata.",
)
@click.option(
    "--file",
    "files",
    type=click.Path(exists=True, dir_okay=False),
    multiple=True,
    metavar="PATH",
    help="A file that is one record, instead of stdin. May be given again.",
)
@click.option("--metadata", default="", metavar="TEXT", help="Goes with every record.")
@click.option(
    "--metadata-from",
    type=click.Path(exists=True, dir_okay=False, readable=True),
    metavar="PATH",
    help="A file whose line N is the metadata of record N.",
)
@click.option("--flush-interval-ms", type=POSITIVE, default=100, show_default=True)
@click.option("--flush-size-bytes", type=POSITIVE, default=64 * MIB, show_default=True)
@click.option(
    "--broker",
    type=click.Choice(["auto", "host", "off"]),
    default="auto",
    show_default=True,
    help="auto: through the queue's broker if there is one; host: be one while there is none; "
    "off: append alone.",
)
@recreate_option
@max_batch_bytes_option
@click.pass_obj
def produce(
    runtime: Any,
    /,
    framing: str,
    compression: str,
    as_json: bool,
    files: tuple[str, ...],
    metadata: str,
    metadata_from: str | None,
    flush_interval_ms: int,
    flush_size_bytes: int,
    broker: str,
    recreate: bool,
    max_batch_bytes: int,
    **queue: Any,
) -> None:
    r"""Put the records of stdin into the queue, by default one for each line.

    Of a line the newline is stripped, nothing else (a "\r" stays). A record that is none in its
    --framing ends the command, which says which one, at which byte, and that those before it are
    durable. Exits 0 only when all records are; the last line of stdout is then JSON: "records"
    and "batches" are numbers, "bytes" is the size of the records without what separates them.
    """
    from opendata_buffer.cli.described import FromJson, FromLines, Same
    from opendata_buffer.cli.pipe import Intake
    from opendata_buffer.cli.progress import counting
    from opendata_buffer.config import ProducerConfig
    from opendata_buffer.errors import OpenDataBufferError
    from opendata_buffer.formats.batch import Compression
    from opendata_buffer.framing import FRAMINGS
    from opendata_buffer.producer.producer import Producer

    _refuse_together(**{"--json": as_json, "--file": bool(files), "--framing": framing != "lines"})
    _refuse_together(
        **{"--json": as_json, "--metadata": bool(metadata), "--metadata-from": metadata_from}
    )
    timeout_ms = queue["timeout_ms"]
    config = ProducerConfig(
        **queue_fields_of(queue),
        delivery_timeout_ms=timeout_ms,
        compression=Compression[compression.upper()],
        flush_interval_ms=flush_interval_ms,
        flush_size_bytes=flush_size_bytes,
        broker=broker,
        recreate=recreate,
        max_batch_bytes=max_batch_bytes,
    )
    if sys.stdin is None and not files:
        raise Failure("standard input is closed: pipe the records into the command")
    with ExitStack() as stack:
        described: Any = FromJson() if as_json else Same(os.fsencode(metadata))
        if metadata_from is not None:
            lines = stack.enter_context(open(metadata_from, "rb"))
            described = FromLines(lines, metadata_from)
        longest = _JSON_LONGER * max_batch_bytes if as_json else None
        advance = stack.enter_context(counting("producing"))
        producer = Producer(config, runtime=runtime)
        intake = Intake(producer, config, described, advance, FRAMINGS[framing], longest)
        try:
            with last_words(intake.last_words), producer:
                if files:
                    intake.take(_contents(files, max_batch_bytes - 4))
                else:
                    stdin: Any = sys.stdin.buffer
                    intake.run(stdin.read1)
            intake.settle()
        except OpenDataBufferError as error:
            with suppress(OpenDataBufferError):
                intake.settle()
            raise Failure(f"{error} Of the input, {intake.durable_part()}.") from error
    click.echo(json.dumps(intake.durable.as_json()))


_JSON_LONGER = 6
"""So much longer a record may be in JSON, where it is all control characters (``\\u0000``)."""


def _contents(paths: Sequence[str], limit: int) -> Iterator[bytes]:
    for path in paths:
        with open(path, "rb") as file:
            data = file.read(limit + 1)
        if len(data) > limit:
            raise InvalidInput(
                f"{path!r} has more than {limit} bytes, and is one record: raise "
                "--max-batch-bytes here and at the consumer, or give its lines to stdin"
            )
        yield data


def _refuse_together(**given: Any) -> None:
    """Options that exclude each other."""
    names = [name for name, value in given.items() if value]
    if len(names) > 1:
        raise click.UsageError(f"{' and '.join(names)} cannot be used together")


@click.command()
@patient_queue_options
@framing_option
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Print each record as a line of JSON, with partition, sequence, index, time, location, "
    "metadata and value; what is no text is in metadata_base64 and value_base64.",
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
    "without a zone. Passing batches by is for --no-ack. Default: earliest.",
)
@click.option("--max-batches", type=NATURAL, metavar="N", help="Stop after N batches.")
@click.option("--follow", is_flag=True, help="Wait for more when the queue is empty.")
@create_if_missing_option
@click.option("--no-ack", is_flag=True, help="Only look: take over nothing, acknowledge nothing.")
@click.option(
    "--last-acked-sequence",
    type=NATURAL,
    metavar="N",
    help="Start after this sequence, and let those up to it leave the queue.",
)
@click.option("--gc/--no-gc", default=True, show_default=True, help="Collect garbage meanwhile.")
@click.option("--poll-interval-ms", type=POSITIVE, default=500, show_default=True)
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

    Takes the queue over (another consumer is fenced) and acknowledges batches after their
    records are written out: after a crash some may be written again. Ends when the queue is
    empty. With --no-ack nothing changes in the queue and its consumer is not disturbed. The last
    line on stderr, also after Ctrl-C, is JSON: "records" and "batches" are numbers, "bytes" is
    the size of the records, "last_sequence" that of the last batch written.
    """
    from opendata_buffer.admin.observe import Observer
    from opendata_buffer.admin.start import Start
    from opendata_buffer.cli.pipe import RecordWriter, copy_out
    from opendata_buffer.cli.progress import counting
    from opendata_buffer.config import ConsumerConfig, GarbageCollectorConfig
    from opendata_buffer.queue.owner import check_owner
    from opendata_buffer.stores.factory import open_store

    _refuse_together(**{"--json": as_json, "--format": template, "--framing": framing != "lines"})
    _refuse_together(**{"--from": from_, "--last-acked-sequence": last_acked_sequence is not None})
    start = None if from_ is None else Start.parse(from_)
    config = ConsumerConfig(
        **queue_fields_of(queue),
        gc=GarbageCollectorConfig(enabled=gc),
        recreate=recreate,
        max_batch_bytes=max_batch_bytes,
        allow_foreign_locations=allow_foreign_locations,
    )
    render = _render(framing, as_json, template, config.data_path_prefix)
    store = open_store(config.store, config.store_options)
    # A look with a short deadline first: a mistyped path or a store that is down is told of soon,
    # and no queue is made there. A queue whose manifest was lost may be started over, by its
    # marker; where there is neither there is no queue.
    soon = replace(config, cas_deadline_ms=min(config.cas_deadline_ms, SOON_MS))
    started_over = recreate and check_owner(store, soon, runtime=runtime) is not None
    if no_ack or not (create_if_missing or started_over):
        found = Observer(store, soon, runtime).manifest()
        if start is not None and not no_ack:
            _refuse_passing_by(start, found, config.manifest_path)

    stdout = sys.stdout.buffer
    with ExitStack() as stack:
        # The progress ends first, so that it does not hide the summary.
        writer = RecordWriter(stdout, render=render)
        stack.enter_context(last_words(writer.report))
        writer.advance = stack.enter_context(counting("consuming", quiet=stdout.isatty()))
        if no_ack:
            reader = _observing(store, config, runtime, last_acked_sequence, start)
        else:
            reader = _owning(stack, config, runtime, last_acked_sequence)
        wait = (lambda: runtime.sleep(poll_interval_ms / 1000)) if follow else None
        copy_out(reader, writer, max_batches=max_batches, wait=wait)
    click.echo(writer.report(), err=True)


def _render(framing: str, as_json: bool, template: str | None, partition: str) -> Render:
    from opendata_buffer.cli import rendering
    from opendata_buffer.cli.pipe import framed
    from opendata_buffer.framing import FRAMINGS

    if as_json:
        return rendering.as_json(partition)
    if template == "table":
        from opendata_buffer.cli.table import as_table

        return as_table()
    if template is not None:
        return rendering.by_format(template, partition)
    return framed(FRAMINGS[framing])


def _refuse_passing_by(start: Start, manifest: Manifest, key: str) -> None:
    """A consumer begins at the oldest batch: what it passed by would leave the queue unread."""
    first = start.sequence_in(manifest, key)
    if first > manifest.first_sequence:
        queue = queue_words()
        raise Failure(
            f"--from {start.text} would drop {plural(first - manifest.first_sequence, 'batch')} "
            f"unread, up to sequence {first - 1}: look at what is behind with --no-ack, or drop "
            f"them with 'opendata-buffer seek {queue} --to {start.text}', which keeps a copy"
        )


def _observing(
    store: Any, config: Any, runtime: Any, last_acked_sequence: int | None, start: Start | None
) -> Reader:
    from opendata_buffer.admin.observe import Observer
    from opendata_buffer.cli.pipe import ObservingReader
    from opendata_buffer.consumer.fetch import FetchHandle

    observer = Observer(store, config, runtime)
    handle = FetchHandle.of(config, store=store)
    key = config.manifest_path
    first = None if start is None else start.sequence_in(observer.manifest(), key)
    return ObservingReader(
        observer.manifest, key, handle, runtime, last_acked_sequence, start=first
    )


def _owning(stack: ExitStack, config: Any, runtime: Any, last_acked_sequence: int | None) -> Reader:
    from opendata_buffer.cli.pipe import OwningReader
    from opendata_buffer.consumer.consumer import Consumer

    consumer = stack.enter_context(
        Consumer(config, last_acked_sequence, runtime=runtime, program="opendata-buffer consume")
    )
    return OwningReader(consumer, runtime)
