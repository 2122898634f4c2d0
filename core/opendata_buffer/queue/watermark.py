"""How far a manifest was, as one value that only rises. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from opendata_buffer.formats.manifest import Manifest

__all__ = ["Watermark"]


@dataclass(frozen=True, slots=True)
class Watermark:
    """What a manifest has reached; later ones are never below it.

    Attributes:
        next_sequence: What the next appended batch got.
        epoch: Of the last consumer.
        acked: The highest sequence that a consumer took out of the manifest; None when none.
        acked_location: Where that batch was; empty when that is not known.
    """

    next_sequence: int
    epoch: int
    acked: int | None = None
    acked_location: str = ""

    @classmethod
    def of(cls, manifest: Manifest, acked_location: str = "") -> Watermark:
        """The watermark of a manifest."""
        acked = manifest.first_sequence - 1 if manifest.first_sequence else None
        return cls(manifest.next_sequence, manifest.epoch, acked, acked_location)

    def allows(self, manifest: Manifest | None) -> bool:
        """Whether this manifest can follow: it is there, and is not behind (failure F4)."""
        return (
            manifest is not None
            and manifest.next_sequence >= self.next_sequence
            and manifest.epoch >= self.epoch
        )

    def covers(self, other: Watermark) -> bool:
        """Whether it is not below the other in anything."""
        return all(mine >= its for mine, its in zip(self._levels, other._levels, strict=True))

    def knows(self, other: Watermark) -> bool:
        """Whether it covers the other, and where the last batch was if the other knows that.

        Whoever only reads the manifest, a collector or a producer, knows how far it is and not
        where that batch was: its note must not keep the consumer from adding that.
        """
        if self.acked == other.acked and other.acked_location and not self.acked_location:
            return False
        return self.covers(other)

    def joined(self, other: Watermark) -> Watermark:
        """The lowest one that covers both."""
        further = max(self, other, key=lambda each: (each._levels[2], each.acked_location))
        return Watermark(
            max(self.next_sequence, other.next_sequence),
            max(self.epoch, other.epoch),
            further.acked,
            further.acked_location,
        )

    @property
    def _levels(self) -> tuple[int, int, int]:
        return self.next_sequence, self.epoch, -1 if self.acked is None else self.acked
