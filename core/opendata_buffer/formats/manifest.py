"""The v1 queue manifest: entries back to back and a footer, kept as the bytes in the store.

::

    entry   [entry_len u32][sequence u64][location_len u16][location][metadata_count u32][items]
    item    [start_index u32][ingestion_time_ms i64][payload_len u32][payload]
    footer  [entry_count u32][next_sequence u64][epoch u64][version u16 = 1]   22 bytes

All numbers are little-endian, and ``entry_len`` counts the bytes after itself (OpenData RFC 0001,
Manifest Format). An append copies the old entries as bytes and never decodes them. Each length,
count, and sequence is checked before it is used (failure F15).
"""

from __future__ import annotations

import struct
from array import array
from bisect import bisect_left
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain, pairwise
from typing import NamedTuple, Protocol

from opendata_buffer.errors import CorruptManifest, InvalidInput
from opendata_buffer.formats import MIB, BytesLike, keep_freed_memory
from opendata_buffer.formats.batch import MAX_LOCATION_BYTES, location_timestamp_ms
from opendata_buffer.hints import Action, Hint, QueueName

VERSION = 1
FOOTER_SIZE = 22
MAX_MANIFEST_BYTES = 1 << 30
"""A larger manifest is neither read nor written, because every append would rewrite it."""

SEALED_EPOCH = 2**63 - 1
"""Epoch of a queue that is closed for good: no consumer can claim it, or reach it by counting."""

_U32_MAX = 2**32 - 1
_U64_MAX = 2**64 - 1

FIXED_SIZE = 8 + 2 + 4
"""``entry_len`` of an entry with an empty location and no metadata."""
LEAST_SIZE = 4 + FIXED_SIZE
"""Bytes of such an entry."""

_FOOTER = struct.Struct("<IQQH")
_HEAD = struct.Struct("<IQH")  # entry_len, sequence, location_len
_ORDER = struct.Struct("<IQ")  # entry_len, sequence
_META = struct.Struct("<IqI")
_U16 = struct.Struct("<H")
_U32 = struct.Struct("<I")
_MOST_QUEUED = 2**48  # no queue gets this far; text that is read as a sequence is larger


@dataclass(frozen=True, slots=True)
class Metadata:
    """Metadata that one ``produce()`` call attached to its range of a batch.

    Attributes:
        start_index: First record of the range, which ends where the next range starts.
        ingestion_time_ms: Milliseconds since the Unix epoch, by the producer's clock; any i64.
        payload: Opaque to the buffer.
    """

    start_index: int
    ingestion_time_ms: int
    payload: bytes = b""


@dataclass(frozen=True, slots=True)
class NewEntry:
    """A batch to append to the queue. The manifest gives it a sequence."""

    location: str
    metadata: tuple[Metadata, ...] = ()


@dataclass(frozen=True, slots=True)
class BatchDescriptor:
    """One queued batch, such as one to fetch. Small, hashable, and picklable.

    Attributes:
        sequence: Position in the queue.
        location: Key of the batch object, relative to the store.
        metadata: Ranges of records with their ingestion time and payload.
        size: Bytes of the object, if a listing has shown them.
        repeats: The sequence of an earlier entry with this location: a writer queued the batch
            twice, and readers skip this entry. None for all entries that are delivered.
    """

    sequence: int
    location: str
    metadata: tuple[Metadata, ...] = ()
    size: int | None = None
    repeats: int | None = None

    @property
    def time_ms(self) -> int | None:
        """When the first record was ingested, in milliseconds since the Unix epoch.

        Without metadata it is the time in the batch's name, which a writer may have set ahead; None
        if there is neither.
        """
        if self.metadata:
            return self.metadata[0].ingestion_time_ms
        return location_timestamp_ms(self.location)

    @property
    def latest_ms(self) -> int:
        """The latest ingestion time of a record, like :attr:`time_ms`; 0 without a time."""
        times = [item.ingestion_time_ms for item in self.metadata]
        return max(times) if times else location_timestamp_ms(self.location) or 0


