"""Check the promises of a whole deployment against one model.

The :class:`Oracle` knows nothing about features. It collects four kinds of facts and compares them:

* store: every batch object and every manifest entry, at the moment a process writes it;
* writers: every record whose write was confirmed. The oracle calls it *acknowledged*;
* readers: every batch that a reader received, with its sequence;
* losses: records that an operator trimmed or moved a reader past, or that an expired reader or a v1
  consumer may have lost.

The promise is one sentence: **every acknowledged record reaches every reader exactly once and in
the order of its writer, or an error names it; no process deletes an object that a reader still
needs.**

There are two kinds of losses. An operator may give records up, and then no error is needed
(:meth:`Oracle.give_up`). A fault or another client may take records from a reader. Such a record
may be missing only if the library raised an error to that reader that names its sequence
(:meth:`Oracle.may_lose`, then :meth:`Oracle.name_loss`). An error must not name a batch that is
still there, because the reader would skip it.

For example, if a writer got a confirmation for ``writer0#3:7`` and a reader never receives it, the
history fails. If a v1 consumer took the record before, the history passes once an error names its
sequence.

Records are bytes ``<writer>:<number>``. Each process of a writer has its own name and counts its
records from 0, so the records alone show whether the order is right.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from opendata_buffer.errors import CorruptData, OpenDataBufferError
from opendata_buffer.formats.batch import decode_batch
from opendata_buffer.formats.manifest import Manifest


def record_of(writer: str, number: int) -> bytes:
    """Return the record of a writer with this number."""
    return f"{writer}:{number}".encode()


@dataclass
class ReaderView:
    """Record the deliveries to one reader, and the promises that it has.

    Attributes:
        once: The reader stores its position together with its results, so it receives each batch
            once. Other readers may receive a batch again after a crash.
        committed: The reader returns only committed transactions, and each only once even if its
            writer wrote it twice.
        in_order: The reader receives batches in order. Workers share the batches of a queue and do
            not.
    """

    name: str
    once: bool = True
    committed: bool = False
    in_order: bool = True
    got: dict[bytes, tuple[str, int]] = field(default_factory=dict)
    """Partition and epoch of the first delivery of each record."""
    places: set[tuple[str, int, str]] = field(default_factory=set)
    """Partition, sequence, and location of each batch that it received."""
    given_up: set[bytes] = field(default_factory=set)
    skipped: set[bytes] = field(default_factory=set)
    """Records before the place to which the reader was moved last, by a reset or a seek."""
    moved: dict[str, int] = field(default_factory=dict)
    """Epoch of the last move, by partition."""
    may_lose: set[bytes] = field(default_factory=set)
    named: set[bytes] = field(default_factory=set)
    accepts_loss: bool = False
    """Its user let it continue past losses. Warnings name them, so :attr:`may_lose` is settled."""
    expired: bool = False
    """The reader did not move for longer than the expiry, so everything may be lost to it."""
    last: dict[tuple[str, str, int], int] = field(default_factory=dict)
    """The highest number that it received, by writer, partition, and epoch."""


class Oracle:
    """The model of one deployment.

    Args:
        fail: Called with the first broken promise; does not return.
        now: Returns the true time, in seconds.
        partition_of: Returns the partition of a manifest's key, or None for another object.
    """

    def __init__(
        self,
        fail: Callable[[str], object],
        now: Callable[[], float],
        partition_of: Callable[[str], str | None],
    ) -> None:
        self._fail = fail
        self._now = now
        self._partition_of = partition_of
        self.batches: dict[str, list[bytes]] = {}
        """Records of every batch object ever written, by key."""
        self.entries: dict[str, dict[int, str]] = defaultdict(dict)
        """Location of every manifest entry, by partition and sequence."""
        self.acknowledged: dict[bytes, None] = {}
        self.rolled_back: set[bytes] = set()
        self.repeatable: set[bytes] = set()
        """Records that their writer writes again if it gets no answer."""
        self.readers: dict[str, ReaderView] = {}
        self.repeats_allowed = False
        """Whether batches may repeat: a rebuilt manifest orders them by name (decision 0011)."""
        self.keep_s = 0.0
        """Seconds for which acknowledged records are kept, even if every reader has read them."""
        self._written_at: dict[str, float] = {}
        self.deleted: set[str] = set()
        self.damaged: set[str] = set()
        """Objects that a fault destroyed."""

    # Facts about the store.

    def object_written(self, process: str, key: str, data: bytes) -> None:
        """Note a write of any object."""
        partition = self._partition_of(key)
        if partition is not None:
            self._manifest_written(partition, data)
        elif "/_quarantine/" in key and key.endswith(".json"):
            # Workers get no error about a batch that cannot be read: its report names it.
            for view in self.readers.values():
                if not view.in_order:
                    location = json.loads(data)["location"]
                    self.name_records(view.name, self.batches.get(location, ()))
        elif "/_" not in f"/{key}":
            with suppress(OpenDataBufferError):
                self.batches[key] = decode_batch(data)
                self._written_at[key] = self._now()
                self.deleted.discard(key)

    def _manifest_written(self, partition: str, data: bytes) -> None:
        with suppress(CorruptData):
            for entry in Manifest.parse(data).entries():
                self.entries[partition][entry.sequence] = entry.location

    def object_deleted(self, process: str, key: str) -> None:
        """Note a deletion, and fail if a reader still needs the object."""
        self.deleted.add(key)
        for record in self.batches.get(key, ()):
            if record not in self.acknowledged or not self._is_in(record, key):
                continue
            if "v1-rogue" in process:  # a v1 client does not know logs, so it may delete this
                self.may_lose([record])
                continue
            age_s = self._now() - self._written_at[key]
            if age_s < self.keep_s:
                self._fail(f"{process} deleted {key}, {age_s:.1f} s old: the log keeps it longer")
            for reader in self.readers.values():
                lost = reader.expired or record in reader.may_lose
                if not self._is_settled(reader, record) and not lost:
                    self._fail(f"{process} deleted {key}, and {reader.name} never got {record!r}")

    def _is_in(self, record: bytes, key: str) -> bool:
        """Return whether no other object holds the record."""
        if record not in self.repeatable:
            return True
        others = (
            other for other, records in self.batches.items() if other != key and record in records
        )
        return all(other in self.deleted for other in others)

    # Facts about writers.

    def acknowledge(self, records: Iterable[bytes]) -> None:
        """Note that a writer got the confirmation for these records."""
        self.acknowledged.update(dict.fromkeys(records))

    def roll_back(self, records: Iterable[bytes]) -> None:
        """Note that the transaction with these records was certainly rolled back."""
        self.rolled_back.update(records)

    def may_repeat(self, records: Iterable[bytes]) -> None:
        """Note that the writer of these records writes them again if it gets no answer."""
        self.repeatable.update(records)

    # Facts about readers.

    def reader(self, name: str, *, once: bool = True, committed: bool = False) -> ReaderView:
        """Return the view of a new or known reader.

        Several programs may read by one name. The view then has the weakest promise of them.
        """
        view = self.readers.setdefault(name, ReaderView(name, once, committed))
        view.once, view.committed = view.once and once, view.committed and committed
        return view

    def deliver(
        self,
        reader: str,
        partition: str,
        sequence: int,
        location: str,
        records: Sequence[bytes],
        *,
        epoch: int = 0,
    ) -> None:
        """Note that a reader received a batch, and fail if that breaks a promise."""
        view = self.readers[reader]
        place = (partition, sequence, location)
        if view.once and not self.repeats_allowed:
            repeated = [place for _, _, known in view.places if known == location]
            if repeated and records:
                self._fail(f"{reader} got {place} twice")
        view.places.add(place)
        written = self.batches.get(location)
        if written is not None and [*records] != written:
            self._fail(f"{reader} got {records} from {location}, which holds {written}")
        for record in records:
            self._deliver_record(view, record, partition, sequence, epoch)

    def _deliver_record(
        self, view: ReaderView, record: bytes, partition: str, sequence: int, epoch: int
    ) -> None:
        if view.committed and record in self.rolled_back:
            self._fail(f"{view.name} got {record!r}, whose transaction was rolled back")
        again = record in view.got
        writer_repeats = record in self.repeatable
        once = view.once and (view.committed or not writer_repeats)
        if again and once and not self.repeats_allowed:
            self._fail(f"{view.name} got {record!r} twice, again at {partition} {sequence}")
        writer, _, number = record.decode().rpartition(":")
        key = (writer, partition, epoch)
        last = view.last.get(key, -1)
        in_order = view.in_order and not writer_repeats and not self.repeats_allowed
        if in_order and not again and int(number) < last:
            self._fail(f"{view.name} got {record!r} after number {last} ({partition})")
        view.last[key] = max(last, int(number))
        view.got.setdefault(record, (partition, epoch))

    def moved(self, reader: str, partition: str, sequence: int, epoch: int) -> None:
        """Note that a reader was moved to a sequence, by an operator or by itself.

        The reader receives everything from there on again, and nothing before it.

        Args:
            reader: Name of the reader.
            partition: Where it was moved.
            sequence: Its new next sequence.
            epoch: Epoch of the new position. A seek has an epoch of its own here.
        """
        view = self.readers[reader]
        if epoch >= view.moved.get(partition, 0):
            view.moved[partition] = epoch
            later = [seq for seq in self.entries[partition] if seq >= sequence]
            view.skipped.difference_update(self._records_at(partition, later))
            for place in [*view.places]:
                if place[0] == partition and place[1] >= sequence:
                    for record in self.batches.get(place[2], ()):
                        where = view.got.get(record)
                        if where is not None and where[1] < epoch:
                            del view.got[record]
        self.may_skip(reader, partition, sequence)

    def may_skip(self, reader: str, partition: str, sequence: int) -> None:
        """Note that a reader begins to move to a sequence, so that it may not get earlier ones."""
        passed = [seq for seq in self.entries[partition] if seq < sequence]
        self.readers[reader].skipped.update(self._records_at(partition, passed))

    # Losses.

    def give_up(self, records: Iterable[bytes], reader: str | None = None) -> None:
        """Note that an operator gave these records up, for one reader or for all."""
        records = [*records]
        for view in self._views(reader):
            view.given_up.update(records)

    def give_up_between(self, reader: str, partition: str, first: int, end: int) -> None:
        """Note that an error told a reader that it does not get the records in ``[first, end)``."""
        sequences = [n for n in self.entries[partition] if first <= n < end]
        self.give_up(self._records_at(partition, sequences), reader)

    def may_lose(self, records: Iterable[bytes], reader: str | None = None) -> None:
        """Note that these records were taken from readers. An error must name them."""
        records = [*records]
        for view in self._views(reader):
            view.may_lose.update(records)

    def name_loss(self, reader: str, partition: str, first: int, end: int) -> None:
        """Note that an error told a reader that the sequences in ``[first, end)`` are gone.

        Fail if one of these batches is still there.
        """
        entries, again = self.entries[partition], set[str]()
        if self.repeats_allowed:
            # A rebuilt manifest may queue the old one's batches again, at higher sequences.
            again = {location for sequence, location in entries.items() if sequence >= end}
        sequences = [n for n in entries if first <= n < end and entries[n] not in again]
        self.name_records(reader, self._records_at(partition, sequences))

    def name_records(self, reader: str, records: Iterable[bytes]) -> None:
        """Note a loss as :meth:`name_loss` does, by its records."""
        view = self.readers[reader]
        for record in records:
            if self._is_settled(view, record):
                continue
            if record not in self.acknowledged:
                # Its writer may get the confirmation later.
                view.named.update({record} & view.may_lose)
                continue
            if not view.expired and record not in view.may_lose:
                self._fail(
                    f"an error tells {reader} that {record!r} is lost, but it is still there"
                )
            view.named.add(record)

    def _records_at(self, partition: str, sequences: Iterable[int]) -> list[bytes]:
        locations = (self.entries[partition][seq] for seq in sequences)
        return [record for location in locations for record in self.batches.get(location, ())]

    def _views(self, reader: str | None) -> list[ReaderView]:
        return [*self.readers.values()] if reader is None else [self.readers[reader]]

    # At the end.

    def _is_settled(self, view: ReaderView, record: bytes) -> bool:
        """Return whether a reader no longer needs this record."""
        accepted = view.accepts_loss and record in view.may_lose
        known = (view.got, view.given_up, view.skipped, view.named)
        return accepted or any(record in records for records in known)

    def missing(self) -> dict[str, list[bytes]]:
        """Return the acknowledged records that each reader still must receive, by reader."""
        found = {
            view.name: [
                record for record in self.acknowledged if not self._is_settled(view, record)
            ]
            for view in self.readers.values()
        }
        return {name: records for name, records in found.items() if records}

    def where(self, record: bytes) -> str:
        """Describe for an error where a record was stored and queued."""
        stored = [key for key, records in self.batches.items() if record in records]
        queued = [
            f"{partition}@{sequence}"
            for partition, entries in self.entries.items()
            for sequence, location in entries.items()
            if location in stored
        ]
        gone = [key for key in stored if key in self.deleted]
        return f"{record!r} in {stored}, queued at {queued}, deleted {gone}"
