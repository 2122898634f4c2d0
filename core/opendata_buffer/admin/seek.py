"""Moving the beginning of a queue: what lies before it leaves unread, on purpose.

What is dropped is copied to the quarantine first, so that a wrong ``seek`` can be undone batch by
batch. The queue is taken over by the same write that drops: a consumer that still runs is fenced
and cannot acknowledge past a gap that it knows nothing of.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from opendata_buffer.admin.observe import Observer
from opendata_buffer.admin.start import Start
from opendata_buffer.concurrency import together
from opendata_buffer.config import ConsumerConfig
from opendata_buffer.errors import InvalidInput
from opendata_buffer.formats.keys import parse_location
from opendata_buffer.formats.manifest import Manifest, QueueEntry
from opendata_buffer.messages.sequencer import undecided
from opendata_buffer.quarantine import quarantine
from opendata_buffer.queue.consumer_info import write_consumer_info
from opendata_buffer.queue.ownership import claim_for_writing
from opendata_buffer.queue.queue import Queue
from opendata_buffer.runtime import Runtime
from opendata_buffer.stores.base import Store

__all__ = ["SeekPlan", "Sought", "plan_seek", "seek"]

CONCURRENCY = 8
"""Copies at once; each goes through this process's memory."""

GROUP = 64
"""Copies between two reports of progress."""


@dataclass(frozen=True)
class SeekPlan:
    """What a seek would do.

    Attributes:
        first: Where the queue begins now.
        target: Where it shall begin; not below ``first``.
        dropped: The entries between the two.
        cut: Transactions that begin before the target and end behind it. What of them lies behind
            it stays, and is delivered where they are committed, as Kafka does.
    """

    first: int
    target: int
    dropped: Sequence[QueueEntry]
    cut: int = 0


@dataclass(frozen=True, kw_only=True)
class Sought:
    """What a seek did.

    Attributes:
        first: Where the queue begins now.
        epoch: That it was taken over with; its consumer is fenced.
        copies: Ids in the quarantine of what was dropped; empty when nothing was to be copied.
    """

    first: int
    epoch: int
    copies: tuple[str, ...]


def plan_seek(store: Store, config: ConsumerConfig, start: Start, runtime: Runtime) -> SeekPlan:
    """See what lies before a place in the queue; changes nothing.

    Raises:
        InvalidInput: There is no queue, or no such place; or a transaction that nobody has
            decided begins before it, which would be torn apart.
        CorruptManifest, StorageError: The manifest could not be read.
    """
    manifest = Observer(store, config, runtime).manifest()
    target = start.sequence_in(manifest, config.manifest_path)
    dropped = manifest.entries(limit=target - manifest.first_sequence)
    _refuse_torn(manifest, target, config)
    cut = _cut(manifest, target, config.data_path_prefix)
    return SeekPlan(manifest.first_sequence, target, dropped, cut)


def seek(
    store: Store,
    config: ConsumerConfig,
    plan: SeekPlan,
    runtime: Runtime,
    *,
    copy: bool = True,
    advance: Callable[[int, int], None] = lambda done, total: None,
) -> Sought:
    """Copy what a plan drops, then drop it and take the queue over. Free to repeat.

    Entries that its consumer has taken meanwhile are gone, and those that were appended since
    the plan stay.

    Args:
        store: Where the queue lives.
        config: Its manifest and prefix.
        plan: Of :func:`plan_seek`.
        runtime: Clock and threads.
        copy: Copy what is dropped to the quarantine. Without it nothing brings it back once the
            collector has come by.
        advance: Told how many are copied, and of how many.

    Raises:
        InvalidInput: A batch is too large to be copied; nothing was dropped.
        PrefixConflict, UnsafeStore, QueueReset, Drained: As for a consumer.
        Conflict, CorruptManifest, StorageError: Nothing was dropped; call it again.
    """
    claim = claim_for_writing(store, config, runtime=runtime)

    def save(entry: QueueEntry) -> str:
        report = quarantine(
            store,
            config.data_path_prefix,
            entry,
            f"dropped by seek to {plan.target}, not for a fault of its own",
            runtime=runtime,
            allow_foreign_locations=config.allow_foreign_locations,
        )
        return report.id

    copies: list[str] = []
    for at in range(0, len(plan.dropped) if copy else 0, GROUP):
        copies += together(runtime, save, plan.dropped[at : at + GROUP], most=CONCURRENCY)
        advance(len(copies), len(plan.dropped))
    queue = Queue(store, config, runtime=runtime, role="operator", claim=claim)
    # A consumer may have read past the place meanwhile: then there is nothing left to drop.
    last = plan.target - 1 if plan.target else None
    after = queue.claim_epoch(last, allow_data_loss=True)
    write_consumer_info(store, config, runtime, after.epoch, program="opendata-buffer seek")
    queue.close()
    return Sought(first=after.first_sequence, epoch=after.epoch, copies=tuple(copies))


def _refuse_torn(manifest: Manifest, target: int, config: ConsumerConfig) -> None:
    pairs = enumerate(manifest.locations(), manifest.first_sequence)
    for producer, each in undecided(pairs, config.data_path_prefix).items():
        if each.first_sequence < target:
            raise InvalidInput(
                f"the transaction of producer {producer.hex()} begins at sequence "
                f"{each.first_sequence} and is not decided: a place behind that would tear "
                "it apart. End it with 'opendata-buffer transactions abort', or seek to "
                f"{each.first_sequence} at the most"
            )


def _cut(manifest: Manifest, target: int, prefix: str) -> int:
    """How many transactions lie on both sides of a place; none of them is undecided."""
    locations = manifest.locations()
    at = target - manifest.first_sequence
    found = len(undecided(enumerate(locations[:at], manifest.first_sequence), prefix))
    if 0 < at < len(locations):
        last, first = (parse_location(each, prefix) for each in locations[at - 1 : at + 1])
        # Without messages: a transaction is one piece of neighbours with one identity.
        if last and first and last.txn and last.txn == first.txn and not last.message:
            found += 1
    return found
