"""List open transactions, and end those whose writer is not started again (failure F40).

No batch leaves the queue from the first batch of an open transaction on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache

from opendata_buffer.admin.target import Target
from opendata_buffer.config import DEFAULT_GRACE_PERIOD_MS
from opendata_buffer.errors import InvalidInput, ObjectNotFound
from opendata_buffer.formats.batch import parse_location
from opendata_buffer.formats.manifest import Manifest
from opendata_buffer.hints import Action, Hint
from opendata_buffer.messages import ACK_TXN, FINAL, parse_uuid, undecided
from opendata_buffer.queue.sidecar import read_sidecar
from opendata_buffer.runtime import in_parallel
from opendata_buffer.topic.description import is_topic
from opendata_buffer.transactions import (
    RECORD,
    ROLL_BACK,
    TOPIC_FOLDER,
    CommitRecord,
    MarkerWriter,
    TransactionCoordinator,
    TransactionMarker,
    record_key,
)

STALE_AFTER_S = 900.0
"""Age in seconds from which ``status`` warns about a transaction, and ``abort`` ends it without
``force``. No running writer takes this long."""


@dataclass(frozen=True, kw_only=True)
class OpenTransaction:
    """The part of a transaction that is in one queue, at one moment.

    It is ``committed`` if it is decided and only lacks its acknowledgement in this queue. Then the
    app's commit record names it or, without an app, another queue has acknowledged it.
    """

    partition: str  # the queue's data prefix
    producer: str  # the producer's id, 12 hexadecimal digits
    app: str | None  # None for a publisher without a name
    batch: int | None  # the app's number of the transaction
    first_sequence: int  # sequence of its first batch; nothing from there on leaves the queue
    last_clock: int  # the producer's clock at its last batch
    batches: int
    behind: int  # queued batches from its first one on, of all producers
    age_seconds: float | None  # age of the first batch; None if its name has no time
    committed: bool = False


def open_in(manifest: Manifest, data_path_prefix: str, now_ms: int) -> list[OpenTransaction]:
    """Return the undecided transactions of one queue, ordered by first batch. No I/O."""
    if b"/message=" not in manifest.raw:
        return []
    first = manifest.first_sequence
    found = undecided(enumerate(manifest.locations(), first), data_path_prefix)

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
            age_seconds=manifest.age_s(now_ms, each.first_sequence),
        )
        for producer, each in found.items()
    ]


def list_open(target: Target) -> list[OpenTransaction]:
    """Return all undecided transactions of a topic or a queue, by partition. Change nothing."""
    names = _names(target)
    manifests = in_parallel(target.runtime, lambda name: target.queue(name).reader().find(), names)
    return open_among(target, dict(zip(names, manifests, strict=True)))


def _names(target: Target) -> list[str]:
    """Return the data prefixes of the queues.

    Raises:
        InvalidInput: The queue does not exist.
    """
    if target.topic is not None:
        return target.topic.read().names
    target.reader().manifest()
    return [target.prefix]


def open_among(target: Target, manifests: Mapping[str, Manifest | None]) -> list[OpenTransaction]:
    """Find the undecided transactions of some queues, in manifests that were already read.

    Args:
        target: The topic or the queue.
        manifests: The manifests by data prefix; None for a queue that was never written.

    Returns:
        The part of each transaction in each queue, and whether it is committed.
    """
    now_ms, there = target.runtime.now_ms(), [(n, each) for n, each in manifests.items() if each]
    found = [part for name, each in there for part in open_in(each, name, now_ms)]
    acknowledged = set().union(*(_committed_in(each, name) for name, each in there))
    # Read the records after the manifests. A transaction that a record names by then stays
    # committed.
    apps = sorted({each.app for each in found if each.app is not None})
    read_records = in_parallel(target.runtime, lambda app: _record(target, app), apps)
    records = dict(zip(apps, read_records, strict=True))
    return [_judged(each, records, acknowledged) for each in found]


def abort(target: Target, producer: str, *, force: bool = False) -> list[OpenTransaction]:
    """End the transaction of a producer in all partitions, and all others of the same app.

    The commit record decides: a transaction that it names is completed, and the others are rolled
    back. The record is claimed first, so that a writer that still runs fails.

    A transaction without an app has no record. It is completed if one of its queues has
    acknowledged it. Otherwise only its publisher, which keeps the intents, knows whether it is
    committed. Rolling it back then needs ``force``, like a transaction that is younger than
    :data:`STALE_AFTER_S`.

    Args:
        target: The topic or the queue.
        producer: The producer's id, 12 hexadecimal digits.
        force: Also end a transaction that its writer may still commit.

    Returns:
        The parts that were ended. Committed ones are delivered now, the others never.

    Raises:
        InvalidInput: No such transaction is undecided, or it is too young, or ``target`` is one
            partition of the topic that it may span.
        Superseded: Its writer was started again at this moment.
        OpenDataBufferError: Call it again. Parts that were ended are not ended twice.
    """
    listed = list_open(target)
    chosen = [each for each in listed if each.producer == producer]
    if not chosen:
        raise InvalidInput(
            f"no transaction of producer {producer!r} is undecided in {target.store.url}: it has "
            "ended, or another one is meant",
            Hint(Action.LIST_TRANSACTIONS, target.name),
        )
    app = chosen[0].app
    if not force and not any(each.committed for each in chosen):
        _refuse_running(producer, app, chosen)
    if target.topic is None and is_topic(target.store):
        raise InvalidInput(
            f"{target.prefix!r} is a partition of a topic, and a transaction "
            "is ended in all of them or in none: leave --partition and --data-path-prefix out"
        )
    open_queue = cache(lambda name: target.queue(name).open_for_repair())
    where = (target.store, target.config, open_queue, target.runtime)
    if app is None:
        markers = {}
        for each in chosen:
            clock = each.last_clock + 1 if each.committed else ROLL_BACK
            markers[each.partition] = [TransactionMarker(bytes.fromhex(each.producer), clock)]
        MarkerWriter(*where, ahead_ms=DEFAULT_GRACE_PERIOD_MS).write(markers)
        return chosen
    coordinator = TransactionCoordinator(
        *where, ahead_ms=DEFAULT_GRACE_PERIOD_MS, folder=_records_folder(target)
    )
    coordinator.recover(app, None, _names(target))
    # recover() claimed the record, so it does not change any more.
    records = {app: _record(target, app)}
    return [_judged(each, records, set()) for each in listed if each.app == app]


def _refuse_running(producer: str, app: str | None, chosen: list[OpenTransaction]) -> None:
    """Raise ``InvalidInput`` for a transaction that its writer may still commit."""
    youngest = min(each.age_seconds or 0.0 for each in chosen)
    if youngest < STALE_AFTER_S:
        raise InvalidInput(
            f"the transaction of producer {producer!r} is {youngest:.0f} s old: its writer may be "
            f"at work. Wait until it is {STALE_AFTER_S:.0f} s old",
            Hint(Action.FORCE),
        )
    if app is None:
        raise InvalidInput(
            f"the transaction of producer {producer!r} has no name, so only its publisher has its "
            "intents: if they are applied after this, the transaction is delivered in some "
            "partitions and not in others. Apply them, or make sure that no process will (delete "
            "them, end the publisher)",
            Hint(Action.FORCE),
        )


def _committed_in(manifest: Manifest, data_path_prefix: str) -> set[str]:
    """Return the producers whose transactions were committed by an acknowledgement in a queue."""
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


def _records_folder(target: Target) -> str:
    return target.prefix if target.topic is None else TOPIC_FOLDER


def _record(target: Target, app: str) -> CommitRecord | None:
    key = record_key(_records_folder(target), app)
    try:
        return read_sidecar(target.store, key, RECORD, CommitRecord.from_json)
    except ObjectNotFound:
        return None


def _judged(
    each: OpenTransaction, records: Mapping[str, CommitRecord | None], acknowledged: set[str]
) -> OpenTransaction:
    if each.app is None:
        return replace(each, committed=each.producer in acknowledged)
    record = records[each.app]
    return replace(each, committed=record is not None and record.producer == each.producer)
