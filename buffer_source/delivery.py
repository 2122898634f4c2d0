"""The entries of a queue that a query delivers, and how far the queue may be acknowledged.

The rule is :class:`~opendata_buffer.consumer.isolation.ReadCommitted`. Its state is part of each
position in Spark's offsets. So the rule can be restored at any position, in any run, and decides
the same about the entries that follow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from buffer_source.options import SourceOptions
from buffer_source.partitions import PartitionOffset
from opendata_buffer import errors
from opendata_buffer.consumer.isolation import READ_COMMITTED, ReadCommitted
from opendata_buffer.formats.batch import parse_location
from opendata_buffer.formats.manifest import BatchDescriptor
from opendata_buffer.hints import Action, Hint
from opendata_buffer.queue.hints import topic_name


def rule_after(start: PartitionOffset | None, options: SourceOptions) -> ReadCommitted:
    """Restore the rule of transactions, in the state that it had at a position.

    Args:
        start: The position in Spark's checkpoint; None for the beginning of the queue.
        options: The source's options, of one partition.

    Returns:
        The rule, which continues at the position.

    Raises:
        InvalidInput: Transactions were open at the position, but the query now reads uncommitted
            batches.
    """
    prefix, isolation = options.queue.data_path_prefix, options.isolation
    if start is None or not start.transactions:
        return ReadCommitted(prefix, isolation)
    rule = ReadCommitted.from_dict(start.transactions, prefix, isolation)
    if isolation != READ_COMMITTED and rule.stable_end(start.next) < start.next:
        raise errors.InvalidInput(
            f"option isolationLevel is {isolation!r}, and the checkpoint holds back transactions "
            f"that were undecided at sequence {rule.stable_end(start.next)} of {prefix!r}: their "
            "batches would never be read",
            Hint(Action.WAIT_FOR_TRANSACTIONS, topic_name(options.queue.store, options.queue)),
        )
    return rule


def stable_end_of(position: PartitionOffset, options: SourceOptions) -> int:
    """Return the first sequence that a query may still ask for which continues at the position."""
    return rule_after(position, options).stable_end(position.next)


class IsolationFilter:
    """Applies the rule of transactions to the entries after a position, in order of sequence.

    Args:
        start: The position; None for the beginning of a query.
        options: The source's options, of one partition.
        entries: Returns the entries of a range of sequences that are still in the queue.

    Attributes:
        rule: The rule, in the state after the entries that :meth:`step` got.
        delivered: The batches to deliver, in order.
        repeats: Batches left out because their writer had repeated an append or a transaction.
    """

    def __init__(
        self,
        start: PartitionOffset | None,
        options: SourceOptions,
        entries: Callable[[int, int], Sequence[BatchDescriptor]],
    ) -> None:
        self.rule = rule_after(start, options)
        self.delivered: list[BatchDescriptor] = []
        self.repeats: list[BatchDescriptor] = []
        self._prefix = options.queue.data_path_prefix
        self._entries = entries
        self._expected = None if start is None else start.next
        self._missing = set[int]() if start is None else set(start.missing)

    def step(self, batch: BatchDescriptor, *, missing: bool = False) -> None:
        """Apply the rule to the next entry; ``missing`` skips it because its object is gone."""
        if self._expected is not None and batch.sequence > self._expected:
            self.rule.lost(batch.sequence - 1)
        self._expected = batch.sequence + 1
        if batch.repeats is not None:
            self.repeats.append(batch)
            return
        if missing:
            self._missing.add(batch.sequence)
            self.rule.skip(batch.sequence, batch.location)
            return
        delivered = self.rule.offer(batch.sequence, batch.location, self._held_back)
        if delivered == [batch.sequence]:
            self.delivered.append(batch)
            return
        for sequence in delivered:
            self.delivered += self._entries(sequence, sequence + 1)
        if not delivered:
            named = parse_location(batch.location, self._prefix)
            if named is not None and named.message is None:
                self.repeats.append(batch)

    def _held_back(self, begin: int, end: int) -> list[tuple[int, str]]:
        # Leave out missing entries: the rule takes whichever of a message and its repeat it sees
        # first.
        return [
            (batch.sequence, batch.location)
            for batch in self._entries(begin, end)
            if batch.sequence not in self._missing
        ]
