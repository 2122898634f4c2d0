"""The queue manifest, v1: entries back to back and a footer, held as the bytes on storage.

::

    entry   [entry_len u32][sequence u64][location_len u16][location][metadata_count u32][items]
    item    [start_index u32][ingestion_time_ms i64][payload_len u32][payload]
    footer  [entry_count u32][next_sequence u64][epoch u64][version u16 = 1]   22 bytes

All little-endian (RFC 0001, Manifest Format). ``entry_len`` counts the bytes after itself.
Appending copies the old entries as bytes and never decodes them.
"""

from __future__ import annotations

import struct
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from opendata_buffer.errors import CorruptManifest, InvalidInput
from opendata_buffer.formats.keys import MAX_LOCATION_BYTES

__all__ = ["FOOTER_SIZE", "VERSION", "Manifest", "Metadata", "NewEntry", "QueueEntry"]

BytesLike: TypeAlias = bytes | bytearray | memoryview

VERSION = 1
FOOTER_SIZE = 22
_FOOTER = struct.Struct("<IQQH")
_HEAD = struct.Struct("<IQ")  # entry_len, sequence
_HEAD_AND_LENGTH = struct.Struct("<IQH")  # and location_len
_META = struct.Struct("<IqI")
_U16 = struct.Struct("<H")
_U32 = struct.Struct("<I")
_FIXED = 8 + 2 + 4  # entry_len of an entry with an empty location and no metadata
_LEAST_ENTRY = 4 + _FIXED
_U32_MAX = 2**32 - 1
_U64_MAX = 2**64 - 1
_EPOCH_LIMIT = 2**63
_LOOK = "Look at it with 'opendata-buffer manifest dump'"


@dataclass(frozen=True, slots=True)
class Metadata:
    """What one ``produce()`` call attached to its range of a batch.

    Attributes:
        start_index: First record of the range; it ends where the next one starts.
        ingestion_time_ms: Milliseconds since the Unix epoch, by the producer's clock; any i64.
        payload: Opaque to the buffer.
    """

    start_index: int
    ingestion_time_ms: int
    payload: bytes = b""


@dataclass(frozen=True, slots=True)
class NewEntry:
    """A batch to append to the queue; the manifest gives it a sequence."""

    location: str
    metadata: tuple[Metadata, ...] = ()


@dataclass(frozen=True, slots=True)
class QueueEntry:
    """A queued batch."""

    sequence: int
    location: str
    metadata: tuple[Metadata, ...] = ()


