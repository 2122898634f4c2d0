"""Tables that commands draw in a terminal. Built on rich."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import click
from rich.console import Console, Group, RenderableType
from rich.filesize import decimal as format_bytes
from rich.table import Table
from rich.text import Text

from opendata_buffer.admin.broker_status import BrokerStatus, ClaimsStatus
from opendata_buffer.admin.log_status import LogStatus
from opendata_buffer.admin.queue_status import Status
from opendata_buffer.admin.readers import ReaderStatus
from opendata_buffer.admin.topic_status import TopicStatus
from opendata_buffer.admin.transactions import OpenTransaction
from opendata_buffer.cli.text import (
    format_age,
    format_retention,
    format_span,
    format_time,
    plural,
    waiting,
)
from opendata_buffer.queue.consumer_note import ConsumerInfo


def topic_table(status: TopicStatus) -> Group:
    """Return a topic for a person: a line per partition, then its open transactions and notes."""
    total = f"{plural(len(status.partitions), 'partition')}, {waiting(status.queue_length)}"
    total += f" (records: {_records(status)})"
    table = Table(box=None)
    table.add_column("partition", style="cyan", min_width=12, overflow="fold")
    table.add_column("state")
    for name in ("batches", "oldest", "open", "skipped", "next sequence", "epoch"):
        table.add_column(name, justify="right")
    table.add_column("consumer", overflow="fold")
    for each in status.partitions:
        table.add_row(
            Text(each.name),
            each.state,
            f"{each.queue_length:,}",
            format_age(each.oldest_age_seconds),
            f"{each.undecided:,}" if each.undecided else "-",
            f"{each.quarantined:,}" if each.quarantined else "-",
            f"{each.next_sequence:,}",
            f"{each.epoch:,}",
            Text(_short_consumer(each.epoch, each.consumer)),
        )
    lines = [
        f"{part.name}: reader {_reader(each)}"
        for part in status.partitions
        if part.log is not None
        for each in part.log.readers
    ]
    lines += [f"open: {_transaction(each)}" for each in status.transactions]
    lines += [f"note: {note}" for note in status.notes]
    return Group(Text(f"{status.store}: {total}"), table, *map(Text, lines))


_WIDEST = 1_000_000  # Characters in a line of a pipe: more than any table has.


def open_console() -> Console:
    """Return a console that writes to stdout."""
    return Console()


def show(renderable: RenderableType, console: Console | None = None) -> None:
    """Print a table, or lines of text.

    Lines are as wide as a terminal. A pipe or a file gets one line for each row, without padding,
    so that ``grep`` and ``awk`` find whole values.

    Args:
        renderable: The table or the lines.
        console: Where to print. Default: stdout.
    """
    console = console or open_console()
    if console.is_terminal:
        console.print(renderable)
        return
    console.width = _WIDEST
    with console.capture() as captured:
        console.print(renderable)
    lines = (line.rstrip() for line in captured.get().split("\n"))
    click.echo("\n".join(lines), nl=False)


def readers_table(readers: Iterable[ReaderStatus], topic: bool) -> Table:
    """Return a table with a line per reader; for a ``topic``, per reader and partition."""
    table = Table(box=None)
    for name in ["partition"] * topic + ["reader"]:
        table.add_column(name, style="cyan", min_width=12, overflow="fold")
    for name in ("batches", "oldest", "next sequence", "expires in"):
        table.add_column(name, justify="right")
    table.add_column("consumer", overflow="fold")
    for each in readers:
        table.add_row(
            *[Text(each.partition)] * topic,
            Text(each.name),
            f"{each.lag:,}",
            format_age(each.oldest_unread_seconds),
            f"{each.next_sequence:,}",
            _expiry(each),
            Text(_program(each)),
        )
    return table


def reader_table(each: ReaderStatus) -> Group:
    """Return a table with all details of one reader."""
    age_s = each.oldest_unread_seconds
    oldest = "" if age_s is None else f", the oldest {format_age(age_s)}"
    rows = [
        ("next sequence", f"{each.next_sequence:,}"),
        ("behind", f"{plural(each.lag, 'batch')}{oldest}"),
        ("consumer", _program(each) if each.runs or each.v1 else f"none, the last was {each.who}"),
        ("epoch", f"{each.epoch:,}"),
        ("last moved", format_time(each.moved_ms) or f"{each.moved_ms} ms"),
        ("expires in", _expiry(each)),
    ]
    if each.v1 is not None:
        fed = f"up to {each.fed or 0:,}, {plural(each.unfed, 'batch')} to go"
        rows.append(("fed", each.stopped or fed))
    return name_value_table(f"{each.partition}: reader {each.name}", rows)


def _program(each: ReaderStatus) -> str:
    if each.stopped:
        return f"{each.who}, FEEDING HAS STOPPED"
    return each.who if each.runs or each.v1 or each.position_missing else "none"


def _expiry(each: ReaderStatus) -> str:
    left = format_age(each.expires_seconds)
    return f"{left}, SOON" if each.expires_soon else left


def name_value_table(title: str, rows: Iterable[tuple[str, str]]) -> Group:
    """Return a title, and a table of names and values. Values are never parsed as markup."""
    table = Table(show_header=False, box=None)
    table.add_column(style="cyan")
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(Text(name), Text(value))
    return Group(Text(title), table)


def status_table(status: Status) -> Group:
    """Return a queue's status for a person."""

    def entry(sequence: int | None, age: float | None) -> str:
        return "-" if sequence is None else f"{sequence:,}, {format_age(age)} old"

    def stored(count: int, noun: str, size: int) -> str:
        least = "" if status.listed_all else "at least "
        return f"{plural(count, noun)}, {least}{format_bytes(size)} stored"

    rows = [
        ("manifest", f"{status.manifest} ({format_bytes(status.manifest_bytes)})"),
        ("data path prefix", status.data_path_prefix),
        ("queue length", stored(status.queue_length, "batch", status.bytes_queued)),
        ("records", _records(status)),
        ("oldest sequence", entry(status.oldest_sequence, status.oldest_age_seconds)),
        ("newest sequence", entry(status.newest_sequence, status.newest_age_seconds)),
        ("next sequence", f"{status.next_sequence:,}"),
        ("epoch", f"{status.epoch:,}"),
        ("consumer", _consumer(status.epoch, status.consumer)),
        ("orphans", stored(status.orphans, "object", status.orphan_bytes)),
    ]
    if status.grace_period_ms is not None:
        rows.append(("grace period", format_age(status.grace_period_ms / 1000)))
    if status.log is not None:
        rows += _log_rows(status.log)
    if status.missing:
        rows.append(("missing", f"{plural(status.missing, 'object')} of queued batches: run fsck"))
    if status.undecided:
        oldest = format_age(status.oldest_undecided_seconds)
        rows.append(("open", f"{plural(status.undecided, 'transaction')}, the oldest {oldest} old"))
    rows += [("", _transaction(each)) for each in status.transactions]
    if status.broker is not None:
        rows += _broker_rows(status.broker)
    if status.claims is not None:
        rows.append(("claims", _claims(status.claims)))
    if status.quarantined:
        count = plural(status.quarantined, "batch")
        rows.append(("quarantine", f"{count} skipped or trimmed, kept until someone deletes them"))
    rows += [("", _skipped(each)) for each in status.quarantine]
    rows += [("note", each) for each in status.notes]
    return name_value_table(status.store, rows)


