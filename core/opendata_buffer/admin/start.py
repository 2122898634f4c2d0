"""Where in a queue to begin, in an operator's words. Pure.

``earliest`` is the oldest queued batch and ``latest`` the end; a whole number is a sequence; a
time is the first batch with a record that was taken in then or later, as the Spark source's
``startingTimestamp`` finds it. Partitions of a topic count each for itself, so sequences are given
by partition there, as the source's ``startingOffsets``: ``{"0": 42}``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime

from opendata_buffer.errors import InvalidInput
from opendata_buffer.formats.keys import location_timestamp_ms
from opendata_buffer.formats.manifest import Manifest, QueueEntry

__all__ = ["EARLIEST", "LATEST", "Start", "Starts"]

EARLIEST = "earliest"
LATEST = "latest"
_MOST_DIGITS = 20


@dataclass(frozen=True, slots=True)
class Start:
    """A place in any queue: a word, a sequence or a time.

    Attributes:
        text: As it was given.
        sequence: The batch to begin with; None for the others.
        since_ms: Milliseconds since the Unix epoch; None for the others.
    """

    text: str
    sequence: int | None = None
    since_ms: int | None = None

    @property
    def is_earliest(self) -> bool:
        """Whether nothing is passed by, whatever the queue holds."""
        return self.text == EARLIEST

    @classmethod
    def parse(cls, text: str) -> Start:
        """Read ``earliest``, ``latest``, a sequence, or a time in ISO 8601, UTC without a zone.

        Raises:
            InvalidInput: It is none of them.
        """
        if text in (EARLIEST, LATEST):
            return cls(text)
        if text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS:
            return cls(text, sequence=int(text))
        try:
            at = datetime.fromisoformat(text)
        except ValueError:
            raise InvalidInput(
                f"{text!r} is no place in a queue: use {EARLIEST}, {LATEST}, a sequence such as "
                "42, or a time such as 2026-01-31T03:00:00Z"
            ) from None
        if at.tzinfo is None:
            at = at.replace(tzinfo=UTC)
        return cls(text, since_ms=round(at.timestamp() * 1000))

    def sequence_in(self, manifest: Manifest, key: str) -> int:
        """The sequence it means in a queue; ``manifest.next_sequence`` is the end.

        Args:
            manifest: The queue's.
            key: The manifest's name, for messages.

        Raises:
            InvalidInput: A sequence that has left the queue, or that it has not reached.
        """
        if self.since_ms is not None:
            return _first_since(manifest, self.since_ms)
        if self.sequence is None:
            return manifest.first_sequence if self.text == EARLIEST else manifest.next_sequence
        if manifest.first_sequence <= self.sequence <= manifest.next_sequence:
            return self.sequence
        first, end = manifest.first_sequence, manifest.next_sequence
        held = f"it holds {first} to {end - 1}" if manifest.entry_count else "it is empty"
        if self.sequence < first:
            raise InvalidInput(
                f"sequence {self.sequence} has left the queue with manifest {key!r}: {held}. "
                f"Begin at {EARLIEST}; what was passed by on purpose is in 'opendata-buffer "
                "quarantine list'"
            )
        raise InvalidInput(
            f"sequence {self.sequence} is beyond the end of the queue with manifest {key!r}: "
            f"{held}, and the next batch gets {end}. Use {LATEST} for the end"
        )


@dataclass(frozen=True, slots=True)
class Starts:
    """Where to begin in each of some queues.

    Attributes:
        text: As it was given.
        everywhere: The same place in all of them; None if sequences are given by partition.
        by_partition: Names or numbers of partitions, and the place in each.
    """

    text: str
    everywhere: Start | None
    by_partition: Mapping[str, Start] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> Starts:
        """Read what :meth:`Start.parse` reads, or JSON such as ``{"0": 42, "p-00001-05mv": 7}``.

        Raises:
            InvalidInput: It is neither.
        """
        if not text.lstrip().startswith("{"):
            return cls(text, Start.parse(text))
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            found = {}
        if not found or not all(type(each) is int and each >= 0 for each in found.values()):
            raise InvalidInput(
                f"{text!r} is no place in a topic: give sequences by partition, by number or "
                'name, such as {"0": 42, "1": 7}'
            )
        return cls(
            text, None, {name: Start(str(each), sequence=each) for name, each in found.items()}
        )

    def resolved(self, resolve: Callable[[str], str]) -> Callable[[str], Start]:
        """From the whole name of a partition to its place; ``earliest`` where none was given.

        Args:
            resolve: From a name or a number to the name; raises for one that there is not.

        Raises:
            InvalidInput: A partition that there is not.
        """
        if self.everywhere is not None:
            everywhere = self.everywhere
            return lambda name: everywhere
        places = {resolve(name): start for name, start in self.by_partition.items()}
        return lambda name: places.get(name, Start(EARLIEST))


def _first_since(manifest: Manifest, since_ms: int) -> int:
    for entry in manifest.entries():
        taken_in_ms = _newest_ms(entry)
        # One of which nobody knows when it came rather comes too often than never.
        if taken_in_ms is None or taken_in_ms >= since_ms:
            return entry.sequence
    return manifest.next_sequence


def _newest_ms(entry: QueueEntry) -> int | None:
    times = [each.ingestion_time_ms for each in entry.metadata]
    return max(times) if times else location_timestamp_ms(entry.location)