class Manifest:
    """One immutable version of a queue manifest.

    Make one with :meth:`empty` or :meth:`parse`; every change returns a new manifest.

    Attributes:
        raw: The bytes on storage.
        entry_count: Batches queued.
        next_sequence: What the next appended entry gets.
        epoch: Of the consumer that owns the queue; 0 before the first one.
        first_sequence: Of the oldest entry; ``next_sequence`` when the queue is empty.
    """

    __slots__ = ("_starts", "entry_count", "epoch", "first_sequence", "next_sequence", "raw")

    raw: bytes
    entry_count: int
    next_sequence: int
    epoch: int
    first_sequence: int
    _starts: tuple[int, ...]

    def __init__(self) -> None:
        raise TypeError("use Manifest.empty() or Manifest.parse(raw)")

    @classmethod
    def _make(
        cls, raw: bytes, count: int, next_sequence: int, epoch: int, starts: tuple[int, ...] = ()
    ) -> Manifest:
        self = object.__new__(cls)
        put = object.__setattr__
        put(self, "raw", raw)
        put(self, "entry_count", count)
        put(self, "next_sequence", next_sequence)
        put(self, "epoch", epoch)
        put(self, "first_sequence", next_sequence - count)
        # Where the entries start, as far as they were walked: a cache, replaced as a whole so
        # that threads may share a manifest.
        put(self, "_starts", starts)
        return self

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a Manifest never changes: cannot set {name}")

    def __reduce__(self) -> tuple[object, ...]:
        return (Manifest.parse, (self.raw,))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Manifest) and self.raw == other.raw

    def __hash__(self) -> int:
        return hash(self.raw)

    def __repr__(self) -> str:
        return (
            f"Manifest(entries={self.entry_count}, first_sequence={self.first_sequence}, "
            f"next_sequence={self.next_sequence}, epoch={self.epoch}, size={self.size})"
        )

    @property
    def size(self) -> int:
        """Bytes on storage."""
        return len(self.raw)

    @classmethod
    def empty(cls) -> Manifest:
        """The manifest of a queue nobody has written to."""
        return cls._make(_FOOTER.pack(0, 0, 0, VERSION), 0, 0, 0)

    @classmethod
    def parse(cls, raw: BytesLike) -> Manifest:
        """Read the footer and check it against the body's size and first entry.

        Constant time: the entries behind the first are checked when they are read
        (:meth:`entries`, :meth:`check`) or dropped.

        Raises:
            CorruptManifest: The bytes are no v1 manifest.
        """
        data = raw if type(raw) is bytes else bytes(raw)
        body = len(data) - FOOTER_SIZE
        if body < 0:
            raise CorruptManifest(
                f"manifest has {len(data)} bytes, less than its {FOOTER_SIZE}-byte footer: it is "
                "truncated or not a manifest"
            )
        count, next_sequence, epoch, version = _FOOTER.unpack_from(data, body)
        if version != VERSION:
            raise CorruptManifest(
                f"manifest has version {version}, this library reads version {VERSION}"
            )
        # F16: bytes without a count would be dropped unread; a count without bytes is damage.
        if count * _LEAST_ENTRY > body or (count == 0 and body):
            raise CorruptManifest(
                f"manifest counts {count} entries but they have {body} bytes. {_LOOK}"
            )
        if count > next_sequence:
            raise CorruptManifest(
                f"manifest counts {count} entries but its next sequence is {next_sequence}. {_LOOK}"
            )
        self = cls._make(data, count, next_sequence, epoch)
        if count:
            _, end = _decode_entry(data, 0, self.first_sequence, body)
            if count == 1 and end != body:
                raise _left_over(body - end, count)
        return self

    def append(self, entries: Sequence[NewEntry]) -> Manifest:
        """A manifest with the entries behind the present ones, in order.

        The present entries are copied as bytes, once, and never decoded.

        Raises:
            InvalidInput: A value does not fit its field; the message names the entry. Checked
                before anything is built (failure F34).
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
            _encode_entry(sequence, entry, pieces)
        pieces.append(_FOOTER.pack(count, next_sequence, self.epoch, VERSION))
        return self._make(b"".join(pieces), count, next_sequence, self.epoch, self._starts)

    def drop_through(self, sequence: int) -> Manifest:
        """A manifest without the entries up to and including ``sequence``.

        All entry headers are walked first, so that a manifest whose count and bytes disagree is
        never written back (failure F16); what stays is copied as bytes. Returns this manifest
        when there is nothing to drop.

        Raises:
            InvalidInput: ``sequence`` is not queued yet (failure F27).
            CorruptManifest: The entries break the format.
        """
        if sequence >= self.next_sequence:
            raise InvalidInput(
                f"cannot drop through sequence {sequence}: the newest entry queued is "
                f"{self.next_sequence - 1}"
            )
        dropped = sequence - self.first_sequence + 1
        if dropped <= 0:
            return self
        starts = self._walk(self.entry_count)
        count = self.entry_count - dropped
        cut = starts[dropped] if count else len(self.raw) - FOOTER_SIZE
        footer = _FOOTER.pack(count, self.next_sequence, self.epoch, VERSION)
        raw = b"".join((memoryview(self.raw)[cut:-FOOTER_SIZE], footer))
        return self._make(raw, count, self.next_sequence, self.epoch)

    def with_epoch(self, epoch: int) -> Manifest:
        """The same entries under another consumer epoch.

        Raises:
            InvalidInput: The epoch is lower than the present one, or not below 2^63.
            CorruptManifest: The present epoch leaves no higher one. Honest consumers never get
                there, so somebody forged it (failure F10).
        """
        if epoch == self.epoch:
            return self
        if self.epoch >= _EPOCH_LIMIT - 1:
            raise CorruptManifest(
                f"manifest has epoch {self.epoch}: no consumer can claim it, epochs end below "
                f"{_EPOCH_LIMIT}. Consumers count up by one, so this one was forged. {_LOOK}"
            )
        if not self.epoch < epoch < _EPOCH_LIMIT:
            raise InvalidInput(
                f"epoch is {epoch}: use {self.epoch} (the present one) to {_EPOCH_LIMIT - 1}"
            )
        footer = _FOOTER.pack(self.entry_count, self.next_sequence, epoch, VERSION)
        raw = b"".join((memoryview(self.raw)[:-FOOTER_SIZE], footer))
        return self._make(raw, self.entry_count, self.next_sequence, epoch, self._starts)

    def entries(self, start: int | None = None, limit: int | None = None) -> tuple[QueueEntry, ...]:
        """Entries from sequence ``start`` on, decoded strictly.

        The headers of the entries before ``start`` are walked, and the walk is kept, so reading
        a manifest piece by piece walks it once.

        Args:
            start: First sequence wanted. Default: the oldest. Entries already dropped are not
                an error here: compare with :attr:`first_sequence`.
            limit: Most entries returned. Default: all.

        Raises:
            CorruptManifest: An entry read or walked over breaks the format.
        """
        skip = 0 if start is None else max(start - self.first_sequence, 0)
        end = self.entry_count if limit is None else min(skip + max(limit, 0), self.entry_count)
        if skip >= end:
            return ()
        starts = self._walk(end)
        body = len(self.raw) - FOOTER_SIZE
        return tuple(
            _decode_entry(self.raw, starts[index], self.first_sequence + index, body)[0]
            for index in range(skip, end)
        )

    def check(self) -> None:
        """Decode everything.

        Raises:
            CorruptManifest: Any entry breaks the format, sequences are not contiguous, or the
                count does not match.
        """
        self.entries()

    def find(self, location: str) -> int | None:
        """Sequence of the entry with this location, the oldest if there are several.

        A search of the bytes, so that a miss costs no decoding; a hit is confirmed by walking
        the entries, because payloads may hold any bytes.

        Raises:
            CorruptManifest: There was a hit and the entries break the format.
        """
        encoded = location.encode()
        if len(encoded) > MAX_LOCATION_BYTES:
            return None
        needle = _U16.pack(len(encoded)) + encoded
        body = len(self.raw) - FOOTER_SIZE
        at = self.raw.find(needle, 0, body)
        while at >= 0:
            starts = self._walk(self.entry_count)
            index = bisect_left(starts, at - _HEAD.size)
            if index < len(starts) and starts[index] == at - _HEAD.size:
                return self.first_sequence + index
            at = self.raw.find(needle, at + 1, body)
        return None

    def _walk(self, wanted: int) -> tuple[int, ...]:
        """Where the first ``wanted`` entries start, checking headers, order and fit."""
        known = self._starts
        if len(known) >= wanted:
            return known
        raw, body, unpack = self.raw, len(self.raw) - FOOTER_SIZE, _HEAD.unpack_from
        starts = list(known)
        add = starts.append
        position = known[-1] + 4 + _U32.unpack_from(raw, known[-1])[0] if known else 0
        first = self.first_sequence
        for expected in range(first + len(known), first + wanted):
            # position <= body, and the footer behind the body is longer than a header: the
            # unpack cannot run over.
            length, sequence = unpack(raw, position)
            end = position + 4 + length
            if length < _FIXED or end > body or sequence != expected:
                raise _bad_header(position, length, sequence, expected, body)
            add(position)
            position = end
        if wanted == self.entry_count and position != body:
            raise _left_over(body - position, self.entry_count)
        result = tuple(starts)
        object.__setattr__(self, "_starts", result)
        return result


def _bad_header(at: int, length: int, sequence: int, expected: int, body: int) -> CorruptManifest:
    if length < _FIXED or at + 4 + length > body:
        return CorruptManifest(
            f"manifest entry {expected} at byte {at} claims {length} bytes of the "
            f"{max(body - at - 4, 0)} left, and needs at least {_FIXED}. {_LOOK}"
        )
    # F28: a gap is undetected loss, a repeat is a duplicate.
    return CorruptManifest(
        f"manifest entry at byte {at} has sequence {sequence}, expected {expected}: sequences are "
        f"contiguous up to the footer's next sequence. {_LOOK}"
    )


def _left_over(size: int, count: int) -> CorruptManifest:
    return CorruptManifest(
        f"manifest has {size} bytes after its {count} entries: the footer's count is too small. "
        f"{_LOOK}"
    )


def _decode_entry(raw: bytes, at: int, expected: int, body: int) -> tuple[QueueEntry, int]:
    """The entry at byte ``at`` and where it ends; every length is checked before it is used."""
    if body - at < _LEAST_ENTRY:
        raise _bad_header(at, 0, expected, expected, body)
    length, sequence, location_size = _HEAD_AND_LENGTH.unpack_from(raw, at)
    end = at + 4 + length
    if length < _FIXED or end > body or sequence != expected:
        raise _bad_header(at, length, sequence, expected, body)
    position = at + _HEAD_AND_LENGTH.size
    if location_size > end - position - 4:
        raise CorruptManifest(
            f"manifest entry {sequence} has a location of {location_size} bytes but "
            f"{end - position - 4} are left in it. {_LOOK}"
        )
    encoded = raw[position : position + location_size]
    try:
        location = encoded.decode()
    except UnicodeDecodeError as error:
        raise CorruptManifest(
            f"manifest entry {sequence} has a location that is not UTF-8: {encoded[:80]!r}. {_LOOK}"
        ) from error
    position += location_size
    (count,) = _U32.unpack_from(raw, position)
    position += 4
    # F17: a 40-byte manifest may claim 4 billion items. Each one needs 16 bytes.
    if count * _META.size > end - position:
        raise CorruptManifest(
            f"manifest entry {sequence} counts {count} metadata items but has {end - position} "
            f"bytes for them. {_LOOK}"
        )
    items: list[Metadata] = []
    for index in range(count):
        # F19: checked against this entry's end, not the manifest's, or the next entry's bytes
        # would be read as metadata.
        if _META.size > end - position:
            raise _bad_item(sequence, index, count, "header", end - position)
        start_index, time_ms, size = _META.unpack_from(raw, position)
        position += _META.size
        if size > end - position:
            raise _bad_item(sequence, index, count, f"payload of {size} bytes", end - position)
        items.append(Metadata(start_index, time_ms, raw[position : position + size]))
        position += size
    if position != end:
        raise CorruptManifest(
            f"manifest entry {sequence} has {end - position} bytes after its {count} metadata "
            f"items. {_LOOK}"
        )
    return QueueEntry(sequence, location, tuple(items)), end


def _bad_item(sequence: int, index: int, count: int, part: str, left: int) -> CorruptManifest:
    return CorruptManifest(
        f"manifest entry {sequence}, metadata item {index} of {count}: its {part} does not fit "
        f"the {left} bytes left in the entry. {_LOOK}"
    )


def _encode_entry(sequence: int, entry: NewEntry, pieces: list[BytesLike]) -> None:
    try:
        location = entry.location.encode()
    except UnicodeEncodeError as error:
        raise InvalidInput(f"location {entry.location!r} is not valid Unicode") from error
    if not 0 < len(location) <= MAX_LOCATION_BYTES:
        raise InvalidInput(
            f"location {entry.location[:80]!r} has {len(location)} bytes of UTF-8: use 1 to "
            f"{MAX_LOCATION_BYTES}"
        )
    length = _FIXED + len(location)
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
    pieces.append(_HEAD_AND_LENGTH.pack(length, sequence, len(location)))
    pieces.append(location)
    pieces.append(_U32.pack(len(entry.metadata)))
    pieces.extend(tail)
