"""Decide which queued batches are delivered, and when: the one rule of all readers.

The problem: a writer may queue a batch twice, because it got no answer and could not know whether
its append was applied. And the batches of a transaction lie between those of other writers, perhaps
long before the entry that commits or aborts it. A reader has to deliver each batch once, and the
batches of a transaction either all or not at all.

The idea: the name of a batch tells its writer and its place in the writer's order. So a reader
needs only the names, never the objects, and two readers of one queue decide the same. There are
three kinds of names:

- ``app=<id>/batch=<n>/``: the batches of a transaction that was written in one append. If its
writer
  repeats the append, :class:`~.isolation.TransactionFilter` drops the second one.
- ``message=<uuid>/``: producer, clock and flags. :class:`~.messages.Sequencer` holds such a batch
  back until its transaction is decided, and drops repeats and rolled-back batches.
- Other names have no identity. A batch is delivered at once, each location once (:class:`Repeats`).

For example, producers A and B write transactions, and C writes without one::

    sequence    0    1    2    3           4    5
    entry       A1   B1   C    A commits   C    B aborts
    delivered             2    0           4

An undecided transaction delays only the batches of its own producer: 2 is delivered before 0.

What can go wrong:

- An entry leaves the manifest while its transaction is open, and is not there at the commit. So a
  reader acknowledges only entries before :meth:`ReadCommitted.stable_end`, here 0 until A commits
  and 1 until B aborts (failure F38).
- Entries are lost, perhaps including the acknowledgement of a transaction. The reader reports the
  loss (:meth:`ReadCommitted.lost`), and open transactions that began there are given up.
- The object of a batch is gone, and its writer repeats it. The reader reports the skip
  (:meth:`ReadCommitted.skip`), and the repeat is delivered.
"""

from __future__ import annotations

import logging
import re
from base64 import b64encode
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from dataclasses import replace
from hashlib import blake2b
from itertools import chain, islice, takewhile
from operator import itemgetter
from typing import Any, Final, TypeVar

from opendata_buffer import errors
from opendata_buffer.arguments import checked
from opendata_buffer.config import QueueConfig
from opendata_buffer.formats.batch import BatchLocation, Transaction, parse_location
from opendata_buffer.formats.manifest import BatchDescriptor
from opendata_buffer.messages import (
    ACK_TXN,
    CLOCK_MAX,
    FINAL,
    ProducerState,
    Sequencer,
    message_at,
    parse_uuid,
)
from opendata_buffer.queue.cas import CasObject, CasStore
from opendata_buffer.queue.sidecar import LARGEST, Sidecar, is_number
from opendata_buffer.runtime import Runtime

log = logging.getLogger(__name__)

MOST_NOTED = 2_048
"""The number of acknowledged batches that are remembered; see :class:`Repeats`."""

HORIZON_DAYS = 30
"""The number of days without a batch after which an app is forgotten."""

READ_COMMITTED: Final = "read_committed"
READ_UNCOMMITTED: Final = "read_uncommitted"
ISOLATION_LEVELS = (READ_COMMITTED, READ_UNCOMMITTED)

Replay = Callable[[int, int], Iterable[tuple[int, str]]]
"""Returns sequence and location of all entries from the first sequence up to, not including, the
second."""

Key = TypeVar("Key", bound=Hashable)

_DAY_MS = 24 * 60 * 60 * 1000
_PRODUCER = re.compile("[0-9a-fA-F]{12}")


