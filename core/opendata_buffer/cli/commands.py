"""The command line: ``opendata-buffer``, also ``python -m opendata_buffer``.

Every command is thin: it turns options into a configuration and prints what a module below it
returns. Errors are one line on stderr and exit code 1; usage errors exit 2. Only stdout is
output; progress, summaries and warnings go to stderr.
"""

from __future__ import annotations

import json
import os
import stat
import sys
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any

import click

from opendata_buffer.cli.errors import Application, Failure, main_of
from opendata_buffer.cli.options import (
    NATURAL,
    OBSERVER_DEADLINE_MS,
    POSITIVE,
    json_option,
    max_batch_bytes_option,
    queue_fields_of,
    queue_options,
    store_options,
    store_options_of,
    version_option,
)
from opendata_buffer.formats import MIB

__all__ = ["cli", "main"]

READ_AHEAD_BYTES = 64 * MIB
"""Decoded batches that ``consume`` holds while it writes one out."""

# Commands import what they need: --help and usage errors answer without loading Arrow.


@click.group(cls=Application, context_settings={"help_option_names": ["-h", "--help"]})
@version_option
@click.option("-v", "--verbose", count=True, help="Log more; twice for everything.")
@click.pass_context
def cli(context: click.Context, verbose: int) -> None:
    """Look into and move records through a queue that lives in object storage.

    STORE is a directory, file:///dir, or s3://bucket[/root]. Credentials come from the standard
    AWS chain.
    """
    from opendata_buffer.runtime import SystemRuntime

    # Tests put a manual clock here.
    context.obj = context.obj or SystemRuntime()


main = main_of(cli)


# ---- looking at one object


@cli.group()
def manifest() -> None:
    """Look at a manifest."""


@cli.group()
def batch() -> None:
    """Look at a batch object."""


@manifest.command("dump")
@click.argument("object_", metavar="PATH_OR_URL")
@store_options
def manifest_dump(object_: str, **store: Any) -> None:
    """Print a manifest as JSON.

    PATH_OR_URL names the object itself: a file, file:///dir/ingest/manifest, or
    s3://bucket/ingest/manifest.
    """
    from opendata_buffer.cli.dump import manifest_document, read_object
    from opendata_buffer.errors import CorruptData
    from opendata_buffer.formats.manifest import MAX_MANIFEST_BYTES

    try:
        raw = read_object(object_, store_options_of(store), max_bytes=MAX_MANIFEST_BYTES)
        document = manifest_document(raw)
    except CorruptData as error:
        raise Failure(f"{object_!r} is no sound manifest: {error}") from error
    sys.stdout.writelines(document.lines())  # click.echo() would flush at each record


@batch.command("dump")
@click.argument("object_", metavar="PATH_OR_URL")
@click.option("--limit", type=NATURAL, metavar="N", help="Show only the first N records.")
@max_batch_bytes_option
@store_options
def batch_dump(object_: str, limit: int | None, max_batch_bytes: int, **store: Any) -> None:
    """Print a batch object as JSON, records in base64.

    PATH_OR_URL names the object itself: a file, or s3://bucket/ingest/<ULID>.batch.
    """
    from opendata_buffer.cli.dump import batch_document, read_object
    from opendata_buffer.errors import CorruptData
    from opendata_buffer.formats.batch import largest_object

    try:
        raw = read_object(
            object_, store_options_of(store), max_bytes=largest_object(max_batch_bytes)
        )
        document = batch_document(raw, limit=limit, max_bytes=max_batch_bytes)
    except CorruptData as error:
        raise Failure(f"{object_!r} is no sound batch: {error}") from error
    sys.stdout.writelines(document.lines())  # click.echo() would flush at each record


# ---- records in, records out


@cli.command()
@queue_options
@click.option(
    "--compression",
    type=click.Choice(["none", "zstd"], case_sensitive=False),
    default="none",
    show_default=True,
)
@click.option("--metadata", default="", metavar="TEXT", help="Goes with every record range.")
@click.option("--flush-interval-ms", type=POSITIVE, default=100, show_default=True)
@click.option("--flush-size-bytes", type=POSITIVE, default=64 * MIB, show_default=True)
@max_batch_bytes_option
@click.pass_obj
def produce(
    runtime: Any,
    /,
    compression: str,
    metadata: str,
    flush_interval_ms: int,
    flush_size_bytes: int,
    max_batch_bytes: int,
    **queue: Any,
) -> None:
    r"""Put the lines of stdin into the queue, one record each.

    The newline is stripped, nothing else (a "\r" stays). Exits 0 only when all records are
    durable; the last line of stdout is then JSON with their number.
    """
    from opendata_buffer.cli.pipe import Intake
    from opendata_buffer.cli.terminal import counting
    from opendata_buffer.config import ProducerConfig
    from opendata_buffer.errors import OpenDataBufferError
    from opendata_buffer.formats.batch import Compression
    from opendata_buffer.producer.producer import Producer

    config = ProducerConfig(
        **queue_fields_of(queue),
        compression=Compression[compression.upper()],
        flush_interval_ms=flush_interval_ms,
        flush_size_bytes=flush_size_bytes,
        max_batch_bytes=max_batch_bytes,
    )
    if sys.stdin is None:
        raise Failure("standard input is closed: pipe the records into the command")
    stdin: Any = sys.stdin.buffer
    with counting("producing") as advance:
        producer = Producer(config, runtime=runtime)
        intake = Intake(producer, config, os.fsencode(metadata), advance)
        try:
            with producer:
                intake.run(stdin.read1)
            intake.settle()
        except OpenDataBufferError as error:
            with suppress(OpenDataBufferError):
                intake.settle()
            done = intake.durable.records
            first = f"lines 1 to {done} are" if done else "not one line is known to be"
            raise Failure(f"{error} Of the input, {first} durable.") from error
    click.echo(json.dumps(intake.durable.as_json()))


