"""The guarantees of a producer when its caller, its store, or its callbacks misbehave."""

from __future__ import annotations

import logging
import re
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import pytest

from opendata_buffer import Producer
from opendata_buffer.errors import (
    Closed,
    CommitStateUnknown,
    FlushFailed,
    OpenDataBufferError,
    PermanentStorageError,
    TransientStorageError,
    copied,
)
from opendata_buffer.formats.batch import Transaction
from opendata_buffer.formats.manifest import Manifest
from opendata_buffer.producer.batching import WriteHandle
from opendata_buffer.runtime import SystemRuntime
from opendata_buffer.stores.base import Blob, PutOutcome, Store
from opendata_buffer.stores.memory import MemoryStore
from tests.unit.broker.local import eventually
from tests.unit.interrupts import each_step
from tests.unit.producer.in_memory import WAIT_S, bytes_of, config, held_config, records


def within(seconds: float, call: Callable[[], object]) -> None:
    """Run a call that must end in time, and raise its error."""
    raised: list[BaseException | None] = []

    def run() -> None:
        try:
            call()
            raised.append(None)
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    assert raised, f"{call} did not end in {seconds} s"
    if raised[0] is not None:
        raise raised[0]


class Silent(MemoryStore):
    """Accepts every request, but does not answer while it is silent."""

    def __init__(self) -> None:
        super().__init__()
        self.answers = threading.Event()
        self.answers.set()
        self.only: Callable[[str], bool] = lambda key: True
        self.asked = threading.Event()

    def _answer(self, key: str) -> None:
        if not self.answers.is_set() and self.only(key):
            self.asked.set()
            assert self.answers.wait(2 * WAIT_S)

    def get(self, key: str, **options: Any) -> Blob | None:
        self._answer(key)
        return super().get(key, **options)

    def put(self, key: str, data: bytes | memoryview) -> None:
        self._answer(key)
        super().put(key, data)

    def put_if(self, key: str, data: bytes, condition: str | None) -> PutOutcome:
        self._answer(key)
        return super().put_if(key, data, condition)


@pytest.fixture
def silent() -> Iterator[Silent]:
    store = Silent()
    yield store
    store.answers.set()  # lets the threads end


# Interrupted callers.


@pytest.mark.full
@pytest.mark.parametrize(
    "settings",
    [{}, {"flush_size_bytes": 1}, {"max_buffered_bytes": 1}],
    ids=["into an open batch", "fills a batch", "waits for room"],
)
@pytest.mark.parametrize(
    "call",
    [{}, {"metadata": b"m"}, {"transaction": Transaction("a", 1)}],
    ids=["plain", "with metadata", "transaction"],
)
def test_an_interrupt_anywhere_in_produce_leaves_nothing_stuck(
    settings: dict[str, int], call: dict[str, Any]
) -> None:
    # test_batching.py tests the few steps of a plain call that finds an open buffer.
    for interrupt in each_step(least=40 if call or settings else 10):
        store = MemoryStore()
        producer = Producer(config(flush_interval_ms=8, **settings), store=store)
        before = producer.produce([b"before"])
        interrupt(partial(producer.produce, [b"hit"], **call))
        after = producer.produce([b"after"])
        for handle in (before, after):
            # The timer flushes it, and not close(). The interrupt must not stop the timer.
            handle.result(WAIT_S)
        producer.close(WAIT_S)
        assert records(store) in ([b"before", b"after"], [b"before", b"hit", b"after"])
        assert producer.buffered_bytes == 0


@pytest.mark.full
@pytest.mark.parametrize("method", ["flush", "close"])
def test_an_interrupt_anywhere_in_flush_and_close_lets_a_second_close_end(method: str) -> None:
    for interrupt in each_step(least=20):
        store = MemoryStore()
        producer = Producer(held_config(), store=store)
        handle = producer.produce([b"a"])
        interrupt(getattr(producer, method))
        producer.close(WAIT_S)
        assert handle.done()
        assert records(store) == [b"a"]


class Waited(SystemRuntime):
    """A clock that lets its caller wait once, even if a busy machine asks late."""

    def __init__(self) -> None:
        self._times = iter((0.0, 0.0))  # the caller starts to wait, and checks the remaining time

    def monotonic(self) -> float:
        return next(self._times, 1.0)


@pytest.mark.full
def test_an_interrupt_anywhere_in_await_durable_does_not_stop_other_threads() -> None:
    for interrupt in each_step(least=40):  # 32 of them without the wait
        with Producer(held_config(), store=MemoryStore()) as producer:
            handle = producer.produce([b"a"])
            handle._completion._runtime = Waited()
            interrupt(partial(waits, handle))
        assert handle.done()


def waits(handle: WriteHandle) -> None:
    with suppress(TimeoutError):
        handle.result(0.001)