class Footer(NamedTuple):
    """The values in the footer, as :class:`Manifest` describes them."""

    entry_count: int
    next_sequence: int
    epoch: int

    def pack(self) -> bytes:
        """Return the footer's bytes."""
        return _FOOTER.pack(self.entry_count, self.next_sequence, self.epoch, VERSION)

    @classmethod
    def parse(cls, data: bytes) -> Footer:
        """Read the footer of a whole manifest, and compare it with the size of the entries.

        Args:
            data: The bytes of the manifest.

        Returns:
            The footer.

        Raises:
            CorruptManifest: The bytes do not end with a footer of version 1 that fits them.
        """
        body = len(data) - FOOTER_SIZE
        if body < 0:
            raise _no_footer(data)
        count, next_sequence, epoch, version = _FOOTER.unpack_from(data, body)
        if version != VERSION:
            # A damaged manifest may end with any two bytes, so trust the version only if the rest
            # of the footer is plausible.
            if count * LEAST_SIZE > body or count > next_sequence or (count == 0) != (body == 0):
                raise _no_footer(data)
            raise CorruptManifest(
                f"manifest has version {version}, but this library reads version {VERSION}: a "
                "later release wrote it. Upgrade this program first."
            )
        # failure F16: entries beyond the count would be dropped unread.
        if count * LEAST_SIZE > body or (count == 0 and body):
            raise _corrupt(f"manifest counts {count} entries but they have {body} bytes")
        if count > next_sequence:
            raise _corrupt(
                f"manifest counts {count} entries but its next sequence is {next_sequence}"
            )
        return cls(count, next_sequence, epoch)


def _corrupt(fault: str) -> CorruptManifest:
    return CorruptManifest(fault, Hint(Action.REPAIR_MANIFEST))


def _no_footer(data: bytes) -> CorruptManifest:
    """Return the error for bytes that do not end with a footer; it says what happened to them."""
    size = len(data)
    if not size:
        fault = "manifest is empty: 0 bytes were written over it"
    elif _begins_with_entry(data):
        fault = (
            f"manifest is truncated: its {size} bytes begin with an entry but do not end with the "
            f"{FOOTER_SIZE}-byte footer"
        )
    else:
        fault = (
            f"manifest was overwritten: its {size} bytes begin with {data[:16]!r} and are not a "
            "manifest"
        )
    return CorruptManifest(fault, Hint(Action.RESTORE_OR_REPAIR_MANIFEST))


def _begins_with_entry(data: bytes) -> bool:
    """Return whether the bytes start like an entry's header and location, as far as they go."""
    if len(data) < _HEAD.size:
        return False
    length, sequence, location_size = _HEAD.unpack_from(data, 0)
    location = data[_HEAD.size : _HEAD.size + location_size]
    return (
        FIXED_SIZE + location_size <= length <= MAX_MANIFEST_BYTES
        and sequence < _MOST_QUEUED
        and bool(location)
        and location.isascii()
        and all(32 <= byte < 127 for byte in location)
    )


