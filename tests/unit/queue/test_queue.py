from __future__ import annotations

from collections.abc import Callable

import pytest

from opendata_buffer import outcomes
from opendata_buffer.config import QueueConfig
from opendata_buffer.errors import (
    CommitStateUnknown,
    Conflict,
    CorruptData,
    CorruptManifest,
    Drained,
    Fenced,
    InvalidInput,
    QueueFull,
    QueueReset,
    TransientStorageError,
)
from opendata_buffer.formats.manifest import FOOTER_SIZE, Manifest, NewEntry, entry_bytes
from opendata_buffer.queue.queue import Queue
from opendata_buffer.stores.base import PutOutcome
from opendata_buffer.testing.runtime import ManualRuntime
from tests.support.tuned import tuned
from tests.unit.scripted import (
    DeafStore,
    ScriptedStore,
    Step,
    applied,
    applied_answer_lost,
    applied_then_412,
    before,
    not_applied_answer_lost,
    then,
)

KEY = "ingest/manifest"


def entry(n: int) -> NewEntry:
    return NewEntry(f"ingest/01J5T4R3KXBMZ7QV9N2WG8Y{n:03d}.batch")


def make(store: ScriptedStore, **settings: int) -> Queue:
    config = tuned(QueueConfig, store="memory://unused", **settings)
    return Queue(store, config, runtime=ManualRuntime(), role="producer")


def started(*script: Step, **settings: int) -> tuple[ScriptedStore, Queue]:
    """Return a queue with entry 0 whose later writes follow the script."""
    store = ScriptedStore(applied, *script)
    queue = make(store, **settings)
    queue.append([entry(0)])
    return store, queue


def stored(store: ScriptedStore) -> Manifest:
    blob = store.get(KEY)
    return Manifest.parse(blob.data)


def locations(store: ScriptedStore) -> list[str]:
    return [e.location for e in stored(store).entries()]


def as_other(change: Callable[[Manifest], Manifest]) -> Callable[[ScriptedStore], None]:
    """Return a step in which another process changes the manifest."""

    def write(store: ScriptedStore) -> None:
        blob = store.get(KEY)
        raw = change(Manifest.parse(blob.data)).raw
        assert isinstance(store.really_put_if(KEY, raw, blob.version), outcomes.Applied)

    return write


def append_as_other(n: int) -> Callable[[ScriptedStore], None]:
    return as_other(lambda manifest: manifest.append([entry(n)]))


dequeue_all = as_other(lambda manifest: manifest.drop_through(manifest.next_sequence - 1))


class InFlight:
    """A write without an answer that is applied when the test asks for it."""

    def __call__(
        self, store: ScriptedStore, key: str, data: bytes, condition: str | None
    ) -> PutOutcome:
        self.write = (key, data, condition)
        return outcomes.Unknown("read timed out")

    def land(self, store: ScriptedStore) -> None:
        assert isinstance(store.really_put_if(*self.write), outcomes.Applied)


def test_append_creates_the_manifest_and_numbers_the_group() -> None:
    store = ScriptedStore()
    queue = make(store)
    assert queue.append([entry(0), entry(1)]) == 0
    reads = store.gets
    assert queue.append([entry(2)]) == 2
    assert store.gets == reads, "the second append does not read the manifest"
    assert [e.sequence for e in stored(store).entries()] == [0, 1, 2]
    assert stored(store).epoch == 0
    assert not queue.seal(), "only an empty queue is claimed without a read"
    assert queue.append([entry(3)]) == 3


def test_a_change_that_lost_a_race_is_applied_to_the_manifest_of_the_winner() -> None:
    store, queue = started(before(applied, append_as_other(7)))
    assert queue.append([entry(1)]) == 2
    assert locations(store) == [entry(0).location, entry(7).location, entry(1).location]
    assert queue.conflicts == 1