def test_a_signal_handler_cannot_call_a_producer_during_a_call_of_it() -> None:
    producer = Producer(config(), store=MemoryStore())

    batcher = producer._batcher
    original = batcher.add_item

    def interrupted_by_a_handler(*_: Any) -> Any:
        producer.close()

    batcher.add_item = interrupted_by_a_handler  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="by a signal handler: raise an exception"):
        producer.produce([b"a"])
    batcher.add_item = original  # type: ignore[method-assign]
    producer.produce([b"b"]).result(WAIT_S)
    producer.close(WAIT_S)


# Callbacks.


def stored_batches(store: Store) -> int:
    return sum(info.key.endswith(".batch") for info in store.list("ingest/").objects)


@pytest.mark.parametrize("error", [SystemExit(1), KeyboardInterrupt(), GeneratorExit()])
def test_a_callback_that_raises_system_exit_does_not_stop_other_handles(
    error: BaseException,
) -> None:
    store = MemoryStore()
    with Producer(held_config(), store=store) as producer:

        def callback(_: object) -> None:
            raise error

        producer.produce([b"a"]).add_done_callback(callback)
        producer.flush(WAIT_S)
        later = producer.produce([b"b"])
        producer.flush(WAIT_S)
        assert later.result(WAIT_S).sequence == 1
    assert records(store) == [b"a", b"b"]


def test_a_callback_that_blocks_does_not_stop_uploads_of_other_batches() -> None:
    store = MemoryStore()
    producer = Producer(config(flush_size_bytes=1), store=store)
    go_on, blocked = threading.Event(), threading.Event()

    def callback(_: object) -> None:
        blocked.set()
        assert go_on.wait(WAIT_S)

    producer.produce([b"a"]).add_done_callback(callback)
    assert blocked.wait(WAIT_S)
    producer.produce([b"b"])
    try:
        eventually(lambda: stored_batches(store) == 2)
    finally:
        go_on.set()
    producer.close(WAIT_S)
    assert records(store) == [b"a", b"b"]


# Stores with unusual failures.


@pytest.mark.parametrize("bug", [RuntimeError("a bug"), SystemExit(3)])
@pytest.mark.parametrize("operation", ["put", "put_if"])
def test_f29_an_unexpected_error_fails_its_group_and_not_the_thread(
    operation: str, bug: BaseException
) -> None:
    store = MemoryStore()
    producer = Producer(config(), store=store)
    original = getattr(store, operation)

    def fail_once(*arguments: Any) -> None:
        setattr(store, operation, original)
        raise bug

    setattr(store, operation, fail_once)
    failed = producer.produce([b"a"])
    # Reading the outcome does not raise SystemExit, although a call of the store did.
    with pytest.raises(RuntimeError if isinstance(bug, RuntimeError) else OpenDataBufferError):
        failed.result(WAIT_S)
    producer.produce([b"b"]).result(WAIT_S)
    with pytest.raises(FlushFailed):
        producer.close(WAIT_S)
    assert records(store) == [b"b"]


class Refusing(Silent):
    """Refuses every write of the manifest once it answers again."""

    def put_if(self, key: str, data: bytes, condition: str | None) -> PutOutcome:
        self._answer(key)
        if key == "ingest/manifest":
            raise PermanentStorageError("cannot write 'ingest/manifest': access denied")
        return super().put_if(key, data, condition)


def test_a_failed_append_of_many_calls_is_logged_once_and_its_traceback_does_not_grow(
    caplog: pytest.LogCaptureFixture,
) -> None:
    # A command that ran in this process has disabled the logs.
    for name in ("opendata_buffer", "opendata_buffer.producer.delivery"):
        caplog.set_level(logging.WARNING, logger=name)
    store = Refusing()
    calls = 200
    try:
        producer = Producer(config(flush_size_bytes=1, broker="off"), store=store)
        store.only = lambda key: key == "ingest/manifest"
        store.answers.clear()
        handles = [producer.produce([b"one", b"two"], b"till") for _ in range(calls)]
        eventually(lambda: stored_batches(store) == calls)
    finally:
        store.answers.set()
    lengths = set()
    raised = []
    for _ in range(3):
        for handle in handles:
            with pytest.raises(PermanentStorageError, match="access denied") as caught:
                handle.result(WAIT_S)
            raised.append(caught.value)
            lengths.add(len(traceback.format_exception(caught.value)))
    assert len({id(error) for error in raised}) == len(raised)  # threads do not share an exception
    assert max(lengths) < 30
    with pytest.raises(FlushFailed, match=f"{calls} produce") as flushed:
        producer.flush()
    with pytest.raises(FlushFailed, match=f"{calls} produce") as closed:
        producer.close()
    for error in (flushed.value, closed.value):
        assert isinstance(error.__cause__, PermanentStorageError)
        assert len("".join(traceback.format_exception(error)).splitlines()) < 100
    # The append that was under way, and the one with all others.
    lines = [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]
    assert len(lines) <= 2, lines[:3]
    found = [re.search(r"(\d+) produce\(\) calls with (\d+) records", line) for line in lines]
    assert sum(int(each[1]) for each in found if each) == calls
    assert sum(int(each[2]) for each in found if each) == 2 * calls


