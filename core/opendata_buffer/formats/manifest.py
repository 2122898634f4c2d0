"""The queue manifest, v1: entries back to back and a footer, held as the bytes on storage.

::

    entries  as :mod:`.entries` describes them
    footer   [entry_count u32][next_sequence u64][epoch u64][version u16 = 1]   22 bytes

All little-endian (OpenData RFC 0001, Manifest Format). Appending copies the old entries as bytes
and never decodes them.
"""

from __future__ import annotations

import struct
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from opendata_buffer.errors import CorruptManifest, InvalidInput
from opendata_buffer.formats import BytesLike
from opendata_buffer.formats.entries import (
    FIXED_SIZE,
    LEAST_SIZE,
    REMEDY,
    NewEntry,
    QueueEntry,
    decode_entry,
    encode_entry,
    entry_starts,
    find_location,
    whole_locations,
)

VERSION = 1
FOOTER_SIZE = 22
MAX_MANIFEST_BYTES = 1 << 30
"""A larger manifest is not read, and not written: every append would rewrite it."""

SEALED_EPOCH = 2**63 - 1
"""Epoch of a queue that is closed for good: no consumer gets there by counting, and none can
claim a queue that has it."""

_U32_MAX = 2**32 - 1
_U64_MAX = 2**64 - 1

_FOOTER = struct.Struct("<IQQH")
_HEAD = struct.Struct("<IQH")  # of the first entry: its length, sequence, length of its location


class Footer(NamedTuple):
    """The footer's values, as :class:`Manifest` describes them."""

    entry_count: int
    next_sequence: int
    epoch: int

    def pack(self) -> bytes:
        """Its bytes."""
        return _FOOTER.pack(self.entry_count, self.next_sequence, self.epoch, VERSION)

    @classmethod
    def parse(cls, data: bytes) -> Footer:
        """Read the footer of a whole manifest, and check it against the size of what it counts."""
        body = len(data) - FOOTER_SIZE
        if body < 0:
            raise _no_footer(data)
        count, next_sequence, epoch, version = _FOOTER.unpack_from(data, body)
        if version != VERSION:
            # A damaged manifest may end with any two bytes, so its version counts only if the
            # rest of the footer is right.
            if count * LEAST_SIZE > body or count > next_sequence or (count == 0) != (body == 0):
                raise _no_footer(data)
            raise CorruptManifest(
                f"manifest has version {version}, this library reads version {VERSION}: a later "
                "release wrote it. Upgrade here before you go on."
            )
        # failure F16: bytes without a count would be dropped unread.
        if count * LEAST_SIZE > body or (count == 0 and body):
            raise CorruptManifest(
                f"manifest counts {count} entries but they have {body} bytes. {REMEDY}"
            )
        if count > next_sequence:
            raise CorruptManifest(
                f"manifest counts {count} entries but its next sequence is {next_sequence}. "
                f"{REMEDY}"
            )
        return cls(count, next_sequence, epoch)


def _no_footer(data: bytes) -> CorruptManifest:
    """The error about bytes that do not end as a manifest: what happened to them."""
    size = len(data)
    if not size:
        fault = "manifest is empty: 0 bytes were written over it"
    elif _begins_with_entry(data):
        fault = (
            f"manifest is truncated: its {size} bytes begin with an entry and do not end with the "
            f"{FOOTER_SIZE}-byte footer"
        )
    else:
        fault = (
            f"manifest was overwritten: its {size} bytes begin with {data[:16]!r} and are no "
            "manifest"
        )
    return CorruptManifest(
        f"{fault}. Restore the object's latest version (bucket versioning), or stop producers, "
        "consumers and collectors and run 'opendata-buffer manifest rebuild'."
    )


def _begins_with_entry(data: bytes) -> bool:
    """Whether the first bytes are an entry's header and location, as far as they are there."""
    if len(data) < _HEAD.size:
        return False
    length, sequence, location_size = _HEAD.unpack_from(data, 0)
    location = data[_HEAD.size : _HEAD.size + location_size]
    return (
        FIXED_SIZE + location_size <= length <= MAX_MANIFEST_BYTES
        and sequence < 2**48  # text would make it larger
        and bool(location)
        and location.isascii()
        and all(32 <= byte < 127 for byte in location)
    )