@cli.command()
@queue_options
@click.option("--max-batches", type=NATURAL, metavar="N", help="Stop after N batches.")
@click.option("--follow", is_flag=True, help="Wait for more when the queue is empty.")
@click.option("--no-ack", is_flag=True, help="Only look: take over nothing, acknowledge nothing.")
@click.option(
    "--last-acked-sequence",
    type=NATURAL,
    metavar="N",
    help="Start after this sequence. Default: at the oldest batch.",
)
@click.option("--gc/--no-gc", default=True, show_default=True, help="Collect garbage meanwhile.")
@click.option("--poll-interval-ms", type=POSITIVE, default=500, show_default=True)
@max_batch_bytes_option
@click.pass_obj
def consume(
    runtime: Any,
    /,
    max_batches: int | None,
    follow: bool,
    no_ack: bool,
    last_acked_sequence: int | None,
    gc: bool,
    poll_interval_ms: int,
    max_batch_bytes: int,
    **queue: Any,
) -> None:
    """Write the records of the queue to stdout, one line each.

    Takes the queue over (another consumer is fenced) and acknowledges batches after their
    records are written out: after a crash some may be written again. Ends when the queue is
    empty. With --no-ack nothing changes in the queue and its consumer is not disturbed.
    """
    from opendata_buffer.cli.pipe import Consumed, Peek, copy_out
    from opendata_buffer.cli.status import open_queue, read_manifest
    from opendata_buffer.cli.terminal import counting
    from opendata_buffer.config import ConsumerConfig, GarbageCollectorConfig
    from opendata_buffer.consumer.consumer import Consumer
    from opendata_buffer.consumer.fetch import FetchHandle
    from opendata_buffer.consumer.read_ahead import fetch_many
    from opendata_buffer.stores.factory import open_store

    config = ConsumerConfig(
        **queue_fields_of(queue),
        gc=GarbageCollectorConfig(enabled=gc),
        max_batch_bytes=max_batch_bytes,
    )
    store = open_store(config.store, config.store_options)
    if no_ack or not follow:  # say soon where no queue was found, or no store
        soon = replace(config, cas_deadline_ms=OBSERVER_DEADLINE_MS)
        read_manifest(open_queue(store, soon, runtime), store, config)

    total = Consumed()
    stdout = sys.stdout.buffer
    with ExitStack() as stack:
        advance = stack.enter_context(counting("consuming", quiet=stdout.isatty()))
        if no_ack:
            observed = open_queue(store, config, runtime)
            peek = Peek(
                lambda: read_manifest(observed, store, config),
                config.manifest_path,
                last_acked_sequence,
            )
            handle = FetchHandle.of(config, store=store)
            take: Any = peek.take
            acknowledge: Any = lambda sequence: None  # noqa: E731
        else:
            consumer = stack.enter_context(Consumer(config, last_acked_sequence, runtime=runtime))
            handle = consumer.fetch_handle()
            take, acknowledge = consumer.next_descriptors, consumer.ack_through
        copy_out(
            take,
            lambda group: fetch_many(
                handle.fetch_arrow, group, max_in_flight_bytes=READ_AHEAD_BYTES, runtime=runtime
            ),
            acknowledge,
            stdout,
            total,
            max_batches=max_batches,
            wait=(lambda: runtime.sleep(poll_interval_ms / 1000)) if follow else None,
            persist=lambda: _sync(stdout),
            advance=advance,
        )
    click.echo(json.dumps(total.as_json()), err=True)


# ---- operating a queue


@cli.command()
@queue_options
@json_option
@click.option("--watch", is_flag=True, help="Show it again and again until interrupted.")
@click.option("--interval-ms", type=POSITIVE, default=1000, show_default=True, help="For --watch.")
@click.pass_obj
def status(runtime: Any, /, as_json: bool, watch: bool, interval_ms: int, **queue: Any) -> None:
    """Show what is in the queue, changing nothing.

    With --json and --watch, one JSON object per line.
    """
    from rich.console import Console
    from rich.live import Live

    from opendata_buffer.cli.status import open_queue, read_status
    from opendata_buffer.cli.terminal import status_table
    from opendata_buffer.config import QueueConfig
    from opendata_buffer.stores.factory import open_store

    config = QueueConfig(**queue_fields_of(queue), cas_deadline_ms=OBSERVER_DEADLINE_MS)
    store = open_store(config.store, config.store_options)
    observed = open_queue(store, config, runtime)

    console = Console()

    def look() -> Any:
        found = read_status(observed, store, config, runtime)
        return json.dumps(found.as_json()) if as_json else status_table(found)

    if watch and console.is_terminal and not as_json:
        with Live(look(), console=console, auto_refresh=False) as live:
            while True:
                runtime.sleep(interval_ms / 1000)
                live.update(look(), refresh=True)
    while True:
        click.echo(look()) if as_json else console.print(look())
        if not watch:
            return
        runtime.sleep(interval_ms / 1000)