@dataclass(frozen=True, slots=True, repr=False)
class Manifest:
    """One immutable version of a queue manifest.

    Create one with :meth:`empty` or :meth:`parse`. Every change returns a new manifest. The next
    appended entry gets ``next_sequence``. ``epoch`` belongs to the consumer that owns the queue and
    is 0 before the first one.
    """

    raw: bytes
    entry_count: int = field(compare=False)
    next_sequence: int = field(compare=False)
    epoch: int = field(compare=False)
    # Cache of where the first entries start. It is replaced as a whole, so threads may share it.
    _starts: Sequence[int] = field(default=(), compare=False)
    # The queue, to name it in errors.
    _queue: QueueName | None = field(default=None, compare=False)

    @property
    def first_sequence(self) -> int:
        """Sequence of the oldest entry; ``next_sequence`` if the queue is empty."""
        return self.next_sequence - self.entry_count

    @property
    def _footer(self) -> Footer:
        return Footer(self.entry_count, self.next_sequence, self.epoch)

    def __reduce__(self) -> tuple[object, ...]:
        return (Manifest.parse, (self.raw,))

    def __repr__(self) -> str:
        return (
            f"Manifest(entries={self.entry_count}, first_sequence={self.first_sequence}, "
            f"next_sequence={self.next_sequence}, epoch={self.epoch}, size={self.size})"
        )

    @property
    def size(self) -> int:
        """Bytes in the store."""
        return len(self.raw)

    @property
    def sealed(self) -> bool:
        """Whether the queue is closed for good: nothing can be appended or claimed."""
        return self.epoch == SEALED_EPOCH

    @classmethod
    def empty(cls) -> Manifest:
        """Return the manifest of a queue that was never written to."""
        return cls.starting_at(0, 0)

    @classmethod
    def starting_at(cls, next_sequence: int, epoch: int) -> Manifest:
        """Make an empty manifest of a queue that has reached this sequence and epoch.

        Args:
            next_sequence: Sequence of the next entry, at least 0.
            epoch: The consumer's epoch, at least 0.

        Returns:
            The manifest.

        Raises:
            InvalidInput: A value is out of range.
        """
        if not 0 <= next_sequence <= _U64_MAX or not 0 <= epoch <= SEALED_EPOCH:
            raise InvalidInput(
                f"next sequence {next_sequence} and epoch {epoch} must not be negative, nor above "
                f"{_U64_MAX} and {SEALED_EPOCH}"
            )
        footer = Footer(0, next_sequence, epoch)
        return cls(footer.pack(), *footer)

    @classmethod
    def parse(cls, raw: BytesLike) -> Manifest:
        """Read the footer and compare it with the body's size and first entry, in constant time.

        Later entries are checked when they are read or dropped.

        Args:
            raw: The whole object.

        Returns:
            The manifest.

        Raises:
            CorruptManifest: The bytes break the format.
        """
        data = raw if type(raw) is bytes else bytes(raw)
        self = cls(data, *Footer.parse(data))
        if self.entry_count:
            body = self._body
            _, end = decode_entry(data, 0, self.first_sequence, body)
            if self.entry_count == 1 and end != body:
                raise _left_over(body - end, 1)
        return self

    def of(self, queue: QueueName) -> Manifest:
        """Return the same manifest as that of a queue, which its errors then name."""
        return Manifest(self.raw, *self._footer, self._starts, queue)

    def append(self, entries: Sequence[NewEntry]) -> Manifest:
        """Add entries. The present ones are copied as bytes, once.

        Args:
            entries: The new entries.

        Returns:
            The longer manifest.

        Raises:
            InvalidInput: A value does not fit its field (failure F34); the error names the entry.
        """
        count = self.entry_count + len(entries)
        next_sequence = self.next_sequence + len(entries)
        if count > _U32_MAX or next_sequence > _U64_MAX:
            raise InvalidInput(
                f"append of {len(entries)} entries makes {count} entries and next sequence "
                f"{next_sequence}: the manifest holds at most {_U32_MAX} and {_U64_MAX}"
            )
        if not entries:
            return self
        pieces: list[BytesLike] = [memoryview(self.raw)[:-FOOTER_SIZE]]
        for sequence, entry in enumerate(entries, self.next_sequence):
            encode_entry(sequence, entry, pieces)
        return self._changed(pieces, Footer(count, next_sequence, self.epoch), self._starts)

    def drop_through(self, sequence: int) -> Manifest:
        """Remove the entries up to and including ``sequence``.

        All entry headers are checked first, so that a manifest whose count and bytes disagree is
        never written back (failure F16).

        Args:
            sequence: Sequence of the last entry to remove.

        Returns:
            The shorter manifest; this one if it has no such entries.

        Raises:
            InvalidInput: ``sequence`` is not queued yet (failure F27).
            CorruptManifest: An entry's header is wrong.
        """
        if sequence >= self.next_sequence:
            raise InvalidInput(
                f"cannot drop through sequence {sequence}: the newest entry queued is "
                f"{self.next_sequence - 1}"
            )
        dropped = sequence - self.first_sequence + 1
        if dropped <= 0:
            return self
        count = self.entry_count - dropped
        starts = self._find_starts(self.entry_count)
        cut = starts[dropped] if count else self._body
        kept = memoryview(self.raw)[cut:-FOOTER_SIZE]
        return self._changed([kept], self._footer._replace(entry_count=count))

    def part(self, first: int, end: int) -> Manifest:
        """Make a manifest, with epoch 0, of some entries, all of which are in this one.

        Args:
            first: Sequence of the first entry.
            end: The sequence after the last entry.

        Returns:
            The manifest.
        """
        bounds = self._bounds()
        body = self.raw[bounds[first - self.first_sequence] : bounds[end - self.first_sequence]]
        footer = Footer(end - first, end, 0)
        return Manifest(body + footer.pack(), *footer)

    def replace(self, sequence: int, entry: NewEntry) -> Manifest:
        """Put another entry in place of one. All else is copied as bytes.

        Args:
            sequence: The sequence of both entries.
            entry: The new entry.

        Returns:
            The changed manifest.

        Raises:
            InvalidInput: The sequence is not queued.
        """
        index = sequence - self.first_sequence
        if not 0 <= index < self.entry_count:
            raise InvalidInput(
                f"sequence {sequence} is not queued: the queue holds {self.first_sequence} to "
                f"{self.next_sequence - 1}"
            )
        bounds = self._bounds()
        whole = memoryview(self.raw)
        pieces: list[BytesLike] = [whole[: bounds[index]]]
        encode_entry(sequence, entry, pieces)
        pieces.append(whole[bounds[index + 1] : -FOOTER_SIZE])
        return self._changed(pieces, self._footer)

    def with_epoch(self, epoch: int) -> Manifest:
        """Put the same entries under another consumer epoch.

        Args:
            epoch: The epoch, at least the present one.

        Returns:
            The changed manifest; this one if it has the epoch already.

        Raises:
            CorruptManifest: No higher epoch is possible, because the present one was forged
                (failure F10).
            InvalidInput: ``epoch`` is lower than the present one or out of range.
        """
        if epoch == self.epoch:
            return self
        if self.epoch >= SEALED_EPOCH:
            raise self._named_error(
                CorruptManifest(
                    f"manifest has epoch {self.epoch}: no consumer can claim it, because epochs "
                    f"end below {SEALED_EPOCH + 1}. Consumers count up by one, so this epoch was "
                    "forged",
                    Hint(Action.INSPECT),
                )
            )
        if not self.epoch < epoch <= SEALED_EPOCH:
            raise InvalidInput(
                f"epoch is {epoch}: use {self.epoch} (the present one) to {SEALED_EPOCH}"
            )
        footer = self._footer._replace(epoch=epoch)
        return self._changed([memoryview(self.raw)[:-FOOTER_SIZE]], footer, self._starts)

    def entries(
        self, start: int | None = None, limit: int | None = None
    ) -> tuple[BatchDescriptor, ...]:
        """Decode entries strictly, from sequence ``start`` on.

        A ``start`` that was dropped is not an error. Reading piece by piece scans the headers only
        once.

        Args:
            start: Sequence of the first entry. Default: the oldest one.
            limit: Largest number of entries. Default: all of them.

        Returns:
            The entries, by sequence.

        Raises:
            CorruptManifest: An entry, up to the last one read, breaks the format.
        """
        skip = 0 if start is None else max(start - self.first_sequence, 0)
        end = self.entry_count if limit is None else min(skip + max(limit, 0), self.entry_count)
        if skip >= end:
            return ()
        starts, body = self._find_starts(end), self._body
        try:
            return tuple(
                decode_entry(self.raw, starts[index], self.first_sequence + index, body)[0]
                for index in range(skip, end)
            )
        except CorruptManifest as error:
            raise self._named_error(error) from None

    def since(self, time_ms: int) -> int:
        """Find the first entry with a record of this time or later.

        An entry without a time may have any time. It counts as being as late as the next entry
        that has one, so that nothing is skipped; see :func:`first_undated`.

        Args:
            time_ms: Milliseconds since the Unix epoch.

        Returns:
            Its sequence; the next sequence if there is no such entry.
        """
        later = (entry.sequence for entry in self.entries() if entry.latest_ms >= time_ms)
        return first_undated(self, next(later, self.next_sequence))

    def age_s(self, now_ms: int, start: int | None = None) -> float | None:
        """Measure the age of the first entry from ``start`` on.

        The age is measured with the clocks of its writer and of this process.

        Args:
            now_ms: The clock of this process, in milliseconds since the Unix epoch.
            start: The sequence to start from. Default: the oldest entry.

        Returns:
            Seconds, at least 0; None if there is no such entry, or it has no time.
        """
        first = next(iter(self.entries(start, 1)), None)
        written_ms = None if first is None else first.time_ms
        return None if written_ms is None else max(0, now_ms - written_ms) / 1000

    def available_from(self, needed: int) -> int:
        """Return the first sequence from ``needed`` on that is queued or will be."""
        return max(needed, self.first_sequence)

    def check(self) -> None:
        """Check all entry headers, and that no bytes follow the last entry.

        Raises:
            CorruptManifest: A header is wrong, or bytes follow the last entry.
        """
        self._find_starts(self.entry_count)

    def locations(self) -> list[str]:
        """Read the locations of all entries, several times faster than :meth:`entries`.

        Headers and locations are checked; metadata is not.

        Returns:
            The locations, by sequence.

        Raises:
            CorruptManifest: An entry breaks the format.
        """
        raw, found = self.raw, list[str]()
        with suppress(UnicodeDecodeError):
            starts = self._find_starts(self.entry_count)
            for start, end in pairwise(chain(starts, (self._body,))):
                first = start + _HEAD.size
                # A u16, little-endian.
                last = first + raw[first - 2] + (raw[first - 1] << 8)
                if last + 4 > end:
                    break
                found.append(str(raw[first:last], "utf-8"))
        if len(found) < self.entry_count:
            return [entry.location for entry in self.entries()]  # raises the error
        return found

    def find(self, location: str) -> int | None:
        """Return the sequence of the oldest entry with this location; None without one.

        A miss costs no decoding. A hit in the bytes is confirmed by the starts of the entries.
        """
        encoded = location.encode()
        if len(encoded) > MAX_LOCATION_BYTES:
            return None
        wanted = _U16.pack(len(encoded)) + encoded
        at = self.raw.find(wanted, _ORDER.size, self._body)
        while at >= 0:  # the bytes may also be part of a payload
            starts = self._find_starts(self.entry_count)
            index = bisect_left(starts, at - _ORDER.size)
            if index < len(starts) and starts[index] == at - _ORDER.size:
                return self.first_sequence + index
            at = self.raw.find(wanted, at + 1, self._body)
        return None

    @property
    def _body(self) -> int:
        """Bytes of the entries; the footer follows them."""
        return len(self.raw) - FOOTER_SIZE

    def _changed(
        self, body: Sequence[BytesLike], footer: Footer, starts: Sequence[int] = ()
    ) -> Manifest:
        """Return the manifest that follows this one, given where its first entries start."""
        if len(self.raw) > MIB:
            keep_freed_memory()
        return Manifest(b"".join((*body, footer.pack())), *footer, starts, self._queue)

    def _bounds(self) -> Sequence[int]:
        """Return where each entry starts, and where the last one ends."""
        return [*self._find_starts(self.entry_count), self._body]

    def _find_starts(self, wanted: int) -> Sequence[int]:
        """Return where the first ``wanted`` entries start, and check headers, order, and fit."""
        known, raw, body = self._starts, self.raw, self._body
        if len(known) >= wanted:
            return known
        # Offsets are below MAX_MANIFEST_BYTES. A list would take ten times as much memory.
        starts = array("I", known)
        add, unpack = starts.append, _ORDER.unpack_from
        at = known[-1] + 4 + _U32.unpack_from(raw, known[-1])[0] if known else 0
        for expected in range(self.first_sequence + len(known), self.first_sequence + wanted):
            # at <= body, and the footer after the body is longer than a header, so unpacking
            # cannot run past the end.
            length, sequence = unpack(raw, at)
            end = at + 4 + length
            if length < FIXED_SIZE or end > body or sequence != expected:
                raise self._named_error(_bad_header(at, length, sequence, expected, body))
            add(at)
            at = end
        if wanted == self.entry_count and at != body:
            raise self._named_error(_left_over(body - at, wanted))
        object.__setattr__(self, "_starts", starts)
        return starts

    def _named_error(self, error: CorruptManifest) -> CorruptManifest:
        """Return the error with the name of this manifest's queue, if it is known."""
        if self._queue is None:
            return error
        return CorruptManifest(f"{self._queue.place}: ", *error.args).at(self._queue)