def test_an_error_that_cannot_be_copied_is_raised_as_it_is() -> None:
    class Odd(Exception):
        def __init__(self, one: int, two: int) -> None:
            super().__init__("odd")

    error = Odd(1, 2)
    assert copied(error) is error
    lost = CommitStateUnknown("ingest/manifest", 3, ("a",), 4, "no answer")
    lost.__cause__ = ValueError("why")
    found = copied(lost)
    assert found is not lost
    assert (type(found), str(found), vars(found)) == (type(lost), str(lost), vars(lost))
    assert found.__cause__ is lost.__cause__


def test_f35_a_group_that_does_not_fit_at_once_is_appended_in_parts(silent: Silent) -> None:
    # After a minute without the store, many uploads wait. Together they may be too large for a
    # manifest, and would be refused forever although the queue is empty.
    settings = config(flush_size_bytes=1, max_manifest_bytes=400, upload_concurrency=16)
    producer = Producer(settings, store=silent)
    silent.only = lambda key: key == "ingest/manifest"
    silent.answers.clear()
    handles = [producer.produce([b"%d" % n]) for n in range(10)]
    eventually(lambda: stored_batches(silent) == 10)
    silent.answers.set()
    # 22 bytes and 75 per entry, so five entries fit.
    handles[4].result(WAIT_S)
    assert records(silent) == [b"%d" % n for n in range(5)]
    assert not handles[5].done()
    manifest = Manifest.parse(bytes_of(silent, "ingest/manifest"))
    silent.put("ingest/manifest", manifest.drop_through(4).raw)
    for n, handle in enumerate(handles):
        assert handle.result(WAIT_S).sequence == n
    producer.close(WAIT_S)
    assert records(silent) == [b"%d" % n for n in range(5, 10)]


# Stores that do not answer.


def test_creating_a_producer_ends_at_its_deadline(silent: Silent) -> None:
    silent.answers.clear()
    with pytest.raises(TransientStorageError, match=r"within 0.1 s \(timeout_ms\)"):
        within(WAIT_S, lambda: Producer(config(timeout_ms=100), store=silent))


def test_flush_and_close_keep_their_deadlines_while_uploads_hang(silent: Silent) -> None:
    producer = Producer(config(), store=silent)
    silent.answers.clear()
    handle = producer.produce([b"a"])
    with pytest.raises(TimeoutError, match=r"1 batches not durable after 0.05 s"):
        producer.flush(0.05)
    with pytest.raises(FlushFailed, match="Produce their records again") as failed:
        within(WAIT_S, lambda: producer.close(0.05))
    assert failed.value.unknown_calls == 0
    with pytest.raises(Closed, match=r"after 0.05 s: look at the store"):
        handle.result()
    with pytest.raises(Closed):
        producer.produce([b"b"])


def test_a_close_that_times_out_leaves_a_hanging_append_unknown(silent: Silent) -> None:
    producer = Producer(config(), store=silent)
    silent.only = lambda key: key == "ingest/manifest"
    silent.answers.clear()
    handle = producer.produce([b"a"])
    assert silent.asked.wait(WAIT_S)
    with pytest.raises(FlushFailed, match="1 of them may be in the queue nevertheless"):
        within(WAIT_S, lambda: producer.close(0.05))
    with pytest.raises(CommitStateUnknown, match="may or may not have landed"):
        handle.result()


@pytest.mark.parametrize("upload_concurrency", [1, 8])
def test_delivery_times_out_while_every_upload_hangs(
    silent: Silent, upload_concurrency: int
) -> None:
    settings = config(
        delivery_timeout_ms=100, flush_size_bytes=1, upload_concurrency=upload_concurrency
    )
    producer = Producer(settings, store=silent)
    silent.answers.clear()
    handles = [producer.produce([b"%d" % n]) for n in range(12)]
    for handle in handles:
        with pytest.raises(TransientStorageError, match="delivery_timeout_ms"):
            handle.result(WAIT_S)
    # Handles have their outcome before the room of their batch is free.
    eventually(lambda: producer.buffered_bytes == 0)
    # Without another deadline, close() may take as long as a batch may take.
    with pytest.raises(FlushFailed):
        within(WAIT_S, producer.close)
