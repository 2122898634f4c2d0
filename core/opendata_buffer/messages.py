"""Messages: batches with a producer, a clock, and flags, and which of them are committed. Pure.

The problem: several producers write to one log, and each may repeat a message, die in the middle of
a transaction, or roll it back. A reader must deliver exactly the committed messages, in order, and
must be able to restart anywhere. The idea comes from Gazette: each message carries the identity of
its producer and a clock, so the reader can decide everything by itself.

The identity is one v1 UUID (RFC 4122) in the name of the batch::

    time stamp, 60 bits of 100 ns since 1582-10-15       most significant bits of the clock
    clock sequence, first 4 of 14 bits: a counter         least significant bits of the clock
    clock sequence, last 10 bits: flags                   OUTSIDE, CONTINUE or ACK_TXN; FINAL
    node, 48 bits                                         the producer

The clock rises with each message of a producer. The :class:`Sequencer` takes every message in the
order of the log and returns the committed ones:

- A message is a **duplicate** if its clock is not beyond the last one committed by its producer. -
CONTINUE_TXN messages wait in the producer's **span** until an ACK_TXN decides them. Messages up
  to the acknowledgement's clock are committed; later ones are dropped.
- An ACK_TXN at or before the last committed clock **rolls back**: the span is dropped, and the
  producer continues from that clock.

For example, a producer writes CONTINUE 2, CONTINUE 3, ACK 4. The reader delivers 2 and 3 when it
reaches ACK 4. If it sees CONTINUE 3 again later, it drops it as a duplicate.

Outcomes, replay ranges, and checkpoints agree with Gazette's sequencer, step by step.
"""

from __future__ import annotations

import uuid
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from enum import Enum

from opendata_buffer.errors import InvalidInput
from opendata_buffer.formats.batch import Transaction, parse_location

OUTSIDE_TXN = 0
"""The message is not part of a transaction: it is committed as soon as it is written."""

CONTINUE_TXN = 1
"""The message begins or continues a transaction: it is committed once an ACK_TXN follows."""

ACK_TXN = 2
"""Commits all CONTINUE_TXN messages of the producer up to this clock, and drops later ones."""

FINAL = 4
"""Added to an ACK_TXN: the producer writes nothing after it, and readers forget the producer.

A :class:`Sequencer`, like Gazette's, takes the sum for OUTSIDE_TXN, so mask this flag first.
"""

FLAGS_MASK = 0x3FF
CLOCK_MAX = (1 << 64) - 1
PRODUCER_BYTES = 6

_UNIX_EPOCH_100NS = 122_192_928_000_000_000
"""From 1582-10-15, where v1 time stamps begin, to 1970-01-01."""


@dataclass(frozen=True, slots=True)
class MessageId:
    """The UUID of a message: producer (6 random bytes), clock (64 bits), and flags (10 bits)."""

    producer: bytes
    clock: int
    flags: int


def build_uuid(producer: bytes, clock: int, flags: int) -> uuid.UUID:
    """Build the v1 UUID of a message.

    Args:
        producer: 6 bytes.
        clock: 0 to 2^64 - 1.
        flags: 0 to 1023.

    Returns:
        The UUID, which becomes part of the name of the message's batch.

    Raises:
        InvalidInput: An argument has the wrong length or is out of range.
    """
    if len(producer) != PRODUCER_BYTES:
        raise InvalidInput(f"producer id {producer.hex()!r} has {len(producer)} bytes: use 6")
    if not 0 <= clock <= CLOCK_MAX:
        raise InvalidInput(f"clock is {clock}: use 0 to {CLOCK_MAX}")
    if not 0 <= flags <= FLAGS_MASK:
        raise InvalidInput(f"flags are {flags}: use 0 to {FLAGS_MASK}, 10 bits")
    stamp, counter = clock >> 4, clock & 0xF
    return uuid.UUID(
        fields=(
            stamp & 0xFFFFFFFF,
            stamp >> 32 & 0xFFFF,
            stamp >> 48 | 0x1000,
            0x80 | counter << 2 | flags >> 8,
            flags & 0xFF,
            int.from_bytes(producer, "big"),
        )
    )


