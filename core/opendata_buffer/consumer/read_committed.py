"""Which queued batches count, each once: the one rule for everything that reads. Pure.

Two kinds of identity lie in the names of batches, and each has its part of the rule:

- ``app=<id>/batch=<n>/`` alone: written in one append, and repeated by a writer that could not
  tell whether it landed. :class:`~.transactions.TransactionFilter` drops the repeat.
- ``message=<uuid>/``: producer, clock and flags. :class:`~.messages.sequencer.Sequencer` holds
  back what is undecided, drops duplicates and what was rolled back, and releases a transaction at
  its acknowledgement. An acknowledgement itself is never delivered.

Batches with neither are delivered at once. No producer waits for another: an undecided
transaction holds up what its own producer wrote, and nothing else.

Because batches of a transaction are delivered late, a reader acknowledges only what lies before
:meth:`ReadCommitted.floor`. So the entries of open transactions are still in the manifest when
they are decided, after any number of restarts, and are read from there once more (failure
F38).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import TYPE_CHECKING, Any, Final

from opendata_buffer.consumer.transactions import HORIZON_DAYS, TransactionFilter
from opendata_buffer.errors import InvalidInput
from opendata_buffer.formats.keys import parse_location
from opendata_buffer.late import late_imports

if TYPE_CHECKING:
    from uuid import UUID

    from opendata_buffer.messages import Message, ProducerState, Sequencer

__all__ = [
    "ISOLATION_LEVELS",
    "READ_COMMITTED",
    "READ_UNCOMMITTED",
    "ReadCommitted",
    "Replay",
    "is_acknowledgement",
]

READ_COMMITTED: Final = "read_committed"
READ_UNCOMMITTED: Final = "read_uncommitted"
ISOLATION_LEVELS = (READ_COMMITTED, READ_UNCOMMITTED)

Replay = Callable[[int, int], Iterable[tuple[int, str]]]
"""Sequence and location of all entries from the first sequence up to, not including, the second."""

_DAY_MS = 24 * 60 * 60 * 1000
_PRODUCER_HEX = 12


def is_acknowledgement(location: str, data_path_prefix: str) -> bool:
    """Whether an entry only decides others: it is offered, and its object is never read."""
    parsed = parse_location(location, data_path_prefix)
    if parsed is None or parsed.message is None:
        return False
    with late_imports():
        from opendata_buffer.messages import ACK_TXN, FINAL, parse_uuid

    return parse_uuid(parsed.message).flags & ~FINAL == ACK_TXN


class ReadCommitted:
    """Offer every entry in order; get the sequences that are to be delivered now.

    Not thread-safe. What it remembers grows with the apps and the producers that write: a
    producer is forgotten at its final acknowledgement, the others by :meth:`prune`.

    Args:
        data_path_prefix: The queue's data prefix; batches elsewhere have no identity.
        isolation: ``read_committed``; or ``read_uncommitted``, which delivers everything but
            acknowledgements at once: undecided and rolled back batches, duplicates and repeats
            as well. It holds nothing back, and remembers nothing but what it was made from.
        buffer: Undecided messages that are kept; of larger transactions the beginning is read
            again from the manifest when they are decided.

    Raises:
        InvalidInput: There is no such isolation.
    """

    def __init__(
        self, data_path_prefix: str, isolation: str = READ_COMMITTED, *, buffer: int = 4096
    ) -> None:
        if isolation not in ISOLATION_LEVELS:
            raise InvalidInput(f"isolation is {isolation!r}: use {' or '.join(ISOLATION_LEVELS)}")
        self._prefix = data_path_prefix
        self._isolation = isolation
        self._transactions = TransactionFilter(data_path_prefix)
        # None until there is a message: most queues have none, and each query's start would wait
        # for all that messages need.
        self._sequencer: Sequencer | None = None
        self._buffer = buffer
        self._seen: dict[Hashable, int] = {}  # producer: day since the epoch of its newest batch
        self._judged: int | None = None

    def offer(self, sequence: int, location: str, replay: Replay) -> list[int]:
        """The sequences that are to be delivered now that this entry was seen, in order.

        Offer every entry in order of sequence; one that was neither offered, skipped nor told to
        be :meth:`lost` may be the acknowledgement that others wait for.

        Args:
            sequence: The entry's.
            location: The entry's.
            replay: Gives earlier entries again, all in a range; called at most once, and only by
                an acknowledgement. Never asked for what lies before :meth:`floor`.

        Raises:
            Exception: What ``replay`` raised. Make the same call again to go on.
        """
        if self._isolation == READ_UNCOMMITTED:
            return [] if is_acknowledgement(location, self._prefix) else [sequence]
        passes = self._transactions.offer(sequence, location)
        # Most queues have no messages, and names are not read twice for nothing.
        parsed = parse_location(location, self._prefix) if "/message=" in location else None
        if parsed is None or parsed.message is None:
            return [sequence] if passes else []
        message, final = _message(sequence, parsed.message)
        sequencer = self._sequencer = self._sequencer or _sequencer((), self._buffer)
        if message.clock:
            day = parsed.timestamp_ms // _DAY_MS
            self._seen[message.producer] = max(self._seen.get(message.producer, 0), day)
        if self._judged != sequence:
            sequencer.queue_uncommitted(message)
            self._judged = sequence
        delivered = self._committed(sequencer, replay)
        self._judged = None
        if final and message.clock:
            self._forget(message.producer)
        return delivered

    def _committed(self, sequencer: Sequencer, replay: Replay) -> list[int]:
        from opendata_buffer.messages import ACK_TXN  # loaded: there was a message

        if not sequencer.has_committed():
            return []
        begin, end = sequencer.replay_range()
        if begin != end:
            # All of it before the first is taken: an error here leaves the state as it was. What
            # has no clock was delivered when it was read.
            again = []
            for sequence, location in replay(begin, end):
                parsed = parse_location(location, self._prefix)
                if parsed is not None and parsed.message is not None:
                    message, _ = _message(sequence, parsed.message)
                    if message.clock:
                        again.append(message)
            sequencer.start_replay(again)
        return [
            message.begin for message in sequencer.dequeue_committed() if message.flags != ACK_TXN
        ]

    def floor(self, next_sequence: int) -> int:
        """The first sequence that must not be acknowledged yet.

        Args:
            next_sequence: Behind the last entry offered; the answer where nothing is undecided.
        """
        pending = None if self._sequencer is None else self._sequencer.pending_from()
        return next_sequence if pending is None else min(pending, next_sequence)

    def skip(self, sequence: int, location: str) -> None:
        """Instead of :meth:`offer`, for an entry whose object is gone and that was passed by.

        Of a message nothing is remembered: it is as if it had never been written, and a repeat
        of it counts. See :meth:`.TransactionFilter.skip` for the others.

        Raises:
            InvalidInput: It is an acknowledgement: that needs no object, and others wait for it.
        """
        if self._isolation == READ_UNCOMMITTED:
            return
        if is_acknowledgement(location, self._prefix):
            raise InvalidInput(
                f"sequence {sequence} at {location!r} is an acknowledgement: offer it, no object "
                "is needed for that"
            )
        self._transactions.skip(sequence, location)

    def lost(self, through: int) -> None:
        """Sequences up to and including ``through`` are gone, and nobody knows what they were.

        Transactions that were open are given up: their batches are gone with them, and the
        acknowledgement may be, too. Of one that goes on behind the gap the rest is delivered
        when it is committed.
        """
        if self._isolation == READ_UNCOMMITTED:
            return
        self._transactions.lost(through)
        if self._sequencer is not None:
            self._sequencer.drop_before(through + 1)

    def prune(self, now_ms: int, horizon_days: int = HORIZON_DAYS) -> None:
        """Forget apps and producers whose newest batch is older than the horizon.

        Ages go by the ULIDs of batches and not by the producers' clocks, which need not be
        times. A producer with an open transaction is not forgotten.

        Args:
            now_ms: Milliseconds since the Unix epoch, by the caller's clock.
            horizon_days: Age in days.
        """
        self._transactions.prune(now_ms, horizon_days)
        if self._sequencer is None or not self._seen:
            return
        # Whichever is earlier: neither one name nor one clock that is far ahead makes all old.
        today = min(now_ms // _DAY_MS, max(self._seen.values()))
        for state in self._sequencer.checkpoint():
            producer = _id(state)
            if today - self._seen.setdefault(producer, today) > horizon_days and state.begin < 0:
                self._forget(producer)

    def copy(self) -> ReadCommitted:
        """An independent one in the same state, to try a plan out."""
        other = ReadCommitted(self._prefix, self._isolation, buffer=self._buffer)
        other._transactions = self._transactions.copy()
        other._sequencer = None if self._sequencer is None else self._sequencer.copy()
        other._seen = dict(self._seen)
        return other

    def to_dict(self) -> dict[str, Any]:
        """The state as a value for JSON, keys in a fixed order; equal states give equal values.

        That of :meth:`.TransactionFilter.to_dict` and, once there was a message, ``"producers":
        {id in hex: [clock of the last committed message, sequence that its open transaction
        begins at or -1, day of its newest batch since the Unix epoch]}``.
        """
        state = self._transactions.to_dict()
        if self._sequencer is None:
            return state
        producers = {
            _id(each).hex(): [each.last_ack, each.begin, self._seen[_id(each)]]
            for each in self._sequencer.checkpoint()
        }
        if producers:
            state["producers"] = dict(sorted(producers.items()))
        return state

    @classmethod
    def from_dict(
        cls,
        state: Any,
        data_path_prefix: str,
        isolation: str = READ_COMMITTED,
        *,
        buffer: int = 4096,
    ) -> ReadCommitted:
        """What :meth:`to_dict` described, or :meth:`.TransactionFilter.to_dict` before it.

        Raises:
            InvalidInput: Another program or a later version wrote it.
        """
        made = cls(data_path_prefix, isolation, buffer=buffer)
        made._transactions = TransactionFilter.from_dict(state, data_path_prefix)
        states = []
        match state.get("producers", {}):
            case dict(producers):
                pass
            case _:
                raise _unreadable(state)
        if not producers:
            return made
        with late_imports():
            from opendata_buffer.messages import ProducerState
            from opendata_buffer.messages.uuids import CLOCK_MAX
        for name, value in producers.items():
            match value:
                case [int() as last_ack, int() as begin, int() as day] if (
                    0 <= last_ack <= CLOCK_MAX and begin >= -1 and day >= 0
                ):
                    producer = _producer(name)
                    if producer is None:
                        raise _unreadable(state)
                    states.append(ProducerState(producer, last_ack, begin))
                    made._seen[producer] = day
                case _:
                    raise _unreadable(state)
        made._sequencer = _sequencer(states, buffer)
        return made

    def _forget(self, producer: Hashable) -> None:
        if self._sequencer is not None:
            self._sequencer.forget(producer)
        self._seen.pop(producer, None)


def _sequencer(states: Iterable[ProducerState], buffer: int) -> Sequencer:
    with late_imports():
        from opendata_buffer.messages import Sequencer

    return Sequencer(states, buffer)


def _message(sequence: int, identity: UUID) -> tuple[Message, bool]:
    """For the sequencer; and whether it is the last one of its producer."""
    with late_imports():
        from opendata_buffer.messages import ACK_TXN, FINAL, Message, parse_uuid

    read = parse_uuid(identity)
    flags = read.flags & ~FINAL
    final = flags == ACK_TXN and read.flags != flags
    return Message(read.producer, read.clock, flags, sequence, sequence + 1), final


def _id(state: ProducerState) -> bytes:
    producer = state.producer
    assert isinstance(producer, bytes)
    return producer


def _producer(name: object) -> bytes | None:
    if not isinstance(name, str) or len(name) != _PRODUCER_HEX:
        return None
    try:
        return bytes.fromhex(name)
    except ValueError:
        return None


def _unreadable(state: object) -> InvalidInput:
    return InvalidInput(
        f"transaction state {state!r:.200} is not version 1 of this library: resume with the "
        "version that wrote it, or start without state and accept repeats"
    )