@pytest.mark.parametrize("step", [applied_answer_lost, applied_then_412])
def test_f1_f2_an_append_whose_answer_was_lost_is_found_not_repeated(
    step: Callable[..., PutOutcome],
) -> None:
    store, queue = started(step)
    assert queue.append([entry(1), entry(2)]) == 1
    assert locations(store) == [entry(n).location for n in range(3)]


def test_f1_an_append_is_found_before_later_appends_of_others() -> None:
    store, queue = started(then(applied_answer_lost, append_as_other(7)))
    assert queue.append([entry(1)]) == 1
    assert locations(store) == [entry(0).location, entry(1).location, entry(7).location]


def test_f2_an_append_that_was_not_applied_is_retried() -> None:
    store, queue = started(not_applied_answer_lost)
    assert queue.append([entry(1)]) == 1
    assert locations(store) == [entry(0).location, entry(1).location]


def test_f2_a_group_that_was_partly_dequeued_counts_as_landed() -> None:
    dequeue_two = as_other(lambda manifest: manifest.drop_through(1))
    store = ScriptedStore(then(applied_answer_lost, dequeue_two))
    assert make(store).append([entry(0), entry(1), entry(2)]) == 0
    assert locations(store) == [entry(2).location]


def test_f2_an_append_dequeued_before_it_was_found_is_unknown() -> None:
    store, queue = started(then(applied_answer_lost, dequeue_all))
    with pytest.raises(CommitStateUnknown) as caught:
        queue.append([entry(1)])
    assert caught.value.sequence == 1
    assert caught.value.locations == (entry(1).location,)
    assert caught.value.next_sequence == 2
    assert locations(store) == []


def test_f2_a_write_that_lands_late_is_found_by_the_retry() -> None:
    """The answer is lost, a read shows the manifest unchanged, and then the write lands."""
    late = InFlight()
    store, queue = started(late, before(applied, late.land))
    assert queue.append([entry(1)]) == 1
    assert locations(store) == [entry(0).location, entry(1).location]


def test_f2_a_write_that_lands_after_the_read_and_is_dequeued_is_unknown() -> None:
    """A read that finds an unchanged version does not prove that the write failed."""
    late = InFlight()

    def land_and_dequeue(store: ScriptedStore) -> None:
        late.land(store)
        dequeue_all(store)

    store, queue = started(late, before(applied, land_and_dequeue))
    with pytest.raises(CommitStateUnknown, match="dequeued since"):
        queue.append([entry(1)])
    assert stored(store).next_sequence == 2


@pytest.mark.parametrize("later", [not_applied_answer_lost, lambda *_: outcomes.LostRace()])
def test_answers_lost_until_the_deadline_leave_the_outcome_unknown(
    later: Callable[..., PutOutcome],
) -> None:
    _, queue = started(not_applied_answer_lost, *[later] * 10_000, timeout_ms=1_000)
    with pytest.raises(CommitStateUnknown, match="may or may not have landed") as caught:
        queue.append([entry(1)])
    assert "Nothing was written" not in str(caught.value)


def test_answers_lost_until_the_deadline_are_not_reported_as_a_conflict() -> None:
    # A repeatable change never ends unknown. No other process raced it, and it may have landed.
    _, queue = started(*[not_applied_answer_lost] * 10_000, timeout_ms=1_000)
    with pytest.raises(TransientStorageError, match=r"answers were lost: .*reset") as caught:
        queue.claim_epoch(None)
    assert "may have been written; try again" in str(caught.value)


def test_an_object_too_large_for_a_manifest_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("opendata_buffer.queue.stored_manifest.MAX_MANIFEST_BYTES", 100)
    store = ScriptedStore()
    store.put("ingest/manifest", bytes(101))
    with pytest.raises(CorruptData, match=r"'ingest/manifest' has 101 bytes.*not read"):
        make(store).read()