def parse_uuid(value: uuid.UUID) -> MessageId:
    """Return the producer, clock, and flags in the UUID of a message.

    Args:
        value: A UUID from the name of a message's batch.

    Returns:
        The three parts.

    Raises:
        InvalidInput: The UUID is not of version 1.
    """
    if value.version != 1:
        raise InvalidInput(
            f"{value} is not a version 1 UUID: only those carry a producer and a clock"
        )
    sequence = value.clock_seq
    return MessageId(
        producer=value.node.to_bytes(PRODUCER_BYTES, "big"),
        clock=value.time << 4 | sequence >> 10 & 0xF,
        flags=sequence & FLAGS_MASK,
    )


def new_producer_id(entropy: Callable[[int], bytes]) -> bytes:
    """Draw a random producer id.

    Args:
        entropy: Returns as many random bytes as it is asked for.

    Returns:
        6 bytes. Their multicast bit is set, which no network card's address has.
    """
    drawn = entropy(PRODUCER_BYTES)
    return bytes([drawn[0] | 1]) + drawn[1:]


class Clock:
    """A producer's clock, which follows the wall clock and never goes back. Not thread-safe."""

    def __init__(self) -> None:
        self.value = 0

    def update(self, now_ms: int) -> None:
        """Advance to the wall clock, in milliseconds since the Unix epoch, unless it is earlier."""
        stamp = now_ms * 10_000 + _UNIX_EPOCH_100NS
        self.value = max(self.value, stamp << 4)

    def tick(self) -> int:
        """Return the clock of the next message: one more than the last."""
        self.value += 1
        return self.value


NONE = -1
"""Stands for "no message" where a position is expected, as in checkpoints."""


@dataclass(frozen=True, slots=True)
class Message:
    """One message of the log, from one position to another."""

    producer: Hashable
    clock: int
    """The producer's clock. A message with clock 0 is not sequenced and is always committed."""
    flags: int
    """OUTSIDE_TXN, CONTINUE_TXN, or ACK_TXN. Other flags are read as OUTSIDE_TXN."""
    begin: int
    end: int


def message_at(sequence: int, identity: uuid.UUID) -> tuple[Message, bool]:
    """Return the message in the batch with this sequence, and whether it is its producer's last."""
    read = parse_uuid(identity)
    flags = read.flags & ~FINAL
    is_final = flags == ACK_TXN and read.flags != flags and read.clock > 0
    return Message(read.producer, read.clock, flags, sequence, sequence + 1), is_final


class Outcome(Enum):
    """The result of :meth:`Sequencer.queue_uncommitted` for a message, with Gazette's names."""

    OUTSIDE_ALREADY_ACKED = "outsideAlreadyAcked"
    OUTSIDE_COMMIT = "outsideCommit"
    CONTINUE_ALREADY_ACKED = "continueAlreadyAcked"
    CONTINUE_CLOCK_LARGER = "continueRingClockLarger"
    CONTINUE_BEGIN_SPAN = "continueBeginSpan"
    CONTINUE_EXTEND_SPAN = "continueExtendSpan"
    ACK_ROLLBACK = "ackRollback"
    ACK_EMPTY = "ackEmpty"
    ACK_COMMIT_RING = "ackCommitRing"
    ACK_COMMIT_REPLAY = "ackCommitReplay"


_DUPLICATES = {
    Outcome.OUTSIDE_ALREADY_ACKED,
    Outcome.CONTINUE_ALREADY_ACKED,
    Outcome.CONTINUE_CLOCK_LARGER,
}
_CONTINUES = {Outcome.CONTINUE_BEGIN_SPAN, Outcome.CONTINUE_EXTEND_SPAN}
_BEGINS = {Outcome.CONTINUE_BEGIN_SPAN, Outcome.OUTSIDE_COMMIT, Outcome.ACK_EMPTY}


@dataclass(frozen=True, slots=True)
class ProducerState:
    """One producer in a checkpoint."""

    producer: Hashable
    last_ack: int
    """Clock of its last committed message."""
    begin: int
    """Position of the first message of its open span; :data:`NONE` without a span."""


@dataclass(slots=True)
class _Span:
    """The messages of a producer since its last commit."""

    low: int
    """Clock of the producer's last committed message; messages up to it are duplicates."""
    high: int
    """Largest clock seen in the span; ``low`` without a span."""
    begin: int = NONE
    """Position of the span's first message, even if that message is no longer buffered."""
    buffered: deque[Message] = field(default_factory=deque)
    """The span's messages that are still in the buffer, oldest first."""

    def reset(self, clock: int) -> None:
        self.low = self.high = clock
        self.begin = NONE
        self.buffered.clear()


