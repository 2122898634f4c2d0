"""Rebuilding a lost manifest with every unread batch, and checking and repairing queues."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any
from uuid import UUID

import pytest

from opendata_buffer import Consumer, Producer
from opendata_buffer.admin.queue_check import (
    NOT_REPAIRED,
    REPAIRED_BY,
    Finding,
    Kind,
    Report,
    check_queue,
    plan_repair,
    repair,
)
from opendata_buffer.admin.rebuild import SEQUENCES_AHEAD, RebuildPlan, plan_rebuild, rebuild
from opendata_buffer.admin.target import Target
from opendata_buffer.config import DEFAULT_GRACE_PERIOD_MS as GRACE_MS
from opendata_buffer.config import ConsumerConfig, GarbageCollectorConfig, ProducerConfig
from opendata_buffer.consumer.isolation import ReadCommitted
from opendata_buffer.consumer.read_only import ReadOnlyReader
from opendata_buffer.errors import Conflict, DataLoss, InvalidInput, PermanentStorageError
from opendata_buffer.formats.batch import (
    Compression,
    Transaction,
    batch_key,
    encode_batch,
    parse_location,
)
from opendata_buffer.formats.manifest import FIXED_SIZE, FOOTER_SIZE, Manifest, Metadata, NewEntry
from opendata_buffer.messages import ACK_TXN, CONTINUE_TXN, FINAL, build_uuid
from opendata_buffer.queue.marker import Watermark
from opendata_buffer.runtime import SystemRuntime
from opendata_buffer.stores.base import Blob, Listing, ObjectInfo
from opendata_buffer.stores.memory import MemoryStore
from opendata_buffer.testing.runtime import ManualRuntime
from tests.support.tuned import tuned
from tests.unit.cli.shell import Lossy, bytes_of, copy_into, manifest_of

CONFIG = ConsumerConfig(store="memory://rebuild", gc=GarbageCollectorConfig(enabled=False))
RUNTIME = SystemRuntime()
NAMES = ManualRuntime()
NOW = NAMES.now_ms()
KEY = "ingest/manifest"


def location(at_ms: int, txn: Transaction | None = None, message: UUID | None = None) -> str:
    return batch_key("ingest", NAMES.ulid_at(NOW + at_ms), txn, message)


def listing(*keys: str, stored_ms: int = 0) -> Listing:
    return Listing(tuple(ObjectInfo(key, 7, NOW + stored_ms) for key in keys), NOW)


SEEN = Watermark(5, 1)


def plan_of(raw: bytes | None, found: Listing, seen: Watermark | None = SEEN) -> RebuildPlan:
    return plan_rebuild(raw, found, seen, config=CONFIG)


# ---- the plan


def test_objects_that_are_not_batches_of_this_queue_are_left_out() -> None:
    mine = location(0)
    nested = location(1).replace("ingest/", "ingest/other/")
    others = ["ingest/_owner.json", "ingest/manifest", "ingest/_quarantine/1-a.object", nested]
    plan = plan_of(None, listing(mine, "ingest/other/_owner.json", *others))
    assert plan.found == (mine,)


METADATA = (Metadata(0, 3, b"payload"),)


def test_a_truncated_manifest_keeps_order_and_metadata() -> None:
    later, earlier, lost = location(9), location(1), location(5)
    whole = Manifest.starting_at(7, 2).append(
        [NewEntry(later, METADATA), NewEntry(earlier, METADATA), NewEntry(lost)]
    )
    cut = whole.raw[: -22 - 10]  # the footer and the end of the last entry are gone
    plan = plan_of(cut, listing(later, earlier, lost), Watermark(8, 2))
    assert plan.manifest.locations() == [later, earlier, lost]
    assert [each.metadata for each in plan.manifest.entries()] == [METADATA, METADATA, ()]
    assert plan.found == (lost,)
    assert plan.manifest.first_sequence > 9


def test_batches_of_a_restored_manifest_that_were_read_or_are_gone_are_dropped() -> None:
    read, gone, waits, newer = (location(n) for n in range(4))
    old = Manifest.empty().append([NewEntry(each, METADATA) for each in (read, gone, waits)])
    seen = Watermark(4, 1, acked=0, acked_location=read)
    plan = plan_of(old.raw, listing(read, waits, newer), seen)
    assert plan.manifest.locations() == [waits, newer]
    assert plan.missing == (gone,)
    assert plan.fault is not None
    assert "went backwards" in str(plan.fault)


def test_f4_batches_that_were_appended_to_a_new_manifest_do_not_count_as_read() -> None:
    # A client without markers created the manifest: its sequences begin at 0 again, below the
    # read ones.
    old, acked, first, second = (location(at) for at in (-2 * GRACE_MS, 0, 1, 2))
    anew = Manifest.empty().append([NewEntry(each, METADATA) for each in (first, second)])
    seen = Watermark(42, 3, acked=39, acked_location=acked)
    plan = plan_of(anew.raw, listing(old, acked, first, second), seen)
    assert plan.manifest.locations() == [first, second, acked]


def test_batches_of_an_old_copy_that_were_read_long_before_are_dropped() -> None:
    long_ago, acked = location(-GRACE_MS), location(0)
    old = Manifest.empty().append([NewEntry(long_ago)])
    seen = Watermark(42, 3, acked=39, acked_location=acked)
    plan = plan_of(old.raw, listing(long_ago, acked), seen)
    assert plan.manifest.locations() == [acked]


def test_a_batch_that_certainly_left_the_queue_before_another_is_left_out() -> None:
    old, border, acked, new = (location(at) for at in (-GRACE_MS, -GRACE_MS // 2, 0, 1))
    seen = Watermark(9, 1, acked=3, acked_location=acked)
    plan = plan_of(None, listing(old, border, acked, new), seen)
    # The upload of the batch at the limit may have taken half of the grace period.
    assert plan.found == (border, acked, new)


@pytest.mark.parametrize(
    ("txn", "flags"), [(None, None), (Transaction("app", 1), None), (None, ACK_TXN | FINAL)]
)
def test_a_name_that_is_ahead_of_time_counts_as_the_time_at_which_its_object_was_stored(
    txn: Transaction | None, flags: int | None
) -> None:
    # Sinks whose writes may take hours make such names, with or without a transaction, and so do
    # publishers.
    message = None if flags is None else build_uuid(A, 3, flags)
    ahead, waits, old = location(10 * GRACE_MS, txn, message), location(0), location(-GRACE_MS)
    seen = Watermark(9, 1, acked=3, acked_location=ahead)
    plan = plan_of(None, listing(old, waits, ahead), seen)
    assert plan.found == (waits, ahead)
    # Without its object, this time is unknown.
    assert plan_of(None, listing(old, waits), seen).found == (old, waits)


def test_an_object_that_was_restored_later_has_the_age_of_its_name() -> None:
    waits, acked = location(GRACE_MS), location(0)
    seen = Watermark(9, 1, acked=3, acked_location=acked)
    plan = plan_of(None, listing(waits, acked, stored_ms=9 * GRACE_MS), seen)
    assert waits in plan.found


def test_transactions_stay_contiguous_and_in_the_order_of_their_numbers() -> None:
    first, second = Transaction("app", 9), Transaction("app", 10)
    a1, b1, plain, b2, a2 = (
        location(0, second), location(1, first), location(2), location(3, first),
        location(4, second),
    )  # fmt: skip
    plan = plan_of(None, listing(a1, b1, plain, b2, a2))
    assert plan.found == (b1, b2, a1, a2, plain)


A, B = b"\1AAAAA", b"\1BBBBB"


def unfinished_write() -> tuple[str, str, str]:
    """The object of a committed batch, and both objects of the batch after it."""
    committed, first, second = (Transaction("query", number) for number in (9, 10, 10))
    return location(0, committed), location(1, first), location(2, second)


def test_f52_a_part_of_an_unfinished_write_is_queued_as_a_copy_without_its_identity() -> None:
    done, part, _ = unfinished_write()
    plan = plan_rebuild(None, listing(done, part), SEEN, committed={"query": 9}, config=CONFIG)
    (copy,) = plan.copies
    assert plan.manifest.locations() == [done, copy]
    assert plan.copies[copy] == part
    parsed, source = parse_location(copy, "ingest"), parse_location(part, "ingest")
    assert parsed is not None
    assert source is not None
    assert (parsed.ulid, parsed.txn) == (source.ulid, None)


def test_f52_a_copy_that_an_interrupted_repair_has_made_is_queued_once() -> None:
    _, first, second = unfinished_write()
    copies = sorted(plan_of(None, listing(first, second)).copies)
    assert len(copies) == 2
    again = plan_of(None, listing(first, second, copies[0]))
    assert again.manifest.locations() == copies
    assert list(again.copies) == copies[1:]


@pytest.mark.parametrize("evidence", ["commit record", "entry", "segment"])
def test_a_write_that_is_known_to_be_committed_keeps_its_identity(evidence: str) -> None:
    done, first, second = unfinished_write()
    raw = Manifest.empty().append([NewEntry(first), NewEntry(second)]).raw[:-1]
    plan = plan_rebuild(
        raw if evidence == "entry" else None,
        listing(done, first, second),
        SEEN,
        in_segments=frozenset({first} if evidence == "segment" else ()),
        committed={"query": 10 if evidence == "commit record" else 9},
        config=CONFIG,
    )
    assert plan.copies == {}
    left = {done, first, second} - ({first} if evidence == "segment" else set())
    assert {*plan.manifest.locations()} == left


def test_only_the_newest_batch_of_an_app_may_be_unfinished() -> None:
    done, first, second = unfinished_write()
    plan = plan_of(None, listing(done, first, second))
    assert sorted(plan.copies.values()) == [first, second]
    assert plan.manifest.locations()[0] == done


def test_messages_are_ordered_by_their_clock_with_the_final_acknowledgement_last() -> None:
    txn = Transaction("app", 1)
    last = location(1, txn, build_uuid(A, 1, ACK_TXN | FINAL))
    third = location(2, txn, build_uuid(A, 4, CONTINUE_TXN))
    other = location(3, txn, build_uuid(B, 9, CONTINUE_TXN))
    first = location(4, txn, build_uuid(A, 2, CONTINUE_TXN))
    plain = location(5)
    second = location(6, txn, build_uuid(A, 3, CONTINUE_TXN))
    plan = plan_of(None, listing(last, third, other, first, plain, second))
    assert plan.found == (first, second, other, third, plain, last)


def test_a_roll_back_stays_after_the_messages_that_it_rolls_back() -> None:
    begun, acknowledged = (2, 4, 5), (3, 3, 6)
    pairs = zip(begun, acknowledged, strict=True)
    clocks = [each for a, b in pairs for each in ((a, CONTINUE_TXN), (b, ACK_TXN))]
    names = [location(at, None, build_uuid(A, *each)) for at, each in enumerate(clocks)]
    assert plan_of(None, listing(*reversed(names))).found == tuple(names)


def test_messages_come_before_the_acknowledgement_in_the_manifest_that_decided_them() -> None:
    # Its messages were read and dequeued. It is kept for the transaction of another producer.
    txn = Transaction("app", 1)
    begun = location(0, txn, build_uuid(A, 2, CONTINUE_TXN))
    other = location(1, txn, build_uuid(B, 2, CONTINUE_TXN))
    decided = location(2, txn, build_uuid(A, 3, ACK_TXN | FINAL))
    manifest = Manifest.starting_at(1, 1).append([NewEntry(other), NewEntry(decided)])
    cut = manifest.raw[:-FOOTER_SIZE]
    plan = plan_of(cut, listing(begun, other, decided), Watermark(3, 1))
    assert plan.manifest.locations() == [begun, other, decided]
    pairs = list(enumerate(plan.manifest.locations()))
    rule = ReadCommitted("ingest")
    offered = [rule.offer(*pair, lambda first, end: pairs[first:end]) for pair in pairs]
    assert offered == [[], [], [0]]
    # Only the transaction of the other producer keeps entries in the queue.
    assert rule.stable_end(3) == 1


# ---- the rebuild


def queue() -> MemoryStore:
    """Return the store of a queue of five batches, two of which were read."""
    store = MemoryStore()
    with Producer(ProducerConfig(store="memory://rebuild"), store=store) as producer:
        for n in range(5):
            producer.produce([b"%d" % n])
            producer.flush()
            RUNTIME.sleep(0.002)  # names are ordered by milliseconds
    with Consumer(CONFIG, store=store) as consumer:
        for _ in range(2):
            batch = consumer.next_batch()
            assert batch is not None
            consumer.ack(batch.sequence)
    return store


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda raw: b"",
    "truncated": lambda raw: raw[:-30],
    "overwritten": lambda raw: b"\xff" * 100,
    "restored": lambda raw: Manifest.empty().raw,
}


def damaged(how: str) -> MemoryStore:
    store = queue()
    if how == "removed":
        store.delete_many([KEY])
    else:
        store.put(KEY, DAMAGE[how](bytes_of(store, KEY)))
    return store


@pytest.mark.parametrize("how", ["removed", *DAMAGE])
def test_f4_after_a_rebuild_everything_unread_is_delivered(how: str) -> None:
    store = damaged(how)
    with pytest.raises(Exception):  # noqa: B017, PT011  QueueReset or CorruptManifest
        Consumer(CONFIG, store=store)
    rebuild(Target(store, CONFIG, RUNTIME))
    with Consumer(CONFIG, store=store) as consumer:
        delivered = []
        while (batch := consumer.next_batch()) is not None:
            delivered += batch.entries
    # Recently read batches may be repeated. No unread batch is missing or out of order.
    assert [each for each in delivered if each >= b"2"] == [b"2", b"3", b"4"]
    assert len(delivered) == len(set(delivered))
    with Producer(ProducerConfig(store="memory://rebuild"), store=store) as producer:
        producer.produce([b"after"])
    assert check_queue(Target(store, CONFIG, RUNTIME)).ok


@pytest.mark.parametrize("how", DAMAGE)
def test_the_old_bytes_are_saved_next_to_the_manifest(how: str) -> None:
    store = damaged(how)
    old = bytes_of(store, KEY)
    saved = rebuild(Target(store, CONFIG, RUNTIME))
    assert saved is not None
    assert saved.startswith(f"{KEY}.broken-")
    assert bytes_of(store, saved) == old


def test_a_saved_position_is_not_valid_in_the_rebuilt_queue() -> None:
    store = damaged("removed")
    rebuild(Target(store, CONFIG, RUNTIME))
    with pytest.raises(Exception, match="needed but manifest"):
        Consumer(CONFIG, 4, store=store)


@pytest.mark.parametrize("acked", [1, 4])
def test_a_loss_after_a_rebuild_counts_only_batches_that_existed(
    acked: int,
) -> None:
    store = damaged("removed")
    rebuild(Target(store, CONFIG, RUNTIME))
    first = Manifest.parse(bytes_of(store, KEY)).first_sequence
    with pytest.raises(DataLoss) as lost:
        Consumer(CONFIG, acked, store=store)
    assert lost.value.count == 4 - acked
    assert (lost.value.needed, lost.value.oldest) == (acked + 1, first)
    assert f"Sequences 5 to {first - 1} never held batches" in str(lost.value)
    assert "Another consumer" not in str(lost.value)
    assert ("3 batches before them were queued again" in str(lost.value)) == (acked == 1)
    reader = ReadOnlyReader(CONFIG, store=store, runtime=RUNTIME)
    with pytest.raises(DataLoss) as lost:
        reader.seek(acked + 1)
    assert lost.value.count == 4 - acked


def test_a_second_rebuild_adds_its_own_gap_and_a_new_queue_has_none() -> None:
    store = damaged("removed")
    target = Target(store, CONFIG, RUNTIME)
    for _ in range(2):
        rebuild(target)
        store.delete_many([KEY])
    claim = target.owner()
    assert claim is not None
    (first, after), (second, end) = claim.skipped
    assert (first, after - first, end - second) == (5, SEQUENCES_AHEAD, SEQUENCES_AHEAD)
    assert second > after, "the batches of the first rebuild are in between"
    assert claim.start_over(None).skipped == ()


def test_f1_a_rebuild_whose_answer_was_lost_happens_once() -> None:
    store = Lossy()
    copy_into(store, damaged("removed"))
    store.armed = True
    rebuild(Target(store, CONFIG, RUNTIME))
    assert not store.armed
    found = Manifest.parse(bytes_of(store, KEY)).locations()
    assert len(found) == len(set(found)) >= 3


def test_a_manifest_that_was_written_meanwhile_is_not_replaced() -> None:
    store = damaged("empty")
    put = store.put

    def racing(key: str, data: bytes | memoryview) -> None:
        put(key, data)
        put(KEY, b"another process")

    store.put = racing  # type: ignore[method-assign]
    with pytest.raises(Conflict):
        rebuild(Target(store, CONFIG, RUNTIME))
    assert bytes_of(store, KEY) == b"another process"


def test_a_rebuild_of_an_empty_prefix_creates_no_queue() -> None:
    store = MemoryStore()
    with pytest.raises(InvalidInput, match="there is no queue"):
        rebuild(Target(store, CONFIG, RUNTIME))
    assert store.list("").objects == ()


def test_a_longer_grace_period_restores_more_batches() -> None:
    """Producers append uploads of up to half of it, possibly after a younger batch was read."""
    old, acked = location(-GRACE_MS), location(0)
    seen = Watermark(5, 1, 4, acked)
    found = listing(old, acked)
    assert old not in plan_of(None, found, seen).found
    plan = plan_rebuild(None, found, seen, config=CONFIG, grace_ms=3 * GRACE_MS)
    assert old in plan.found


# ---- checks and repairs of a queue


FSCK = ConsumerConfig(store="memory://fsck")
LOCATIONS = [f"ingest/01J5T4R3KXBMZ7QV9N2WG8YD{n:02}.batch" for n in range(20)]


def queue_of(*batches: bytes | None) -> MemoryStore:
    """Return the store of a queue whose entries have these objects. None is a missing object."""
    store = MemoryStore()
    for location, data in zip(LOCATIONS, batches, strict=False):
        if data is not None:
            store.put(location, data)
    entries = [NewEntry(location) for location in LOCATIONS[: len(batches)]]
    store.put("ingest/manifest", Manifest.empty().append(entries).raw)
    return store


def check(store: MemoryStore, config: ConsumerConfig = FSCK) -> Report:
    return check_queue(Target(store, config, RUNTIME))


def test_f25_a_missing_batch_is_found_and_the_check_continues() -> None:
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
def test_f20_a_batch_that_cannot_be_decoded_is_found(data: bytes, says: str) -> None:
    (problem,) = check(queue_of(data)).problems
    assert problem.sequence == 0
    assert says in problem.problem


def test_f21_a_batch_above_the_limit_is_found_without_being_decompressed() -> None:
    bomb = encode_batch([bytes(10_000_000)], Compression.ZSTD)
    config = tuned(ConsumerConfig, store="memory://fsck", max_batch_bytes=100_000)
    (problem,) = check(queue_of(bomb), config).problems
    assert problem.kind is Kind.TOO_LARGE


def test_an_object_above_the_limit_is_reported_as_too_large_and_not_as_damaged() -> None:
    config = tuned(ConsumerConfig, store="memory://fsck", max_batch_bytes=100_000)
    (problem,) = check(queue_of(bytes(200_000)), config).problems
    assert problem.kind is Kind.TOO_LARGE


def test_a_damaged_batch_whose_text_mentions_the_limit_is_not_reported_as_too_large() -> None:
    (problem,) = check(queue_of(b"max_batch_bytes" + b"\xff" * 7)).problems
    assert "max_batch_bytes" in problem.problem
    assert problem.kind is Kind.UNREADABLE


def test_f23_a_location_outside_the_prefix_is_found_and_never_fetched() -> None:
    store = MemoryStore()
    store.put("secret/01J5T4R3KXBMZ7QV9N2WG8YDHP.batch", encode_batch([b"secret"]))
    entry = NewEntry("secret/01J5T4R3KXBMZ7QV9N2WG8YDHP.batch")
    store.put("ingest/manifest", Manifest.empty().append([entry]).raw)
    report = check(store)
    assert "below the data prefix 'ingest'" in report.problems[0].problem
    assert report.records == 0


def test_f15_a_corrupt_manifest_is_a_finding_and_not_an_error() -> None:
    # No entry of the first manifest can be read, and all entries of the second one can.
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


def test_a_batch_that_was_dequeued_and_collected_meanwhile_is_not_a_finding() -> None:
    class Racing(MemoryStore):
        """The consumer finishes and its collector runs right after the manifest was read."""

        def get(self, key: str, **options: Any) -> Blob | None:  # type: ignore[override]
            got = super().get(key, **options)
            if isinstance(got, Blob) and key == "ingest/manifest" and not options.get("if_changed"):
                self.put(key, Manifest.parse(got.data).drop_through(0).raw)
                self.delete_many([LOCATIONS[0], LOCATIONS[1]])
            return got

    store = Racing()
    copy_into(store, queue_of(encode_batch([b"a"]), encode_batch([b"a"])))
    # Sequence 0 was consumed and may be gone. Sequence 1 is still queued, so its object is missing.
    assert [each.sequence for each in check(store).problems] == [1]


@pytest.mark.parametrize("location", ["", "ingest//x", "ingest/a\nb"])
def test_a_location_that_no_object_can_have_is_skipped(location: str) -> None:
    store = queue_of(None)
    name = location.encode()
    entry = struct.pack("<IQH", FIXED_SIZE + len(name), 0, len(name)) + name + bytes(4)
    store.put("ingest/manifest", entry + manifest_of(store).raw[-FOOTER_SIZE:])
    (problem,) = check(store).problems
    assert problem.kind is Kind.MISSING
    assert problem.problem.startswith("no object can have this name: it ")
    repair(Target(store, FSCK, RUNTIME), [problem])
    assert check(store).ok


def test_a_role_that_may_read_only_the_prefix_can_check_its_queue() -> None:
    class Limited(MemoryStore):
        def get(self, key: str, **options: Any) -> Blob | None:  # type: ignore[override]
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


def test_every_kind_of_finding_is_repaired_or_left_with_a_reason() -> None:
    notes = {Kind.UNREAD}
    assert set(REPAIRED_BY) | set(NOT_REPAIRED) == set(Kind) - notes
    assert not set(REPAIRED_BY) & set(NOT_REPAIRED)


def test_only_the_first_of_three_entries_for_one_object_is_kept() -> None:
    repeats = [finding(n, Kind.REPEATED, "a") for n in (1, 4, 6)]
    other = finding(5, Kind.REPEATED, "b")
    plan, _ = plan_repair(Report(problems=[*repeats[:2], other, repeats[2]]))
    assert [each.sequence for each in plan] == [4, 6]
