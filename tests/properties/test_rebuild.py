"""A rebuild loses nothing, whatever was written and read before a manifest was lost or cut.

Unnamed publishers write transactions, and other producers write plain batches. A reader follows and
acknowledges as far as it may, and its marker lags. Then the manifest or its end is lost. The
batches that were written determine the records that the rebuilt manifest must deliver.
"""

from __future__ import annotations

import random

import pytest

from opendata_buffer.admin.rebuild import plan_rebuild
from opendata_buffer.config import DEFAULT_GRACE_PERIOD_MS as GRACE_MS
from opendata_buffer.config import ConsumerConfig
from opendata_buffer.consumer.isolation import ReadCommitted, Replay
from opendata_buffer.formats.batch import batch_key, parse_location
from opendata_buffer.formats.manifest import FOOTER_SIZE, Manifest, NewEntry
from opendata_buffer.messages import ACK_TXN, CONTINUE_TXN, FINAL, build_uuid, undecided
from opendata_buffer.queue.marker import Watermark
from opendata_buffer.stores.base import Listing, ObjectInfo
from opendata_buffer.testing.runtime import ManualRuntime

CONFIG = ConsumerConfig(store="memory://unused")
SEEDS = 60


class History:
    """A queue with random writers and a random reader."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.names = ManualRuntime(seed=seed)
        self.now_ms = self.names.now_ms()
        self.manifest = Manifest.starting_at(self.random.choice([0, 7]), 1)
        self.written: dict[int, str] = {}
        self.stored_ms: dict[str, int] = {}
        self.committed: set[str] = set()
        self.open: dict[bytes, list[str]] = {}
        self.rule = ReadCommitted("ingest")
        self.next = self.manifest.first_sequence
        self.delivered: set[str] = set()
        self.seen = Watermark(self.manifest.next_sequence, 1)
        for _ in range(self.random.randint(5, 60)):
            self.now_ms += self.random.choice([1, 50, 1_000, 60_000, 200_000])
            self.random.choice([self.write, self.write, self.end, self.read])()

    def append(self, message: tuple[bytes, int, int] | None = None, ahead_ms: int = 0) -> str:
        named = None if message is None else build_uuid(*message)
        location = batch_key("ingest", self.names.ulid_at(self.now_ms + ahead_ms), None, named)
        self.written[self.manifest.next_sequence] = location
        self.stored_ms[location] = self.now_ms
        self.manifest = self.manifest.append([NewEntry(location)])
        return location

    def write(self) -> None:
        kind = self.random.random()
        if kind < 0.3:
            # The names of a sink's writes are dated hours ahead.
            self.committed.add(self.append(ahead_ms=self.random.choice([0, 0, 10**7])))
            return
        if kind < 0.6 or not self.open:
            self.open[bytes([1]) + len(self.written).to_bytes(5, "big")] = []
        producer = self.random.choice(list(self.open))
        parts = self.open[producer]
        parts.append(self.append((producer, 2 + len(parts), CONTINUE_TXN)))

    def end(self) -> None:
        if not self.open:
            return
        producer, parts = self.random.choice(list(self.open.items()))
        del self.open[producer]
        commits = bool(parts) and self.random.random() < 0.7
        clock = 2 + len(parts) if commits else 1
        self.append((producer, clock, ACK_TXN | FINAL), ahead_ms=GRACE_MS)
        self.committed |= set(parts) if commits else set()

    def read(self) -> None:
        again = replay_of(self.written)
        while self.next < self.manifest.next_sequence and self.random.random() < 0.8:
            for offered in self.rule.offer(self.next, self.written[self.next], again):
                self.delivered.add(self.written[offered])
            self.next += 1
        floor = self.rule.stable_end(self.next)
        if floor > self.manifest.first_sequence and self.random.random() < 0.8:
            self.manifest = self.manifest.drop_through(floor - 1)
            if self.random.random() < 0.5:
                self.seen = Watermark.of(self.manifest, self.written[floor - 1])

    def left(self) -> Listing:
        """Return a listing that a collector may leave: all queued batches, and other young ones."""
        oldest_ms = self.now_ms - self.random.choice([GRACE_MS, 2 * GRACE_MS, 10**9])
        queued = set(self.manifest.locations())
        found = []
        for location in sorted(self.written.values()):
            parsed = parse_location(location, "ingest")
            assert parsed is not None
            if location in queued or parsed.timestamp_ms >= oldest_ms:
                found.append(ObjectInfo(location, 7, self.stored_ms[location]))
        return Listing(tuple(found), self.now_ms)


def replay_of(locations: dict[int, str]) -> Replay:
    return lambda begin, end: [(sequence, locations[sequence]) for sequence in range(begin, end)]


def read_all(rule: ReadCommitted, locations: dict[int, str]) -> set[str]:
    """Return everything that a new reader receives, from beginning to end."""
    again = replay_of(locations)
    return {
        locations[offered]
        for sequence, location in locations.items()
        for offered in rule.offer(sequence, location, again)
    }


@pytest.mark.parametrize("damage", ["gone", "cut", "without its footer"])
def test_a_rebuild_loses_nothing_delivers_nothing_wrong_and_blocks_no_reader(damage: str) -> None:
    rebuilt = 0
    for seed in range(SEEDS):
        history = History(seed)
        raw: bytes | None = history.manifest.raw
        if damage == "gone":
            raw = None
        else:
            whole = len(history.manifest.raw)
            end = history.random.randrange(whole) if damage == "cut" else whole - FOOTER_SIZE
            raw = history.manifest.raw[:end]
        plan = plan_rebuild(raw, history.left(), history.seen, config=CONFIG)
        assert plan.fault is not None
        pairs = {entry.sequence: entry.location for entry in plan.manifest.entries()}
        rule = ReadCommitted("ingest")
        delivered = read_all(rule, pairs)
        waited = history.committed.intersection(history.manifest.locations()) - history.delivered
        assert waited <= delivered, seed
        assert delivered <= history.committed, seed
        waiting = undecided(pairs.items(), "ingest")
        assert set(waiting) <= set(history.open), seed
        first = min((transaction.first_sequence for transaction in waiting.values()), default=None)
        following = plan.manifest.next_sequence
        assert rule.stable_end(following) == (following if first is None else first), seed
        rebuilt += bool(waited)
    assert rebuilt > SEEDS // 4
