"""OpenData's v1 consumer and collector, which know neither logs nor owner markers."""

from __future__ import annotations

from typing import Any

from opendata_buffer import outcomes
from opendata_buffer.errors import ObjectNotFound
from opendata_buffer.formats.batch import parse_location
from opendata_buffer.formats.manifest import BatchDescriptor, Manifest
from opendata_buffer.stores.base import Blob


class V1Consumer:
    """A v1 consumer with a manifest and a data prefix, like that of the Rust crate.

    Args:
        store: The store.
        prefix: The data prefix.
        manifest_path: Default: the manifest below the prefix.
    """

    def __init__(self, store: Any, prefix: str, manifest_path: str = "") -> None:
        self.store = store
        self.prefix = prefix
        self.path = manifest_path or f"{prefix}/manifest"
        self.epoch = -1
        self.after = -1

    def read(self) -> tuple[Manifest, str | None]:
        """Return the manifest and its version. A manifest that is not there counts as empty."""
        try:
            found = self.store.get(self.path)
        except ObjectNotFound:
            return Manifest.empty(), None
        assert isinstance(found, Blob)
        return Manifest.parse(found.data), found.version

    def claim(self) -> bool:
        """Take the queue over. It does not know that an epoch can mean the end of a queue."""
        manifest, version = self.read()
        self.epoch = manifest.epoch + 1
        raw = manifest.raw[:-10] + self.epoch.to_bytes(8, "little") + manifest.raw[-2:]
        return isinstance(self.store.put_if(self.path, raw, version), outcomes.Applied)

    def next_entries(self, most: int = 1_000) -> list[BatchDescriptor]:
        """Return the next entries; none if it was fenced."""
        manifest, _ = self.read()
        if manifest.epoch != self.epoch:
            return []
        found = [entry for entry in manifest.entries() if entry.sequence > self.after][:most]
        if found:
            self.after = found[-1].sequence
        return found

    def dequeue(self, through: int) -> Manifest | None:
        """Remove entries, again and again after a lost race.

        Returns:
            The manifest before that; None if it was fenced, or it is not known whether it worked.
        """
        while True:
            manifest, version = self.read()
            if manifest.epoch != self.epoch or not manifest.entry_count:
                return None
            after = manifest.drop_through(min(through, manifest.next_sequence - 1))
            outcome = self.store.put_if(self.path, after.raw, version)
            if not isinstance(outcome, outcomes.LostRace):
                return manifest if isinstance(outcome, outcomes.Applied) else None

    def collect(self) -> list[str]:
        """Delete batches below the prefix that the manifest does not name. Return their keys."""
        manifest, _ = self.read()
        named = set(manifest.locations())
        listed = [info.key for info in self.store.list(f"{self.prefix}/").objects]
        old = [key for key in listed if parse_location(key, self.prefix) and key not in named]
        self.store.delete_many(old)
        return old
