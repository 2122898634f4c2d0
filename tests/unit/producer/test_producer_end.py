"""How a producer ends: closed twice, at once, interrupted, at exit, short of threads."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest

from opendata_buffer.config import ProducerConfig
from opendata_buffer.errors import Closed
from opendata_buffer.formats.manifest import Manifest
from opendata_buffer.producer import producer as producer_module
from opendata_buffer.producer.producer import Producer
from opendata_buffer.runtime import SystemRuntime, Task
from opendata_buffer.stores.base import NotModified
from opendata_buffer.stores.memory import MemoryStore

WAIT_S = 60.0


def config(**settings: Any) -> ProducerConfig:
    settings.setdefault("flush_interval_ms", 60_000)
    return ProducerConfig(store="memory://unused", **settings)


def queued(store: MemoryStore) -> int:
    blob = store.get("ingest/manifest")
    assert not isinstance(blob, NotModified)
    return Manifest.parse(blob.data).entry_count


def test_threads_may_close_one_producer_at_once() -> None:
    failures: list[BaseException] = []
    for _ in range(20):
        producer = Producer(config(), store=MemoryStore())
        producer.produce([b"a"])
        together = threading.Barrier(4)

        def close(producer: Producer = producer, together: threading.Barrier = together) -> None:
            together.wait(WAIT_S)
            try:
                producer.close()
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=close) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert failures == []


def test_an_interrupted_close_leaves_no_handle_without_an_outcome(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = MemoryStore()
    producer = Producer(config(), store=store)
    handle = producer.produce([b"a"])

    def interrupted(seconds: float) -> bool:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(producer._accumulator, "await_end", interrupted)
        with pytest.raises(KeyboardInterrupt):
            producer.close()
    with pytest.raises(Closed):
        producer.produce([b"b"])
    producer.close()
    assert handle.watcher.result() is not None
    assert queued(store) == 1


class FewThreads(SystemRuntime):
    """Starts so many threads and no more, as at the end of the interpreter."""

    def __init__(self, limit: int) -> None:
        self.left = limit

    def spawn(self, target: Callable[[], None], name: str) -> Task:
        if not self.left:
            raise RuntimeError("can't start new thread")
        self.left -= 1
        return super().spawn(target, name)


def test_one_worker_is_enough_when_no_more_threads_start() -> None:
    runtime = FewThreads(2)  # the committer, one worker
    store = MemoryStore()
    with Producer(config(flush_size_bytes=1), store=store, runtime=runtime) as producer:
        for n in range(50):
            producer.produce([b"%d" % n])
    assert queued(store) == 50


@pytest.mark.parametrize("threads", [0, 1])
def test_a_producer_is_not_made_when_no_thread_would_flush_it(threads: int) -> None:
    runtime, store = FewThreads(threads), MemoryStore()
    with pytest.raises(RuntimeError, match="new thread"):
        Producer(config(), store=store, runtime=runtime)
    # Nothing of it is left behind that would disturb the next one.
    runtime.left = 10
    with Producer(config(), store=store, runtime=runtime) as producer:
        producer.produce([b"a"])
    assert queued(store) == 1


def test_f30_exit_closes_every_forgotten_producer(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store, broken = MemoryStore(), MemoryStore()
    producers = [Producer(config(), store=broken), Producer(config(), store=store)]
    senders = [producer._sender for producer in producers]
    producers[1].produce([b"a"])
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(producer_module, "_open_senders", senders)
        patch.setattr(senders[0].accumulator, "begin_closing", lambda: 1 / 0)
        producer_module._close_forgotten()
    producers[0].close()
    assert queued(store) == 1
    assert "closing the producer failed" in caplog.text


def test_an_interrupt_ends_the_closing_at_exit(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def interrupted(seconds: float) -> bool:
        raise KeyboardInterrupt

    producer = Producer(config(), store=MemoryStore())
    producer.produce([b"a"])
    with monkeypatch.context() as patch:
        patch.setattr(producer_module, "_open_senders", [producer._sender])
        patch.setattr(producer._accumulator, "await_end", interrupted)
        producer_module._close_forgotten()
    assert "interrupted: 1 produce() calls are not durable" in caplog.text
    producer.close()
