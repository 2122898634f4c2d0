"""Name the parts of a log: the segments that hold its old entries, and the pages that list them.

A segment is an object that has the entries of a range of sequences, in the format of a manifest. It
never changes. A page is a small JSON object that names segments, or other pages, so that the index
of a long log stays short. The name of an object says which sequences it has::

    ingest/_log/00000000000000001024-00000000000000001792-01J6...segment    entries 1024 to 1791
    ingest/_log/00000000000000000000-00000000000000131072-01J7...page       names of segments

    {"version": 1, "parts": [[1024, 1792, 1767225600000, 1767225700000, "0...-01J6....segment"]]}

Everything here is a function of values. :mod:`opendata_buffer.queue.log_segments` reads and stores
the objects.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from opendata_buffer.config import QueueConfig
from opendata_buffer.formats.batch import name_time_ms
from opendata_buffer.formats.manifest import Manifest
from opendata_buffer.queue.sidecar import LARGEST, Sidecar, SidecarFields

MAX_SEGMENT_BYTES = 1 << 28

PAGE = Sidecar(
    "a page of the log's index",
    "Restore the object (bucket versioning): it names segments of the log.",
    max_bytes=1024 * 1024,
)


@dataclass(frozen=True, slots=True)
class Part:
    """A segment, or a page that names parts. Times are milliseconds since the Unix epoch.

    Attributes:
        first: The first sequence.
        end: The sequence after the last one.
        named_ms: The earliest time in the names of its batches, milliseconds since the Unix epoch;
            0 if one name has no time.
        newest_ms: The latest time of a record, in milliseconds since the Unix epoch.
        name: Name of the object, below the folder of the log.
    """

    first: int
    end: int
    named_ms: int
    newest_ms: int
    name: str

    @classmethod
    def of(cls, entries: Manifest, name: str) -> Part:
        """Return the segment of these entries, of which there must be at least one."""
        found = entries.entries()
        named = [name_ms(entry.location) for entry in found]
        newest = max(entry.latest_ms for entry in found)
        return cls(found[0].sequence, entries.next_sequence, min(named), max(newest, 0), name)

    @classmethod
    def page(cls, parts: Sequence[Part], name: str) -> Part:
        """Return the page that names these parts."""
        named, newest = min(p.named_ms for p in parts), max(p.newest_ms for p in parts)
        return cls(parts[0].first, parts[-1].end, named, newest, name)


def name_ms(location: str) -> int:
    """Return the time in the name of a batch; 0 if the name has no time."""
    return max(name_time_ms(location) or 0, 0)


def parts_folder(config: QueueConfig) -> str:
    """Return the folder of the segments and pages, with a slash at the end."""
    return f"{config.data_path_prefix}/_log/"


def part_name(first: int, end: int, ulid: str, kind: str) -> str:
    """Name a new part.

    Args:
        first: Its first sequence.
        end: The sequence after its last one.
        ulid: Tells it from the parts of other writers with the same sequences.
        kind: ``segment`` or ``page``.

    Returns:
        The name, without the folder.
    """
    # Padded, so that a listing is in the order of sequences and begins with what lies before the
    # floor.
    return f"{first:020d}-{end:020d}-{ulid}.{kind}"


def span_of_segment(key: str) -> tuple[int, int] | None:
    """Return the first sequence of a segment and one past its last; None for any other object."""
    first, _, _ = key.rsplit("/", 1)[-1].partition("-")
    end = end_of_part(key)
    known = key.endswith(".segment") and first.isascii() and first.isdigit() and end != LARGEST
    return (int(first), end) if known and int(first) < end else None


def begin_of_part(key: str) -> int:
    """Return the first sequence of a segment or a page, by its name; -1 for any other object."""
    first = key.rsplit("/", 1)[-1].partition("-")[0]
    return int(first) if first.isascii() and first.isdigit() else -1


def end_of_part(key: str) -> int:
    """Return one past the last sequence of a segment or page, by its name.

    :data:`LARGEST` for any other object. The object can be deleted if that is below the floor.
    """
    _, end, *rest = (*key.rsplit("/", 1)[-1].split("-"), "", "")
    return int(end) if end.isascii() and end.isdigit() and rest[0] else LARGEST


def chain_of(spans: Iterable[tuple[int, int]], end: int) -> list[tuple[int, int]]:
    """Choose the segments that follow one another and together reach furthest.

    Segments that lost a race overlap others and have the same entries.

    Args:
        spans: First sequence of each segment, and one past its last.
        end: The first sequence in the manifest, where a chain may end.

    Returns:
        The spans of the chosen segments, oldest first.
    """
    known = sorted(set(spans), reverse=True)
    # For the first sequence of a chain: how far the chain reaches, and where its first span ends.
    reach: dict[int, tuple[int, int]] = {}
    for first, last in known:
        if last in reach:
            reach[first] = max(reach.get(first, (0, 0)), (reach[last][0], last))
        elif last >= end or not any(begin < last < ends for begin, ends in known):
            reach[first] = max(reach.get(first, (0, 0)), (last, last))
    chain: list[tuple[int, int]] = []
    at = -1
    while at < end and (begins := [first for first in reach if at <= first < end]):
        at = min(begins)
        while at in reach and at < end:
            chain.append((at, reach[at][1]))
            at = reach[at][1]
    return chain


def page_to_json(parts: Sequence[Part]) -> bytes:
    """Return the bytes of the page that names these parts."""
    return PAGE.encode({"parts": rows_of(parts)})


def page_from_json(data: bytes) -> tuple[Part, ...]:
    """Parse the bytes of a page.

    Args:
        data: The bytes of the object.

    Returns:
        The parts that the page names.

    Raises:
        CorruptData: They are not a page, or a later version wrote them.
    """
    found = PAGE.decode(data)
    return parts_in(found, "parts", found.items("parts"))


def rows_of(parts: Sequence[Part]) -> list[list[Any]]:
    """Return the parts as the JSON of an index or a page has them."""
    return [[p.first, p.end, p.named_ms, p.newest_ms, p.name] for p in parts]


def parts_in(found: SidecarFields, name: str, rows: Any) -> tuple[Part, ...]:
    """Parse the parts in a field of an index or a page.

    Args:
        found: The object, which its error names.
        name: Name of the field.
        rows: Its value, or one item of it.

    Returns:
        The parts, in the order of the field.

    Raises:
        CorruptData: It is not a list of parts.
    """
    made = []
    for row in rows if isinstance(rows, list) else [None]:
        match row:
            case [int(first), int(end), int(named), int(newest), str(text)] if (
                0 <= first < end <= LARGEST and text and "/" not in text
            ):
                made.append(Part(first, end, named, newest, text))
            case _:
                raise found.wrong(name, "a list of parts", row)
    return tuple(made)
