"""What commands draw in a terminal: tables and progress. Built on rich."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

from rich import progress
from rich.console import Console, Group
from rich.filesize import decimal as format_bytes
from rich.table import Table
from rich.text import Text

from opendata_buffer.admin.status import BrokerStatus, ClaimsStatus, Status, TopicStatus
from opendata_buffer.admin.transactions import OpenTransaction
from opendata_buffer.cli.output import format_age, plural, waiting
from opendata_buffer.queue.consumer_info import ConsumerInfo


def topic_table(status: TopicStatus) -> Group:
    """A topic for a person: a line for each partition, then its open transactions and notes."""
    total = f"{plural(len(status.partitions), 'partition')}, {waiting(status.queue_length)}"
    table = Table(title=Text(f"{status.store}: {total}"), title_justify="left", box=None)
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
    lines = [f"open: {_transaction(each)}" for each in status.transactions]
    return Group(table, *map(Text, [*lines, *(f"note: {each}" for each in status.notes)]))


def name_value_table(title: str, rows: Iterable[tuple[str, str]]) -> Table:
    """Two columns, names and values. Values are never interpreted as markup."""
    table = Table(title=Text(title), show_header=False, title_justify="left", box=None)
    table.add_column(style="cyan")
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(Text(name), Text(value))
    return table


def status_table(status: Status) -> Table:
    """A queue's status for a person."""

    def entry(sequence: int | None, age: float | None) -> str:
        return "-" if sequence is None else f"{sequence:,}, {format_age(age)} old"

    def stored(count: int, noun: str, size: int) -> str:
        least = "" if status.listed_all else "at least "
        return f"{plural(count, noun)}, {least}{format_bytes(size)} stored"

    rows = [
        ("manifest", f"{status.manifest} ({format_bytes(status.manifest_bytes)})"),
        ("data path prefix", status.data_path_prefix),
        ("queue length", stored(status.queue_length, "batch", status.bytes_queued)),
        ("oldest sequence", entry(status.oldest_sequence, status.oldest_age_seconds)),
        ("newest sequence", entry(status.newest_sequence, status.newest_age_seconds)),
        ("next sequence", f"{status.next_sequence:,}"),
        ("epoch", f"{status.epoch:,}"),
        ("consumer", _consumer(status.epoch, status.consumer)),
        ("orphans", stored(status.orphans, "object", status.orphan_bytes)),
    ]
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
        rows.append(("quarantine", f"{count} skipped or trimmed, kept until somebody deletes them"))
    rows += [("", _skipped(each)) for each in status.quarantine]
    rows += [("note", each) for each in status.notes]
    return name_value_table(status.store, rows)


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
    try:
        at = datetime.fromtimestamp(found.since_ms / 1000, UTC).isoformat(timespec="seconds")
    except (OverflowError, ValueError, OSError):
        at = f"{found.since_ms} ms"
    text = f"{found.program}{query}, process {found.process} on {found.host}, since {at}"
    return text if found.epoch == epoch else f"{unknown}; epoch {found.epoch} was {text}"


def _short_consumer(epoch: int, found: ConsumerInfo | None) -> str:
    if epoch and found is not None and found.epoch == epoch:
        return f"{found.program} on {found.host}"
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


@contextmanager
def track(what: str) -> Iterator[Callable[[int, int | None], None]]:
    """A progress bar; yields what is called with the number of items done, and of all if known."""
    with _progress(what, progress.BarColumn(), progress.MofNCompleteColumn()) as (bar, task):
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextmanager
def count_progress(what: str) -> Iterator[Callable[[int], None]]:
    """The bytes so far; yields what is called with the number of further bytes."""
    with _progress(what, progress.DownloadColumn(), progress.TransferSpeedColumn()) as (bar, task):
        yield lambda size: bar.advance(task, size)


@contextmanager
def _progress(
    what: str, *columns: progress.ProgressColumn
) -> Iterator[tuple[progress.Progress, progress.TaskID]]:
    """Progress on stderr, if that is a terminal."""
    console = Console(stderr=True)
    console.quiet = not console.is_terminal
    before = progress.SpinnerColumn(), progress.TextColumn("{task.description}")
    shown = *before, *columns, progress.TimeElapsedColumn()
    with progress.Progress(*shown, console=console, transient=True, disable=console.quiet) as bar:
        yield bar, bar.add_task(what, total=None)