class Entries(Protocol):
    """Entries in order, each one sequence after the one before, except at gaps."""

    @property
    def first_sequence(self) -> int:
        """The first sequence that may have an entry."""

    def entries(
        self, start: int | None = None, limit: int | None = None
    ) -> Sequence[BatchDescriptor]:
        """Return up to ``limit`` entries from ``start`` on, up to a gap."""


_UNDATED = 1_000  # entries without a time that are read at once


def first_undated(view: Entries, before: int) -> int:
    """Find the first of the entries without a time that lie directly before a sequence.

    Other programs may write entries without metadata and with names that contain no time. Nobody
    knows when they were written. They count as being as late as the next entry that has a time. So
    a reader that begins at a time may read some of them too early, and never skips one.

    Args:
        view: A manifest or the view of a log.
        before: The sequence that was found by its time, or the end.

    Returns:
        The sequence; ``before`` if the entry in front of it has a time, or is gone.

    Raises:
        CorruptData: The entries cannot be read.
    """
    limit = 1
    while before > view.first_sequence:
        start = max(view.first_sequence, before - limit)
        for entry in reversed(view.entries(start, before - start)):
            if entry.sequence != before - 1 or entry.time_ms is not None:
                return before
            before = entry.sequence
        if before != start:
            return before
        limit = _UNDATED
    return before


