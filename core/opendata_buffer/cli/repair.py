"""``fsck``, ``skip``, ``restore``, ``trim`` and ``gc``."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import click
from rich.filesize import decimal as format_bytes

from opendata_buffer.admin.queue_check import (
    REPAIRED_BY,
    Finding,
    Kind,
    Report,
    check_queue,
    plan_repair,
    repair,
)
from opendata_buffer.admin.readers import readers_of, view_of
from opendata_buffer.admin.target import Target
from opendata_buffer.admin.trimming import (
    check_unqueued,
    collect,
    plan_trim,
    restore_batch,
    restore_object,
    skip_batch,
    trim_queue,
)
from opendata_buffer.cli import options
from opendata_buffer.cli.errors import Failure, print_summary
from opendata_buffer.cli.options import LONG_MS, command
from opendata_buffer.cli.target import check_start, one_queue, target_of
from opendata_buffer.cli.text import confirm, plural
from opendata_buffer.config import DEFAULT_GRACE_PERIOD_MS, ConsumerConfig
from opendata_buffer.consumer.place import Place
from opendata_buffer.hints import Action, Hint, Surface
from opendata_buffer.queue.ownership import change_grace_period

KEPT = "copied to the quarantine first"
NOT_KEPT = (
    "NOT copied: the garbage collector deletes their objects once they are older than its grace "
    "period, and nothing restores them then"
)
GO_ON = (
    "Spark queries continue with failOnDataLoss=false once; a consumer that keeps its own position "
    "starts without it"
)


@command()
@options.queue
@options.flag(
    "--repair repair_found",
    "Repair the problems: rebuild a manifest, and skip batches that cannot be delivered. Objects "
    "are copied before they are replaced. A sound manifest stays unchanged.",
)
@options.flag("--dry-run", "With --repair: only print what would be done.")
@options.yes
@options.as_json
@click.pass_obj
def fsck(
    runtime: Any, /, repair_found: bool, dry_run: bool, yes: bool, as_json: bool, **queue: Any
) -> None:
    """Check that every queued batch exists and decodes; exit with 1 and a list if not.

    Prints a line for each problem and note, and the amount that was checked: the bytes of records,
    and of their objects as stored. For a topic it checks all partitions. Changes nothing without
    --repair. Stop producers and consumers before a repair; a consumer that still reads is fenced.
    With --json prints a line for each queue.
    """
    if (dry_run or yes) and not repair_found:
        raise click.UsageError("--dry-run and --yes are about --repair: give that, too")
    target = target_of(runtime, queue, ConsumerConfig)

    problems: dict[str, int] = {}
    repairable, reasons = 0, list[str]()
    for each in target.written():
        where = "" if target.topic is None else f"{each.prefix}: "
        report = check_queue(each)
        tries = repair_found and not report.ok
        repaired: list[tuple[Finding, str | None]] = []
        if tries:
            if not as_json:
                _print_report(report, where, every=True)
            repaired = _repair(each, report, dry_run=dry_run, yes=yes, as_json=as_json)
            if repaired:
                report = check_queue(each)
        if as_json:
            _print_as_json(each, report, repaired if tries else None)
        else:
            _print_repaired(each, report, repaired)
            if repaired or not tries:
                _print_report(report, where)
        if not report.ok:
            plan, left = plan_repair(report, each.name)
            problems[each.config.manifest_path] = len(left) if dry_run else len(report.problems)
            repairable += len(plan)
            reasons += [reason for _, reason in left]
    if reasons or (problems and not dry_run):
        advice = (
            "restore the objects if there are copies, or repair with 'opendata-buffer fsck "
            f"{options.queue_words()} --repair', which copies what it skips"
        )
        if dry_run or not repairable:
            advice = reasons[0]
        raise Failure(
            f"{plural(sum(problems.values()), 'problem')} {'would be left ' if dry_run else ''}in "
            f"the {'queue' if len(problems) == 1 else 'queues'} with manifest "
            f"{', '.join(map(repr, problems))}: {advice}"
        )


def _repair(
    queue: Target, report: Report, *, dry_run: bool, yes: bool, as_json: bool
) -> list[tuple[Finding, str | None]]:
    """Print how the problems of a queue are repaired, and repair them.

    Returns:
        The repaired problems, each with the key of the copy.
    """
    plan, left = plan_repair(report, queue.name)
    for finding in plan:
        click.echo(f"repair: {finding.name} {REPAIRED_BY[finding.kind]}", err=as_json)
    for finding, reason in left:
        click.echo(f"not repaired: {finding.name}: {reason}", err=as_json)
    if not plan or dry_run:
        return []
    confirm(f"{plural(len(plan), 'problem')} of {queue.prefix!r} will be repaired", yes)
    return repair(queue, plan)


def _print_as_json(
    queue: Target, report: Report, repaired: list[tuple[Finding, str | None]] | None
) -> None:
    """Print the line of one queue.

    Args:
        queue: The queue.
        report: Its last check.
        repaired: The repaired problems; None if none was to be repaired.
    """
    fields = {"ok": report.ok, **asdict(report), "partition": queue.prefix}
    del fields["is_log"], fields["positions"]
    if repaired is not None:
        fields["repaired"] = [{**asdict(finding), "copy": copy} for finding, copy in repaired]
    click.echo(json.dumps(fields))


def _print_repaired(
    queue: Target, report: Report, repaired: list[tuple[Finding, str | None]]
) -> None:
    """Print a line for each repaired problem, and where readers continue after it."""
    for finding, copy in repaired:
        copied = "there was nothing to copy" if copy is None else f"copied as {copy}"
        click.echo(f"repaired {finding.name} ({finding.kind}); {copied}")
        if finding.kind is Kind.MANIFEST:
            rebuilt = queue.reader().manifest()
            click.echo(
                f"sequences continue at {rebuilt.first_sequence:,}, and the next batch gets "
                f"{rebuilt.next_sequence:,}"
            )
            click.echo(_after_rebuild(queue) if report.is_log else GO_ON)


def _after_rebuild(queue: Target) -> str:
    """Describe where the readers of a log continue after its manifest was rebuilt.

    The rebuilt manifest begins at a much higher sequence.
    """
    view = view_of(queue)
    (_, last), first = view.gaps[-1], view.manifest.first_sequence
    begin = view.gaps[-1][0] if last == first else first
    lines = []
    for reader in readers_of(queue, view):
        hint = Hint(Action.RESET_TO_CONTINUE, queue.name, first, readers=(reader.name,))
        before = ""
        if reader.next_sequence < begin:
            before = f"It reads up to sequence {begin - 1} first. "
        lines.append(f"reader {reader.name!r}: {before}{hint}")
    return "\n".join(lines) or f"a new reader has to begin at sequence {first} or later"


def _print_report(report: Report, where: str, *, every: bool = False) -> None:
    unread = [each.location for each in report.notes if each.kind is Kind.UNREAD]
    if unread and not every:
        click.echo(
            f"{where}note: {plural(len(unread), 'batch')} that no entry names, and that no "
            f"consumer is known to have read; the first is {unread[0]!r}"
        )
    for finding in report.notes:
        if every or finding.kind is not Kind.UNREAD:
            click.echo(f"{where}note: {finding}")
    for finding in report.problems:
        click.echo(f"{where}problem: {finding}")
    click.echo(
        f"{where}{plural(report.batches, 'batch')}, {plural(report.records, 'record')} checked, "
        f"{format_bytes(report.bytes)} of records in {format_bytes(report.stored_bytes)} of objects"
    )


@command()
@options.queue
@click.argument("sequence", type=options.NATURAL)
@options.flag("--force", "Skip the batch even if it can be read.")
@options.as_json
@click.pass_obj
def skip(runtime: Any, /, sequence: int, force: bool, as_json: bool, **queue: Any) -> None:
    """Skip the one batch that stops a queue.

    SEQUENCE is the sequence of the batch, as fsck and errors show it. The command copies the batch
    to the quarantine and puts an empty one in its place; all others stay. Stop the queue's consumer
    or Spark query first, and start it again afterwards: one that still runs is fenced.
    """
    target = one_queue(runtime, queue, ConsumerConfig)
    report, epoch = skip_batch(target, sequence, force=force)
    if as_json:
        click.echo(json.dumps({**report.as_json(), "epoch": epoch}))
        return
    copied = "there was no object to copy" if report.copied_bytes is None else "copied"
    click.echo(
        f"skipped batch {sequence} at {report.location!r} ({report.error}); in the quarantine as "
        f"{report.id}, {copied}"
    )


@command()
@options.queue
@click.argument("ids", metavar="ID|LOCATION...", nargs=-1, required=True)
@options.yes
@click.pass_obj
def restore(runtime: Any, /, ids: tuple[str, ...], yes: bool, **queue: Any) -> None:
    """Produce batches again that were skipped, trimmed or are not queued.

    Appends them to the queue. ID is the id of a copy, as 'status' shows it. The copy must be
    readable; if it is not, repair the object <data-path-prefix>/_quarantine/<ID>.object first. If
    the object of a skipped batch was gone, the command uses the object itself once it is back. Copy
    and report stay. Restoring a batch again does nothing.

    LOCATION is the whole key of a batch object that exists and is not queued. Asks first.
    """
    target = one_queue(runtime, queue, ConsumerConfig)
    for name in ids:
        if "/" in name:
            confirm(check_unqueued(target, name), yes)
            done = restore_object(target, name)
        else:
            done = restore_batch(target, name)
        if done.is_new:
            click.echo(f"restored batch {done.id} as sequence {done.sequence}")
        else:
            click.echo(f"batch {done.id} was restored already, as sequence {done.sequence}")


@command(timeout_ms=LONG_MS)
@options.queue
@click.option(
    "--to",
    required=True,
    metavar="WHERE",
    help="New first sequence of the queue: a sequence, a time such as 2026-01-31T03:00:00Z (UTC "
    "without a zone), 'latest', which deletes all waiting batches, or 'earliest', which deletes "
    "none.",
)
@click.option(
    "--copy/--no-copy",
    default=True,
    help="Copy the batches to the quarantine before they are deleted.",
)
@options.flag("--dry-run", "Only print what would be deleted.")
@options.yes
@options.as_json
@click.pass_obj
def trim(
    runtime: Any, /, to: str, copy: bool, dry_run: bool, yes: bool, as_json: bool, **queue: Any
) -> None:
    """Delete the batches before a sequence or a time.

    Prints the batches and asks first. Copies them to the quarantine before it deletes them:
    'status' lists the copies, and 'restore' produces one again. Stop the queue's consumer or Spark
    query first, because one that still runs is fenced. In a topic, a time or 'latest' applies to
    all partitions. With --json prints a line for each queue.
    """
    start = Place.parse(to)
    target = target_of(runtime, queue, ConsumerConfig)
    check_start(target, start, "--to")
    plans = [(each, plan_trim(each, start)) for each in target.written()]
    for each, plan in plans:
        if plan.dropped and not (as_json or yes):
            which = f"sequences {plan.dropped[0].sequence:,} to {plan.target - 1:,}"
            count = plural(len(plan.dropped), "batch")
            click.echo(f"{each.prefix}: {count}, {which}", err=not dry_run)
    trimmed = sum(len(plan.dropped) for _, plan in plans)
    if trimmed and not dry_run:
        kept = KEPT if copy else NOT_KEPT
        confirm(f"{plural(trimmed, 'batch')} of {target.store.url} will be deleted, {kept}", yes)
    # Made here, because the thread that prints it for a hanging command has no click context.
    summary = (
        f"ended by a signal: 'opendata-buffer status {options.queue_words()}' shows what still "
        "waits. Copies alone delete nothing: run it again, and no batch is copied twice"
    )
    for each, plan in plans:
        done: tuple[int, int | None, list[str]] = (plan.target, None, [])
        if plan.dropped and not dry_run:
            with print_summary(lambda: summary):
                done = trim_queue(each, plan, copy=copy)
        prefix, (first, epoch, copies) = each.prefix, done
        if as_json:
            fields = {
                "partition": prefix,
                "dry_run": dry_run,
                "trimmed": len(plan.dropped),
                "first_sequence": first,
                "epoch": epoch,
                "copies": copies,
            }
            click.echo(json.dumps(fields))
            continue
        would = "would delete" if dry_run else "deleted"
        count = plural(len(plan.dropped), "batch")
        click.echo(f"{prefix}: {would} {count}; the queue begins at sequence {first}")
        if copies:
            partition = "" if target.topic is None else f" --partition {prefix}"
            click.echo(
                f"{prefix}: {plural(len(copies), 'copy')} below {prefix}/_quarantine/; the first "
                f"comes back with 'opendata-buffer restore {options.queue_words()}{partition} "
                f"{copies[0]}'"
            )
    if trimmed and not dry_run and not as_json:
        click.echo(GO_ON)


def _change_grace_period(target: Target, grace_ms: int, yes: bool) -> None:
    queues, longest = target.written(), 0
    for queue in queues:
        claim = queue.owner()
        if claim is None:  # Do not create a marker for a mistyped path.
            queue.reader().manifest()
        longest = max(longest, DEFAULT_GRACE_PERIOD_MS if claim is None else claim.grace_ms)
    if grace_ms < longest:
        confirm(
            f"the grace period of {target.store.url} will be {grace_ms:,} ms and not {longest:,}: "
            "a producer or sink that still runs goes by the longer one, and loses batches",
            yes,
        )
    for queue in queues:
        change_grace_period(queue.store, queue.config, queue.runtime, grace_ms)


@command()
@options.queue
@options.flag("--dry-run", "Only print what would be deleted.")
@click.option(
    "--grace-period-ms",
    type=click.IntRange(min=1_000),
    help="First change the queue's grace period for all its programs: younger objects are not "
    "deleted. Shorten it only while no producer and no sink runs.",
)
@options.yes
@options.as_json
@click.pass_obj
def gc(
    runtime: Any,
    /,
    dry_run: bool,
    grace_period_ms: int | None,
    yes: bool,
    as_json: bool,
    **queue: Any,
) -> None:
    """Delete the objects of consumed batches, once.

    For a topic it works in all partitions. A running consumer does this automatically, but not in
    partitions that have left the topic. Refuses a data prefix of another queue, and a queue without
    a manifest.
    """
    target = target_of(runtime, queue, ConsumerConfig)
    if grace_period_ms is not None:
        if dry_run:
            raise click.UsageError("--grace-period-ms changes the queue: leave out --dry-run")
        _change_grace_period(target, grace_period_ms, yes)
    report = collect(target, dry_run=dry_run)
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
            "held": plan.held and str(plan.held),
        }
        click.echo(json.dumps(found))
    else:
        for each in plan.delete:
            click.echo(f"{'would delete' if dry_run else 'delete'} {each.key}")
        total = f"{plural(len(plan.delete), 'object')}, {format_bytes(plan.delete_bytes)}"
        done = f"would delete {total}" if dry_run else f"deleted {report.deleted:,} of {total}"
        click.echo(f"{done}; queued: {plan.referenced:,}, too young: {plan.waiting:,}")
        if plan.held:
            click.echo(f"nothing was deleted: {plan.held.text(Surface.SHELL)}")
    if report.failed:
        first = report.failed[0]
        raise Failure(
            f"{plural(len(report.failed), 'object')} could not be deleted, the first is "
            f"{first.key!r}: {first.reason}. Run it again."
        )
