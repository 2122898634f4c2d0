"""The write handle, with the methods of ``concurrent.futures.Future``."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import FIRST_EXCEPTION, Future, as_completed, wait
from typing import Any

import pytest

from opendata_buffer import TopicHandle
from opendata_buffer.errors import Drained, TransientStorageError
from opendata_buffer.producer.handles import Completion, Durable, Handle, WriteHandle
from opendata_buffer.runtime import SystemRuntime

DURABLE, OTHER = Durable(7, "p-00000/x.batch"), Durable(8, "p-00001/y.batch")
BOTH = {"p-00000": DURABLE, "p-00001": OTHER}


class Call:
    """A call of a queue's producer, or a call of a topic's producer with two parts."""

    def __init__(self, parts: int) -> None:
        runtime = SystemRuntime()
        self.parts = [
            Completion(runtime, "memory://orders ('ingest/manifest')") for _ in range(parts)
        ]
        handles = [WriteHandle(part, 5 + n) for n, part in enumerate(self.parts)]
        topic = TopicHandle(dict(zip(BOTH, handles, strict=False)), runtime)
        self.handle: Handle[Any] = handles[0] if parts == 1 else topic
        self.durable = DURABLE if parts == 1 else BOTH

    def complete(self, *outcomes: Durable | BaseException) -> None:
        for part, outcome in zip(self.parts, outcomes or (DURABLE, OTHER), strict=False):
            part.complete(outcome)


@pytest.fixture(params=[1, 2])
def call(request: pytest.FixtureRequest) -> Call:
    return Call(request.param)


def test_a_handle_has_the_methods_of_a_future(call: Call) -> None:
    public = {"result", "done", "exception", "add_done_callback"}
    assert public <= {name for name in dir(Future) if hasattr(call.handle, name)}
    assert not hasattr(call.handle, "reslut")


def test_a_handle_waits_and_keeps_its_first_outcome(call: Call) -> None:
    assert not call.handle.done()
    for ask in (call.handle.result, call.handle.exception):
        with pytest.raises(TimeoutError, match="wait again"):
            ask(timeout=0.01)
    threading.Timer(0.01, call.complete).start()
    assert call.handle.result() == call.durable
    call.complete(TransientStorageError("late"))
    assert call.handle.result(0) == call.durable
    assert (call.handle.done(), call.handle.exception()) == (True, None)


def test_every_method_raises_a_failure_once_all_parts_have_ended(call: Call) -> None:
    call.parts[0].complete(Drained("p-00000/manifest"))
    assert call.handle.done() is (len(call.parts) == 1)  # the other part may still land
    call.complete(DURABLE, TransientStorageError("down"))
    for ask in (call.handle.result, lambda: asyncio.run(awaited(call))):
        with pytest.raises(Drained):  # the first failure
            ask()
    assert isinstance(call.handle.exception(), Drained)


def test_a_callback_gets_the_handle_and_its_errors_do_not_stop_others(
    call: Call, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[object] = []

    def broken(_: object) -> None:
        raise ValueError("a bug of the caller's")

    call.handle.add_done_callback(broken)
    call.handle.add_done_callback(calls.append)
    call.parts[-1].complete(OTHER if call.parts[1:] else DURABLE)
    assert calls == [] or len(call.parts) == 1
    call.complete()
    call.handle.add_done_callback(calls.append)  # at once
    call.handle.add_done_callback(broken)
    assert calls == [call.handle, call.handle]
    assert caplog.text.count("ValueError: a bug of the caller's") == 2


def test_an_interrupt_during_a_callback_in_the_thread_of_the_caller_is_raised_there(
    call: Call,
) -> None:
    call.complete()

    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        call.handle.add_done_callback(interrupted)


async def awaited(call: Call) -> Any:
    return await call.handle


def test_a_handle_can_be_awaited_and_completed_by_another_thread(call: Call) -> None:
    async def main() -> Any:
        threading.Timer(0.01, call.complete).start()
        return await asyncio.wait_for(awaited(call), 20)

    assert asyncio.run(main()) == call.durable


def test_a_closed_event_loop_is_not_called(call: Call) -> None:
    async def give_up() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(awaited(call), 0.01)

    asyncio.run(give_up())
    call.complete()
    assert call.handle.result() == call.durable


def test_an_empty_call_is_durable_at_once() -> None:
    handle = TopicHandle({}, SystemRuntime())
    calls: list[object] = []
    handle.add_done_callback(calls.append)
    assert (handle.done(), handle.result(0), calls) == (True, {}, [handle])


def test_a_handle_is_a_future_for_the_standard_library(call: Call) -> None:
    assert isinstance(call.handle, Future)
    assert wait([call.handle], timeout=0) == (set(), {call.handle})
    threading.Timer(0.01, call.complete).start()
    assert wait([call.handle], timeout=60).done == {call.handle}
    assert list(as_completed([call.handle], timeout=0)) == [call.handle]
    assert call.handle.result(0) == call.durable


def test_wait_returns_at_the_first_failure(call: Call) -> None:
    pending = Call(1).handle
    error = TransientStorageError("down")
    threading.Timer(0.01, lambda: call.complete(error, error)).start()
    done, not_done = wait([call.handle, pending], timeout=60, return_when=FIRST_EXCEPTION)
    assert (done, not_done) == ({call.handle}, {pending})


def test_as_completed_yields_handles_in_the_order_of_their_outcomes() -> None:
    calls = [Call(1), Call(2), Call(1)]
    found = as_completed([call.handle for call in calls], timeout=60)
    for call in reversed(calls):
        threading.Timer(0.01, call.complete).start()
        assert next(found) is call.handle


def test_a_handle_that_was_done_before_anyone_waited_is_done_at_once(call: Call) -> None:
    call.complete()
    assert wait([call.handle], timeout=0).done == {call.handle}
    assert list(as_completed([call.handle], timeout=0)) == [call.handle]


def test_asyncio_wraps_a_handle(call: Call) -> None:
    async def wrapped() -> object:
        future = asyncio.wrap_future(call.handle)
        threading.Timer(0.01, call.complete).start()
        return await asyncio.wait_for(future, 60)

    assert asyncio.run(wrapped()) == call.durable


def test_asyncio_gives_up_waiting_for_a_handle_that_is_not_done(call: Call) -> None:
    async def impatient() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.wrap_future(call.handle), 0.01)

    asyncio.run(impatient())
    call.complete()
    assert call.handle.result(0) == call.durable


def test_accepted_records_cannot_be_cancelled(call: Call) -> None:
    assert (call.handle.cancel(), call.handle.cancelled()) == (False, False)
    assert call.handle.running()
    call.complete()
    assert (call.handle.cancel(), call.handle.running()) == (False, False)


def test_many_threads_may_begin_to_wait_for_one_handle_at_once(call: Call) -> None:
    together = threading.Barrier(9)
    found: list[object] = []

    def wait_for_it() -> None:
        together.wait()
        found.append(wait([call.handle], timeout=60).done)

    threads = [threading.Thread(target=wait_for_it) for _ in range(8)]
    for thread in threads:
        thread.start()
    together.wait()
    call.complete()
    for thread in threads:
        thread.join(60)
    assert found == [{call.handle}] * 8


def test_the_text_of_a_handle_shows_its_queue_and_its_outcome(call: Call) -> None:
    name = type(call.handle).__name__
    assert repr(call.handle).startswith(f"<{name} of ")
    assert "pending" in repr(call.handle)
    call.complete()
    assert "sequence 7" in repr(call.handle)
    failed = Call(1)
    assert repr(failed.handle) == "<WriteHandle of memory://orders ('ingest/manifest'): pending>"
    failed.complete(TransientStorageError("down"))
    assert repr(failed.handle).endswith("failed with TransientStorageError>")