def _left_over(size: int, count: int) -> CorruptManifest:
    return _corrupt(
        f"manifest has {size} bytes after its {count} entries: the footer's count is too small"
    )


def check_transition(before: Manifest, after: Manifest) -> None:
    """Refuse a manifest that cannot follow another. Called before every write.

    Args:
        before: The manifest that is stored.
        after: The manifest to write.

    Raises:
        CorruptManifest: Epoch, next sequence, or first sequence falls (failures F4, F10, F11, F15).
    """
    for name in ("epoch", "next_sequence", "first_sequence"):
        old, new = getattr(before, name), getattr(after, name)
        if new < old:
            raise before._named_error(
                CorruptManifest(
                    f"manifest {name} falls from {old} to {new}: another writer broke the format, "
                    "or someone replaced the manifest. Stop producers and consumers",
                    Hint(Action.INSPECT),
                )
            )


def _bad_header(at: int, length: int, sequence: int, expected: int, body: int) -> CorruptManifest:
    """Return the error for an entry whose length or sequence is wrong."""
    if length < FIXED_SIZE or at + 4 + length > body:
        return _corrupt(
            f"manifest entry {expected} at byte {at} claims {length} bytes of the "
            f"{max(body - at - 4, 0)} left; an entry needs at least {FIXED_SIZE}"
        )
    # failure F28: a gap would be an undetected loss, and a repeat a duplicate.
    return _corrupt(
        f"manifest entry at byte {at} has sequence {sequence}, expected {expected}: sequences are "
        "contiguous up to the footer's next sequence"
    )


