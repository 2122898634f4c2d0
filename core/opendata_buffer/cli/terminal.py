"""What a person sees in a terminal: tables, sizes and ages. Built on rich."""

from __future__ import annotations

from collections.abc import Iterable

from rich.table import Table
from rich.text import Text

from opendata_buffer.admin.broker import BrokerStatus, ClaimsStatus
from opendata_buffer.admin.status import Status
from opendata_buffer.admin.topic import TopicStatus
from opendata_buffer.cli.words import plural, waiting

__all__ = [
    "format_age",
    "format_bytes",
    "status_table",
    "table",
    "topic_table",
]


def format_bytes(size: int) -> str:
    """``1536`` as ``1.5 KiB``."""
    if size < 1024:
        return f"{size} B"
    value = float(size)
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        value /= 1024
        if value < 1024 or unit == "TiB":
            break
    return f"{value:.1f} {unit}"


def format_age(seconds: float | None) -> str:
    """``93.2`` as ``1 min 33 s``; None as a dash."""
    if seconds is None:
        return "-"
    # Another machine's clock may run ahead: an age below zero is no age.
    if seconds < 10:
        return f"{max(0.0, seconds):.1f} s"
    whole = int(seconds)
    days, whole = divmod(whole, 86_400)
    hours, whole = divmod(whole, 3_600)
    minutes, whole = divmod(whole, 60)
    if days:
        return f"{days} d {hours} h"
    if hours:
        return f"{hours} h {minutes} min"
    if minutes:
        return f"{minutes} min {whole} s"
    return f"{whole} s"


def topic_table(status: TopicStatus) -> Table:
    """A topic for a person: a line for each partition."""
    total = f"{plural(len(status.partitions), 'partition')}, {waiting(status.queue_length)}"
    result = Table(title=Text(f"{status.store}: {total}"), title_justify="left", box=None)
    result.add_column("partition", style="cyan")
    result.add_column("state")
    for name in ("batches", "oldest", "undecided", "next sequence", "epoch"):
        result.add_column(name, justify="right")
    for each in status.partitions:
        result.add_row(
            Text(each.name),
            each.state,
            f"{each.queue_length:,}",
            format_age(each.oldest_age_seconds),
            f"{each.undecided:,}" if each.undecided else "-",
            f"{each.next_sequence:,}",
            f"{each.epoch:,}",
        )
    return result


def table(title: str, rows: Iterable[tuple[str, str]]) -> Table:
    """Two columns, names and values. Values are shown as they are, never as markup."""
    result = Table(title=Text(title), show_header=False, title_justify="left", box=None)
    result.add_column(style="cyan")
    result.add_column(overflow="fold")
    for name, value in rows:
        result.add_row(Text(name), Text(value))
    return result


def status_table(status: Status) -> Table:
    """A queue's status for a person."""

    def entry(sequence: int | None, age: float | None) -> str:
        return "-" if sequence is None else f"{sequence:,}, {format_age(age)} old"

    rows = [
        ("manifest", f"{status.manifest} ({format_bytes(status.manifest_bytes)})"),
        ("data path prefix", status.data_path_prefix),
        ("queue length", _stored(status.queue_length, "batch", status.bytes_queued)),
        ("oldest sequence", entry(status.oldest_sequence, status.oldest_age_seconds)),
        ("newest sequence", entry(status.newest_sequence, status.newest_age_seconds)),
        ("next sequence", f"{status.next_sequence:,}"),
        ("epoch", f"{status.epoch:,}"),
        ("orphans", _stored(status.orphans, "object", status.orphan_bytes)),
    ]
    if status.missing:
        rows.append(("missing", f"{plural(status.missing, 'object')} of queued batches: run fsck"))
    if status.undecided:
        oldest = format_age(status.oldest_undecided_seconds)
        rows.append(
            ("undecided", f"{plural(status.undecided, 'transaction')}, the oldest {oldest} old")
        )
    if status.broker is not None:
        rows += _broker_rows(status.broker)
    if status.claims is not None:
        rows.append(("claims", _claims(status.claims)))
    rows += [("note", each) for each in status.notes]
    return table(status.store, rows)


def _stored(count: int, noun: str, size: int) -> str:
    return f"{plural(count, noun)}, {format_bytes(size)} stored"


def _broker_rows(broker: BrokerStatus) -> list[tuple[str, str]]:
    term = ("broker term", f"{broker.term:,}, id {broker.id}")
    if not broker.address:
        return [("broker", "none, the last one has left"), term]
    if broker.alive is None:
        return [("broker", f"{broker.address}, not asked"), term]
    if not broker.alive:
        return [("broker", f"{broker.address}, DEAD or not reached: {broker.reason}"), term]
    rate, size = broker.commit_rate or 0.0, broker.group_size or 0.0
    commits = (
        f"{broker.commits or 0:,}, {rate:.1f}/s, {size:.1f} entries each, "
        f"{broker.conflicts or 0:,} conflicts, {broker.floors or 0:,} pauses for others"
    )
    clients = f"{broker.clients or 0:,}, {broker.waiting or 0:,} entries wait"
    return [
        ("broker", f"{broker.address}, alive"),
        term,
        ("broker clients", clients),
        ("broker commits", commits),
    ]


def _claims(claims: ClaimsStatus) -> str:
    text = f"{claims.held:,} held, {claims.done:,} done beyond {claims.frontier:,}"
    if claims.oldest_held is None:
        return text
    return (
        f"{text}; the oldest held is {claims.oldest_held:,}, by {claims.oldest_worker}, "
        f"delivery {claims.oldest_deliveries or 1:,}"
    )
