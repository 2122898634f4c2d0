"""The broker of a queue and its workers' claims, as somebody sees them who only looks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from opendata_buffer.broker.claims import CLAIMS, claims_key, decode
from opendata_buffer.broker.client import ChannelClosed, Connection
from opendata_buffer.broker.discovery_record import DiscoveryRecord
from opendata_buffer.broker.secure_channel import ProtocolError
from opendata_buffer.config import QueueConfig
from opendata_buffer.errors import ObjectNotFound
from opendata_buffer.stores.base import Store, read_sidecar

__all__ = ["BrokerStatus", "ClaimsStatus", "ask_broker", "read_claims"]

STATS_S = 1.0
"""A broker that lives answers sooner."""


@dataclass(frozen=True, kw_only=True)
class BrokerStatus:
    """The announced broker. Counters are those of its term; None without an answer.

    Attributes:
        term: Rises with each broker.
        id: Of the broker.
        address: Where clients find it; empty when it has left, and nobody followed.
        seen_ms: Its last sign of life by its own clock, milliseconds since the Unix epoch.
        alive: Whether it answered; None when it was not asked, because it has left or the extra
            ``broker`` is not installed.
        reason: Why it gave no answer.
        clients: Connections, the one that asked included.
        waiting: Entries that wait for the next write.
        commits: Writes of the manifest that landed.
        appended: Entries appended by them.
        conflicts: Attempts that lost a race against somebody who does not use the broker.
        floors: How often it paused for somebody who appends beside it, as Spark's sink does.
        serving_seconds: How long it has served.
    """

    term: int
    id: str
    address: str
    seen_ms: int
    alive: bool | None = None
    reason: str = ""
    clients: int | None = None
    waiting: int | None = None
    commits: int | None = None
    appended: int | None = None
    conflicts: int | None = None
    floors: int | None = None
    serving_seconds: float | None = None

    @property
    def group_size(self) -> float | None:
        """Entries per write."""
        return self.appended / self.commits if self.commits and self.appended else None

    @property
    def commit_rate(self) -> float | None:
        """Writes per second, since it serves."""
        if self.commits is None or not self.serving_seconds:
            return None
        return self.commits / self.serving_seconds


@dataclass(frozen=True, kw_only=True)
class ClaimsStatus:
    """What workers have in hand.

    Attributes:
        frontier: Sequence of the first batch that is not done.
        held: Batches that a worker holds.
        done: Batches that are done and wait for an older one.
        oldest_held: Sequence of the oldest held batch.
        oldest_worker: Who holds it.
        oldest_deliveries: How often it was handed out.
    """

    frontier: int
    held: int
    done: int
    oldest_held: int | None
    oldest_worker: str | None
    oldest_deliveries: int | None


def ask_broker(
    announced: DiscoveryRecord, connect: Callable[[DiscoveryRecord], Connection] | None
) -> BrokerStatus:
    """What the announced broker says of itself; takes two seconds at most.

    Args:
        announced: What the queue says.
        connect: Opens a connection; None does not ask.
    """
    known = BrokerStatus(
        term=announced.term,
        id=announced.id,
        address=announced.address,
        seen_ms=announced.seen_ms,
    )
    if connect is None or not announced.serves:
        return known
    try:
        connection = connect(announced)
    except (ChannelClosed, ProtocolError) as error:
        return replace(known, alive=False, reason=str(error))
    try:
        said = connection.stats(STATS_S)
    finally:
        connection.close()
    if said is None:
        reason = f"no answer within {STATS_S:g} s"
        return replace(known, alive=False, reason=reason)
    return replace(
        known,
        alive=True,
        clients=_count(said, "clients"),
        waiting=_count(said, "waiting"),
        commits=_count(said, "commits"),
        appended=_count(said, "appended"),
        conflicts=_count(said, "conflicts"),
        floors=_count(said, "floors"),
        serving_seconds=_number(said, "serving_s"),
    )


def read_claims(store: Store, config: QueueConfig) -> ClaimsStatus | None:
    """The claims; None where no worker ever was.

    Raises:
        CorruptData: The object holds no claims.
        TransientStorageError, PermanentStorageError: The store did not answer.
    """
    try:
        claims = read_sidecar(store, claims_key(config.data_path_prefix), CLAIMS, decode)
    except ObjectNotFound:
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


def _count(said: Mapping[str, Any], name: str) -> int | None:
    value = said.get(name)
    return value if isinstance(value, int) else None


def _number(said: Mapping[str, Any], name: str) -> float | None:
    value = said.get(name)
    return float(value) if isinstance(value, int | float) else None
