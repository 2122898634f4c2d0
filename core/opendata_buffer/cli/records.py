"""Records in, records out: ``produce`` and ``consume``."""

from __future__ import annotations

import json
import os
import sys
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
    recreate_option,
)
from opendata_buffer.formats import MIB

if TYPE_CHECKING:
    from opendata_buffer.cli.pipe import Reader

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
@click.option("--metadata", default="", metavar="TEXT", help="Goes with every record range.")
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
    metadata: str,
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
    durable. Exits 0 only when all records are; the last line of stdout is then JSON with their
    number.
    """
    from opendata_buffer.cli.pipe import Intake
    from opendata_buffer.cli.terminal import counting
    from opendata_buffer.config import ProducerConfig
    from opendata_buffer.errors import OpenDataBufferError
    from opendata_buffer.formats.batch import Compression
    from opendata_buffer.framing import FRAMINGS
    from opendata_buffer.producer.producer import Producer

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
    if sys.stdin is None:
        raise Failure("standard input is closed: pipe the records into the command")
    stdin: Any = sys.stdin.buffer
    with counting("producing") as advance:
        producer = Producer(config, runtime=runtime)
        intake = Intake(producer, config, os.fsencode(metadata), advance, FRAMINGS[framing])
        try:
            with last_words(intake.last_words), producer:
                intake.run(stdin.read1)
            intake.settle()
        except OpenDataBufferError as error:
            with suppress(OpenDataBufferError):
                intake.settle()
            raise Failure(f"{error} Of the input, {intake.durable_part()}.") from error
    click.echo(json.dumps(intake.durable.as_json()))


@click.command()
@patient_queue_options
@framing_option
@click.option("--max-batches", type=NATURAL, metavar="N", help="Stop after N batches.")
@click.option("--follow", is_flag=True, help="Wait for more when the queue is empty.")
@create_if_missing_option
@click.option("--no-ack", is_flag=True, help="Only look: take over nothing, acknowledge nothing.")
@click.option(
    "--last-acked-sequence",
    type=NATURAL,
    metavar="N",
    help="Start after this sequence. Default: at the oldest batch.",
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
    empty. With --no-ack nothing changes in the queue and its consumer is not disturbed.
    """
    from opendata_buffer.admin.observe import Observer
    from opendata_buffer.cli.pipe import RecordWriter, copy_out
    from opendata_buffer.cli.terminal import counting
    from opendata_buffer.config import ConsumerConfig, GarbageCollectorConfig
    from opendata_buffer.framing import FRAMINGS
    from opendata_buffer.stores.factory import open_store

    config = ConsumerConfig(
        **queue_fields_of(queue),
        gc=GarbageCollectorConfig(enabled=gc),
        recreate=recreate,
        max_batch_bytes=max_batch_bytes,
        allow_foreign_locations=allow_foreign_locations,
    )
    store = open_store(config.store, config.store_options)
    if no_ack or not (create_if_missing or recreate):
        # A look with a short deadline first: a mistyped path or a store that is down is told of
        # soon, and no queue is made there.
        soon = replace(config, cas_deadline_ms=min(config.cas_deadline_ms, SOON_MS))
        Observer(store, soon, runtime).manifest()

    stdout = sys.stdout.buffer
    with ExitStack() as stack:
        advance = stack.enter_context(counting("consuming", quiet=stdout.isatty()))
        writer = RecordWriter(stdout, advance, FRAMINGS[framing])
        if no_ack:
            reader = _observing(store, config, runtime, last_acked_sequence)
        else:
            reader = _owning(stack, config, runtime, last_acked_sequence)
        wait = (lambda: runtime.sleep(poll_interval_ms / 1000)) if follow else None
        copy_out(reader, writer, max_batches=max_batches, wait=wait)
    click.echo(json.dumps(writer.total.as_json()), err=True)


def _observing(store: Any, config: Any, runtime: Any, last_acked_sequence: int | None) -> Reader:
    from opendata_buffer.admin.observe import Observer
    from opendata_buffer.cli.pipe import ObservingReader
    from opendata_buffer.consumer.fetch import FetchHandle

    observer = Observer(store, config, runtime)
    handle = FetchHandle.of(config, store=store)
    key = config.manifest_path
    return ObservingReader(observer.manifest, key, handle, runtime, last_acked_sequence)


def _owning(stack: ExitStack, config: Any, runtime: Any, last_acked_sequence: int | None) -> Reader:
    from opendata_buffer.cli.pipe import OwningReader
    from opendata_buffer.consumer.consumer import Consumer

    consumer = stack.enter_context(Consumer(config, last_acked_sequence, runtime=runtime))
    return OwningReader(consumer, runtime)