def decode_entry(raw: bytes, at: int, expected: int, body: int) -> tuple[BatchDescriptor, int]:
    """Decode the entry at byte ``at``. Every length is checked before it is used.

    Args:
        raw: A manifest's bytes.
        at: Where the entry starts, at least :data:`LEAST_SIZE` bytes before ``body``.
        expected: The sequence that the entry must have.
        body: Where the entries end.

    Returns:
        The entry, and where it ends.

    Raises:
        CorruptManifest: The entry breaks the format.
    """
    length, sequence, location_size = _HEAD.unpack_from(raw, at)
    end = at + 4 + length
    if length < FIXED_SIZE or end > body or sequence != expected:
        raise _bad_header(at, length, sequence, expected, body)
    position = at + _HEAD.size
    if location_size > end - position - 4:
        raise _corrupt(
            f"manifest entry {sequence} has a location of {location_size} bytes but "
            f"{end - position - 4} are left in it"
        )
    encoded = raw[position : position + location_size]
    try:
        location = encoded.decode()
    except UnicodeDecodeError as error:
        raise _corrupt(
            f"manifest entry {sequence} has a location that is not UTF-8: {encoded[:80]!r}"
        ) from error
    position += location_size
    (count,) = _U32.unpack_from(raw, position)
    position += 4
    # failure F17: a 40-byte manifest may claim 4 billion items, but each needs 16 bytes.
    if count * _META.size > end - position:
        raise _corrupt(
            f"manifest entry {sequence} counts {count} metadata items but has {end - position} "
            "bytes for them"
        )
    items: list[Metadata] = []
    for index in range(count):
        # failure F19: compare with this entry's end instead of the manifest's. Otherwise the next
        # entry's bytes would be read as metadata.
        if _META.size > end - position:
            raise _bad_item(sequence, index, count, "header", end - position)
        start_index, time_ms, size = _META.unpack_from(raw, position)
        position += _META.size
        if size > end - position:
            raise _bad_item(sequence, index, count, f"payload of {size} bytes", end - position)
        items.append(Metadata(start_index, time_ms, raw[position : position + size]))
        position += size
    if position != end:
        raise _corrupt(
            f"manifest entry {sequence} has {end - position} bytes after its {count} metadata items"
        )
    return BatchDescriptor(sequence, location, tuple(items)), end