def test_f1_a_conflict_at_the_deadline_is_unknown_when_the_manifest_cannot_be_read() -> None:
    class Silent(ScriptedStore):
        silent = False

        def get(self, key: str, **options: object) -> object:
            if self.silent:
                raise TransientStorageError("no answer")
            return super().get(key, **options)

    def win_and_fall_silent(
        store: ScriptedStore, key: str, data: bytes, when: str | None
    ) -> PutOutcome:
        assert isinstance(store, Silent)
        store.silent = True
        return applied_then_412(store, key, data, when)

    queue = make(Silent(win_and_fall_silent), timeout_ms=1_000)
    with pytest.raises(CommitStateUnknown, match="no answer"):
        queue.append([entry(0)])


def test_a_guard_decides_on_the_stored_manifest_and_not_on_the_remembered_one() -> None:
    store, queue = started()

    def full(before: Manifest) -> str | None:
        return "full" if before.entry_count else None

    assert queue.append([entry(1)], guard=full) == "full"
    assert len(locations(store)) == 1
    dequeue_all(store)
    # The remembered manifest would have stopped it.
    assert queue.append([entry(1)], guard=full) == 1


def test_a_bad_manifest_is_named_with_its_store_and_key() -> None:
    store = ScriptedStore()
    queue = make(store)
    queue.append([entry(0), entry(1)])
    good = stored(store).raw
    store.put(KEY, good[:-3])
    for call in (
        queue.read,
        lambda: queue.claim_epoch(None),
        lambda: make(store).append([entry(2)]),
    ):
        with pytest.raises(
            CorruptManifest, match=r"'ingest/manifest' in memory://\w*: manifest is truncated"
        ):
            call()


@pytest.mark.parametrize("call", ["read", "append", "claim", "dequeue"])
def test_a_store_that_never_answers_fails_the_call_at_the_deadline(call: str) -> None:
    runtime = ManualRuntime()
    store = DeafStore(runtime)
    config = QueueConfig(store="memory://unused").with_timeout(20_000)
    queue = Queue(store, config, runtime=runtime, role="producer")
    store.deaf = False
    queue.append([entry(0)])
    epoch = queue.claim_epoch(None).epoch
    store.deaf = True
    started = runtime.monotonic()
    calls: dict[str, Callable[[], object]] = {
        "read": queue.read,
        "append": lambda: queue.append([entry(1)]),
        "claim": lambda: queue.claim_epoch(None),
        "dequeue": lambda: queue.dequeue(0, epoch),
    }
    # An append was sent and may have landed; the other calls sent only a read.
    with pytest.raises(CommitStateUnknown if call == "append" else TransientStorageError):
        calls[call]()
    assert runtime.monotonic() - started <= 25.0


def test_f14_attempts_back_off_with_jitter_and_end_at_the_deadline() -> None:
    def conflict(*_: object) -> PutOutcome:
        return outcomes.LostRace()

    store = ScriptedStore(*[conflict] * 10_000)
    runtime = ManualRuntime()
    config = QueueConfig(store="memory://unused").with_timeout(5_000)
    queue = Queue(store, config, runtime=runtime, role="producer")
    started = runtime.monotonic()
    with pytest.raises(Conflict) as caught:
        queue.append([entry(0)])
    assert 4.9 <= runtime.monotonic() - started <= 5.1
    # The pauses double from 10 ms up to 2 s, so there are few attempts.
    assert 3 <= caught.value.attempts < 40
    assert "timeout_ms" in str(caught.value)


def test_f4_a_vanished_manifest_is_never_recreated() -> None:
    store, queue = started()
    store.delete_many([KEY])
    with pytest.raises(QueueReset, match=r"not recreated.* fsck memory://.* --repair'"):
        queue.append([entry(1)])
    with pytest.raises(QueueReset, match="not recreated"):
        queue.read()
    assert store.list("").objects == ()


def test_f4_f10_an_epoch_that_went_backwards_is_refused() -> None:
    # The number of entries is unchanged, but an old owner would own the queue again.
    store, queue = started()
    queue.claim_epoch(None)
    store.put(KEY, Manifest.empty().append([entry(0)]).raw)
    with pytest.raises(QueueReset, match="epoch 1 -> 0"):
        queue.read()


