"""The dispatcher: how batches are assigned to workers, and how a successor takes over."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar

import pytest

from opendata_buffer import metrics
from opendata_buffer.broker import dispatcher as dispatcher_module
from opendata_buffer.broker.claims import Claims, decode, encode
from opendata_buffer.broker.dispatcher import MAX_ANSWER_BYTES, Dispatcher, DispatcherTerm
from opendata_buffer.broker.protocol import ClaimRequest, FinishRequest
from opendata_buffer.config import ConsumerConfig
from opendata_buffer.consumer.entries import EntryConsumer
from opendata_buffer.errors import Fenced, InvalidInput
from opendata_buffer.formats.batch import encode_batch
from opendata_buffer.formats.manifest import Metadata, NewEntry
from opendata_buffer.quarantine import list_quarantine
from opendata_buffer.queue.queue import Queue
from opendata_buffer.runtime import Runtime
from opendata_buffer.stores.base import read_bytes
from opendata_buffer.stores.memory import MemoryStore
from opendata_buffer.testing.runtime import ManualRuntime
from tests.unit.broker.local import RUNTIME, Hooked, eventually

CONFIG = ConsumerConfig(store="memory://unused", create_if_missing=True)
CLAIMS = "ingest/_claims.json"


@pytest.fixture(autouse=True)
def _dispatchers_stop(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(dispatcher_module, "REPLACED_S", 0.05)
    yield
    while Asking.made:
        Asking.made.pop().dispatcher.stop(5)


def filled(count: int, store: MemoryStore | None = None) -> MemoryStore:
    store = store if store is not None else MemoryStore()
    entries = [NewEntry(f"ingest/{number}.batch") for number in range(count)]
    for each in entries:
        store.put(each.location, encode_batch([b"x"]))
    Queue(store, CONFIG, runtime=RUNTIME, role="test").append(entries)
    return store


def stored(store: MemoryStore) -> Claims:
    return decode(read_bytes(store, CLAIMS))


def epoch_of(store: MemoryStore) -> int:
    manifest = Queue(store, CONFIG, runtime=RUNTIME, role="test").read()
    assert manifest is not None
    return manifest.epoch


def sequences(answer: dict[str, Any]) -> list[int]:
    return [each["sequence"] for each in answer["batches"]]


class Asking:
    """Asks a dispatcher and records its answers.

    The manual clock stands still until the test moves it, so no claim expires on a busy machine.
    """

    made: ClassVar[list[Asking]] = []

    def __init__(self, store: MemoryStore, *, runtime: Runtime = RUNTIME, **more: Any) -> None:
        self.made.append(self)
        self.runtime = runtime
        self.is_announced = True
        self.dispatcher = Dispatcher(
            store, CONFIG, runtime, is_announced=lambda: self.is_announced, **more
        )
        self.answers: list[dict[str, Any]] = []
        self.number = 0

    def claim(self, most: int = 1, wait_s: float = 60.0, **more: int) -> dict[str, Any]:
        self.ask_for(most, wait_s, **more)
        return self.answer()

    def fails(self) -> str:
        """Claim, and return the name of the error in the answer."""
        return str(self.claim()["error"]["name"])

    def claim_in_time(self, **more: int) -> dict[str, Any]:
        """Claim a batch that another worker holds, and move the clock until it is answered."""
        assert isinstance(self.runtime, ManualRuntime)
        self.ask_for(**more)
        while not self.is_answered():
            self.runtime.advance(0.01)
            RUNTIME.sleep(0.001)
        return self.answer()

    def ask_for(self, most: int = 1, wait_s: float = 60.0, **more: int) -> None:
        self.number += 1
        self.dispatcher.submit(
            ClaimRequest(
                self.number,
                self.answers.append,
                most,
                self.runtime.monotonic() + wait_s,
                "worker",
                more.get("timeout_ms", 60_000),
                more.get("max_deliveries", 0),
            )
        )

    def finish(self, how: str, batch: dict[str, Any], rest_ms: int = 0) -> dict[str, Any]:
        self.number += 1
        sequence, token = batch["sequence"], batch["token"]
        self.dispatcher.submit(
            FinishRequest(self.number, self.answers.append, how, sequence, token, "why", rest_ms)
        )
        return self.answer()

    def is_answered(self) -> bool:
        return any(each["n"] == self.number for each in self.answers)

    def answer(self) -> dict[str, Any]:
        eventually(self.is_answered)
        return next(each for each in self.answers if each["n"] == self.number)


def test_f41_a_location_that_was_queued_twice_is_assigned_once() -> None:
    queue = Queue(store := filled(2), CONFIG, runtime=RUNTIME, role="test")
    queue.append([NewEntry("ingest/0.batch"), NewEntry("ingest/1.batch")], read_first=True)
    asking = Asking(store)
    for expected in (0, 1):
        (batch,) = asking.claim()["batches"]
        assert batch["sequence"] == expected
        asking.finish("done", batch)
    assert asking.claim(wait_s=0)["batches"] == []
    asking.dispatcher.stop()
    queue.append([NewEntry("ingest/1.batch"), NewEntry("ingest/2.batch")], read_first=True)
    assert sequences(Asking(store).claim(4)) == [5]


def test_no_answer_is_sent_before_its_claims_are_stored() -> None:
    store = Hooked(CLAIMS)
    asking = Asking(filled(1, store))
    answered: list[int] = []
    store.on_write = lambda: answered.append(len(asking.answers))
    (batch,) = asking.claim()["batches"]
    assert asking.finish("done", batch)["op"] == "finished"
    asking.dispatcher.stop()
    # One write each for the takeover, the claim, and the finish after its answer.
    assert answered == [0, 0, 1]


def test_a_successor_assigns_free_batches_and_keeps_existing_claims() -> None:
    store = filled(3)
    first = Asking(store)
    held = first.claim(2)["batches"]
    first.finish("done", held[1])
    first.dispatcher.stop(5)
    second = Asking(store)
    assert sequences(second.claim(5)) == [2]
    assert second.finish("done", held[0])["op"] == "finished"
    assert stored(store).frontier == 2


def test_a_successor_restarts_the_timeout_of_every_claim() -> None:
    store, runtime = filled(1), ManualRuntime()
    first = Asking(store, runtime=runtime)
    first.claim(timeout_ms=700)
    first.dispatcher.stop(5)
    runtime.advance(0.5)
    second = Asking(store, runtime=runtime)
    (again,) = second.claim_in_time()["batches"]
    assert runtime.monotonic() >= 0.5 + 0.7
    assert again["deliveries"] == 2


def replaced_and_announced(store: MemoryStore) -> tuple[Asking, Asking]:
    """Return a dispatcher that has learned that another one replaced it, and the other one."""
    first, second = Asking(store), Asking(store)
    first.claim()
    second.claim()
    first.is_announced = False
    assert first.claim()["why"] == "moved"
    return first, second


def test_an_older_dispatcher_does_not_fence_the_later_one() -> None:
    first, second = replaced_and_announced(filled(4))
    assert first.fails() == "TransientStorageError"
    assert sequences(second.claim()) == [2]


def test_a_fenced_broker_refuses_new_workers_until_it_restarts() -> None:
    store = filled(3)
    broker = Asking(store)
    broker.claim()
    EntryConsumer(CONFIG, store=store, runtime=RUNTIME, program="other").close()
    epoch = epoch_of(store)
    assert [broker.fails(), broker.fails()] == ["Fenced"] * 2
    assert epoch_of(store) == epoch
    broker.dispatcher.stop(5)
    assert Asking(store).claim(3)["op"] == "claimed"
    assert epoch_of(store) > epoch


def test_a_broker_that_may_have_been_replaced_refers_heartbeats_to_its_successor() -> None:
    current = [True, False]
    asking = Asking(filled(1), is_current=lambda: current.pop(0))
    assert asking.dispatcher.beat([1])
    assert not asking.dispatcher.beat([1])


def test_metrics_count_held_and_expired_claims(monkeypatch: pytest.MonkeyPatch) -> None:
    lapsed: list[int] = []
    monkeypatch.setattr(metrics.claims_lapsed, "add", lapsed.append)
    runtime = ManualRuntime()
    asking = Asking(filled(3), runtime=runtime)
    assert asking.dispatcher.held_now() is None
    asking.claim(2, timeout_ms=300)
    assert asking.dispatcher.held_now() == 2
    assert id(asking.dispatcher) in metrics.claims_held._owners
    runtime.advance(0.3)
    eventually(lambda: sum(lapsed) == 2)
    eventually(lambda: asking.dispatcher.held_now() == 0)
    asking.dispatcher.stop(5)
    assert id(asking.dispatcher) not in metrics.claims_held._owners


def test_a_batch_too_large_for_the_quarantine_stays_and_does_not_block_others(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(store: Any, prefix: str, entry: Any, *rest: Any, **more: Any) -> None:
        if entry.sequence < 2:
            raise InvalidInput("its object has more than 1 GiB")

    monkeypatch.setattr(dispatcher_module, "quarantine", refuse)
    store = filled(3)
    asking = Asking(store)
    worn, rejected = asking.claim(2)["batches"]
    asking.finish("release", worn)
    assert asking.finish("reject", rejected)["op"] == "finished"
    (other,) = asking.claim(3, max_deliveries=1)["batches"]
    assert other["sequence"] == 2
    assert asking.finish("done", other)["op"] == "finished"
    assert asking.claim(3, wait_s=0.0, max_deliveries=1)["batches"] == []
    assert "opendata-buffer skip memory://" in caplog.text
    # Only batches that a worker finished count as finished.
    assert (stored(store).frontier, set(stored(store).done)) == (0, {2})
    # After the claims were removed it starts again, without any failed deliveries.
    store.delete_many([CLAIMS])
    filled(1, store)
    assert asking.fails() == "TransientStorageError"
    assert sequences(asking.claim(3)) == [0, 1, 2]


def test_a_repeated_finish_gets_the_same_answer_and_a_different_one_is_lost() -> None:
    asking = Asking(filled(2))
    (batch,) = asking.claim()["batches"]
    assert [asking.finish("done", batch)["op"] for _ in range(2)] == ["finished"] * 2
    assert asking.finish("release", batch)["error"]["name"] == "ClaimLost"


def test_the_dispatcher_of_the_announced_broker_takes_the_claims_back_from_a_replaced_one() -> None:
    store = filled(4)
    announced, zombie = Asking(store), Asking(store)
    announced.claim()
    zombie.claim()
    zombie.is_announced = False
    # Its worker is referred to the announced broker, and comes back here.
    assert announced.claim()["why"] == "moved"
    assert sequences(announced.claim()) == [2]
    assert stored(store).epoch == 3
    assert zombie.claim()["why"] == "moved"
    assert stored(store).epoch == 3


def test_an_announced_dispatcher_does_not_take_the_claims_back_from_another_consumer() -> None:
    store = filled(4)
    asking = Asking(store)
    (batch,) = asking.claim()["batches"]
    Queue(store, CONFIG, runtime=RUNTIME, role="consumer").claim_epoch(None)
    assert asking.finish("done", batch)["op"] == "finished"
    assert [asking.fails(), asking.fails()] == ["Fenced"] * 2


def test_a_replaced_dispatcher_hands_out_batches_again_when_it_is_announced_again() -> None:
    first, second = replaced_and_announced(filled(4))
    first.is_announced, second.is_announced = True, False
    assert sequences(first.claim()) == [2]
    assert second.claim()["why"] == "moved"


def test_waiting_requests_are_refused_when_the_dispatcher_stops() -> None:
    runtime = ManualRuntime()
    asking = Asking(MemoryStore(), runtime=runtime)
    asking.ask_for()
    runtime.await_waits(1)
    asking.dispatcher.stop(5)
    assert asking.answer()["why"] == "moved"
    assert asking.claim()["why"] == "moved"


def test_a_suspended_dispatcher_does_not_reassign_the_claim_of_a_live_worker() -> None:
    store, runtime = filled(1), ManualRuntime()
    asking = Asking(store, runtime=runtime)
    (batch,) = asking.claim(timeout_ms=500)["batches"]
    # The clock of its machine went on while it did not run.
    runtime.advance(30.0)
    # It has checked the claim since.
    eventually(lambda: asking.dispatcher._term.heartbeats.lapses[batch["sequence"]] == 30.5)
    assert stored(store).holds(batch["sequence"], batch["token"])
    asking.dispatcher.beat([batch["token"]])
    assert asking.finish("done", batch)["op"] == "finished"


def test_a_broker_that_may_have_missed_heartbeats_restarts_the_timeouts() -> None:
    store, runtime = filled(1), ManualRuntime()
    paused_until = [float("-inf")]
    asking = Asking(store, runtime=runtime, steady_since=lambda: paused_until[0])
    (first,) = asking.claim(timeout_ms=150)["batches"]
    paused_until[0] = 0.6
    (again,) = asking.claim_in_time()["batches"]
    assert (again["sequence"], again["deliveries"]) == (first["sequence"], 2)
    assert runtime.monotonic() >= 0.6 + 0.15


def test_a_broker_takes_the_claims_only_if_announced_and_asked_by_a_worker() -> None:
    store = filled(1)
    asking = Asking(store)
    assert epoch_of(store) == 0
    asking.is_announced = False
    assert asking.fails() == "TransientStorageError"
    assert epoch_of(store) == 0
    asking.is_announced = True
    assert asking.claim()["op"] == "claimed"
    assert epoch_of(store) == 1


def test_a_heartbeat_makes_a_successor_take_the_claims_over() -> None:
    store = filled(1)
    first = Asking(store)
    (batch,) = first.claim()["batches"]
    second = Asking(store)
    second.dispatcher.beat([batch["token"]])
    eventually(lambda: stored(store).epoch == 2)
    first.is_announced = False
    assert first.claim()["why"] == "moved"


def test_an_answer_has_no_more_batches_than_fit_into_a_message() -> None:
    store = MemoryStore()
    size = MAX_ANSWER_BYTES // 2
    entries = []
    for number in range(3):
        store.put(f"ingest/{number}.batch", encode_batch([b"x"]))
        payload = bytes(size if number else 3 * size)
        entries.append(NewEntry(f"ingest/{number}.batch", (Metadata(0, 0, payload),)))
    Queue(store, CONFIG, runtime=RUNTIME, role="test").append(entries)
    asking = Asking(store)
    # The first batch does not fit into any message.
    assert [sequences(asking.claim(5)), sequences(asking.claim(5))] == [[1], [2]]
    (report,) = list_quarantine(store, "ingest")
    assert (report.sequence, "metadata is larger" in report.error) == (0, True)


def take_over(store: MemoryStore, runtime: Runtime = RUNTIME) -> DispatcherTerm:
    return DispatcherTerm(store, CONFIG, runtime)


def test_a_replaced_dispatcher_writes_no_claims() -> None:
    store = filled(2)
    first, second = take_over(store), take_over(store)
    with pytest.raises(Fenced) as caught:
        first.write(first.claims.claim([0], "w", 1_000))
    assert (caught.value.epoch, caught.value.current_epoch) == (1, 2)
    assert stored(store) == second.claims
    assert second.claims.held == {}


def test_unchanged_claims_are_not_written() -> None:
    store = filled(2)
    term = take_over(store)
    store.delete_many([CLAIMS])
    term.write(term.claims)
    assert not store.list(CLAIMS).objects


def test_claims_of_an_earlier_queue_do_not_apply_to_a_recreated_one() -> None:
    """With the old frontier, the first batches of the new queue would look finished."""
    store = filled(2)
    old = Claims(epoch=9, frontier=1_000, tokens=77, queue="another queue")
    store.put(CLAIMS, encode(old))
    claims = take_over(store).claims
    assert claims.free(2) == [0, 1]
    assert claims.tokens == 77


def test_a_newer_dispatcher_takes_over_the_last_claims_of_the_older_one() -> None:
    store = Hooked(CLAIMS)
    take_over(filled(2, store))

    def older_writes() -> None:
        """Write between the newer one's read and its write."""
        store.on_write = lambda: None
        store.put(CLAIMS, encode(replace(stored(store), tokens=50)))

    store.on_write = older_writes
    second = take_over(store)
    assert second.claims.tokens == 50
    assert stored(store) == second.claims


def test_a_dispatcher_that_is_replaced_during_its_start_closes_its_consumer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = Hooked(CLAIMS)
    filled(2, store)
    closed: list[int] = []
    successors: list[DispatcherTerm] = []

    def succeed() -> None:
        store.on_read = lambda: None
        successors.append(take_over(store, ManualRuntime(seed=2)))

    monkeypatch.setattr(EntryConsumer, "close", lambda consumer: closed.append(consumer.epoch))
    store.on_read = succeed
    with pytest.raises(Fenced) as caught:
        take_over(store)
    assert (caught.value.epoch, caught.value.current_epoch) == (1, 2)
    assert stored(store) == successors[0].claims
    assert closed == [1]
