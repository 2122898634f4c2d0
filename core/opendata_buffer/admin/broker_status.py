"""Read the state of a queue's broker, and of the claims of its workers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from opendata_buffer import errors
from opendata_buffer.admin.target import Target
from opendata_buffer.broker.claims import claims_key, claims_kind, decode
from opendata_buffer.broker.client import ChannelClosed, Connection, DiscoveryRecord
from opendata_buffer.broker.protocol import ProtocolError
from opendata_buffer.queue.sidecar import read_sidecar

STATS_S = 1.0  # seconds to wait for a broker's answer; a running broker answers sooner


@dataclass(frozen=True, kw_only=True)
class BrokerStatus:
    """The broker that the queue's discovery record names.

    Counters are those of its term. They are None if it did not answer.
    """

    term: int
    id: str
    address: str  # where clients reach it; empty if it has stopped without a successor
    seen_ms: int  # last renewal of the record, by its clock, since the Unix epoch
    alive: bool | None = None  # whether it answered; None if it was not asked
    reason: str = ""  # why it gave no answer
    clients: int | None = None  # connections, including the one that asked
    waiting: int | None = None  # entries that wait for the next write
    commits: int | None = None  # manifest writes that were applied
    appended: int | None = None  # entries appended by them
    conflicts: int | None = None  # writes that lost a race against a writer without the broker
    pauses: int | None = None  # pauses for writers that append without it, such as Spark's sink
    serving_seconds: float | None = None
    group_size: float | None = None  # entries per write
    commit_rate: float | None = None  # writes per second


@dataclass(frozen=True, kw_only=True)
class ClaimsStatus:
    """The batches that workers hold."""

    frontier: int  # sequence of the first unfinished batch
    held: int
    done: int  # finished batches that wait for an older one
    oldest_held: int | None  # sequence of the oldest held batch
    oldest_worker: str | None  # the worker that holds it
    oldest_deliveries: int | None  # how often it was delivered


def ask_broker(
    announced: DiscoveryRecord, connect: Callable[[DiscoveryRecord], Connection] | None
) -> BrokerStatus:
    """Ask the announced broker for its statistics, for up to two seconds.

    Args:
        announced: The broker's discovery record.
        connect: Opens a connection to the broker; None to ask no broker.

    Returns:
        The broker as it answered, or as it is announced.
    """
    known = BrokerStatus(
        term=announced.term, id=announced.id, address=announced.address, seen_ms=announced.seen_ms
    )
    if connect is None or not announced.serves:
        return known
    try:
        connection = connect(announced)
    except (ChannelClosed, ProtocolError) as error:
        return replace(known, alive=False, reason=str(error))
    try:
        stats = connection.stats(STATS_S)
    finally:
        connection.close()
    if stats is None:
        return replace(known, alive=False, reason=f"no answer within {STATS_S:g} s")
    names = ("clients", "waiting", "commits", "appended", "conflicts", "pauses")
    counters: dict[str, Any] = {name: stats.get(name) for name in names}
    commits, appended = counters["commits"] or 0, counters["appended"]
    if seconds := stats.get("serving_s"):
        counters |= {"serving_seconds": seconds, "commit_rate": commits / seconds}
    if commits and appended:
        counters["group_size"] = appended / commits
    return replace(known, alive=True, **counters)


def read_claims(queue: Target) -> ClaimsStatus | None:
    """Read the claims of workers.

    Args:
        queue: The queue.

    Returns:
        The claims; None if the queue never had any.

    Raises:
        CorruptData: The object cannot be read. The error contains the command that replaces it.
    """
    kind = claims_kind(queue.name)
    key = claims_key(queue.prefix)
    try:
        claims = read_sidecar(queue.store, key, kind, lambda data: decode(data, kind))
    except errors.ObjectNotFound:
        return None
    oldest = min(claims.held, default=None)
    return ClaimsStatus(
        frontier=claims.frontier,
        held=len(claims.held),
        done=len(claims.done),
        oldest_held=oldest,
        oldest_worker=None if oldest is None else claims.held[oldest].worker,
        oldest_deliveries=None if oldest is None else claims.deliveries.get(oldest),
    )
