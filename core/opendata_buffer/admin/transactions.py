"""Undecided transactions: whose they are, since when, and how to end them (failure F40).

A writer that was killed leaves its transaction undecided. Nothing of it is delivered, and nobody
waits for it but the acknowledgements: a reader takes nothing out of the queue from the first
undecided batch on. The same writer ends it when it is started again; where none will, an operator
does, with :func:`abort`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from opendata_buffer.admin.observe import Observer
from opendata_buffer.admin.rebuild import GRACE_MS
from opendata_buffer.concurrency import together
from opendata_buffer.config import QueueConfig
from opendata_buffer.errors import InvalidInput, ObjectNotFound
from opendata_buffer.formats.keys import Transaction, parse_location
from opendata_buffer.formats.manifest import Manifest
from opendata_buffer.messages.message_ids import ACK_TXN, FINAL, parse_uuid
from opendata_buffer.messages.sequencer import undecided
from opendata_buffer.queue.ownership import claim_for_writing
from opendata_buffer.queue.queue import Queue
from opendata_buffer.runtime import Runtime
from opendata_buffer.stores.base import Get, Store, read_sidecar
from opendata_buffer.topic.topic import Topic, is_topic
from opendata_buffer.transactions.commit_record import (
    RECORD,
    TOPIC_FOLDER,
    CommitRecord,
    record_key,
)
from opendata_buffer.transactions.coordinator import TransactionCoordinator
from opendata_buffer.transactions.markers import ROLL_BACK, TransactionMarker, settle

__all__ = ["PATIENCE_S", "Aborted", "OpenTransaction", "Place", "abort", "list_open", "open_in"]

PATIENCE_S = 900.0
"""Age from which a transaction is told as a problem, and may be ended without force: no write
takes so long that is still at work and well."""


@dataclass(frozen=True, kw_only=True)
class OpenTransaction:
    """A transaction's part in one queue, at one moment.

    Attributes:
        partition: The queue's data prefix.
        producer: Who wrote it: a producer id, 12 hexadecimal digits.
        app: Whose it is; None for a publisher without a name.
        batch: The app's number of it.
        first_sequence: Of its first batch: nothing from there on leaves the queue.
        last_clock: The producer's clock at the last one.
        batches: How many it has.
        behind: Queued batches from the first one on, of whomever.
        age_seconds: Since the first one was produced; None where that cannot be told.
        committed: Whether the app's commit record names it, or, where there is no app, another
            queue has its acknowledgement: it is committed, and only has to be acknowledged in
            this queue.
    """

    partition: str
    producer: str
    app: str | None
    batch: int | None
    first_sequence: int
    last_clock: int
    batches: int
    behind: int
    age_seconds: float | None
    committed: bool = False

    def as_json(self) -> dict[str, Any]:
        """All fields, by name."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Aborted:
    """What :func:`abort` ended.

    Attributes:
        committed: Parts of transactions that were committed already, and are delivered now.
        rolled_back: Parts that never will be.
    """

    committed: tuple[OpenTransaction, ...]
    rolled_back: tuple[OpenTransaction, ...]

    def as_json(self) -> dict[str, Any]:
        """All fields, by name."""
        return asdict(self)


