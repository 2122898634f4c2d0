"""Checks and repairs of a queue."""

from __future__ import annotations

import struct
from typing import Any

import pytest

from opendata_buffer.admin.fsck import (
    NOT_REPAIRED,
    REPAIRED_BY,
    Finding,
    Kind,
    Report,
    check_queue,
    plan_repair,
    repair,
)
from opendata_buffer.admin.target import Target
from opendata_buffer.config import ConsumerConfig
from opendata_buffer.errors import PermanentStorageError
from opendata_buffer.formats.batch import Compression, encode_batch
from opendata_buffer.formats.manifest import FIXED_SIZE, FOOTER_SIZE, Manifest, NewEntry
from opendata_buffer.runtime import SystemRuntime
from opendata_buffer.stores.base import Blob, NotModified
from opendata_buffer.stores.memory import MemoryStore
from tests.support.tuned import tuned
from tests.unit.cli.shell import bytes_of, copy_into, manifest_of

CONFIG = ConsumerConfig(store="memory://fsck")
RUNTIME = SystemRuntime()
LOCATIONS = [f"ingest/01J5T4R3KXBMZ7QV9N2WG8YD{n:02}.batch" for n in range(20)]


def queue_of(*batches: bytes | None) -> MemoryStore:
    """A queue whose entries have these objects; None is missing."""
    store = MemoryStore()
    for location, data in zip(LOCATIONS, batches, strict=False):
        if data is not None:
            store.put(location, data)
    entries = [NewEntry(location) for location in LOCATIONS[: len(batches)]]
    store.put("ingest/manifest", Manifest.empty().append(entries).raw)
    return store


def check(store: MemoryStore, config: ConsumerConfig = CONFIG) -> Report:
    return check_queue(Target(store, config, RUNTIME))


def test_f25_a_missing_batch_is_found_and_the_check_goes_on() -> None:
    report = check(queue_of(encode_batch([b"a"]), None, encode_batch([b"c"])))
    assert report.problems == [Finding(1, LOCATIONS[1], "its object does not exist", Kind.MISSING)]
    assert (report.batches, report.records, report.ok) == (3, 2, False)
    assert str(report.problems[0]).startswith(f"sequence 1 '{LOCATIONS[1]}': ")


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "footer"),
        (encode_batch([b"abc"])[1:], "record 0"),
        (encode_batch([b"abc"])[:-1] + b"\x07", "version"),
        (b"\x00" + encode_batch([]), "footer counts no records"),
    ],
)
def test_f20_a_batch_that_does_not_decode_is_found(data: bytes, says: str) -> None:
    (problem,) = check(queue_of(data)).problems
    assert problem.sequence == 0
    assert says in problem.problem


def test_f21_a_batch_beyond_the_cap_is_found_without_being_expanded() -> None:
    bomb = encode_batch([bytes(10_000_000)], Compression.ZSTD)
    config = tuned(ConsumerConfig, store="memory://fsck", max_batch_bytes=100_000)
    (problem,) = check(queue_of(bomb), config).problems
    assert "max_batch_bytes" in problem.problem


def test_f23_a_location_outside_the_prefix_is_found_and_never_fetched() -> None:
    store = MemoryStore()
    store.put("secret/01J5T4R3KXBMZ7QV9N2WG8YDHP.batch", encode_batch([b"secret"]))
    entry = NewEntry("secret/01J5T4R3KXBMZ7QV9N2WG8YDHP.batch")
    store.put("ingest/manifest", Manifest.empty().append([entry]).raw)
    report = check(store)
    assert "below the data prefix 'ingest'" in report.problems[0].problem
    assert report.records == 0


def test_f15_a_corrupt_manifest_is_a_finding_and_no_error() -> None:
    # Of the first one no entry can be read, of the second one all.
    for damage, note in ((slice(0, 1), Kind.UNREAD), (slice(-1, None), Kind.MISSING)):
        store = queue_of(encode_batch([b"a"]), None)
        raw = bytearray(bytes_of(store, "ingest/manifest"))
        raw[damage] = b"\xff"
        store.put("ingest/manifest", bytes(raw))
        report = check(store)
        (problem,) = report.problems
        assert [each.kind for each in report.notes] == [note]
        assert (problem.sequence, problem.location) == (None, "ingest/manifest")
        assert str(problem).startswith("manifest 'ingest/manifest': ")


def test_a_batch_dequeued_and_collected_meanwhile_is_no_problem() -> None:
    class Racing(MemoryStore):
        """The consumer finishes, and its collector runs, right after the manifest was read."""

        def get(self, key: str, **options: Any) -> Blob | NotModified:  # type: ignore[override]
            got = super().get(key, **options)
            if isinstance(got, Blob) and key == "ingest/manifest" and not options.get("if_changed"):
                self.put(key, Manifest.parse(got.data).drop_through(0).raw)
                self.delete_many([LOCATIONS[0], LOCATIONS[1]])
            return got

    store = Racing()
    copy_into(store, queue_of(encode_batch([b"a"]), encode_batch([b"a"])))
    # Sequence 0 was consumed and may be gone; sequence 1 still waits and is missed.
    assert [each.sequence for each in check(store).problems] == [1]


@pytest.mark.parametrize("location", ["", "ingest//x", "ingest/a\nb"])
def test_a_location_that_no_object_can_have_is_skipped(
    location: str,
) -> None:
    store = queue_of(None)
    name = location.encode()
    entry = struct.pack("<IQH", FIXED_SIZE + len(name), 0, len(name)) + name + bytes(4)
    store.put("ingest/manifest", entry + manifest_of(store).raw[-FOOTER_SIZE:])
    (problem,) = check(store).problems
    assert problem.kind is Kind.MISSING
    assert problem.problem.startswith("no object can have this name: it ")
    repair(Target(store, CONFIG, RUNTIME), [problem])
    assert check(store).ok


def test_a_role_that_may_read_only_the_prefix_can_check_its_queue() -> None:
    class Limited(MemoryStore):
        def get(self, key: str, **options: Any) -> Blob | NotModified:  # type: ignore[override]
            if not key.startswith("a/b/"):
                raise PermanentStorageError(f"{key!r}: access denied")
            return super().get(key, **options)

    store = Limited()
    store.put("a/b/manifest", Manifest.empty().append([NewEntry("a/b/x")]).raw)
    store.put("a/b/x", encode_batch([b"a"]))
    assert check(store, ConsumerConfig(store="memory://fsck", data_path_prefix="a/b")).ok


# ---- repair


def finding(sequence: int, kind: Kind, location: str = "x") -> Finding:
    return Finding(sequence, location, "text", kind)


def test_every_kind_of_problem_is_mended_or_left_with_a_reason() -> None:
    notes = {Kind.UNREAD}
    assert set(REPAIRED_BY) | set(NOT_REPAIRED) == set(Kind) - notes
    assert not set(REPAIRED_BY) & set(NOT_REPAIRED)


def test_of_an_object_that_is_queued_three_times_the_first_entry_stays() -> None:
    repeats = [finding(n, Kind.REPEATED, "a") for n in (1, 4, 6)]
    other = finding(5, Kind.REPEATED, "b")
    plan, _ = plan_repair(Report(problems=[*repeats[:2], other, repeats[2]]))
    assert [each.sequence for each in plan] == [4, 6]
