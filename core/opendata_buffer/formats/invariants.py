"""What no change of a manifest may break, whoever makes it.

Checked before every write and on every read that follows another (failures F4, F10, F11, F15).
"""

from __future__ import annotations

from opendata_buffer.errors import CorruptManifest
from opendata_buffer.formats.manifest import Manifest

__all__ = ["check_transition"]


def check_transition(before: Manifest, after: Manifest) -> None:
    """Refuse a manifest that cannot follow another. Constant time.

    Epoch, next sequence and first sequence never fall; that each manifest's count matches its
    sequences was checked when it was made, and is checked again here because this is the last
    gate before storage.

    Raises:
        CorruptManifest: Names the value that fell and both of its values.
    """
    for name in ("epoch", "next_sequence", "first_sequence"):
        old, new = getattr(before, name), getattr(after, name)
        if new < old:
            raise CorruptManifest(
                f"manifest {name} falls from {old} to {new}: another writer broke the format, or "
                "the manifest was replaced. Stop producers and consumers and look at it with "
                "'opendata-buffer manifest dump'"
            )
    if after.first_sequence + after.entry_count != after.next_sequence:
        raise CorruptManifest(
            f"manifest counts {after.entry_count} entries from sequence {after.first_sequence} "
            f"but the next sequence is {after.next_sequence}"
        )