class Place:
    """A topic, or one queue, whose transactions are looked at.

    Args:
        config: Of the topic, or of the one queue.
        store: Where it is.
        runtime: Clock and threads.
        topic: None for one queue.
    """

    def __init__(
        self, config: QueueConfig, store: Store, runtime: Runtime, topic: Topic | None = None
    ) -> None:
        self.store = store
        self.runtime = runtime
        self.topic = topic
        self.config = config
        self._queues: dict[str, Queue] = {}

    def names(self) -> list[str]:
        """Data prefixes of its queues.

        Raises:
            InvalidInput: There is no such queue or topic.
            StorageError, CorruptData: It could not be read.
        """
        if self.topic is not None:
            return self.topic.read().names
        Observer(self.store, self.config, self.runtime).manifest()
        return [self.config.data_path_prefix]

    def config_of(self, name: str) -> QueueConfig:
        """Settings of one of its queues."""
        return self.config if self.topic is None else self.topic.config_of(name, self.config)

    def queue(self, name: str) -> Queue:
        """One of its queues, to be written."""
        if name not in self._queues:
            own = self.config_of(name)
            claim = claim_for_writing(self.store, own, runtime=self.runtime)
            self._queues[name] = Queue(
                self.store, own, runtime=self.runtime, role="operator", claim=claim
            )
        return self._queues[name]

    def manifest(self, name: str) -> Manifest | None:
        """The manifest of one of its queues; None for one that was never written."""
        own = self.config_of(name)
        return Queue(self.store, own, runtime=self.runtime, role="observer").read()


def open_in(manifest: Manifest, data_path_prefix: str, now_ms: int) -> list[OpenTransaction]:
    """The undecided transactions of one queue, in the order of their beginnings; pure.

    Args:
        manifest: Of the queue.
        data_path_prefix: Its data prefix.
        now_ms: Wall clock, for ages.

    Raises:
        CorruptManifest: Entries break the format.
    """
    if b"/message=" not in manifest.raw:
        return []
    first = manifest.first_sequence
    found = undecided(enumerate(manifest.locations(), first), data_path_prefix)

    def age(sequence: int) -> float | None:
        (entry,) = manifest.entries(sequence, 1)
        written_ms = entry.time_ms
        return None if written_ms is None else max(0, now_ms - written_ms) / 1000

    return [
        OpenTransaction(
            partition=data_path_prefix,
            producer=producer.hex(),
            app=None if each.txn is None else each.txn.app,
            batch=None if each.txn is None else each.txn.batch,
            first_sequence=each.first_sequence,
            last_clock=each.last_clock,
            batches=each.batches,
            behind=manifest.next_sequence - each.first_sequence,
            age_seconds=age(each.first_sequence),
        )
        for producer, each in found.items()
    ]


def list_open(place: Place) -> list[OpenTransaction]:
    """All undecided transactions of a topic or a queue, by partition; changes nothing.

    Raises:
        InvalidInput: There is no such queue or topic.
        CorruptData, StorageError: A manifest or a commit record could not be read.
    """

    def look(name: str) -> tuple[list[OpenTransaction], set[str]]:
        manifest = place.manifest(name)
        if manifest is None:
            return [], set()
        return open_in(manifest, name, place.runtime.now_ms()), _committed_in(manifest, name)

    looks = together(place.runtime, look, place.names())
    found = [each for part, _ in looks for each in part]
    elsewhere = set().union(*(committed for _, committed in looks))
    # After the manifests: what a record names by then is committed, whatever happens next.
    apps = sorted({each.app for each in found if each.app is not None})
    records = dict(
        zip(apps, together(place.runtime, lambda app: _record(place.store, app), apps), strict=True)
    )
    return [
        replace(each, committed=True)
        if each.app is None and each.producer in elsewhere
        else _judged(each, records)
        for each in found
    ]