def _records(status: Status | TopicStatus) -> str:
    if status.records is None:
        return "unknown"
    return f"{'' if status.records_exact else 'about '}{status.records:,}"


def _log_rows(log: LogStatus) -> list[tuple[str, str]]:
    kept = (
        f"{plural(log.kept, 'batch')} kept, {log.first:,} to {log.end - 1:,}"
        if log.kept
        else (f"nothing kept, the next is {log.end:,}")
    )
    retention = format_retention(log.retention_ms, log.retention_bytes)
    rows = [
        ("log", f"{kept}; {log.in_segments:,} of them in segments"),
        ("retention", f"{retention}; readers expire after {format_span(log.reader_expiry_ms)}"),
    ]
    return rows + [("reader", _reader(each)) for each in log.readers]


def _reader(each: ReaderStatus) -> str:
    size = "" if each.lag_bytes is None else f", {format_bytes(each.lag_bytes)}"
    oldest = format_age(each.oldest_unread_seconds)
    return (
        f"{each.name}: {plural(each.lag, 'batch')}{size} behind, the oldest {oldest}; consumer "
        f"{_program(each)}; expires in {_expiry(each)}"
    )


def _transaction(each: OpenTransaction) -> str:
    app = "no name" if each.app is None else f"app {each.app}, batch {each.batch}"
    age = "age unknown" if each.age_seconds is None else f"{format_age(each.age_seconds)} old"
    state = "committed, not acknowledged" if each.committed else "open"
    return (
        f"{each.producer}  {app}  {each.partition} from {each.first_sequence}  "
        f"{plural(each.batches, 'batch')}, {each.behind} behind  {age}  {state}"
    )


def _skipped(report: Mapping[str, Any]) -> str:
    size, again = report["copied_bytes"], report["restored_sequence"]
    copy = "no copy" if size is None else format_bytes(size)
    restored = "" if again is None else f"restored as {again}  "
    return f"{report['id']}  {report['time']}  {copy}  {restored}{report['error']}"


def _consumer(epoch: int, found: ConsumerInfo | None) -> str:
    unknown = "without a record: another client, an older release, or a repair"
    if epoch == 0 or found is None:
        return unknown if epoch else "none yet"
    query = f", query {found.query}" if found.query else ""
    at = format_time(found.since_ms) or f"{found.since_ms} ms"
    ended = ", ended" if found.has_ended else ""
    text = f"{found.program}{query}, process {found.process} on {found.host}, since {at}{ended}"
    return text if found.epoch == epoch else f"{unknown}; epoch {found.epoch} was {text}"


def _short_consumer(epoch: int, found: ConsumerInfo | None) -> str:
    if epoch and found is not None and found.epoch == epoch:
        return f"{found.program} on {found.host}{', ended' if found.has_ended else ''}"
    return "unknown" if epoch else "none yet"


def _broker_rows(broker: BrokerStatus) -> list[tuple[str, str]]:
    term = ("broker term", f"{broker.term:,}, id {broker.id}")
    if not broker.address:
        return [("broker", "none, the last one has stopped"), term]
    if not broker.alive:
        return [("broker", f"{broker.address}, DEAD or not reached: {broker.reason}"), term]
    rate, size = broker.commit_rate or 0.0, broker.group_size or 0.0
    commits = (
        f"{broker.commits or 0:,}, {rate:.1f}/s, {size:.1f} entries each, "
        f"{broker.conflicts or 0:,} conflicts, {broker.pauses or 0:,} pauses for others"
    )
    clients = f"{broker.clients or 0:,}, {broker.waiting or 0:,} entries wait"
    alive = ("broker", f"{broker.address}, alive")
    return [alive, term, ("broker clients", clients), ("broker commits", commits)]


def _claims(claims: ClaimsStatus) -> str:
    text = f"{claims.held:,} held, {claims.done:,} done beyond {claims.frontier:,}"
    if claims.oldest_held is not None:
        oldest = f"{claims.oldest_held:,}, by {claims.oldest_worker}"
        text += f"; the oldest held is {oldest}, delivery {claims.oldest_deliveries or 1:,}"
    return text
