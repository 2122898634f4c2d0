"""Which entries behind a position are delivered, and how far it lets the queue go. Pure.

The rule is :class:`~opendata_buffer.consumer.isolation.ReadCommitted`; its state is part of
each position. Here it is taken up behind a position, and walked over the entries that follow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from buffer_source.offsets import Position
from buffer_source.options import SourceOptions
from opendata_buffer.consumer.fetch import BatchDescriptor
from opendata_buffer.consumer.isolation import READ_COMMITTED, ReadCommitted, is_acknowledgement
from opendata_buffer.errors import InvalidInput
from opendata_buffer.formats.keys import parse_location

__all__ = ["IsolationFilter", "check_remembered", "floor_of", "rule_behind", "vouched_for"]

Entries = Callable[[int, int], Sequence[BatchDescriptor]]
"""The entries of a range of sequences that are still in the queue."""


def rule_behind(start: Position | None, options: SourceOptions) -> ReadCommitted:
    """The rule in the state it had at a position.

    Raises:
        InvalidInput: The state is another version's; or transactions were open there, and the
            query does not hold any back now.
    """
    prefix, isolation = options.queue.data_path_prefix, options.isolation
    if start is None or not start.transactions:
        return ReadCommitted(prefix, isolation)
    rule = ReadCommitted.from_dict(start.transactions, prefix, isolation)
    if isolation != READ_COMMITTED and rule.stable_end(start.next) < start.next:
        raise InvalidInput(
            f"option isolationLevel is {isolation!r}, and the checkpoint holds back transactions "
            f"that were undecided at sequence {rule.stable_end(start.next)} of {prefix!r}: their "
            "batches would never be read. Go on with read_committed until they are decided "
            "('opendata-buffer transactions list'), or give the query a new checkpointLocation"
        )
    return rule


def floor_of(position: Position, options: SourceOptions) -> int:
    """The first sequence that must stay in the queue for whoever goes on at the position."""
    return rule_behind(position, options).stable_end(position.next)


def check_remembered(rule: ReadCommitted, end: Position, options: SourceOptions) -> None:
    """Refuse to hold back what the position behind it does not know of: nobody would deliver it.

    Args:
        rule: In the state it has at that position now.
        end: The position, as the micro-batch was planned that ends there.
        options: What the query asked for.

    Raises:
        InvalidInput: The micro-batch was planned without holding transactions back.
    """
    if rule.stable_end(end.next) < floor_of(end, options):
        raise InvalidInput(
            f"option isolationLevel is {options.isolation!r}, and the micro-batch that is repeated "
            f"was planned with read_uncommitted, up to sequence {end.next - 1} of "
            f"{options.queue.data_path_prefix!r}: its undecided batches would never be read. Start "
            "the query with read_uncommitted until that micro-batch is done, then change it"
        )


def vouched_for(batch: BatchDescriptor, prefix: str) -> bool:
    """Whether the batch's writer repeats it when it finds that its object is gone."""
    named = parse_location(batch.location, prefix)
    if named is None or is_acknowledgement(batch.location, prefix):
        return False
    return named.txn is not None or named.message is not None


class IsolationFilter:
    """The rule on its way over entries in order of sequence.

    Args:
        start: The position the entries follow.
        options: What the query asked for, with the queue of these entries.
        entries: Gives those that were held back before.
    """

    def __init__(self, start: Position | None, options: SourceOptions, entries: Entries) -> None:
        self.rule = rule_behind(start, options)
        self.delivered: list[BatchDescriptor] = []
        self.repeats: list[BatchDescriptor] = []
        """Left out because their writer had repeated a transaction."""
        self._prefix = options.queue.data_path_prefix
        self._entries = entries
        self._expected = None if start is None else start.next
        self._gone = set[int]() if start is None else set(start.missing)

    def step(self, batch: BatchDescriptor, *, gone: bool = False) -> None:
        """Take one entry.

        Args:
            batch: The entry.
            gone: Pass it by, because its object does not exist.
        """
        if self._expected is not None and batch.sequence > self._expected:
            self.rule.lost(batch.sequence - 1)
        self._expected = batch.sequence + 1
        if gone:
            self._gone.add(batch.sequence)
            self.rule.skip(batch.sequence, batch.location)
            return
        delivered = self.rule.offer(batch.sequence, batch.location, self._again)
        if delivered == [batch.sequence]:
            self.delivered.append(batch)
            return
        for sequence in delivered:
            self.delivered += self._entries(sequence, sequence + 1)
        if not delivered:
            named = parse_location(batch.location, self._prefix)
            if named is not None and named.message is None:
                self.repeats.append(batch)

    def _again(self, begin: int, end: int) -> list[tuple[int, str]]:
        # Without what is gone: of a message and its repeat the rule takes the one it sees first.
        entries = self._entries(begin, end)
        return [
            (each.sequence, each.location) for each in entries if each.sequence not in self._gone
        ]