def abort(
    place: Place, producer: str, *, force: bool = False, patience_s: float = PATIENCE_S
) -> Aborted:
    """End the transaction of a producer in all partitions, and with it all others of its app.

    It does not decide against a commit record: what that names is committed, and is completed. A
    writer that lives is overtaken by it: it finds its record claimed and fails, and nothing of
    its transaction is visible. A transaction without an app has no record: it is completed where
    one of its queues still has an acknowledgement of it; else whether it is committed is known to
    its publisher alone, who keeps its intents. Rolled back here and applied by those later, it is
    delivered in some partitions only; so that takes ``force``.

    Args:
        place: The whole topic, or a queue of its own.
        producer: As :attr:`OpenTransaction.producer` says.
        force: Also a transaction that is younger than ``patience_s``, and also one whose intents
            may be saved elsewhere: after making sure that nobody applies them.
        patience_s: Seconds.

    Raises:
        InvalidInput: No such transaction is undecided; it is young; or ``place`` is one
            partition of the topic that the transaction may span. Nothing was changed.
        Superseded: Its writer was started again at this moment, and ends it itself.
        OpenDataBufferError: Storage failed. Call it again: what is ended is not ended twice.
    """
    listed = list_open(place)
    chosen = [each for each in listed if each.producer == producer]
    if not chosen:
        raise InvalidInput(
            f"no transaction of producer {producer!r} is undecided in {place.store.url}: it has "
            "ended, or another one is meant. See 'opendata-buffer transactions list'."
        )
    youngest = min(each.age_seconds or 0.0 for each in chosen)
    if youngest < patience_s and not force and not any(each.committed for each in chosen):
        raise InvalidInput(
            f"the transaction of producer {producer!r} is {youngest:.0f} s old: its writer may be "
            f"at work. Wait until it is {patience_s:.0f} s old, or pass force=True"
        )
    app = chosen[0].app
    if app is None and not force and not any(each.committed for each in chosen):
        raise InvalidInput(
            f"the transaction of producer {producer!r} has no name, so its publisher saves its "
            "intents where only it knows: if they are applied after this, the transaction is "
            "delivered in some partitions and not in others. Apply them, or make sure that nobody "
            "will (delete them, end the publisher), then pass force=True"
        )
    if app is None or place.topic is None:
        if place.topic is None and is_topic(place.store):
            raise InvalidInput(
                f"{place.config.data_path_prefix!r} is a partition of a topic, and a transaction "
                "is ended in all of them or in none: leave --partition and --data-path-prefix out"
            )
        _settle(place, chosen)
        return Aborted(
            committed=tuple(each for each in chosen if each.committed),
            rolled_back=tuple(each for each in chosen if not each.committed),
        )
    ledger = TransactionCoordinator(
        place.store, place.config, place.queue, place.runtime, ahead_ms=GRACE_MS
    )
    ledger.recover(app, None, place.names())
    # The record is claimed by now, so what it names does not change any more.
    records = {app: _record(place.store, app)}
    ended = [_judged(each, records) for each in listed if each.app == app]
    return Aborted(
        committed=tuple(each for each in ended if each.committed),
        rolled_back=tuple(each for each in ended if not each.committed),
    )


def _committed_in(manifest: Manifest, data_path_prefix: str) -> set[str]:
    """Producers that a queue has a committing acknowledgement of."""
    if b"/message=" not in manifest.raw:
        return set()
    found = set()
    for location in manifest.locations():
        parsed = parse_location(location, data_path_prefix)
        if parsed is not None and parsed.message is not None:
            message = parse_uuid(parsed.message)
            if message.flags & ~FINAL == ACK_TXN and message.clock > ROLL_BACK:
                found.add(message.producer.hex())
    return found


def _settle(place: Place, chosen: list[OpenTransaction]) -> None:
    def end(each: OpenTransaction) -> int:
        named = each.app is not None and each.batch is not None
        txn = Transaction(each.app, each.batch) if named else None  # type: ignore[arg-type]
        clock = each.last_clock + 1 if each.committed else ROLL_BACK
        return settle(
            place.queue(each.partition),
            each.partition,
            (TransactionMarker(bytes.fromhex(each.producer), clock, txn),),
            store=place.store,
            runtime=place.runtime,
            ahead_ms=GRACE_MS,
        )

    together(place.runtime, end, chosen)


def _record(store: Get, app: str) -> CommitRecord | None:
    try:
        return read_sidecar(store, record_key(TOPIC_FOLDER, app), RECORD, CommitRecord.from_json)
    except ObjectNotFound:
        return None


def _judged(each: OpenTransaction, records: Mapping[str, CommitRecord | None]) -> OpenTransaction:
    record = None if each.app is None else records[each.app]
    return replace(each, committed=record is not None and record.producer == each.producer)
