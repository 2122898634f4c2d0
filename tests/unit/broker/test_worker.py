"""Workers of one queue."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace

import pytest

from opendata_buffer.admin.queue_check import Kind, check_queue, plan_repair, repair
from opendata_buffer.admin.target import Target
from opendata_buffer.broker.claims import Claims
from opendata_buffer.broker.client import Lost, Refused
from opendata_buffer.broker.dispatcher import Dispatcher, DispatcherTerm
from opendata_buffer.broker.protocol import MAX_OPEN_REQUESTS
from opendata_buffer.broker.worker import Claim, ClaimedBatch, DispatcherClient, Worker
from opendata_buffer.config import ConsumerConfig, WorkerConfig
from opendata_buffer.errors import (
    ClaimLost,
    Closed,
    CorruptData,
    Fenced,
    InvalidInput,
    TransientStorageError,
)
from opendata_buffer.formats.batch import batch_key, encode_batch
from opendata_buffer.formats.manifest import NewEntry
from opendata_buffer.messages import ACK_TXN, CONTINUE_TXN, build_uuid
from opendata_buffer.quarantine import list_quarantine
from opendata_buffer.queue.queue import Queue
from opendata_buffer.runtime import Moment, SystemRuntime
from opendata_buffer.stores.base import read_bytes
from opendata_buffer.stores.memory import MemoryStore
from opendata_buffer.testing.runtime import ManualRuntime
from tests.unit.broker.local import (
    CONFIG,
    RUNTIME,
    FakeConnection,
    Hooked,
    eventually,
    hosting,
    queued,
)

# Heartbeats are late on a busy machine. Tests in which claims expire use another timeout.
SETTINGS = WorkerConfig(
    store="memory://unused", broker="auto", claim_timeout_ms=60_000, create_if_missing=True
)


def fill(store: MemoryStore, count: int, first: int = 0) -> None:
    entries = []
    for number in range(first, first + count):
        location = f"ingest/{RUNTIME.ulid()}.batch"
        store.put(location, encode_batch([b"%d" % number]))
        entries.append(NewEntry(location))
    Queue(store, CONFIG, runtime=RUNTIME, role="test").append(entries)


def claimed(worker: Worker, count: int) -> set[int]:
    """Claim this number of batches, each as soon as it is free, and return their sequences."""
    found: list[int] = []
    while len(found) < count:
        batches = worker.claim(count, timeout=60)
        assert batches
        found += [each.sequence for each in batches]
        kept.extend(batches)
    return set(found)


kept: list[ClaimedBatch] = []  # a batch that is garbage collected is released


@pytest.fixture
def store() -> Iterator[MemoryStore]:
    """Return the store of a queue that has a broker."""
    made = MemoryStore()
    with hosting(made):
        yield made


@pytest.fixture
def workers(store: MemoryStore) -> Iterator[list[Worker]]:
    with ExitStack() as stack:
        yield [stack.enter_context(Worker(SETTINGS, store=store)) for _ in range(2)]


@pytest.fixture
def batch(store: MemoryStore, workers: list[Worker]) -> ClaimedBatch:
    """Return the only batch of its queue, held by the first worker."""
    fill(store, 1)
    return workers[0].claim()[0]


def test_each_batch_goes_to_one_worker_oldest_first(
    store: MemoryStore, workers: list[Worker]
) -> None:
    fill(store, 4)
    one, two = workers
    first, second = one.claim(2), two.claim(5)
    assert [each.sequence for each in first] == [0, 1]
    assert [each.sequence for each in second] == [2, 3]
    assert [each.entries for each in (*first, *second)] == [[b"%d" % n] for n in range(4)]
    assert one.claim(1, timeout=0.1) == []


def test_workers_get_every_batch_of_an_undecided_transaction_and_its_end(
    store: MemoryStore, workers: list[Worker]
) -> None:
    message, acknowledgement = (
        batch_key("ingest", RUNTIME.ulid(), message=build_uuid(b"\x01pro__", clock, flags))
        for clock, flags in ((2, CONTINUE_TXN), (1, ACK_TXN))
    )
    queue = Queue(store, CONFIG, runtime=RUNTIME, role="test")
    store.put(message, encode_batch([b"undecided"]))
    queue.append([NewEntry(message)])
    (batch,) = workers[0].claim()
    assert [each.value for each in batch.records()] == [b"undecided"]
    # The transaction is rolled back, which a worker sees only as an empty batch.
    store.put(acknowledgement, encode_batch([]))
    queue.append([NewEntry(acknowledgement)])
    (end,) = workers[1].claim(timeout=60)
    assert (end.sequence, list(end.entries)) == (1, [])


def test_the_leading_run_of_finished_batches_is_dequeued(
    store: MemoryStore, workers: list[Worker]
) -> None:
    fill(store, 3)
    batches = workers[0].claim(3)
    batches[1].done()
    batches[2].done()
    assert len(queued(store)) == 3
    batches[0].done()
    batches[0].done()
    eventually(lambda: queued(store) == [])


BROKEN = "ingest/broken.batch"
HOSTILE = ("ingest/../../secret.batch", "ingest/a\n\x1b[2J.batch", "elsewhere/secret.batch")


def test_unreadable_batches_and_foreign_locations_block_no_worker_and_are_not_copied(
    store: MemoryStore, workers: list[Worker]
) -> None:
    store.put(BROKEN, b"no batch")
    store.put("elsewhere/secret.batch", encode_batch([b"secret"]))
    queue = Queue(store, CONFIG, runtime=RUNTIME, role="test")
    queue.append([NewEntry(location) for location in (*HOSTILE, BROKEN)])
    fill(store, 1)
    (batch,) = workers[0].claim()
    assert batch.sequence == len(HOSTILE) + 1
    batch.done()
    eventually(lambda: queued(store) == [])
    reports = list_quarantine(store, "ingest")
    copied = [(each.location, each.copied_bytes) for each in reports]
    assert copied == [*((each, None) for each in HOSTILE), (BROKEN, 8)]


def test_the_error_about_unreadable_claims_names_the_command_that_replaces_them(
    store: MemoryStore, workers: list[Worker]
) -> None:
    fill(store, 2)
    store.put("ingest/_claims.json", b"damaged")
    with pytest.raises(CorruptData, match=r"'opendata-buffer fsck memory://\S* --repair' saves"):
        workers[0].claim()
    config = ConsumerConfig(store="memory://unused")
    queue = Target(store, config, RUNTIME)
    report = check_queue(queue)
    ((finding, copy),) = repair(queue, plan_repair(report)[0])
    assert finding.kind is Kind.CLAIMS
    assert read_bytes(store, str(copy)) == b"damaged"
    assert check_queue(queue).ok
    assert claimed(workers[0], 2) == {0, 1}


def test_a_batch_that_is_never_finished_goes_to_the_quarantine(store: MemoryStore) -> None:
    fill(store, 1)
    config = replace(SETTINGS, max_deliveries=2)
    with Worker(config, store=store) as worker:
        for count in (1, 2):
            (batch,) = worker.claim(timeout=60)
            assert batch.delivery_count == count
            batch.release()
        assert worker.claim(timeout=0.5) == []
        eventually(lambda: queued(store) == [])
    (report,) = list_quarantine(store, "ingest")
    assert "handed out 2 times" in report.error


def test_the_batch_of_a_silent_worker_goes_to_another_and_its_finish_is_refused(
    store: MemoryStore,
) -> None:
    fill(store, 1)
    quick = replace(SETTINGS, claim_timeout_ms=1_000)
    silent = Worker(quick, store=store)
    (batch,) = silent.claim()
    silent._claims.clear()  # Its heartbeats no longer name a batch.
    with Worker(SETTINGS, store=store) as other:
        (again,) = other.claim(timeout=60)
        assert (again.sequence, again.delivery_count) == (0, batch.delivery_count + 1)
        with pytest.raises(ClaimLost, match="batch 0 was lost"):
            batch.done()
        again.done()
    eventually(lambda: queued(store) == [])
    silent.close()


def test_many_workers_finish_every_batch_once(store: MemoryStore) -> None:
    fill(store, 200)
    seen: Counter[bytes] = Counter()

    def work() -> None:
        with Worker(SETTINGS, store=store) as worker:
            while sum(seen.values()) < 200:
                for batch in worker.claim(5, timeout=0.5):
                    seen.update(batch.entries)
                    batch.done()

    threads = [threading.Thread(target=work) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == Counter({b"%d" % number: 1 for number in range(200)})
    eventually(lambda: queued(store) == [])


def test_a_closing_worker_releases_more_batches_than_fit_into_one_request(
    store: MemoryStore,
) -> None:
    count = 3 * MAX_OPEN_REQUESTS
    fill(store, count)
    with Worker(replace(SETTINGS, claim_timeout_ms=600_000), store=store) as leaving:
        held = leaving.claim(count)
        assert len(held) == count
    with Worker(SETTINGS, store=store) as other:
        assert claimed(other, count) == set(range(count))
    kept.clear()
    with pytest.raises(Closed):
        leaving.claim()
    leaving.close()


def test_a_worker_in_a_forked_child_neither_claims_nor_releases_batches_of_its_parent(
    store: MemoryStore, workers: list[Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(store, 2)
    (batch,) = workers[0].claim()
    with monkeypatch.context() as child:
        child.setattr(workers[0], "_pid", -1)
        for call in (workers[0].claim, batch.done):
            with pytest.raises(Closed, match="in each process, after the fork"):
                call()
        workers[0].close()
    batch.done()
    (following,) = workers[0].claim()
    assert following.sequence == 1


def test_async_iteration_does_not_block_the_event_loop(
    store: MemoryStore, workers: list[Worker]
) -> None:
    fill(store, 3)

    found: list[int] = []

    async def fill_while_it_waits() -> None:
        while len(found) < 3:
            await asyncio.sleep(0.01)
        for _ in range(8):
            await asyncio.sleep(0.01)
        fill(store, 1, 3)

    async def main() -> None:
        filling = asyncio.create_task(fill_while_it_waits())
        async for batch in workers[0]:
            found.append(batch.sequence)
            await asyncio.to_thread(batch.done)
            if len(found) == 4:
                break
        await filling

    asyncio.run(main())
    assert found == [0, 1, 2, 3]


def test_iteration_claims_batches_until_the_worker_is_closed(
    store: MemoryStore, workers: list[Worker]
) -> None:
    fill(store, 3)
    found = []
    for batch in workers[0]:
        assert len(batch) == 1
        found += [record.value for record in batch]
        batch.ack()
        if len(found) == 2:
            break
    last = next(workers[0])
    found += last.values
    asyncio.run(last.ack_async())
    assert found == [b"0", b"1", b"2"]
    closing = threading.Timer(0.05, workers[0].close)
    closing.start()
    assert list(workers[0]) == []  # waits, because the queue is empty, until it is closed
    closing.join()
    assert workers[1].claim(timeout=0.1) == []


def test_settings_are_checked() -> None:
    long = {"name": "n" * 257}
    for wrong in ({"broker": "off"}, {"broker": "x"}, {"claim_timeout_ms": 0}, long):
        with pytest.raises(InvalidInput):
            replace(SETTINGS, **wrong)
    with Worker(SETTINGS, store=MemoryStore()) as worker, pytest.raises(InvalidInput):
        worker.claim(0)
    with pytest.raises(InvalidInput, match="create it with create_if_missing=True"):
        Worker(replace(SETTINGS, create_if_missing=False), store=MemoryStore())


def test_a_batch_that_could_not_be_fetched_is_released() -> None:
    store = Hooked(".batch")
    fill(store, 2)

    def fail() -> None:
        raise TransientStorageError("injected")

    slow = replace(SETTINGS, claim_timeout_ms=600_000).with_timeout(500)
    with hosting(store), Worker(slow, store=store) as one, Worker(SETTINGS, store=store) as other:
        store.on_read = fail
        with pytest.raises(TransientStorageError):
            one.claim(2)
        store.on_read = lambda: None
        assert claimed(other, 2) == {0, 1}


def test_a_garbage_collected_batch_goes_to_another_worker(store: MemoryStore) -> None:
    fill(store, 1)
    quick = replace(SETTINGS, claim_timeout_ms=800)
    with Worker(quick, store=store) as careless, Worker(SETTINGS, store=store) as other:
        careless.claim()
        (again,) = other.claim(timeout=60)
        assert again.sequence == 0
        assert again.delivery_count >= 2
        again.ack()


def test_a_late_heartbeat_does_not_confirm_an_expired_claim(
    workers: list[Worker], batch: ClaimedBatch
) -> None:
    beaten = batch._claim.beaten
    workers[0]._beat_once()
    assert batch._claim.beaten.monotonic > beaten.monotonic
    # The claim has expired, as after a pause, although a broker answers its heartbeats.
    long_ago = replace(beaten, monotonic=beaten.monotonic - 1_000)
    batch._claim.beaten = long_ago
    workers[0]._beat_once()
    assert batch._claim.beaten == long_ago
    # Another worker has the batch by now, and an earlier attempt of this one may have landed.
    batch._claim.token += 1
    batch._claim.asked = True
    with pytest.raises(ClaimLost):
        batch.done()


def test_a_finish_that_landed_before_its_broker_was_fenced_is_not_a_lost_claim(
    store: MemoryStore, batch: ClaimedBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = DispatcherTerm.write

    def write_and_be_fenced(self: DispatcherTerm, after: Claims) -> None:
        before = self.claims
        write(self, after)
        if after != before:
            raise Fenced("ingest/manifest", 1, 2)

    monkeypatch.setattr(DispatcherTerm, "write", write_and_be_fenced)
    monkeypatch.setattr(Dispatcher, "_was_fenced_by_a_broker", lambda self: True)
    thread = RUNTIME.spawn(batch.done, "done")
    eventually(lambda: batch._claim.asked)
    monkeypatch.setattr(DispatcherTerm, "write", write)
    eventually(lambda: batch._claim.over)
    thread.join()
    assert eventually(lambda: queued(store) == [])


def test_a_refused_heartbeat_is_sent_to_the_newly_announced_broker(
    workers: list[Worker], batch: ClaimedBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = workers[0]
    beaten, before = batch._claim.beaten, worker._discovery.connection
    assert before is not None
    with monkeypatch.context() as patch:
        patch.setattr(Dispatcher, "beat", lambda self, tokens: False)
        worker._beat_once()
        eventually(lambda: before.is_over)
        assert batch._claim.beaten == beaten
    eventually(lambda: (worker._beat_once(), batch._claim.beaten != beaten)[1])
    assert worker._discovery.connection is not before
    batch.done()


class Suspended(SystemRuntime):
    """A runtime whose wall clock went on while the process was suspended."""

    missed = 0.0

    def monotonic(self) -> float:
        return super().monotonic() + self.missed


def test_a_claim_that_expired_while_its_batch_was_fetched_is_not_returned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runtime = Suspended()
    store = Hooked(".batch")
    fill(store, 1)

    def answer_after_the_claim_lapsed() -> None:
        store.on_read = lambda: None
        runtime.missed += 600

    store.on_read = answer_after_the_claim_lapsed
    # No heartbeats are sent while the process is suspended.
    monkeypatch.setattr(Worker, "_beat_once", lambda self: None)
    with hosting(store), Worker(SETTINGS, store=store, runtime=runtime) as worker:
        (batch,) = worker.claim()
        assert (batch.sequence, batch.delivery_count, runtime.missed) == (0, 2, 600)
        batch.done()


ASKED = Moment(wall_ms=1_000_000, monotonic=50.0)


def claim() -> Claim:
    return Claim(7, 3, ASKED)


@pytest.mark.parametrize(
    ("wall_ms", "monotonic", "sure"),
    [
        (1_000_000, 50.0, True),
        (1_029_999, 79.999, True),
        (1_030_000, 60.0, False),  # the machine slept, and its monotonic clock stopped
        (1_010_000, 80.0, False),  # the wall clock was set back meanwhile
        (999_999, 51.0, False),  # the same by an unknown amount
        (1_000_001, 49.0, False),  # the machine was restarted
    ],
)
def test_a_claim_is_certain_only_while_both_clocks_agree(
    wall_ms: int, monotonic: float, sure: bool
) -> None:
    assert claim().is_sure(Moment(wall_ms, monotonic), 30_000) is sure


ANSWER = {"op": "claimed", "batches": []}


class Scripted:
    """Finds the connections of a test in order, and none after the last one."""

    reason = "none is announced"
    is_closed = False

    def __init__(self, *connections: FakeConnection) -> None:
        self.left = list(connections)
        self.forgotten: list[FakeConnection] = []
        self.looked = 0
        self.on_look: Callable[[], object] = lambda: None

    def find(self) -> FakeConnection | None:
        self.looked += 1
        self.on_look()
        return self.left[0] if self.left else None

    def forget(self, connection: FakeConnection) -> None:
        self.forgotten.append(connection)
        self.left.pop(0)

    def close(self) -> None:
        self.is_closed = True


def client_of(*connections: FakeConnection) -> tuple[DispatcherClient, Scripted, ManualRuntime]:
    found, runtime = Scripted(*connections), ManualRuntime()
    made = DispatcherClient(found, runtime, 10.0, "memory://q")  # type: ignore[arg-type]
    return made, found, runtime


@pytest.mark.parametrize(
    ("reply", "forgets", "waits", "asked"),
    [
        (Lost(since=0, safe_at=0.0), True, False, True),
        (Refused("unsent"), True, False, False),
        (Refused("moved"), True, True, True),
        (Refused("busy"), False, True, True),
    ],
    ids=str,
)
def test_a_request_is_repeated_at_the_same_or_the_next_broker(
    reply: Lost | Refused, forgets: bool, waits: bool, asked: bool
) -> None:
    first, second = FakeConnection(reply, ANSWER), FakeConnection(ANSWER)
    asking, discovery, runtime = client_of(first, second)
    mine = claim()
    assert asking.ask({"op": "finish"}, mine) == ANSWER
    assert first.asked + second.asked == [{"op": "finish"}] * 2
    assert discovery.forgotten == [first] * forgets
    assert (runtime.monotonic() > 0) is waits
    assert mine.asked is asked


@pytest.mark.parametrize("error", [TransientStorageError("503"), Fenced("m", 1, 2)])
def test_an_error_of_the_broker_is_raised_and_the_finish_may_be_stored(error: Exception) -> None:
    asking, _, _ = client_of(FakeConnection(error))
    mine = claim()
    with pytest.raises(type(error)):
        asking.ask({"op": "finish"}, mine)
    assert mine.asked


def test_without_a_broker_the_worker_gives_up_after_its_time_limit_and_says_why() -> None:
    asking, discovery, runtime = client_of()
    with pytest.raises(TransientStorageError, match=r"memory://q hands out .*: none is announced"):
        asking.find(0.0)
    assert discovery.looked == 1
    with pytest.raises(TransientStorageError):
        asking.ask({"op": "claim", "wait_ms": 20_000})
    assert 10 <= runtime.monotonic() < 11


def test_the_time_limit_of_a_request_includes_the_time_that_the_broker_may_wait() -> None:
    asking, _, runtime = client_of(FakeConnection(*[Refused("busy")] * 1_000))
    with pytest.raises(TransientStorageError, match="no broker of memory://q answered within 30 s"):
        asking.ask({"op": "claim", "wait_ms": 20_000})
    assert 30 <= runtime.monotonic() < 31


def test_a_broker_that_is_found_while_the_worker_closes_is_not_asked() -> None:
    connection = FakeConnection(ANSWER)
    asking, discovery, _ = client_of(connection)
    discovery.on_look = discovery.close
    with pytest.raises(Closed):
        asking.ask({"op": "claim"})
    assert connection.asked == []
