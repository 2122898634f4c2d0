"""``readers``: make a log of a queue; list, set and delete its named readers."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import click

from opendata_buffer.admin.queue_status import running_consumer
from opendata_buffer.admin.readers import (
    LogSettings,
    ReaderStatus,
    V1Feeding,
    add_v1,
    check_limits,
    delete_reader,
    enable_logs,
    expired_notes,
    readers_in,
    reset_readers,
)
from opendata_buffer.admin.target import Target
from opendata_buffer.admin.units import duration_ms, size_bytes
from opendata_buffer.cli import options
from opendata_buffer.cli.errors import Failure
from opendata_buffer.cli.errors import log as logger
from opendata_buffer.cli.options import Command, Group
from opendata_buffer.cli.target import target_of
from opendata_buffer.cli.terminal import reader_table, readers_table, show
from opendata_buffer.cli.text import confirm, echo_json_lines, format_retention, format_span, plural
from opendata_buffer.config import check_reader_name
from opendata_buffer.consumer.place import Place
from opendata_buffer.errors import CorruptData, InvalidInput, TransientStorageError
from opendata_buffer.runtime import Runtime

MEANS = (
    "Producers go on, also those of other languages. A consumer without a reader's name is refused "
    "from now on. Stop the consumers of other libraries and older releases: they would take "
    "batches from all readers, and their garbage collectors delete what the log keeps. Continue as "
    "a named reader. It cannot be undone"
)

V1_PREFIX_WARNING = (
    "warning: never start that consumer with the data path prefix of the log: its collector would "
    "delete the log's batches. Give it the right to delete below its own prefix only"
)

V1_WARNING = (
    "warning: no garbage collector of another library or an older release may delete below this "
    "prefix: it deletes the batches of segments"
)


@click.group(cls=Group)
def readers() -> None:
    """List, set and delete the named readers of a log, or make a log of a queue.

    Each reader of a log reads everything, with a position of its own. For a topic, a command works
    on all partitions, or on one with --partition.
    """


@readers.command(cls=Command)
@options.queue
@options.text(
    "--retention",
    "DURATION",
    "Keep batches for at least this time, such as 7d, even after every reader has acknowledged "
    "them; 'none' does not keep them longer. Default: none for a new log, unchanged for an "
    "existing one.",
)
@options.text(
    "--retention-bytes",
    "SIZE",
    "Keep at least this many bytes of batches, such as 500GB, even after every reader has "
    "acknowledged them; 'none' does not keep them longer. If --retention is given too, the limit "
    "that keeps less applies. Default: none for a new log, unchanged for an existing one.",
)
@options.text(
    "--reader-expiry",
    "DURATION",
    "If a reader does not move for this time, no batches are kept for it any more. Default: 7d "
    "for a new log, unchanged for an existing one.",
)
@options.yes
@options.as_json
@click.pass_obj
def enable(
    runtime: Any,
    /,
    retention: str | None,
    retention_bytes: str | None,
    reader_expiry: str | None,
    yes: bool,
    as_json: bool,
    **queue: Any,
) -> None:
    """Make a log of a queue, or change how long a log keeps batches.

    For a topic this applies to each partition. Nothing that is queued is lost: a new reader begins
    with the oldest batch. Asks first, because a consumer without a reader's name can no longer read
    the queue. If a partition of a topic lacks a reader that others have, the command registers the
    reader there.
    """
    given = _limits(retention, retention_bytes, reader_expiry)
    target = target_of(runtime, queue)
    if target.topic is None:  # A partition may not have been written yet.
        target.reader().manifest()
    plain = [each for each in target.queues() if not each.is_log()]
    for name in filter(None, map(running_consumer, plain)):
        click.echo(f"warning: {name} seems to run: it is fenced, and ends with an error", err=True)
    if plain:
        which = "the queue" if target.topic is None else plural(len(plain), "partition")
        confirm(f"{which} of {target.store.url} will be a log with named readers. {MEANS}", yes)
    logs = enable_logs(target, given)
    for log in logs:
        _print_enabled(log, as_json=as_json)
    if any(log.made for log in logs):
        click.echo(V1_WARNING, err=True)
    for note in expired_notes(target, logs):
        click.echo(f"warning: {note}", err=True)


def _limits(
    retention: str | None, retention_bytes: str | None, reader_expiry: str | None
) -> dict[str, int | None]:
    """Return the limits of a log that were given as options; None for a limit of 'none'."""
    given: dict[str, int | None] = {}
    if retention is not None:
        given["retention_ms"] = None if retention == "none" else duration_ms(retention)
    if retention_bytes is not None:
        size = None if retention_bytes == "none" else size_bytes(retention_bytes)
        given["retention_bytes"] = size
    if reader_expiry is not None:
        given["reader_expiry_ms"] = duration_ms(reader_expiry)
    check_limits(**given)
    return given


def _print_enabled(log: LogSettings, *, as_json: bool) -> None:
    """Print what 'readers enable' did to one queue."""
    fields = asdict(log)
    del fields["readers"]
    kept = format_retention(log.retention_ms, log.retention_bytes)
    line = (
        f"{log.partition}: {'is a log now' if log.made else 'is a log'}, from sequence "
        f"{log.first_sequence:,} on; retention: {kept}; readers expire after "
        f"{format_span(log.reader_expiry_ms)}"
    )
    for name, sequence in log.registered.items():
        line += f"\n{log.partition}: registered reader {name}, from sequence {sequence:,} on"
    click.echo(json.dumps(fields) if as_json else line)


@readers.command(cls=Command)
@options.queue
@click.argument("name")
@options.text(
    "--v1",
    "PREFIX",
    "Prefix of a queue for the consumer, below which there is nothing yet. Its manifest is "
    "PREFIX/manifest.",
    required=True,
)
@options.text(
    "--from",
    "WHERE",
    "Where the reader begins: earliest, latest, a sequence, or a time such as "
    "2026-01-31T03:00:00Z.",
    default="earliest",
)
@options.as_json
@click.pass_obj
def add(runtime: Any, /, name: str, v1: str, as_json: bool, **queue: Any) -> None:
    """Make a consumer of another language (v1) a reader of a log.

    Creates a queue with a manifest of its own, to which the processes of the log append the same
    batches. Nothing is copied. Then start the consumer with the manifest path and the data path
    prefix that this command prints, and with the same store. It gets every batch, also those of
    transactions that are not committed. Our producers and collectors feed the queue; where none
    runs, use 'readers feed'.
    """
    start = Place.parse(queue.pop("from"))
    path, begin = add_v1(target_of(runtime, queue), name, v1, start)
    fields = {"reader": name, "manifest_path": path, "data_path_prefix": v1, "begins": begin}
    line = (
        f"added reader {name}, from sequence {begin:,} on. Configure its consumer with:\n"
        f"  manifest_path: {path}\n  data_path_prefix: {v1}"
    )
    click.echo(json.dumps(fields) if as_json else line)
    click.echo(V1_PREFIX_WARNING, err=True)


@readers.command(cls=Command)
@options.queue
@options.flag("--follow", "Continue until it is interrupted.")
@options.number("--interval-ms", 500, "With --follow: milliseconds between two looks.")
@options.as_json
@click.pass_obj
def feed(runtime: Any, /, follow: bool, interval_ms: int, as_json: bool, **queue: Any) -> None:
    """Feed the queues of v1 consumers: append to them what is new in the log.

    Producers of this library do so after each append, and collectors in each cycle. Use this where
    only other programs write, so that their batches reach the consumers at once. Any number of
    processes may feed at the same time.
    """
    feeding = V1Feeding(target_of(runtime, queue))
    shown: list[dict[str, Any]] = []
    while True:
        try:
            feeders = feeding.feed()
        except TransientStorageError as error:
            if not follow:
                raise
            logger.warning("tries again: %s", error)
            runtime.sleep(interval_ms / 1000)
            continue
        lines = [
            {
                "reader": feeder.name,
                "manifest_path": feeder.key,
                "fed": None if feeder.queue is None else feeder.queue.next_sequence,
                "stopped": feeder.fault,
            }
            for feeder in feeders
        ]
        if lines != shown and as_json:
            echo_json_lines(lines)
        elif lines != shown:
            for feeder, line in zip(feeders, lines, strict=True):
                state = feeder.fault or f"fed up to sequence {line['fed']}"
                click.echo(f"{feeder.name}: {feeder.key}: {state}")
        elif not lines and not follow:
            click.echo("no v1 consumers: 'readers add' makes one", err=True)
        shown = lines
        if not follow:
            break
        runtime.sleep(interval_ms / 1000)
    if stopped := [feeder.fault for feeder in feeders if feeder.fault]:
        raise Failure(". ".join(stopped))


@readers.command("list", cls=Command)
@options.queue
@options.as_json
@click.pass_obj
def list_(runtime: Any, /, as_json: bool, **queue: Any) -> None:
    """List the readers, and how far each is behind.

    With --json prints a line for each reader and partition, or [] if there is none.
    """
    target = target_of(runtime, queue)
    found, faults = _readers_in(target)
    if as_json:
        echo_json_lines(map(asdict, found))
    else:
        show(readers_table(found, target.topic is not None))
    _fail(faults)


@readers.command(cls=Command)
@options.queue
@click.argument("name", required=False)
@options.as_json
@click.pass_obj
def describe(runtime: Any, /, name: str | None, as_json: bool, **queue: Any) -> None:
    """Show all that is known of one reader, or of each.

    With --json prints a line for each reader and partition, or [] if there is none.
    """
    if name is not None:
        check_reader_name(name)
    found, faults = _readers_in(target_of(runtime, queue), name)
    if as_json:
        echo_json_lines(map(asdict, found))
    else:
        for reader in found:
            show(reader_table(reader))
    _fail(faults)


@readers.command(cls=Command)
@options.queue
@click.argument("name")
@options.flag("--to-earliest", "To the oldest batch that is kept.")
@options.flag("--to-latest", "To the end: the reader gets only later batches.")
@options.text(
    "--to-datetime", "TIME", "To a time such as 2026-01-31T03:00:00Z; UTC without a zone."
)
@options.text("--by-duration", "DURATION", "To this time before now, such as 6h.")
@click.option(
    "--shift-by", type=int, metavar="N", help="By N batches; a negative number moves it back."
)
@click.option("--to-sequence", type=options.NATURAL, metavar="N", help="To a sequence.")
@options.flag("--dry-run", "Only print the plan.")
@options.flag("--force", "Do it even if a consumer runs under this name. The consumer is fenced.")
@options.as_json
@click.pass_obj
def reset(
    runtime: Any, /, name: str, dry_run: bool, force: bool, as_json: bool, **given: Any
) -> None:
    """Move a reader to another position, or create a reader at a position.

    Deletes nothing, and does not affect other readers. Batches that this reader skips can be
    deleted once all other readers have acknowledged them and the retention is over.
    """
    names = ("to_earliest", "to_latest", "to_datetime", "by_duration", "shift_by", "to_sequence")
    flags = {each: f"--{each.replace('_', '-')}" for each in names}
    values = {each: given.pop(each) for each in names}
    # A sequence of 0 is equal to False, and is given nevertheless.
    chosen = {
        each: value for each, value in values.items() if value is not None and value is not False
    }
    if len(chosen) != 1:
        raise click.UsageError(f"give exactly one of {', '.join(flags.values())}")
    ((kind, value),) = chosen.items()
    check_reader_name(name)
    where = _where(kind, value, runtime)
    target = target_of(runtime, given)
    if target.topic is not None and kind in ("shift_by", "to_sequence"):
        raise click.UsageError(
            f"{flags[kind]} is about sequences, and partitions count separately: name one with "
            "--partition"
        )
    done = reset_readers(target, name, lambda _: where, force=force, dry_run=dry_run)
    for plan, view in done:
        if as_json:
            click.echo(json.dumps({"dry_run": dry_run, **asdict(plan)}))
            continue
        if plan.before is None:
            before, count = "a new reader", view.count(plan.after, view.next_sequence)
            moved = f"{plural(count, 'batch')} will be read"
        else:
            before = f"from {plan.before:,}"
            moved = f"{plural(plan.again, 'batch')} will be read again"
            if plan.passed:
                moved = f"{plural(plan.passed, 'batch')} will be passed by"
        would = "would be set" if dry_run else "is set"
        click.echo(f"{plan.partition}: {name} {would}, {before}, to {plan.after:,}; {moved}")


@readers.command(cls=Command)
@options.queue
@click.argument("name")
@options.flag("--force", "Do it even if a consumer runs under this name.")
@options.as_json
@click.pass_obj
def delete(runtime: Any, /, name: str, force: bool, as_json: bool, **queue: Any) -> None:
    """Delete a reader, so that no batches are kept for it.

    Batches that only this reader had not read can then be deleted, once the retention is over. A
    consumer that starts with the name again begins with the oldest batch that is kept. With
    --partition, the reader is deleted only there: it stays a reader of the topic, 'status' warns
    that it is missing from this partition, and 'readers enable' registers it there again.
    """
    check_reader_name(name)
    target = target_of(runtime, queue)
    for partition in delete_reader(target, name, force=force):
        fields = {"partition": partition, "deleted": name}
        line = f"{partition}: deleted reader {name}"
        click.echo(json.dumps(fields) if as_json else line)


def _fail(faults: list[CorruptData]) -> None:
    """Raise an error for positions that could not be read, after the others were shown."""
    if faults:
        raise Failure(". ".join(str(fault).rstrip(".") for fault in faults))


def _where(kind: str, value: Any, runtime: Runtime) -> Place | int:
    """Return the position that an option of ``reset`` names, or how many batches to move by."""
    if kind == "shift_by":
        return int(value)
    if kind == "by_duration":
        return Place(value, since_ms=runtime.now_ms() - duration_ms(value))
    start = Place.parse(kind.removeprefix("to_") if value is True else str(value))
    if kind == "to_datetime" and start.since_ms is None:
        raise InvalidInput(f"invalid time {value!r}: use one such as 2026-01-31T03:00:00Z")
    return start


def _readers_in(
    target: Target, name: str | None = None
) -> tuple[list[ReaderStatus], list[CorruptData]]:
    """Return all readers of a log or of all partitions, or those called ``name``.

    Warns of readers that are missing in some partitions of a topic.

    Returns:
        The readers; and the errors of those whose position cannot be read.

    Raises:
        InvalidInput: No reader is called ``name``.
    """
    faults: list[CorruptData] = []
    found, notes = readers_in(target, name, faults.append)
    if not (found or faults):
        click.echo("no readers yet: a consumer with a reader's name makes one", err=True)
    for note in notes:
        click.echo(f"warning: {note}", err=True)
    return found, faults
