from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from opendata_buffer.commit.committer import Lane, Stage, Upload, shared_committer
from opendata_buffer.commit.durability import Completion, Durable
from opendata_buffer.config import QueueConfig
from opendata_buffer.errors import CommitStateUnknown, ObjectNotFound, PermanentStorageError
from opendata_buffer.formats.keys import Transaction
from opendata_buffer.formats.manifest import Manifest
from opendata_buffer.producer.batcher import Batch, Call
from opendata_buffer.runtime import SystemRuntime
from opendata_buffer.stores import Absent, IfVersion, NotModified, PutOutcome
from opendata_buffer.stores.memory import MemoryStore

CONFIG = QueueConfig(store="memory://unused")
WAIT_S = 20.0


class SteppedRuntime(SystemRuntime):
    """The system's threads on a clock that only the test moves."""

    def __init__(self) -> None:
        self.now = 1_000.0

    def monotonic(self) -> float:
        return self.now


class Harness:
    """One lane and what becomes of its uploads."""

    def __init__(
        self,
        store: MemoryStore,
        runtime: SystemRuntime,
        *,
        max_age: float = 300.0,
        config: QueueConfig = CONFIG,
    ) -> None:
        self.runtime = runtime
        self.outcomes: dict[str, Durable | BaseException] = {}
        self.reuploads: list[Upload] = []
        self.repaired: list[str] = []
        self._changed = threading.Condition()
        self.lane = Lane(
            max_age=max_age,
            reupload=self._reupload,
            settle=self._settle,
            repair=lambda upload: self.repaired.append(upload.location),
        )
        self.committer = shared_committer(store, config, runtime, self.lane)

    def _reupload(self, upload: Upload) -> None:
        with self._changed:
            self.reuploads.append(upload)
            self._changed.notify_all()

    def _settle(self, upload: Upload, outcome: Durable | BaseException) -> None:
        with self._changed:
            self.outcomes[upload.location] = outcome
            self._changed.notify_all()

    def wait(self, condition: Callable[[], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(condition, WAIT_S)

    def upload(self, n: int, transaction: Transaction | None = None) -> Upload:
        call = Call(b"", 0, b"", 0, transaction)
        batch = Batch(Completion(self.runtime), 0.0, [call])
        upload = Upload.of(batch, self.runtime.monotonic() + 1e9)
        upload.location = f"ingest/01J5T4R3KXBMZ7QV9N2WG8Y{n:03d}.batch"
        upload.minted_at = self.runtime.monotonic()
        self.committer.enter(self.lane, upload)
        return upload

    def close(self) -> None:
        self.committer.close_lane(self.lane)


def _raw(store: MemoryStore) -> bytes:
    blob = store.get("ingest/manifest")
    assert not isinstance(blob, NotModified)
    return blob.data


def queued(store: MemoryStore) -> list[str]:
    return [entry.location for entry in Manifest.parse(_raw(store)).entries()]


def test_an_upload_waits_for_the_one_before_it() -> None:
    store = MemoryStore()
    harness = Harness(store, SystemRuntime())
    first, second = harness.upload(1), harness.upload(2)
    harness.committer.uploaded(second)
    assert harness.outcomes == {}
    harness.committer.uploaded(first)
    harness.wait(lambda: len(harness.outcomes) == 2)
    assert queued(store) == [first.location, second.location]
    harness.close()


def test_a_failed_upload_lets_those_behind_it_pass() -> None:
    store = MemoryStore()
    harness = Harness(store, SystemRuntime())
    first, second = harness.upload(1), harness.upload(2)
    harness.committer.uploaded(second)
    harness.committer.give_up(harness.lane, first, PermanentStorageError("denied"))
    harness.wait(lambda: len(harness.outcomes) == 2)
    assert isinstance(harness.outcomes[first.location], PermanentStorageError)
    assert queued(store) == [second.location]
    harness.close()


def test_a_failed_transaction_takes_later_ones_with_it_and_only_those() -> None:
    store = MemoryStore()
    harness = Harness(store, SystemRuntime())
    first = harness.upload(1, Transaction("a", 1))
    plain = harness.upload(2)
    later = harness.upload(3, Transaction("a", 2))
    harness.committer.uploaded(plain)
    harness.committer.give_up(harness.lane, first, PermanentStorageError("denied"))
    harness.committer.uploaded(later)
    harness.wait(lambda: len(harness.outcomes) == 3)
    assert later.stage is Stage.SETTLED
    assert isinstance(harness.outcomes[later.location], PermanentStorageError)
    assert queued(store) == [plain.location]
    harness.close()


def test_a_failed_separator_takes_the_transactions_behind_it_along() -> None:
    """Without the empty batch in front, a repeat could stand directly behind its original."""
    store = MemoryStore()
    harness = Harness(store, SystemRuntime())
    separator = Upload.of(Batch(Completion(harness.runtime), 0.0), 1e9)
    harness.committer.enter(harness.lane, separator)
    transaction = harness.upload(1, Transaction("a", 1))
    harness.committer.uploaded(transaction)
    harness.committer.give_up(harness.lane, separator, PermanentStorageError("denied"))
    assert isinstance(harness.outcomes[transaction.location], PermanentStorageError)
    with pytest.raises(ObjectNotFound):
        queued(store)
    harness.close()


def test_a_transaction_cannot_enter_behind_the_sweep_of_a_failed_one() -> None:
    """produce() may have looked for failures just before there was one."""
    store = MemoryStore()
    harness = Harness(store, SystemRuntime())
    failed = harness.upload(0, Transaction("a", 1))
    error = PermanentStorageError("denied")
    harness.committer.give_up(harness.lane, failed, error)
    late = Upload.of(
        Batch(Completion(harness.runtime), 0.0, [Call(b"", 0, b"", 0, Transaction("a", 2))]), 1e9
    )
    assert harness.committer.enter(harness.lane, late) is error
    assert late.stage is Stage.SETTLED
    plain = harness.upload(1)
    harness.committer.uploaded(plain)
    harness.wait(lambda: len(harness.outcomes) == 2)
    assert queued(store) == [plain.location]
    harness.close()


def test_f5_an_old_upload_goes_back_and_holds_its_lane() -> None:
    store = MemoryStore()
    runtime = SteppedRuntime()
    harness = Harness(store, runtime, max_age=300.0)
    old, behind = harness.upload(1), harness.upload(2)
    runtime.now += 301
    behind.minted_at = runtime.now
    harness.committer.uploaded(behind)
    harness.committer.uploaded(old)
    harness.wait(lambda: harness.reuploads == [old])
    assert harness.outcomes == {}
    old.location = "ingest/01J5T4R3KXBMZ7QV9N2WG8Y999.batch"
    old.minted_at = runtime.now
    harness.committer.uploaded(old)
    harness.wait(lambda: len(harness.outcomes) == 2)
    assert queued(store) == [old.location, behind.location]
    harness.close()


def test_f5_an_upload_of_a_machine_that_was_suspended_goes_back() -> None:
    """Linux stops the monotonic clock while the machine sleeps; the collector does not."""
    runtime = SteppedRuntime()
    harness = Harness(MemoryStore(), runtime, max_age=300.0)
    upload = harness.upload(1)
    upload.minted_ms = runtime.now_ms() - 301_000
    harness.committer.uploaded(upload)
    harness.wait(lambda: harness.reuploads == [upload])
    assert harness.outcomes == {}
    upload.minted_ms = runtime.now_ms()
    harness.committer.uploaded(upload)
    harness.wait(lambda: len(harness.outcomes) == 1)
    harness.close()


def test_f5_f6_a_wall_clock_that_was_set_back_does_not_make_an_upload_young() -> None:
    runtime = SteppedRuntime()
    harness = Harness(MemoryStore(), runtime, max_age=300.0)
    upload = harness.upload(1)
    upload.minted_ms = runtime.now_ms() + 3_600_000
    runtime.now += 301
    harness.committer.uploaded(upload)
    harness.wait(lambda: harness.reuploads == [upload])
    assert harness.outcomes == {}
    harness.close()


def test_f5_a_commit_that_slept_past_the_grace_period_promises_nothing() -> None:
    """The process freezes between the age check and the answer of its write."""
    runtime = SteppedRuntime()

    class Freezing(MemoryStore):
        def put_if(self, key: str, data: bytes, condition: Absent | IfVersion) -> PutOutcome:
            runtime.now += 601
            return super().put_if(key, data, condition)

    store = Freezing()
    harness = Harness(store, runtime, max_age=300.0)
    upload = harness.upload(1)
    harness.committer.uploaded(upload)
    harness.wait(lambda: bool(harness.outcomes))
    outcome = harness.outcomes[upload.location]
    assert isinstance(outcome, CommitStateUnknown)
    assert outcome.sequence == 0
    assert "601 s after its upload" in str(outcome)
    assert harness.repaired == [upload.location]
    assert queued(store) == [upload.location]
    harness.close()


def test_f35_a_group_that_does_not_fit_goes_in_by_parts() -> None:
    # A minute without the store leaves many uploads behind: all together they may be more than a
    # manifest holds, and would be refused for ever although the queue is empty.
    class Shut(MemoryStore):
        open = threading.Event()

        def get(self, key: str, **options: object) -> object:
            assert self.open.wait(WAIT_S)
            return super().get(key, **options)  # type: ignore[arg-type]

    store = Shut()
    config = QueueConfig(store="memory://unused", max_manifest_bytes=400)
    harness = Harness(store, SystemRuntime(), config=config)
    uploads = [harness.upload(n) for n in range(10)]
    # The first goes into a group of its own, the others wait for it.
    for upload in uploads:
        harness.committer.uploaded(upload)
    store.open.set()
    # 22 bytes and 75 for each: five fit.
    harness.wait(lambda: len(harness.outcomes) == 5)
    assert queued(store) == [upload.location for upload in uploads[:5]]
    store.put("ingest/manifest", Manifest.parse(_raw(store)).drop_through(4).raw)
    harness.wait(lambda: len(harness.outcomes) == 10)
    assert queued(store) == [upload.location for upload in uploads[5:]]
    harness.close()


def test_f5_an_upload_that_failed_while_its_age_was_looked_at_is_not_uploaded_again() -> None:
    class Racing(SteppedRuntime):
        meanwhile: Callable[[], None] | None = None

        def monotonic(self) -> float:
            if self.meanwhile is not None:
                meanwhile, self.meanwhile = self.meanwhile, None
                meanwhile()
            return super().monotonic()

    store, runtime = MemoryStore(), Racing()
    harness = Harness(store, runtime, max_age=300.0)
    old, young = harness.upload(1), harness.upload(2)
    runtime.now += 301
    young.minted_at = runtime.now
    error = PermanentStorageError("denied")
    runtime.meanwhile = lambda: harness.committer.give_up(harness.lane, old, error)
    harness.committer.uploaded(old)
    harness.wait(lambda: bool(harness.outcomes))
    harness.committer.uploaded(young)
    harness.wait(lambda: len(harness.outcomes) == 2)
    assert harness.outcomes[old.location] is error
    assert harness.reuploads == []
    assert old.stage is Stage.SETTLED
    assert queued(store) == [young.location]
    harness.close()


def test_f29_an_unexpected_error_fails_its_group_and_not_the_thread() -> None:
    class Buggy(MemoryStore):
        bugs = 1

        def put_if(self, key: str, data: bytes, condition: Absent | IfVersion) -> PutOutcome:
            if self.bugs:
                self.bugs -= 1
                raise RuntimeError("a bug")
            return super().put_if(key, data, condition)

    store = Buggy()
    harness = Harness(store, SystemRuntime())
    first = harness.upload(1)
    harness.committer.uploaded(first)
    harness.wait(lambda: bool(harness.outcomes))
    assert isinstance(harness.outcomes[first.location], RuntimeError)
    second = harness.upload(2)
    harness.committer.uploaded(second)
    harness.wait(lambda: len(harness.outcomes) == 2)
    assert queued(store) == [second.location]
    harness.close()


def test_one_committer_per_store_and_manifest() -> None:
    store, runtime = MemoryStore(), SystemRuntime()
    other = QueueConfig(store="memory://unused", manifest_path="other/manifest")
    harness = Harness(store, runtime)

    def joins(store: MemoryStore, config: QueueConfig) -> bool:
        lane = Lane(
            max_age=300.0,
            reupload=lambda upload: None,
            settle=lambda upload, outcome: None,
            repair=lambda upload: None,
        )
        committer = shared_committer(store, config, runtime, lane)
        committer.close_lane(lane)
        committer.close_lane(lane)
        return committer is harness.committer

    assert joins(store, CONFIG)
    assert not joins(store, other)
    assert not joins(MemoryStore(), CONFIG)
    harness.close()


def test_a_committer_whose_last_lane_left_takes_no_new_one() -> None:
    # Its thread may still be ending: two threads would append one upload twice.
    store, runtime = MemoryStore(), SystemRuntime()
    first = Harness(store, runtime)
    first.close()
    assert not first.committer.open_lane(first.lane)
    second = Harness(store, runtime)
    assert second.committer is not first.committer
    second.close()


@pytest.mark.parametrize("times", [1, 2])
def test_the_thread_ends_with_its_last_lane_and_starts_again(times: int) -> None:
    store, runtime = MemoryStore(), SystemRuntime()
    for n in range(times):
        harness = Harness(store, runtime)
        upload = harness.upload(n)
        harness.committer.uploaded(upload)
        harness.wait(lambda harness=harness: bool(harness.outcomes))  # type: ignore[misc]
        harness.close()
    assert len(queued(store)) == times