class Sequencer:
    """Queues uncommitted messages and dequeues committed ones. Not thread-safe.

    After :meth:`queue_uncommitted` returned an outcome that commits, take all messages of
    :meth:`dequeue_committed` before you call anything else. If the beginning of a span is no longer
    buffered, read :meth:`replay_range` again first. Any other order, and a replay of another range,
    raises ``InvalidInput``.

    Args:
        states: A checkpoint. The first message to queue is the one after it.
        buffer: Number of messages that are kept for undecided transactions; at least 1.

    Raises:
        InvalidInput: ``buffer`` is below 1.
    """

    def __init__(self, states: Iterable[ProducerState] = (), buffer: int = 4096) -> None:
        if buffer < 1:
            raise InvalidInput(f"buffer is {buffer}: use a whole number of at least 1")
        self._size = buffer
        self._buffer: deque[Message] = deque()
        self._spans = {
            state.producer: _Span(state.last_ack, state.last_ack, state.begin) for state in states
        }
        self._emitting: _Span | None = None
        self._producer: Hashable = None
        self._replay: Iterator[Message] | None = None

    def queue_uncommitted(self, message: Message) -> Outcome:
        """Take the next message of the log.

        Args:
            message: The message. It comes after all earlier ones in the log.

        Returns:
            What the message means for its producer's open transaction.

        Raises:
            InvalidInput: Committed messages are waiting to be dequeued.
        """
        self._check_taken()
        if len(self._buffer) == self._size:
            self._evict()
        span, outcome = self._judge(message)
        if outcome is Outcome.ACK_ROLLBACK:
            span.reset(message.clock)
        elif outcome not in _DUPLICATES:
            if outcome is Outcome.OUTSIDE_COMMIT:
                # A producer that mixes both kinds gives up its open transaction.
                span.buffered.clear()
            if outcome in _BEGINS:
                span.begin = message.begin
            self._buffer.append(message)
            span.buffered.append(message)
            # Messages beyond the acknowledgement's clock are not committed.
            span.high = message.clock
            if outcome not in _CONTINUES:
                self._emitting, self._producer = span, message.producer
        return outcome

    def has_committed(self) -> bool:
        """Return whether committed messages are waiting to be dequeued."""
        return self._emitting is not None

    def replay_range(self) -> tuple[int, int]:
        """Return the range of positions that must be read again before it can be committed.

        Returns:
            The first position, and the one before which the range ends.

        Raises:
            InvalidInput: No committed messages are waiting.
        """
        span = self._emitting
        if span is None:
            raise InvalidInput("replay_range() without committed messages: it follows an ACK_TXN")
        return span.begin, span.buffered[0].begin

    def start_replay(self, messages: Iterable[Message]) -> None:
        """Pass the messages of :meth:`replay_range`, of all producers, in order."""
        self._replay = iter(messages)

    def dequeue_committed(self) -> Iterator[Message]:
        """Yield the committed messages, in order, each once.

        Asking for the next message means that the previous one was processed. A checkpoint taken in
        between lists the remaining ones as unread.

        Raises:
            InvalidInput: The beginning of the span is no longer buffered and was not replayed.
        """
        span = self._emitting
        if span is None:
            return
        if self._replay is None and span.begin != span.buffered[0].begin:
            raise InvalidInput(
                f"messages from position {span.begin} on are no longer buffered: read "
                "replay_range() again and pass them to start_replay()"
            )
        for message in self._candidates(span):
            if message.clock and not span.low < message.clock <= span.high:
                continue  # Sent twice, or later than the acknowledgement covers.
            span.begin = message.begin
            yield message
            if message.clock:
                span.low = message.clock
        span.reset(span.low)
        self._emitting = None

    def checkpoint(self) -> list[ProducerState]:
        """Return the state with which a new sequencer continues after the last message queued."""
        return [ProducerState(key, span.low, span.begin) for key, span in self._spans.items()]

    def pending_from(self) -> int | None:
        """Return the first position of the oldest open transaction; None if none is open."""
        begins = (span.begin for span in self._spans.values() if span.begin != NONE)
        return min(begins, default=None)

    def forget(self, producer: Hashable) -> None:
        """Drop a producer and its open span. Its next message will be that of a new producer."""
        self._check_taken()
        self._spans.pop(producer, None)

    def drop_before(self, position: int) -> None:
        """Drop the transactions that began before a position, because their messages are lost."""
        self._check_taken()
        for span in self._spans.values():
            if NONE < span.begin < position:
                span.reset(span.low)

    def copy(self) -> Sequencer:
        """Return an independent sequencer in the same state."""
        self._check_taken()
        other = Sequencer(buffer=self._size)
        other._buffer = deque(self._buffer)
        other._spans = {
            producer: replace(span, buffered=deque(span.buffered))
            for producer, span in self._spans.items()
        }
        return other

    def _check_taken(self) -> None:
        if self._emitting is not None:
            raise InvalidInput("committed messages wait: take all of dequeue_committed() first")

    def _judge(self, message: Message) -> tuple[_Span, Outcome]:
        clock = message.clock
        if clock == 0:
            # Without a clock, a repeat cannot be recognized, so nothing is remembered.
            return _Span(0, 0), Outcome.OUTSIDE_COMMIT
        span = self._spans.get(message.producer)
        if span is None:
            span = self._spans[message.producer] = _Span(clock - 1, clock - 1)
        if message.flags == CONTINUE_TXN:
            if clock <= span.low:
                return span, Outcome.CONTINUE_ALREADY_ACKED
            if clock <= span.high:
                return span, Outcome.CONTINUE_CLOCK_LARGER
            begins = span.begin == NONE
            return span, Outcome.CONTINUE_BEGIN_SPAN if begins else Outcome.CONTINUE_EXTEND_SPAN
        if message.flags == ACK_TXN:
            if clock <= span.low:
                return span, Outcome.ACK_ROLLBACK
            if span.begin == NONE:
                return span, Outcome.ACK_EMPTY
            whole = bool(span.buffered) and span.buffered[0].begin == span.begin
            return span, Outcome.ACK_COMMIT_RING if whole else Outcome.ACK_COMMIT_REPLAY
        duplicate = clock <= span.low
        return span, Outcome.OUTSIDE_ALREADY_ACKED if duplicate else Outcome.OUTSIDE_COMMIT

    def _evict(self) -> None:
        oldest = self._buffer.popleft()
        span = self._spans.get(oldest.producer)
        # Committed and dropped messages stay in the buffer, and in no span.
        if span is not None and span.buffered and span.buffered[0] is oldest:
            span.buffered.popleft()

    def _candidates(self, span: _Span) -> Iterator[Message]:
        """Messages of the committed span: first those of a replay, then those in the buffer."""
        if self._replay is not None:
            stop = span.buffered[0].begin
            for message in self._replay:
                if message.begin < span.begin or message.end > stop:
                    raise InvalidInput(
                        f"the replay has a message from {message.begin} to {message.end} and "
                        f"must be of positions {span.begin} to {stop}"
                    )
                if message.producer == self._producer:
                    yield message
            self._replay = None
        while span.buffered:
            yield span.buffered.popleft()