def _bad_item(sequence: int, index: int, count: int, part: str, left: int) -> CorruptManifest:
    return _corrupt(
        f"manifest entry {sequence}, metadata item {index} of {count}: its {part} does not fit "
        f"the {left} bytes left in the entry"
    )


def encode_entry(sequence: int, entry: NewEntry, pieces: list[BytesLike]) -> None:
    """Append the entry's bytes to ``pieces``.

    Args:
        sequence: The entry's sequence.
        entry: The entry.
        pieces: The list that the bytes are added to.

    Raises:
        InvalidInput: A value does not fit its field (failure F34).
    """
    try:
        location = entry.location.encode()
    except UnicodeEncodeError as error:
        raise InvalidInput(f"location {entry.location!r} is not valid Unicode") from error
    if not 0 < len(location) <= MAX_LOCATION_BYTES:
        raise InvalidInput(
            f"location {entry.location[:80]!r} has {len(location)} bytes of UTF-8: use 1 to "
            f"{MAX_LOCATION_BYTES}"
        )
    length = FIXED_SIZE + len(location)
    tail: list[BytesLike] = []
    for index, item in enumerate(entry.metadata):
        size = memoryview(item.payload).nbytes
        try:
            tail.append(_META.pack(item.start_index, item.ingestion_time_ms, size))
        except struct.error:
            raise InvalidInput(
                f"entry {entry.location!r}, metadata item {index}: start_index "
                f"{item.start_index!r} must fit a u32, ingestion_time_ms "
                f"{item.ingestion_time_ms!r} an i64, and a payload of {size} bytes a u32"
            ) from None
        tail.append(item.payload)
        length += _META.size + size
    if length > _U32_MAX:
        raise InvalidInput(
            f"entry {entry.location!r} has {length} bytes with its metadata: at most {_U32_MAX}. "
            "Put large data into the records"
        )
    pieces.append(_HEAD.pack(length, sequence, len(location)))
    pieces.append(location)
    pieces.append(_U32.pack(len(entry.metadata)))
    pieces.extend(tail)


def entry_bytes(entry: NewEntry) -> int:
    """Return the number of bytes that an entry takes in a manifest."""
    location = len(entry.location.encode(errors="replace"))
    items = sum(_META.size + memoryview(item.payload).nbytes for item in entry.metadata)
    return LEAST_SIZE + location + items


def salvage_entries(raw: bytes) -> list[BatchDescriptor]:
    """Return the intact entries at the front of a damaged manifest that follow one another."""
    found: list[BatchDescriptor] = []
    at = 0
    while len(raw) - at >= LEAST_SIZE:
        expected = found[-1].sequence + 1 if found else _HEAD.unpack_from(raw)[1]
        if expected >= _MOST_QUEUED:
            break
        try:
            entry, at = decode_entry(raw, at, expected, len(raw))
        except CorruptManifest:
            break
        found.append(entry)
    return found
