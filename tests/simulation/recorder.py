"""A store that remembers what was ever queued, for checks at the end of a run."""

from __future__ import annotations

from collections.abc import Iterator

from opendata_buffer import outcomes
from opendata_buffer.formats.manifest import FOOTER_SIZE, BatchDescriptor, Manifest, decode_entry
from opendata_buffer.stores.base import Absent, IfVersion, PutOutcome
from opendata_buffer.stores.memory import MemoryStore
from tests.support.simulation import Simulation

MANIFEST = "ingest/manifest"


class Recorder(MemoryStore):
    """Notes every entry that was ever in the manifest, also when a consumer took it since."""

    def __init__(self, simulation: Simulation) -> None:
        super().__init__("simulation", now_ms=simulation.now_ms)
        self.fail = simulation.fail
        self.entries: dict[int, str] = {}
        self.objects: dict[str, bytes] = {}
        self.manifest = Manifest.empty()
        self.commits = 0

    def put_if(self, key: str, data: bytes, condition: Absent | IfVersion) -> PutOutcome:
        outcome = super().put_if(key, data, condition)
        if key == MANIFEST and isinstance(outcome, outcomes.Applied):
            self.commits += 1
            before, self.manifest = self.manifest, Manifest.parse(data)
            for entry in self._new_entries(before):
                known = self.entries.setdefault(entry.sequence, entry.location)
                if known != entry.location:
                    self.fail(f"sequence {entry.sequence}: {known} became {entry.location}")
        return outcome

    def _new_entries(self, before: Manifest) -> Iterator[BatchDescriptor]:
        """Those behind what is byte for byte as before; all of them when it is not."""
        raw, known = self.manifest.raw, before.raw[:-FOOTER_SIZE]
        if not raw.startswith(known):
            yield from self.manifest.entries()
            return
        offset = len(known)
        for sequence in range(before.next_sequence, self.manifest.next_sequence):
            entry, offset = decode_entry(raw, offset, sequence, len(raw) - FOOTER_SIZE)
            yield entry

    def put(self, key: str, data: bytes | memoryview) -> None:
        self.objects[key] = bytes(data)
        super().put(key, data)
