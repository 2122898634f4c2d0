"""What is in a queue: sums over its manifest and one listing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import repeat
from typing import Any

from opendata_buffer.admin.broker import BrokerStatus, ClaimsStatus, ask_broker, read_claims
from opendata_buffer.admin.observe import Observer
from opendata_buffer.admin.transactions import PATIENCE_S, OpenTransaction, open_in
from opendata_buffer.broker.client import Connection
from opendata_buffer.broker.discovery_record import DiscoveryRecord, Lease
from opendata_buffer.config import QueueConfig
from opendata_buffer.errors import CorruptData, PrefixConflict, QueueReset
from opendata_buffer.formats.keys import parse_location
from opendata_buffer.formats.manifest import Manifest, QueueEntry
from opendata_buffer.queue.ownership import check_owner
from opendata_buffer.stores.base import Listing

__all__ = ["Status", "read_status", "summarise"]


@dataclass(frozen=True, kw_only=True)
class Status:
    """A queue at one moment.

    Attributes:
        store: URL of the store.
        manifest: Key of the manifest.
        data_path_prefix: Where its batches are.
        queue_length: Batches that wait for the consumer.
        oldest_sequence: Sequence of the first of them; None when the queue is empty.
        newest_sequence: Sequence of the last of them.
        oldest_age_seconds: Time since it was produced, by its producer's clock and ours.
        newest_age_seconds: The same for the last one.
        next_sequence: What the next batch will get.
        epoch: How often a consumer took over the queue.
        bytes_queued: Sizes of the waiting objects, as stored.
        manifest_bytes: Size of the manifest.
        missing: Waiting batches whose object is not there. ``fsck`` lists them.
        orphans: Batch objects nobody waits for: consumed, or being uploaded right now. The
            garbage collector deletes them when they are old enough.
        orphan_bytes: Their sizes.
        broker: The announced broker; None where there never was one.
        claims: What workers hold; None where there never was one.
        undecided: Transactions that are neither committed nor rolled back.
        oldest_undecided_seconds: Since the first batch of the oldest of them was produced.
        notes: What somebody should look at: a marker that has producers and consumers refused, a
            transaction that nobody ends, or another object beside the manifest that cannot be read.
    """

    store: str
    manifest: str
    data_path_prefix: str
    queue_length: int
    oldest_sequence: int | None
    newest_sequence: int | None
    oldest_age_seconds: float | None
    newest_age_seconds: float | None
    next_sequence: int
    epoch: int
    bytes_queued: int
    manifest_bytes: int
    missing: int
    orphans: int
    orphan_bytes: int
    broker: BrokerStatus | None = None
    claims: ClaimsStatus | None = None
    undecided: int = 0
    oldest_undecided_seconds: float | None = None
    notes: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """All fields, by name, and what is computed from them."""
        found = asdict(self)
        if self.broker is not None:
            found["broker"]["group_size"] = self.broker.group_size
            found["broker"]["commit_rate"] = self.broker.commit_rate
        return found


def read_status(
    observer: Observer, connect: Callable[[DiscoveryRecord], Connection] | None = None
) -> Status:
    """Read the manifest, list the data prefix once, and ask the broker if there is one.

    Args:
        observer: Of the queue.
        connect: Opens a connection to a broker; None asks none.

    Raises:
        InvalidInput: There is no manifest.
        TransientStorageError, PermanentStorageError: The store did not answer.
    """
    store, config = observer.store, observer.config
    before = observer.manifest()
    listing = store.list(config.data_path_prefix + "/")
    # Read again (not transferred when unchanged): a batch enqueued while the listing ran is no
    # orphan, and one dequeued and collected meanwhile is not missing.
    after = observer.manifest()
    now_ms = observer.runtime.now_ms()
    found = summarise(before, after, listing, store=store.url, config=config, now_ms=now_ms)
    notes = [*_refusals(observer, after), *found.notes]
    broker, claims = None, None
    try:
        announced = Lease(store, config, observer.runtime).read()
        broker = None if announced is None else ask_broker(announced, connect)
    except CorruptData as error:
        # A hint that nobody can read must not hide the queue from who is on call.
        notes.append(str(error))
    try:
        claims = read_claims(store, config)
    except CorruptData as error:
        notes.append(str(error))
    return replace(found, broker=broker, claims=claims, notes=tuple(notes))


def summarise(
    before: Manifest,
    after: Manifest,
    listing: Listing,
    *,
    store: str,
    config: QueueConfig,
    now_ms: int,
) -> Status:
    """Add it up; pure.

    Args:
        before: The manifest read before the listing.
        after: The manifest read after it; what is reported.
        listing: The objects below the data prefix.
        store: URL of the store.
        config: Where the queue lives.
        now_ms: Wall clock, for ages.
    """
    sizes = {found.key: found.size for found in listing.objects}
    # Metadata can be most of a manifest and is needed of two entries only.
    locations = set(after.locations())
    known = locations if after is before else set(before.locations())
    # Sets, because there may be a million of them.
    unnamed = sizes.keys() - locations - known
    orphaned = [key for key in unnamed if parse_location(key, config.data_path_prefix) is not None]
    oldest = next(iter(after.entries(limit=1)), None)
    newest = next(iter(after.entries(after.next_sequence - 1)), None)
    pending = open_in(after, config.data_path_prefix, now_ms)
    oldest_pending = max((each.age_seconds or 0.0 for each in pending), default=None)
    return Status(
        store=store,
        manifest=config.manifest_path,
        data_path_prefix=config.data_path_prefix,
        queue_length=after.entry_count,
        oldest_sequence=None if oldest is None else oldest.sequence,
        newest_sequence=None if newest is None else newest.sequence,
        oldest_age_seconds=_age(oldest, config, now_ms),
        newest_age_seconds=_age(newest, config, now_ms),
        next_sequence=after.next_sequence,
        epoch=after.epoch,
        bytes_queued=_total(sizes, locations),
        manifest_bytes=after.size,
        missing=len((locations & known) - sizes.keys()),
        orphans=len(orphaned),
        orphan_bytes=_total(sizes, orphaned),
        undecided=len(pending),
        oldest_undecided_seconds=oldest_pending,
        notes=_stuck(pending, store),
    )


def _refusals(observer: Observer, manifest: Manifest) -> Iterable[str]:
    """Why whoever opens the queue to write or to read is refused, however sound it looks."""
    try:
        claim = check_owner(observer.store, observer.config, runtime=observer.runtime)
        if claim is not None:
            claim.check(manifest)
    except (CorruptData, PrefixConflict, QueueReset) as error:
        yield f"producers and consumers are refused: {error}"


def _stuck(pending: Sequence[OpenTransaction], store: str) -> tuple[str, ...]:
    """A warning for the transaction that holds up most, if nobody seems to end it (failure F40)."""
    for each in pending:
        age_s = each.age_seconds or 0.0
        if age_s >= PATIENCE_S:
            whose = "a publisher without a name" if each.app is None else f"app {each.app!r}"
            return (
                f"a transaction of {whose} (producer {each.producer}) is undecided for "
                f"{age_s / 60:,.0f} min: nothing behind sequence {each.first_sequence} leaves the "
                "queue. Start its writer again, or see 'opendata-buffer transactions list "
                f"{store}' and end it with 'transactions abort'.",
            )
    return ()


def _total(sizes: dict[str, int], locations: Iterable[str]) -> int:
    return sum(map(sizes.get, locations, repeat(0)))


def _age(entry: QueueEntry | None, config: QueueConfig, now_ms: int) -> float | None:
    if entry is None:
        return None
    parsed = parse_location(entry.location, config.data_path_prefix)
    # The earliest record's time if there is one, else the object's: an entry may carry neither.
    times = [each.ingestion_time_ms for each in entry.metadata]
    if not times and parsed is not None:
        times = [parsed.timestamp_ms]
    return (now_ms - min(times)) / 1000 if times else None