def test_read_returns_none_for_a_missing_queue_and_no_body_for_an_unchanged_one() -> None:
    store = ScriptedStore()
    queue = make(store)
    assert queue.read() is None
    queue.append([entry(0)])
    first = queue.read()
    assert queue.read() is first


def test_f35_a_manifest_that_grew_too_large_refuses_appends() -> None:
    store = ScriptedStore()
    queue = make(store, max_manifest_bytes=150)
    queue.append([entry(0), entry(1)])
    with pytest.raises(QueueFull) as caught:
        queue.append([entry(2)])
    assert (caught.value.lag, caught.value.limit) == (2, 150)
    assert "2 batches wait for the consumer" in str(caught.value)
    assert len(locations(store)) == 2
    dequeue_all(store)
    assert queue.append([entry(2)]) == 2, "the remembered manifest is still full"


def test_f35_a_manifest_above_half_of_its_limit_is_warned_about_every_ten_seconds(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store, runtime = ScriptedStore(), ManualRuntime()
    full = FOOTER_SIZE + 10 * entry_bytes(entry(0))
    config = tuned(QueueConfig, store="memory://unused", max_manifest_bytes=full)
    queue = Queue(store, config, runtime=runtime, role="producer")
    warned: dict[int, str] = {}
    for count in range(10):
        queue.append([entry(count)])
        if caplog.messages:
            warned[count + 1] = caplog.messages[-1]
            caplog.clear()
        runtime.advance(5)
    assert list(warned) == [5, 7, 9]
    assert "ingest/manifest in memory://scripted: the manifest is half full: it has 5" in warned[5]
    assert "nearly full" in warned[9]
    assert stored(store).size == full
    with pytest.raises(QueueFull):
        queue.append([entry(10)])


def test_an_empty_group_is_refused() -> None:
    with pytest.raises(InvalidInput, match="no entries"):
        make(ScriptedStore()).append([])


def test_each_claim_takes_the_next_epoch_and_a_lost_answer_costs_one_more() -> None:
    store = ScriptedStore()
    assert make(store).claim_epoch(None).epoch == 1, "the claim creates the queue"
    store.script = [applied_answer_lost]
    assert make(store).claim_epoch(None).epoch == stored(store).epoch == 3


def test_f4_f27_claim_refuses_a_position_the_queue_never_had() -> None:
    store = ScriptedStore()
    with pytest.raises(QueueReset, match="does not exist"):
        make(store).claim_epoch(3)
    make(store).append([entry(0)])
    with pytest.raises(QueueReset, match=r"after sequence 1: .* ends at 0"):
        make(store).claim_epoch(1)
    with pytest.raises(InvalidInput):
        make(store).claim_epoch(-1)
    assert stored(store).epoch == 0
    assert make(store).claim_epoch(0).first_sequence == 1


def test_dequeue_is_repeatable_and_one_write_for_any_number_of_entries() -> None:
    store = ScriptedStore()
    make(store).append([entry(n) for n in range(500)])
    queue = make(store)
    epoch = queue.claim_epoch(None).epoch
    puts = store.puts
    assert queue.dequeue(400, epoch).first_sequence == 401
    assert store.puts == puts + 1
    assert queue.dequeue(400, epoch).first_sequence == 401
    assert queue.dequeue(7, epoch).first_sequence == 401
    assert store.puts == puts + 1


def test_a_change_that_breaks_the_format_is_never_written(monkeypatch: pytest.MonkeyPatch) -> None:
    store, queue = started()
    # No change of this library does this; it is the last check before the store.
    monkeypatch.setattr(Manifest, "with_epoch", lambda self, epoch: Manifest.empty())
    with pytest.raises(CorruptManifest, match="next_sequence falls from 1 to 0"):
        queue.claim_epoch(None)
    assert store.puts == 1


def test_f8_a_dequeue_by_a_fenced_consumer_changes_nothing() -> None:
    store = ScriptedStore()
    old = make(store)
    old.append([entry(0)])
    epoch = old.claim_epoch(None).epoch
    make(store).claim_epoch(None)
    with pytest.raises(Fenced) as caught:
        old.dequeue(0, epoch)
    assert (caught.value.epoch, caught.value.current_epoch) == (1, 2)
    assert len(locations(store)) == 1


def test_f8_a_dequeue_with_a_lost_answer_before_a_takeover_is_fenced_although_it_was_applied() -> (
    None
):
    """The caller must expect this: it processed the batch, and its successor does not get it."""
    taken_over = then(applied_answer_lost, as_other(lambda now: now.with_epoch(now.epoch + 1)))
    store, queue = started(applied, taken_over)
    epoch = queue.claim_epoch(None).epoch
    with pytest.raises(Fenced):
        queue.dequeue(0, epoch)
    assert not locations(store)


def test_f27_dequeue_beyond_the_tail_is_refused() -> None:
    store, queue = started()
    epoch = queue.claim_epoch(None).epoch
    with pytest.raises(InvalidInput, match=r"through 1: .* ends at 0"):
        queue.dequeue(1, epoch)
    assert len(locations(store)) == 1


def test_the_manifest_is_created_only_if_absent() -> None:
    """Two processes create the queue at the same time; the second sees the entries of the first."""

    def create(store: ScriptedStore) -> None:
        raw = Manifest.empty().append([entry(9)]).raw
        assert isinstance(store.really_put_if(KEY, raw, None), outcomes.Applied)

    store = ScriptedStore(before(applied, create))
    assert make(store).append([entry(0)]) == 1
    assert locations(store) == [entry(9).location, entry(0).location]


def test_a_sealed_empty_queue_refuses_appends() -> None:
    queue = make(ScriptedStore())
    assert queue.seal()
    assert queue.seal()
    for call in (lambda: queue.append([entry(0)]), lambda: queue.claim_epoch(None)):
        with pytest.raises(Drained):
            call()
    manifest = queue.read()
    assert manifest is not None
    assert manifest.sealed
    assert manifest.next_sequence == 0


def test_an_append_that_races_with_the_seal_is_either_in_the_queue_or_refused() -> None:
    store, queue = started()
    queue.dequeue(0, queue.claim_epoch(None).epoch)
    store.script = [before(applied_then_412, append_as_other(1))]
    assert not make(store).seal()  # the append won
    assert locations(store) == [entry(1).location]
    queue.dequeue(1, 1)
    slow = make(store)
    slow.read()
    assert make(store).seal()  # the seal won
    with pytest.raises(Drained):
        slow.append([entry(2)])
    assert locations(store) == []


@pytest.mark.parametrize("step", [applied_answer_lost, applied_then_412, not_applied_answer_lost])
def test_f1_f2_a_seal_whose_answer_was_lost_is_in_effect(step: Step) -> None:
    store = ScriptedStore(step)
    assert make(store).seal()
    assert stored(store).sealed


def test_an_entry_is_replaced_only_while_it_names_the_batch_that_was_read() -> None:
    store = ScriptedStore()
    queue = make(store)
    queue.append([entry(0), entry(1)])
    after = queue.replace(0, entry(0).location, entry(5))
    assert (locations(store), after.epoch) == ([entry(5).location, entry(1).location], 1)
    # Another process has replaced the entry since, so its batch must not be skipped.
    with pytest.raises(InvalidInput, match=r"sequence 0 .* names .*005\.batch' by now"):
        queue.replace(0, entry(0).location, entry(6))
    with pytest.raises(InvalidInput, match="sequence 2 is not queued"):
        queue.replace(2, entry(2).location, entry(6))
    assert stored(store) == after
    # The call is repeated because its answer was lost, and changes nothing more.
    assert queue.replace(0, entry(0).location, entry(5)) == after
