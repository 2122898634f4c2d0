"""Races of threads in the producer, in every order that frontrun finds.

frontrun stops each thread at each instruction, and looks for an order of the accesses to shared
state that breaks an invariant. It explores three orders by default, and in the
nightly run as many as ``OPENDATA_BUFFER_INTERLEAVINGS`` says.

It switches threads where the interpreter's lock does not, such as between a read and a write of
a counter. An invariant that holds here also holds without that lock. The exception is the count of
free bytes, which is why a Python without the lock is refused (decision 0025).
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from opendata_buffer import Producer
from opendata_buffer.config import ProducerConfig
from opendata_buffer.errors import PermanentStorageError
from opendata_buffer.formats.batch import Compression, decode_batch
from opendata_buffer.producer.accumulator import Accumulator
from opendata_buffer.producer.batching import (
    BUFFER_HELD,
    RECORD_HELD,
    AppendBuffer,
    Batch,
    ProduceRequest,
)
from opendata_buffer.producer.handles import Completion, Durable, TopicHandle, WriteHandle
from opendata_buffer.runtime import Condition, SystemRuntime

frontrun = pytest.importorskip(
    "frontrun", reason="frontrun explores the interleavings: install the extra 'interleavings'"
)

# frontrun does not look into installed packages.
pytestmark = pytest.mark.checkout

INTERLEAVINGS = int(os.environ.get("OPENDATA_BUFFER_INTERLEAVINGS", "3"))

Worker = Callable[[Any], object]


class Explored(SystemRuntime):
    """A runtime with locks that frontrun controls, and a clock that stands still."""

    monotonic = staticmethod(lambda: 5.0)

    def now_ms(self) -> int:
        return 1_700

    def condition(self) -> Condition:
        # frontrun has replaced both classes while it explores.
        lock = threading.RLock()
        made: Any = threading.Condition(lock)
        made.held = lock._is_owned  # type: ignore[attr-defined]
        return made  # type: ignore[no-any-return]


@pytest.fixture(autouse=True)
def _active(monkeypatch: pytest.MonkeyPatch) -> None:
    # frontrun's command sets this. Its interception of the C library is not needed here.
    monkeypatch.setenv("FRONTRUN_ACTIVE", "1")


def explore(
    setup: Callable[[], Any], invariant: Callable[[Any], bool], *workers: Worker, most: int = 50
) -> Any:
    def alone(worker: Worker) -> Worker:
        def run(state: Any) -> None:
            worker(state)

        return run

    return frontrun.explore(
        setup=setup,
        workers=[alone(worker) for worker in workers],
        invariant=invariant,
        max_executions=most,
        timeout_per_run=60.0,
        # A wait with a timeout ends when no other thread can run, and not after two minutes.
        clock="virtual",
        detect_io=False,
        reproduce_on_failure=0,
    )


def assert_holds(
    setup: Callable[[], Any], invariant: Callable[[Any], bool], *workers: Worker
) -> None:
    found = explore(setup, invariant, *workers, most=INTERLEAVINGS)
    assert found.property_holds, found.explanation
    assert found.num_explored > 1


# Batching.

CONFIG = ProducerConfig(store="memory://unused", flush_interval_ms=60_000)


class Batching:
    """A producer without threads that has one record in its open buffer."""

    def __init__(self) -> None:
        runtime = Explored()
        producer = object.__new__(Producer)
        producer._config, producer._pid = CONFIG, os.getpid()
        producer._accumulator = Accumulator(CONFIG, runtime)
        producer._batcher = producer._accumulator.batcher
        producer._monotonic = runtime.monotonic
        self.producer = producer
        self.handles: dict[bytes, WriteHandle] = {}
        self.send(b"first")

    def send(self, record: bytes) -> None:
        self.handles[record] = self.producer.send(record)

    def produce(self, records: list[bytes]) -> None:
        self.handles[records[0]] = self.producer.produce(records)

    def seal(self) -> None:
        accumulator = self.producer._accumulator
        with accumulator._condition:
            accumulator.batcher.seal(5.0)

    def taken(self) -> list[tuple[list[bytes], int, Completion]]:
        """Return the records, the counted bytes, and the outcome of each batch."""
        self.seal()
        found = []
        while (batch := self.producer._batcher.take(5.0)) is not None:
            data = b"".join(batch.encode(Compression.NONE, 1))
            found.append((decode_batch(data), batch.held, batch.completion))
        return found


def every_record_is_in_the_batch_of_its_handle(state: Batching) -> bool:
    found = state.taken()
    where = {record: completion for records, _, completion in found for record in records}
    return sum(len(records) for records, *_ in found) == len(where) and all(
        where[record] is handle._completion for record, handle in state.handles.items()
    )


def every_byte_is_counted(state: Batching) -> bool:
    return all(
        held == BUFFER_HELD + sum(RECORD_HELD + len(record) for record in records)
        for records, held, _ in state.taken()
    )


def test_each_record_that_arrives_while_its_buffer_is_sealed_is_in_exactly_one_batch() -> None:
    assert_holds(
        Batching,
        every_record_is_in_the_batch_of_its_handle,
        lambda state: state.send(b"one"),
        lambda state: state.send(b"two"),
        Batching.seal,
    )


def test_a_list_that_arrives_while_its_buffer_is_sealed_is_in_exactly_one_batch() -> None:
    assert_holds(
        Batching,
        every_record_is_in_the_batch_of_its_handle,
        lambda state: state.produce([b"one", b"and one"]),
        Batching.seal,
    )


def test_without_the_interpreters_lock_the_count_of_free_bytes_loses_updates() -> None:
    found = explore(
        Batching,
        every_byte_is_counted,
        lambda state: state.send(b"one"),
        lambda state: state.send(b"two"),
    )
    # If this ever holds, Producer need not refuse a Python without the lock.
    assert not found.property_holds
    assert "AppendBuffer.left" in found.explanation


def test_with_the_interpreters_lock_the_count_of_free_bytes_is_exact() -> None:
    state = Batching()
    buffer = state.producer._batcher.buffer
    assert isinstance(buffer, AppendBuffer)
    before, records, senders = buffer.left, 3_000, 4
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [
            threading.Thread(
                target=lambda: [state.producer.send(b"record") for _ in range(records)]
            )
            for _ in range(senders)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert state.producer._batcher.buffer is buffer
    assert buffer.count == records * senders + 1
    assert before - buffer.left == records * senders * (RECORD_HELD + len(b"record"))


# The accumulator.


class Accumulating:
    """A buffer with room for one call, two callers, and the thread that frees space."""

    made: type[Accumulator] = Accumulator

    def __init__(self) -> None:
        config = ProducerConfig(
            store="memory://unused", flush_size_bytes=1, max_buffered_bytes=1_000
        )
        self.accumulator = self.made(config, Explored())
        self.handles: list[WriteHandle] = []

    def accept(self) -> None:
        request = ProduceRequest(b"\x02\x00\x00\x00ab" * 100, 100, b"m", 0)
        self.handles.append(self.accumulator.accept(request))

    def work(self) -> None:
        """Fail two uploads and set their outcomes."""
        completed = 0
        while completed < 2:
            work = self.accumulator.next_work()
            assert work is not None
            if work.batch is not None:
                self.accumulator.uploaded(work.batch, PermanentStorageError("no"))
                continue
            for batch in work.completed:
                assert isinstance(batch.outcome, PermanentStorageError)
                batch.completion.complete(batch.outcome)
            self.accumulator.release(work.completed)
            self.accumulator.checkin()
            completed += len(work.completed)


def everything_has_ended(state: Accumulating) -> bool:
    return (
        len(state.handles) == 2
        and all(handle.done() for handle in state.handles)
        and state.accumulator.held_bytes() == 0
    )


def test_a_caller_that_waits_for_room_is_woken_and_all_bytes_are_released() -> None:
    assert_holds(
        Accumulating,
        everything_has_ended,
        Accumulating.accept,
        Accumulating.accept,
        Accumulating.work,
    )


def test_the_exploration_detects_a_release_that_wakes_no_caller() -> None:
    class Mute(Accumulator):
        def release(self, batches: Sequence[Batch]) -> list[Callable[[], None]]:
            with self._condition:
                for batch in batches:
                    self._in_flight_held -= batch.held
                    del self._in_flight[batch.completion]
            return []

    class Broken(Accumulating):
        made = Mute

    found = explore(Broken, everything_has_ended, Broken.accept, Broken.accept, Broken.work)
    assert found.property_holds is False
    assert "deadlock" in found.explanation.lower()


# Handles.


class Handles:
    """A call with two parts, a thread that waits for it, and a callback."""

    made: type[Completion] = Completion

    def __init__(self) -> None:
        runtime = Explored()
        self.parts = {name: self.made(runtime) for name in ("one", "two")}
        handles = {name: WriteHandle(part, 1_700) for name, part in self.parts.items()}
        self.handle = TopicHandle(handles, runtime)
        self.called: list[object] = []
        self.outcomes: list[Durable] = []

    def complete(self, sequence: int) -> None:
        for name, part in self.parts.items():
            part.complete(Durable(sequence, name))

    def wait(self) -> None:
        self.outcomes.append(self.handle.result()["two"])

    def call_back(self) -> None:
        self.handle.add_done_callback(self.called.append)


def every_callback_was_called_once_and_all_saw_one_outcome(state: Handles) -> bool:
    return state.called == [state.handle] and {*state.outcomes} <= {state.handle.result()["two"]}


def test_a_callback_that_is_added_while_the_parts_end_is_called_once() -> None:
    assert_holds(
        Handles,
        every_callback_was_called_once_and_all_saw_one_outcome,
        lambda state: state.complete(1),
        Handles.call_back,
    )


def test_a_waiting_thread_sees_the_final_outcome_when_two_threads_set_it() -> None:
    assert_holds(
        Handles,
        lambda state: {*state.outcomes} == {state.handle.result()["two"]},
        lambda state: state.complete(1),
        lambda state: state.complete(2),
        Handles.wait,
    )


def test_the_exploration_detects_a_handle_without_a_lock() -> None:
    class Unlocked(Completion):
        def add_callback(self, callback: Callable[[], object]) -> None:
            if self.outcome is None:
                self._callbacks.append(callback)  # the outcome may have been set meanwhile
            else:
                callback()

    class Broken(Handles):
        made = Unlocked

    found = explore(
        Broken,
        every_callback_was_called_once_and_all_saw_one_outcome,
        lambda state: state.complete(1),
        Broken.call_back,
    )
    assert not found.property_holds
