"""The marker below a data prefix: which queue the prefix belongs to, and how far that was. Pure.

``<prefix>/_owner.json`` holds::

    {"version": 1, "manifest": "manifest", "id": "01J5...", "next_sequence": 42, "epoch": 3,
     "acked": 39, "acked_location": "ingest/01J6....batch"}

``manifest`` is relative to the marker, as a link would be: the same queue opened as
``s3://bucket`` or as ``s3://bucket/root`` is the same owner. ``id`` is a ULID, drawn once:
positions in a queue are bare sequences, and only the id tells one queue's from another's, or
from those of a queue that was deleted and made anew (failure F4).

The other four are the watermark, which the manifest has once reached. Markers without one are
read as well; readers that do not know it ignore it. See the decision on the watermark.
"""

from __future__ import annotations

import posixpath
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from opendata_buffer.formats.sidecar import Fields, Sidecar
from opendata_buffer.queue.watermark import Watermark

__all__ = ["MARKER", "MARKER_NAME", "Marker", "marker_key"]

MARKER_NAME = "_owner.json"

MARKER = Sidecar("the owner marker", "If one queue alone uses this data prefix, delete the object.")


def marker_key(data_path_prefix: str) -> str:
    """The key of the marker of a data prefix."""
    return f"{data_path_prefix}/{MARKER_NAME}"


@dataclass(frozen=True, slots=True)
class Marker:
    """The marker of one data prefix.

    Attributes:
        manifest_path: Key of the manifest that the prefix belongs to.
        queue_id: The queue's id; empty for a marker that has none.
        watermark: None when none was noted yet.
        others: Fields of later versions, kept when the marker is written again.
    """

    manifest_path: str
    queue_id: str
    watermark: Watermark | None = None
    others: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self, data_path_prefix: str) -> bytes:
        """The object's bytes, for a marker of this prefix."""
        own: dict[str, Any] = {
            "manifest": posixpath.relpath("/" + self.manifest_path, "/" + data_path_prefix),
            "id": self.queue_id,
        }
        if self.watermark is not None:
            own["next_sequence"] = self.watermark.next_sequence
            own["epoch"] = self.watermark.epoch
            if self.watermark.acked is not None:
                own["acked"] = self.watermark.acked
                own["acked_location"] = self.watermark.acked_location
        return MARKER.encode(own, self.others)

    @classmethod
    def from_json(cls, data: bytes, data_path_prefix: str) -> Marker:
        """Read the bytes of the marker of this prefix.

        Raises:
            CorruptData: They are no marker of this version.
        """
        fields = MARKER.decode(data)
        relative = fields.text("manifest")
        if not relative:
            raise fields.wrong("manifest", "the path of a manifest")
        # No leading slash: '..' beyond the store's root stays visible and never matches.
        manifest_path = posixpath.normpath(posixpath.join(data_path_prefix, relative))
        queue_id, watermark = fields.text("id", ""), _watermark(fields)
        return cls(manifest_path, queue_id, watermark, fields.others())


def _watermark(fields: Fields) -> Watermark | None:
    next_sequence, epoch = fields.number("next_sequence", None), fields.number("epoch", None)
    acked, acked_location = fields.number("acked", None), fields.text("acked_location", "")
    if next_sequence is None or epoch is None:
        return None
    return Watermark(next_sequence, epoch, acked, "" if acked is None else acked_location)