@cli.command()
@queue_options
@click.option("--dry-run", is_flag=True, help="Only tell what would be deleted.")
@click.option(
    "--grace-period-ms",
    type=NATURAL,
    default=600_000,
    show_default=True,
    help="Least age of what is deleted. Below that of the producers, it takes batches that are "
    "being uploaded right now: then only while no producer runs.",
)
@json_option
@click.pass_obj
def gc(runtime: Any, /, dry_run: bool, grace_period_ms: int, as_json: bool, **queue: Any) -> None:
    """Delete batch objects that were consumed, once.

    A running consumer does this by itself. Refuses a data prefix of another queue, and a queue
    whose manifest is not found.
    """
    from opendata_buffer.cli.status import open_queue, read_manifest
    from opendata_buffer.cli.terminal import format_bytes
    from opendata_buffer.config import ConsumerConfig, GarbageCollectorConfig
    from opendata_buffer.gc import GarbageCollector
    from opendata_buffer.stores.factory import open_store

    config = ConsumerConfig(
        **queue_fields_of(queue),
        cas_deadline_ms=OBSERVER_DEADLINE_MS,
        gc=GarbageCollectorConfig(grace_period_ms=grace_period_ms),
    )
    store = open_store(config.store, config.store_options)
    # Before the collector, which would claim the prefix for a manifest that is a typing error.
    read_manifest(open_queue(store, config, runtime), store, config)
    report = GarbageCollector(store, config, runtime=runtime).run_once(dry_run=dry_run)
    plan = report.plan
    if as_json:
        found = {
            "dry_run": dry_run,
            "delete": [{"key": each.key, "size": each.size} for each in plan.delete],
            "delete_bytes": plan.delete_bytes,
            "deleted": report.deleted,
            "failed": [{"key": each.key, "reason": each.reason} for each in report.failed],
            "abandoned": report.abandoned,
            "referenced": plan.referenced,
            "waiting": plan.waiting,
            "ignored": plan.ignored,
            "held": plan.held,
        }
        click.echo(json.dumps(found))
    else:
        for each in plan.delete:
            click.echo(f"{'would delete' if dry_run else 'delete'} {each.key}")
        total = f"{len(plan.delete):,} objects, {format_bytes(plan.delete_bytes)}"
        click.echo(
            f"{'would delete ' + total if dry_run else f'deleted {report.deleted:,} of {total}'}; "
            f"{plan.referenced:,} are queued, {plan.waiting:,} are too young"
        )
        if plan.held:
            click.echo(f"nothing was deleted: {plan.held}")
    if report.failed:
        first = report.failed[0]
        raise Failure(
            f"{len(report.failed)} objects could not be deleted, the first is {first.key!r}: "
            f"{first.reason}. Run it again."
        )


@cli.command()
@queue_options
@max_batch_bytes_option
@json_option
@click.pass_obj
def fsck(runtime: Any, /, max_batch_bytes: int, as_json: bool, **queue: Any) -> None:
    """Check that every queued batch exists and decodes; exits 1 with a list if not."""
    from opendata_buffer.cli.fsck import check_queue
    from opendata_buffer.cli.terminal import format_bytes, track
    from opendata_buffer.config import ConsumerConfig
    from opendata_buffer.stores.factory import open_store

    config = ConsumerConfig(
        **queue_fields_of(queue),
        cas_deadline_ms=OBSERVER_DEADLINE_MS,
        max_batch_bytes=max_batch_bytes,
    )
    store = open_store(config.store, config.store_options)
    with track("checking") as advance:
        report = check_queue(store, config, runtime, advance=advance)
    if as_json:
        click.echo(json.dumps(report.as_json()))
    else:
        for finding in report.notes:
            click.echo(f"note: {finding}")
        for finding in report.problems:
            click.echo(f"problem: {finding}")
        click.echo(
            f"{report.batches:,} batches, {report.records:,} records, "
            f"{format_bytes(report.bytes)} checked"
        )
    if not report.ok:
        raise Failure(
            f"{len(report.problems)} problems in the queue with manifest {config.manifest_path!r}: "
            "restore the objects, or skip their batches in the consumer"
        )


def _sync(stream: Any) -> None:
    """Make a file survive a power cut; pipes and terminals need nothing."""
    try:
        fd = stream.fileno()
    except OSError:
        return
    if stat.S_ISREG(os.fstat(fd).st_mode):
        os.fsync(fd)