@dataclass(frozen=True, slots=True)
class Undecided:
    """The batches of one producer in one queue that are neither committed nor rolled back.

    Attributes:
        first_sequence: No entry from here on can be acknowledged.
        last_clock: An acknowledgement with a clock beyond it commits.
        batches: How many there are.
        txn: The transaction in the name of the first batch, if any.
    """

    first_sequence: int
    last_clock: int
    batches: int
    txn: Transaction | None = None


def undecided(entries: Iterable[tuple[int, str]], data_path_prefix: str) -> dict[bytes, Undecided]:
    """Return the undecided transactions of a queue, in the order of their first batches.

    Args:
        entries: Sequence and location of every entry of a manifest, which shows whole transactions.
        data_path_prefix: The queue's data prefix.

    Returns:
        The undecided transactions by producer id.
    """
    found: dict[bytes, Undecided] = {}
    sequencer = Sequencer(buffer=1)
    for sequence, location in entries:
        parsed = parse_location(location, data_path_prefix)
        if parsed is None or parsed.message is None:
            continue
        message, final = message_at(sequence, parsed.message)
        producer, clock = message.producer, message.clock
        assert isinstance(producer, bytes)
        outcome = sequencer.queue_uncommitted(message)
        if outcome is Outcome.CONTINUE_BEGIN_SPAN:
            found[producer] = Undecided(sequence, clock, 1, parsed.txn)
        elif outcome is Outcome.CONTINUE_EXTEND_SPAN:
            span = found[producer]
            found[producer] = replace(span, last_clock=clock, batches=span.batches + 1)
        elif clock and outcome not in _DUPLICATES:
            found.pop(producer, None)
        sequencer.start_replay(())  # The committed messages themselves are not needed.
        deque(sequencer.dequeue_committed(), maxlen=0)
        if final:
            sequencer.forget(producer)
    return found