class TransactionFilter:
    """A filter that passes each transaction once.

    It remembers for each app the last transaction passed, and that transaction's last entry.

    A transactional writer (the Spark sink) appends all batches of a transaction in one
    compare-and-swap, with batch numbers that only grow. It appends them again if it does not know
    whether that was applied (decision 0005). So a transaction is *contiguous*. An entry repeats an
    earlier one in two cases: its batch number is lower than the highest one passed of its app; or
    it is equal, and the entry is not adjacent to the last entry passed of that transaction.

    A transaction with a skipped batch (:meth:`skip`) does not count as passed, whatever came later,
    so its repeat is passed.

    Not thread-safe. The state grows with the number of apps that write. :meth:`prune` forgets apps
    that wrote nothing for :data:`HORIZON_DAYS` days: a repeat that comes later is read as new.

    ::

        transactions = TransactionFilter("ingest")
        for descriptor in consumer.next_descriptors(1_000):
            if transactions.offer(descriptor.sequence, descriptor.location):
                write(consumer.fetch_descriptor(descriptor))

    Args:
        data_path_prefix: The queue's data prefix; batches elsewhere have no transaction.
    """

    @checked
    def __init__(self, data_path_prefix: str) -> None:
        self._prefix = data_path_prefix
        self._high: dict[str, int] = {}
        self._tail: tuple[str, int, int] | None = None  # app, batch, sequence
        self._missing: dict[str, set[int]] = {}
        self._seen: dict[str, int] = {}  # app: day since the Unix epoch of its newest batch

    @checked
    def offer(self, sequence: int, location: str) -> bool:
        """Return whether to deliver the entry (True) or to drop it as a repeat (False).

        Offer every entry in order of sequence, or call :meth:`skip` or :meth:`lost` for it. An
        entry that is left out makes the rest of its transaction look like a repeat. Entries without
        a transaction are always delivered.

        Args:
            sequence: The entry's sequence.
            location: The entry's location.

        Returns:
            Whether to deliver the entry.
        """
        # A fast path: most names have no identity, and a trigger may have 100,000 of them.
        named = parse_location(location, self._prefix) if "=" in location else None
        if named is None or named.txn is None or named.message is not None:
            # One append writes a transaction in adjacent entries. So an entry without a transaction
            # ends it, and later entries of the same transaction come from a second append.
            # ReadCommitted decides whether a message counts.
            self._tail = None
            return True
        txn = named.txn
        self._saw(named, txn)
        high = self._high.get(txn.app, -1)
        missing = self._missing.get(txn.app, set())
        if txn.batch in missing:
            missing.remove(txn.batch)
            if not missing:
                del self._missing[txn.app]
        elif txn.batch <= high and not self._continues(txn, sequence):
            return False
        self._high[txn.app] = max(high, txn.batch)
        self._tail = (txn.app, txn.batch, sequence)
        return True

    @checked
    def skip(self, sequence: int, location: str) -> None:
        """Note an entry that could not be delivered and was skipped, instead of :meth:`offer`.

        An append that was applied later than the collector's grace period allows may name an object
        that is gone (failure F5). Its writer notices this and appends the transaction again. That
        repeat is passed.

        If the transaction has several batches, the rest of it is still passed. Then its repeat is
        not passed, because part of it would come twice, and the skipped batch is lost.

        Args:
            sequence: The entry's sequence.
            location: The entry's location.
        """
        named = parse_location(location, self._prefix)
        if named is None or named.txn is None or named.message is not None:
            return
        txn = named.txn
        if self._continues(txn, sequence):
            self._tail = (txn.app, txn.batch, sequence)
        elif txn.batch > self._high.get(txn.app, -1):
            self._missing.setdefault(txn.app, set()).add(txn.batch)
            self._saw(named, txn)

    @checked
    def lost(self, through: int) -> None:
        """Note that the sequences up to and including ``through`` are gone, with their names.

        The next entry is delivered even if it is of the same transaction as the last one before
        them: it is more likely the rest of that transaction than a repeat whose separator is gone.

        Args:
            through: The last sequence that is gone.
        """
        if self._tail is not None and self._tail[2] < through:
            self._tail = (*self._tail[:2], through)

    @checked
    def prune(self, now_ms: int, horizon_days: int = HORIZON_DAYS) -> None:
        """Forget apps whose newest batch is older than the horizon.

        The age is measured to the newest batch of any app or to ``now_ms``, whichever is earlier.
        So neither one name nor one clock that is far ahead can make all apps old. If the state was
        written before ages were kept, its apps count as new as of this call.

        Args:
            now_ms: Milliseconds since the Unix epoch, by the caller's clock.
            horizon_days: Age in days.
        """
        current = None if self._tail is None else self._tail[0]
        for app in _expired(self._seen, {*self._high, *self._missing}, now_ms, horizon_days):
            if app != current:
                self._high.pop(app, None)
                self._missing.pop(app, None)
                del self._seen[app]

    def _saw(self, named: BatchLocation, txn: Transaction) -> None:
        self._seen[txn.app] = max(self._seen.get(txn.app, 0), named.timestamp_ms // _DAY_MS)

    def _continues(self, txn: Transaction, sequence: int) -> bool:
        return self._tail == (txn.app, txn.batch, sequence - 1)

    def copy(self) -> TransactionFilter:
        """Return an independent filter in the same state, to try a plan out."""
        other = TransactionFilter(self._prefix)
        other._high = dict(self._high)
        other._tail = self._tail
        other._missing = {app: set(batches) for app, batches in self._missing.items()}
        other._seen = dict(self._seen)
        return other

    def to_dict(self) -> dict[str, Any]:
        """Return the state as a value for JSON, keys in a fixed order.

        ``{"v": 1, "apps": {app: highest batch}, "tail": [app, sequence] or null}``; ``tail`` is the
        last entry delivered, if it had a transaction, with its batch if that is not the app's
        highest. After skips there is also ``"missing": {app: [batch, ...]}``; and, once an app was
        seen, ``"seen": {app: day of its newest batch, since the Unix epoch}``.
        """
        state: dict[str, Any] = {"v": 1, "apps": dict(sorted(self._high.items()))}
        state["tail"] = None
        if self._tail is not None:
            app, batch, sequence = self._tail
            state["tail"] = [app, sequence, batch][: 2 if batch == self._high[app] else 3]
        if self._missing:
            state["missing"] = {app: sorted(self._missing[app]) for app in sorted(self._missing)}
        if self._seen:
            state["seen"] = dict(sorted(self._seen.items()))
        return state

    @classmethod
    @checked
    def from_dict(cls, state: Any, data_path_prefix: str) -> TransactionFilter:
        """Restore the filter that :meth:`to_dict` described.

        Args:
            state: The result of :meth:`to_dict`, also after a round trip through JSON.
            data_path_prefix: The queue's data prefix.

        Returns:
            A filter that continues where the other one was.

        Raises:
            InvalidInput: Another program or a later version wrote it.
        """
        made = cls(data_path_prefix)
        match state:
            case {"v": 1, "apps": dict(apps), "tail": tail, **more}:
                missing, seen = more.get("missing", {}), more.get("seen", {})
            case _:
                raise _unreadable(state)
        match tail:
            case None:
                pass
            case [str() as app, int() as sequence] if app in apps:
                made._tail = (app, apps[app], sequence)
            case [str() as app, int() as sequence, int() as batch] if app in apps:
                made._tail = (app, batch, sequence)
            case _:
                raise _unreadable(state)
        if not (
            isinstance(missing, dict)
            and isinstance(seen, dict)
            and all(isinstance(batches, list) for batches in missing.values())
            and all(map(is_number, (*apps.values(), *seen.values(), *chain(*missing.values()))))
        ):
            raise _unreadable(state)
        made._high, made._seen = dict(apps), dict(seen)
        made._missing = {app: set(batches) for app, batches in missing.items()}
        return made


def _unreadable(state: object) -> errors.InvalidInput:
    return errors.InvalidInput(
        f"transaction state {state!r:.200} is not version 1 of this library: resume with the "
        "version that wrote it, or start without state and accept repeats"
    )


def _expired(seen: dict[Key, int], known: Iterable[Key], now_ms: int, days: int) -> list[Key]:
    """Return the names whose newest batch is older than ``days``.

    A name of unknown age gets today's date.
    """
    if not seen:
        return []
    today = min(now_ms // _DAY_MS, max(seen.values()))
    return [each for each in known if today - seen.setdefault(each, today) > days]


def is_acknowledgement(location: str, data_path_prefix: str) -> bool:
    """Return whether an entry only decides transactions. Offer it, but never read its object."""
    parsed = parse_location(location, data_path_prefix)
    if parsed is None or parsed.message is None:
        return False
    return parse_uuid(parsed.message).flags & ~FINAL == ACK_TXN


class ReadCommitted:
    """The rule that decides which batches to deliver. Offer it every entry in order.

    Deliver the batches that :meth:`offer` returns. Not thread-safe. The state grows with the number
    of apps and producers that write. A producer is forgotten at its final acknowledgement, and
    others by :meth:`prune`.

    Args:
        data_path_prefix: The queue's data prefix; batches elsewhere have no identity.
        isolation: ``read_committed``; or ``read_uncommitted``, which delivers everything but
            acknowledgements at once, and keeps only the state that it was created with.

    Raises:
        InvalidInput: The isolation level does not exist.
    """

    buffer = 4096
    """The number of undecided messages that are kept. The beginning of a larger transaction is read
    again from the manifest when the transaction is decided."""

    def __init__(self, data_path_prefix: str, isolation: str = READ_COMMITTED) -> None:
        if isolation not in ISOLATION_LEVELS:
            raise errors.InvalidInput(
                f"isolation is {isolation!r}: use {' or '.join(ISOLATION_LEVELS)}"
            )
        self._prefix = data_path_prefix
        self._isolation = isolation
        self._transactions = TransactionFilter(data_path_prefix)
        self._sequencer: Sequencer | None = None
        """Made with the first message: most queues have none."""
        self._seen: dict[Hashable, int] = {}  # producer: day since the epoch of its newest batch
        self._queued: int | None = None  # sequence whose offer failed in the replay

    def offer(self, sequence: int, location: str, replay: Replay) -> list[int]:
        """Note the next entry, and return the sequences that can be delivered now.

        Offer every entry in order of sequence, or call :meth:`skip` or :meth:`lost` for it. After
        an error of ``replay`` make the same call again to continue.

        Args:
            sequence: The entry's sequence.
            location: The entry's location.
            replay: Returns all earlier entries of a range again, never from before
                :meth:`stable_end`.

        Returns:
            The sequences to deliver, in order. They may be older than the entry, if it commits a
            transaction.
        """
        if self._isolation == READ_UNCOMMITTED:
            return [] if is_acknowledgement(location, self._prefix) else [sequence]
        passes = self._transactions.offer(sequence, location)
        # Names that do not belong to a message are not parsed twice.
        parsed = parse_location(location, self._prefix) if "/message=" in location else None
        if parsed is None or parsed.message is None:
            return [sequence] if passes else []
        message, final = message_at(sequence, parsed.message)
        if message.clock:
            day = parsed.timestamp_ms // _DAY_MS
            self._seen[message.producer] = max(self._seen.get(message.producer, 0), day)
        if self._sequencer is None:
            self._sequencer = Sequencer((), self.buffer)
        if self._queued != sequence:
            self._sequencer.queue_uncommitted(message)
            self._queued = sequence
        delivered = self._committed(self._sequencer, replay)
        self._queued = None
        if final:
            self._forget(message.producer)
        return delivered

    def _committed(self, sequencer: Sequencer, replay: Replay) -> list[int]:
        if not sequencer.has_committed():
            return []
        begin, end = sequencer.replay_range()
        if begin != end:
            # Read everything before the first message is taken, so that an error here leaves the
            # state as it was. A message without a clock was delivered when it was read.
            again = []
            for sequence, location in replay(begin, end):
                parsed = parse_location(location, self._prefix)
                if parsed is not None and parsed.message is not None:
                    message, _ = message_at(sequence, parsed.message)
                    if message.clock:
                        again.append(message)
            sequencer.start_replay(again)
        return [
            message.begin for message in sequencer.dequeue_committed() if message.flags != ACK_TXN
        ]

    def stable_end(self, next_sequence: int) -> int:
        """Return the first sequence that must not be acknowledged yet.

        Kafka calls it the last stable offset. It is ``next_sequence``, the one after the last entry
        offered, if nothing is undecided.
        """
        pending = None if self._sequencer is None else self._sequencer.pending_from()
        return next_sequence if pending is None else min(pending, next_sequence)

    def skip(self, sequence: int, location: str) -> None:
        """Note an entry whose object is gone, instead of :meth:`offer`: its repeat is delivered.

        See :meth:`.TransactionFilter.skip`.

        Args:
            sequence: The entry's sequence.
            location: The entry's location.

        Raises:
            InvalidInput: The entry is an acknowledgement, which needs no object.
        """
        if self._isolation == READ_UNCOMMITTED:
            return
        if is_acknowledgement(location, self._prefix):
            raise errors.InvalidInput(
                f"sequence {sequence} at {location!r} is an acknowledgement: offer it, no object "
                "is needed for that"
            )
        self._transactions.skip(sequence, location)

    def lost(self, through: int) -> None:
        """Note that the sequences up to and including ``through`` are gone, with their names.

        Open transactions are given up. If one continues, the rest of it is delivered when it is
        committed.
        """
        if self._isolation == READ_UNCOMMITTED:
            return
        self._transactions.lost(through)
        if self._sequencer is not None:
            self._sequencer.drop_before(through + 1)

    def prune(self, now_ms: int) -> None:
        """Forget apps and producers whose newest batch is older than the horizon, by its ULID.

        Producers with an open transaction are kept.
        """
        self._transactions.prune(now_ms)
        begins: dict[Hashable, int] = {_id(state): state.begin for state in self._producers()}
        for producer in _expired(self._seen, begins, now_ms, HORIZON_DAYS):
            if begins[producer] < 0:
                self._forget(producer)

    def copy(self) -> ReadCommitted:
        """Return an independent copy in the same state, to try a plan out."""
        other = type(self)(self._prefix, self._isolation)
        other._transactions = self._transactions.copy()
        other._sequencer = None if self._sequencer is None else self._sequencer.copy()
        other._seen = dict(self._seen)
        return other

    def to_dict(self) -> dict[str, Any]:
        """Return the state as a value for JSON; equal states give equal values.

        Keys have a fixed order. It is that of :meth:`.TransactionFilter.to_dict` and, once there
        was a message, ``"producers": {id in hex: [clock of the last committed message, sequence
        that its open transaction begins at or -1, day of its newest batch since the Unix epoch]}``.
        """
        state = self._transactions.to_dict()
        producers = {
            _id(each).hex(): [each.last_ack, each.begin, self._seen[_id(each)]]
            for each in self._producers()
        }
        if producers:
            state["producers"] = dict(sorted(producers.items()))
        return state

    @classmethod
    def from_dict(
        cls, state: Any, data_path_prefix: str, isolation: str = READ_COMMITTED
    ) -> ReadCommitted:
        """Restore the state that :meth:`to_dict` or :meth:`.TransactionFilter.to_dict` described.

        Args:
            state: The result of ``to_dict``, also after a round trip through JSON.
            data_path_prefix: The queue's data prefix.
            isolation: ``read_committed`` or ``read_uncommitted``.

        Returns:
            A state that continues where the other one was.

        Raises:
            InvalidInput: Another program or a later version wrote it.
        """
        made = cls(data_path_prefix, isolation)
        made._transactions = TransactionFilter.from_dict(state, data_path_prefix)
        states = []
        producers = state.get("producers", {})
        if not isinstance(producers, dict):
            raise _unreadable(state)
        for name, value in producers.items():
            match value:
                case [int() as last_ack, int() as begin, int() as day] if (
                    0 <= last_ack <= CLOCK_MAX
                    and begin >= -1
                    and day >= 0
                    and _PRODUCER.fullmatch(name)
                ):
                    producer = bytes.fromhex(name)
                    states.append(ProducerState(producer, last_ack, begin))
                    made._seen[producer] = day
                case _:
                    raise _unreadable(state)
        if states:
            made._sequencer = Sequencer(states, cls.buffer)
        return made

    def _producers(self) -> list[ProducerState]:
        return [] if self._sequencer is None else self._sequencer.checkpoint()

    def _forget(self, producer: Hashable) -> None:
        assert self._sequencer is not None, "producers are known by their messages"
        self._sequencer.forget(producer)
        self._seen.pop(producer, None)


def _id(state: ProducerState) -> bytes:
    producer = state.producer
    assert isinstance(producer, bytes)
    return producer


_NAME = "_acknowledged.json"
_NOTE = Sidecar(
    "the note of acknowledged batches",
    "Delete it: a batch that another client queued twice may then be delivered twice.",
    max_bytes=256 * 1024,
)

_Noted = tuple[str, dict[str, int]]
"""The queue's id, and the sequence of each batch by the hash of its location."""


def _encode(noted: _Noted) -> bytes:
    return _NOTE.encode({"queue": noted[0], "batches": noted[1]})


def _decode(data: bytes) -> _Noted:
    fields = _NOTE.decode(data)
    batches = fields.mapping("batches")
    if all(map(is_number, batches.values())):
        return fields.text("queue"), batches
    raise fields.wrong("batches", "a sequence for each hash")


def _nothing_known(error: errors.CorruptData, version: str) -> _Noted:
    log.warning("repeats of acknowledged batches are not recognised: %s", error)
    return "", {}


def _hash(location: str) -> str:
    # The hash has 96 bits. The chance that a new location collides with one of MOST_NOTED others is
    # 1 in 2^85. Hashes are kept base64-encoded, as in the note, because encoding all of them on
    # each acknowledgement would take most of its time.
    digest = blake2b(location.encode(errors="surrogatepass"), digest_size=12).digest()
    return b64encode(digest).decode()


class Repeats:
    """A record of acknowledged batches that shows which new entries repeat them (failure F41).

    A v1 writer that got no answer appends the same location again. These later entries are repeats,
    and the batch must be delivered once. An acknowledged entry has left the manifest, so a repeat
    can no longer be compared with it. Therefore a consumer notes the last :data:`MOST_NOTED`
    acknowledged entries before it dequeues them: the sequence of each, by a hash of its location,
    in ``<prefix>/_acknowledged.json`` (decision 0034)::

        {"version": 1, "queue": "01J5...", "batches": {"m3Xk...": 41, "Zc0u...": 42}}

    Batches of transactions and messages are left out: their names show which entries repeat them.
    Not thread-safe.

    Args:
        store: The store of the queue.
        config: The queue.
        runtime: Clock and pauses.
        queue_id: The queue's id; empty to take the note of whatever queue is there.
    """

    def __init__(
        self, store: CasStore, config: QueueConfig, runtime: Runtime, queue_id: str
    ) -> None:
        self._prefix = config.data_path_prefix
        self._queue_id = queue_id
        self._object: CasObject[_Noted] = CasObject(
            store,
            f"{self._prefix}/{_NAME}",
            decode=_decode,
            encode=_encode,
            runtime=runtime,
            settings=config,
            sidecar=_NOTE,
            if_unreadable=_nothing_known,
        )
        self._first: dict[str, int] = {}
        self._unnoted: deque[str] = deque()

    def load(self) -> None:
        """Read the notes of earlier consumers.

        Raises:
            StorageError: The store did not answer.
        """
        found = self._object.read()
        if isinstance(found, tuple) and self._queue_id in ("", found[0]):
            self._first = found[1] | self._first

    def first_of(self, entry: BatchDescriptor) -> int | None:
        """Return the sequence that the next entry repeats, or None.

        May be asked again for any entry.
        """
        if "=" in entry.location:  # most have none, and parsing takes longer than hashing
            named = parse_location(entry.location, self._prefix)
            if named is not None and (named.txn is not None or named.message is not None):
                return None
        name, sequence = _hash(entry.location), entry.sequence
        first = self._first.get(name, LARGEST)
        if first < sequence:
            log.info("entry %d repeats %d: %s", sequence, first, entry.location)
            return first
        if first > sequence:
            self._first[name] = sequence
            self._unnoted.append(name)
        return None

    def described(self, entries: Iterable[BatchDescriptor]) -> list[BatchDescriptor]:
        """Return the next entries, in order, with :attr:`.BatchDescriptor.repeats` filled in."""
        found = ((each, self.first_of(each)) for each in entries)
        return [each if first is None else replace(each, repeats=first) for each, first in found]

    def forget(self, location: str) -> None:
        """Forget a batch that is given up. If it is queued again, it is delivered."""
        name = _hash(location)
        if self._first.pop(name, None) is not None and name in self._unnoted:
            self._unnoted.remove(name)

    def note(self, before: int) -> None:
        """Note all described entries before a sequence. Call it before they leave the manifest.

        If this program may not write the note, it logs a warning with the consequence.

        Args:
            before: The sequence after the last entry that leaves the manifest.

        Raises:
            TransientStorageError: The note may not be stored. Nothing may leave the manifest then.
        """
        due = list(takewhile(lambda name: self._first.get(name, 0) < before, self._unnoted))
        new = {name: self._first[name] for name in due if name in self._first}

        def noted(found: _Noted | None) -> _Noted:
            known = found[1] if found is not None and found[0] == self._queue_id else {}
            if found is not None and new.items() <= known.items():
                return found
            latest = sorted((known | new).items(), key=itemgetter(1))[-MOST_NOTED:]
            return self._queue_id, dict(latest)

        try:
            if new:
                self._object.change(noted, from_memory=True)
        except errors.PermanentStorageError as error:
            log.warning("batches queued a second time may be delivered twice: %s", error)
            return
        self.forget_before(before)

    def forget_before(self, sequence: int) -> None:
        """Keep only the last :data:`MOST_NOTED` of the described entries before a sequence."""
        while self._unnoted and self._first.get(self._unnoted[0], 0) < sequence:
            self._unnoted.popleft()
        known = len(self._first) - MOST_NOTED - len(self._unnoted)
        for name in [*islice(self._first, max(0, known))]:
            del self._first[name]
