"""Read the content of a topic's partitions, and their consumers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from opendata_buffer import errors
from opendata_buffer.admin.log_status import (
    LogStatus,
    describe_log,
    first_damage,
    gone_note,
    missing_of,
    missing_positions,
    without_missing,
)
from opendata_buffer.admin.notes import Notes
from opendata_buffer.admin.queue_status import (
    claim_of,
    count_records,
    epoch_of,
    see_queue,
    stale_transactions,
)
from opendata_buffer.admin.readers import missing_notes, readers_of, unread_notes
from opendata_buffer.admin.target import Target
from opendata_buffer.admin.transactions import OpenTransaction, open_among
from opendata_buffer.formats.manifest import Manifest
from opendata_buffer.quarantine import quarantined_names
from opendata_buffer.queue.consumer_note import ConsumerInfo, read_consumer_info
from opendata_buffer.queue.hints import queue_name
from opendata_buffer.runtime import in_parallel
from opendata_buffer.topic.description import Partition, State
from opendata_buffer.topic.topic import Topic


@dataclass(frozen=True, kw_only=True)
class PartitionStatus:
    """One partition at one moment. Its fields have the meaning of those of :class:`.Status`."""

    name: str
    state: str
    queue_length: int
    oldest_age_seconds: float | None
    next_sequence: int  # 0 if it was never written
    epoch: int
    manifest_bytes: int
    grace_period_ms: int | None = None
    undecided: int = 0
    quarantined: int = 0
    consumer: ConsumerInfo | None = None
    log: LogStatus | None = None
    refused: str = ""


@dataclass(frozen=True, kw_only=True)
class TopicStatus:
    """A topic at one moment, with its partitions in the order of their numbers."""

    store: str
    id: str
    partitions: tuple[PartitionStatus, ...]
    queue_length: int
    records: int | None = None
    records_exact: bool = False
    oldest_age_seconds: float | None
    undecided: int
    quarantined: int
    transactions: tuple[OpenTransaction, ...]  # one part per transaction and partition
    notes: tuple[str, ...]


def read_topic(target: Target, topic: Topic) -> TopicStatus:
    """Read the description, then all manifests and records of consumers in parallel."""
    description, runtime, notes = topic.read(), target.runtime, Notes()
    known = dict[str, Sequence[str]]()  # the readers of each active partition
    read_all = in_parallel(
        runtime,
        lambda partition: _read_partition(target, partition, known, notes),
        description.partitions,
    )
    manifests = {each.name: manifest for each, manifest in read_all}
    transactions = open_among(target, manifests)
    undecided = Counter(each.partition for each in transactions)
    found = tuple(replace(each, undecided=undecided[each.name]) for each, _ in read_all)
    topic_ = queue_name(topic.url, target.config)
    notes += missing_notes(dict(sorted(known.items())), topic_)
    notes += unread_notes(description, topic_)
    ages = [each.oldest_age_seconds for each in found if each.oldest_age_seconds is not None]
    return TopicStatus(
        store=topic.url,
        id=description.topic_id,
        partitions=found,
        queue_length=sum(each.queue_length for each in found),
        **count_records(target.store, runtime, manifests, {}),
        oldest_age_seconds=max(ages, default=None),
        undecided=len({each.producer for each in transactions}),
        quarantined=sum(each.quarantined for each in found),
        transactions=tuple(transactions),
        notes=(*sorted(notes), *stale_transactions(transactions, topic.url, target.config)),
    )


def _read_partition(
    target: Target, partition: Partition, known: dict[str, Sequence[str]], notes: Notes
) -> tuple[PartitionStatus, Manifest]:
    """Read one partition of a topic.

    Args:
        target: The topic.
        partition: The partition.
        known: Gets the readers of the partition if it is an active one of a log.
        notes: Gets the problems that were found.

    Returns:
        The status, without open transactions; and the manifest.
    """
    queue = target.queue(partition.name)
    consumer = None
    with suppress(errors.CorruptData):
        consumer = read_consumer_info(queue.store, queue.config, queue.runtime)
    claim = claim_of(queue)
    manifest, log, refused, grace_ms = see_queue(queue, claim, queue.reader().find())
    log_status = None
    if log is not None:
        missing = missing_of(log, consumer, manifest)
        log = without_missing(log, missing)
        readers = readers_of(queue, log, unreadable=notes.add)
        notes += missing_positions(readers, queue.name)
        if partition.state is State.ACTIVE:
            known[partition.name] = log.index.readers
        log_status = describe_log(log, readers, missing)
        gone, stuck = gone_note(log, readers, missing)
        notes += [gone] if gone else []
        refused = refused or (gone if stuck else first_damage(log, readers))
    view = log or manifest
    status = PartitionStatus(
        name=partition.name,
        state=str(partition.state),
        queue_length=view.entry_count,
        oldest_age_seconds=view.age_s(queue.runtime.now_ms()),
        next_sequence=manifest.next_sequence,
        epoch=epoch_of(manifest),
        manifest_bytes=manifest.size,
        grace_period_ms=grace_ms,
        quarantined=len(quarantined_names(queue.store, partition.name)),
        consumer=consumer,
        log=log_status,
        refused=refused,
    )
    return status, manifest