@dataclass(frozen=True, slots=True, repr=False)
class Manifest:
    """One immutable version of a queue manifest.

    Make one with :meth:`empty` or :meth:`parse`; every change returns a new manifest. The next
    appended entry gets ``next_sequence``. ``epoch`` is that of the consumer that owns the queue, 0
    before the first one.
    """

    raw: bytes
    entry_count: int = field(compare=False)
    next_sequence: int = field(compare=False)
    epoch: int = field(compare=False)
    # Where the first entries start: a cache, replaced as a whole so that threads may share it.
    _starts: tuple[int, ...] = field(default=(), compare=False)
    # Key and store, and the arguments of a command, for errors.
    _name: tuple[str, str] = field(default=("", ""), compare=False)

    @property
    def first_sequence(self) -> int:
        """Sequence of the oldest entry; ``next_sequence`` when the queue is empty."""
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
        """Bytes on storage."""
        return len(self.raw)

    @property
    def sealed(self) -> bool:
        """Whether the queue is closed for good: nothing may be appended or claimed."""
        return self.epoch == SEALED_EPOCH

    @classmethod
    def empty(cls) -> Manifest:
        """The manifest of a queue that was never written to."""
        return cls.starting_at(0, 0)

    @classmethod
    def starting_at(cls, next_sequence: int, epoch: int) -> Manifest:
        """An empty manifest of a queue that has reached this sequence and epoch."""
        if not 0 <= next_sequence <= _U64_MAX or not 0 <= epoch <= SEALED_EPOCH:
            raise InvalidInput(
                f"next sequence {next_sequence} and epoch {epoch} must not be negative, nor above "
                f"{_U64_MAX} and {SEALED_EPOCH}"
            )
        footer = Footer(0, next_sequence, epoch)
        return cls(footer.pack(), *footer)

    @classmethod
    def parse(cls, raw: BytesLike) -> Manifest:
        """Read the footer and check it against the body's size and first entry.

        Constant time: the entries behind the first are checked when they are read
        (:meth:`entries`) or dropped.
        """
        data = raw if type(raw) is bytes else bytes(raw)
        self = cls(data, *Footer.parse(data))
        if self.entry_count:
            body = self._body
            _, end = decode_entry(data, 0, self.first_sequence, body)
            if self.entry_count == 1 and end != body:
                raise _left_over(body - end, 1)
        return self

    def named(self, place: str, arguments: str) -> Manifest:
        """The same manifest, with its place and the command line's arguments for its errors."""
        return Manifest(self.raw, *self._footer, self._starts, (place, arguments))

    def append(self, entries: Sequence[NewEntry]) -> Manifest:
        """A manifest with the entries behind the present ones, in order.

        The present entries are copied as bytes, once, and never decoded. ``InvalidInput`` names an
        entry with a value that does not fit its field (failure F34).
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
        """A manifest without the entries up to and including ``sequence``.

        All entry headers are checked first, so that a manifest whose count and bytes disagree is
        never written back (failure F16); what stays is copied as bytes. Returns this manifest
        when there is nothing to drop. ``InvalidInput`` for a ``sequence`` that is not queued yet
        (failure F27).
        """
        if sequence >= self.next_sequence:
            raise InvalidInput(
                f"cannot drop through sequence {sequence}: the newest entry queued is "
                f"{self.next_sequence - 1}"
            )
        dropped = sequence - self.first_sequence + 1
        if dropped <= 0:
            return self
        starts = self._find_starts(self.entry_count)
        count = self.entry_count - dropped
        cut = starts[dropped] if count else self._body
        kept = memoryview(self.raw)[cut:-FOOTER_SIZE]
        return self._changed([kept], self._footer._replace(entry_count=count))

    def replace(self, sequence: int, entry: NewEntry) -> Manifest:
        """A manifest with another entry at a sequence; everything else is copied as bytes."""
        index = sequence - self.first_sequence
        if not 0 <= index < self.entry_count:
            raise InvalidInput(
                f"sequence {sequence} is not queued: the queue holds {self.first_sequence} to "
                f"{self.next_sequence - 1}"
            )
        starts = (*self._find_starts(self.entry_count), self._body)
        whole = memoryview(self.raw)
        pieces: list[BytesLike] = [whole[: starts[index]]]
        encode_entry(sequence, entry, pieces)
        pieces.append(whole[starts[index + 1] : -FOOTER_SIZE])
        return self._changed(pieces, self._footer)

    def with_epoch(self, epoch: int) -> Manifest:
        """The same entries under another consumer epoch.

        ``CorruptManifest`` where the present epoch leaves no higher one: consumers count up by one
        and never get there, so it was forged (failure F10).
        """
        if epoch == self.epoch:
            return self
        if self.epoch >= SEALED_EPOCH:
            raise self._named_error(
                CorruptManifest(
                    f"manifest has epoch {self.epoch}: no consumer can claim it, epochs end below "
                    f"{SEALED_EPOCH + 1}. Consumers count up by one, so this one was forged. Look "
                    "at it with 'opendata-buffer manifest dump'"
                )
            )
        if not self.epoch < epoch <= SEALED_EPOCH:
            raise InvalidInput(
                f"epoch is {epoch}: use {self.epoch} (the present one) to {SEALED_EPOCH}"
            )
        footer = self._footer._replace(epoch=epoch)
        return self._changed([memoryview(self.raw)[:-FOOTER_SIZE]], footer, self._starts)

    def entries(self, start: int | None = None, limit: int | None = None) -> tuple[QueueEntry, ...]:
        """Up to ``limit`` entries from sequence ``start`` on, decoded strictly.

        Reading a manifest piece by piece goes over the headers before ``start`` only once. A
        ``start`` that was dropped is no error here: compare with :attr:`first_sequence`.
        ``CorruptManifest`` where an entry up to the last one read breaks the format.
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

    def age_s(self, now_ms: int, start: int | None = None) -> float | None:
        """Seconds since the first entry from ``start`` on was written; never negative.

        By the clocks of its writer and of this process, whose ``now_ms`` is milliseconds since the
        Unix epoch. None when there is no such entry, or it has no time.
        """
        first = next(iter(self.entries(start, 1)), None)
        written_ms = None if first is None else first.time_ms
        return None if written_ms is None else max(0, now_ms - written_ms) / 1000

    def locations(self) -> list[str]:
        """Locations of all entries, in order; several times faster than :meth:`entries`.

        Headers and locations are checked, metadata is not.
        """
        starts = self._find_starts(self.entry_count)
        found = whole_locations(self.raw, starts, self._body)
        if len(found) < len(starts):
            self.entries(self.first_sequence + len(found), 1)  # raises the error
            raise AssertionError("a location that does not fit its entry was decoded")
        return found

    def find(self, location: str) -> int | None:
        """Sequence of the entry with this location, the oldest if there are several.

        A miss costs no decoding; a hit in the bytes is confirmed by the starts of the entries.
        """
        at = find_location(self.raw, location, 0, self._body)
        while at is not None:
            starts = self._find_starts(self.entry_count)
            index = bisect_left(starts, at)
            if index < len(starts) and starts[index] == at:
                return self.first_sequence + index
            at = find_location(self.raw, location, at + 1, self._body)
        return None

    @property
    def _body(self) -> int:
        """Bytes of the entries; the footer is behind them."""
        return len(self.raw) - FOOTER_SIZE

    def _changed(
        self, body: Sequence[BytesLike], footer: Footer, starts: tuple[int, ...] = ()
    ) -> Manifest:
        """What follows this one: other entries, of which the first stand at ``starts``."""
        return Manifest(b"".join((*body, footer.pack())), *footer, starts, self._name)

    def _find_starts(self, wanted: int) -> tuple[int, ...]:
        """Where the first ``wanted`` entries start, checking headers, order and fit."""
        if len(self._starts) >= wanted:
            return self._starts
        try:
            starts, end = entry_starts(
                self.raw, self._starts, self.first_sequence, wanted, self._body
            )
            if wanted == self.entry_count and end != self._body:
                raise _left_over(self._body - end, self.entry_count)
        except CorruptManifest as error:
            raise self._named_error(error) from None
        object.__setattr__(self, "_starts", starts)
        return starts

    def _named_error(self, error: CorruptManifest) -> CorruptManifest:
        """The error with this manifest's name, if it has one."""
        place, arguments = self._name
        text = with_queue_in_hint(str(error), arguments)
        return CorruptManifest(f"{place}: {text}") if place else error


def with_queue_in_hint(text: str, arguments: str) -> str:
    """The text of an error, with the queue's arguments in the command that repairs it."""
    return text.replace("manifest rebuild'", f"manifest rebuild {arguments}'")


def _left_over(size: int, count: int) -> CorruptManifest:
    return CorruptManifest(
        f"manifest has {size} bytes after its {count} entries: the footer's count is too small. "
        f"{REMEDY}"
    )


def check_transition(before: Manifest, after: Manifest) -> None:
    """Refuse a manifest that cannot follow another, before every write. Constant time.

    Epoch, next sequence and first sequence never fall, whichever change made it (failures F4,
    F10, F11, F15).
    """
    for name in ("epoch", "next_sequence", "first_sequence"):
        old, new = getattr(before, name), getattr(after, name)
        if new < old:
            raise CorruptManifest(
                f"manifest {name} falls from {old} to {new}: another writer broke the format, or "
                "the manifest was replaced. Stop producers and consumers and look at it with "
                "'opendata-buffer manifest dump'"
            )
