"""An entry of the queue manifest: values, bytes, and every check between them (failure F15).

::

    entry   [entry_len u32][sequence u64][location_len u16][location][metadata_count u32][items]
    item    [start_index u32][ingestion_time_ms i64][payload_len u32][payload]

All little-endian; ``entry_len`` counts the bytes after itself (OpenData RFC 0001, Manifest Format).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from opendata_buffer.errors import CorruptManifest, InvalidInput
from opendata_buffer.formats import BytesLike
from opendata_buffer.formats.keys import MAX_LOCATION_BYTES, location_timestamp_ms

FIXED_SIZE = 8 + 2 + 4
"""``entry_len`` of an entry with an empty location and no metadata."""

LEAST_SIZE = 4 + FIXED_SIZE
"""Bytes of such an entry."""

REMEDY = (
    "Stop producers, consumers and collectors, then mend it with 'opendata-buffer manifest "
    "rebuild'; 'opendata-buffer manifest dump' shows what is in it"
)
"""The end of every error about a manifest."""

_HEAD = struct.Struct("<IQH")  # entry_len, sequence, location_len
_ORDER = struct.Struct("<IQ")  # entry_len, sequence
_META = struct.Struct("<IqI")
_U16 = struct.Struct("<H")
_MOST_QUEUED = 2**48  # no queue gets there; text read as a sequence is larger
_U32 = struct.Struct("<I")
_U32_MAX = 2**32 - 1


@dataclass(frozen=True, slots=True)
class Metadata:
    """Metadata that one ``produce()`` call attached to its range of a batch.

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
    """A queued batch; ``metadata`` are ranges of its records, by ``start_index``."""

    sequence: int
    location: str
    metadata: tuple[Metadata, ...] = ()

    @property
    def time_ms(self) -> int | None:
        """When its first record was ingested, or else the time of its name; None without either.

        Milliseconds since the Unix epoch. The name comes second: a writer may date it ahead.
        """
        if self.metadata:
            return self.metadata[0].ingestion_time_ms
        return location_timestamp_ms(self.location)


def _bad_header(at: int, length: int, sequence: int, expected: int, body: int) -> CorruptManifest:
    """The error about an entry whose length or sequence is wrong."""
    if length < FIXED_SIZE or at + 4 + length > body:
        return CorruptManifest(
            f"manifest entry {expected} at byte {at} claims {length} bytes of the "
            f"{max(body - at - 4, 0)} left, and needs at least {FIXED_SIZE}. {REMEDY}"
        )
    # failure F28: a gap is undetected loss, a repeat is a duplicate.
    return CorruptManifest(
        f"manifest entry at byte {at} has sequence {sequence}, expected {expected}: sequences are "
        f"contiguous up to the footer's next sequence. {REMEDY}"
    )


def decode_entry(raw: bytes, at: int, expected: int, body: int) -> tuple[QueueEntry, int]:
    """The entry at byte ``at`` and where it ends; at byte ``body`` all entries end.

    Its sequence must be ``expected``. Every length is checked before it is used.
    """
    if body - at < LEAST_SIZE:
        raise _bad_header(at, 0, expected, expected, body)
    length, sequence, location_size = _HEAD.unpack_from(raw, at)
    end = at + 4 + length
    if length < FIXED_SIZE or end > body or sequence != expected:
        raise _bad_header(at, length, sequence, expected, body)
    position = at + _HEAD.size
    if location_size > end - position - 4:
        raise CorruptManifest(
            f"manifest entry {sequence} has a location of {location_size} bytes but "
            f"{end - position - 4} are left in it. {REMEDY}"
        )
    encoded = raw[position : position + location_size]
    try:
        location = encoded.decode()
    except UnicodeDecodeError as error:
        raise CorruptManifest(
            f"manifest entry {sequence} has a location that is not UTF-8: {encoded[:80]!r}. "
            f"{REMEDY}"
        ) from error
    position += location_size
    (count,) = _U32.unpack_from(raw, position)
    position += 4
    # failure F17: a 40-byte manifest may claim 4 billion items. Each one needs 16 bytes.
    if count * _META.size > end - position:
        raise CorruptManifest(
            f"manifest entry {sequence} counts {count} metadata items but has {end - position} "
            f"bytes for them. {REMEDY}"
        )
    items: list[Metadata] = []
    for index in range(count):
        # failure F19: checked against this entry's end, not the manifest's, or the next entry's
        # bytes would be read as metadata.
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
            f"items. {REMEDY}"
        )
    return QueueEntry(sequence, location, tuple(items)), end


def _bad_item(sequence: int, index: int, count: int, part: str, left: int) -> CorruptManifest:
    return CorruptManifest(
        f"manifest entry {sequence}, metadata item {index} of {count}: its {part} does not fit "
        f"the {left} bytes left in the entry. {REMEDY}"
    )


def encode_entry(sequence: int, entry: NewEntry, pieces: list[BytesLike]) -> None:
    """Append the entry's bytes; ``InvalidInput`` where a value does not fit (failure F34)."""
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


def entry_starts(
    raw: bytes, known: Sequence[int], first_sequence: int, wanted: int, body: int
) -> tuple[tuple[int, ...], int]:
    """Where the ``wanted`` first entries start, and where the last of them ends; decodes nothing.

    ``known`` are the starts that were found out before. At byte ``body`` the entries end.
    """
    starts = list(known)
    add, unpack = starts.append, _ORDER.unpack_from
    position = known[-1] + 4 + _U32.unpack_from(raw, known[-1])[0] if known else 0
    for expected in range(first_sequence + len(known), first_sequence + wanted):
        # position <= body, and the footer behind the body is longer than a header: the
        # unpack cannot run over.
        length, sequence = unpack(raw, position)
        end = position + 4 + length
        if length < FIXED_SIZE or end > body or sequence != expected:
            raise _bad_header(position, length, sequence, expected, body)
        add(position)
        position = end
    return tuple(starts), position


def whole_locations(raw: bytes, starts: Sequence[int], body: int) -> list[str]:
    """Locations of the entries that start there, up to the first that has none; no metadata."""
    found: list[str] = []
    head = _ORDER.size
    try:
        for start, end in zip(starts, (*starts[1:], body), strict=False):
            first = start + head + 2
            # A u16, little-endian.
            last = first + raw[start + head] + (raw[start + head + 1] << 8)
            if last + 4 > end:
                break
            found.append(str(raw[first:last], "utf-8"))
    except UnicodeDecodeError:
        pass
    return found


def find_location(raw: bytes, location: str, at: int, body: int) -> int | None:
    """Where the next entry from byte ``at`` on has this location, if that is no payload's bytes."""
    encoded = location.encode()
    if len(encoded) > MAX_LOCATION_BYTES:
        return None
    found = raw.find(_U16.pack(len(encoded)) + encoded, at + _ORDER.size, body)
    return None if found < 0 else found - _ORDER.size


def salvage_entries(raw: bytes) -> list[QueueEntry]:
    """The entries at the front of a damaged manifest that are whole, and follow one another."""
    found: list[QueueEntry] = []
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
