"""The committer of a process: one for all its producers, whatever way it appends."""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Callable
from typing import Any

import pytest

from opendata_buffer.broker.committer import open_committer
from opendata_buffer.broker.lease import Lease
from opendata_buffer.consumer.consumer import Consumer
from opendata_buffer.errors import InvalidInput
from opendata_buffer.producer.group_commit import Committer, GroupCommitter
from opendata_buffer.runtime import SystemRuntime, Task
from opendata_buffer.stores.memory import MemoryStore
from tests.unit.broker.local import CONFIG, RUNTIME, entries, eventually, queued, soon


def announced(store: MemoryStore) -> bool:
    found = Lease(store, CONFIG, RUNTIME).read()
    return found is not None and found.serves


def test_producers_of_a_process_share_one_and_the_last_one_ends_it() -> None:
    store = MemoryStore()
    first = open_committer(store, CONFIG, RUNTIME, Consumer)
    second = open_committer(store, CONFIG, RUNTIME, Consumer)
    assert first is second
    first.close()
    assert second.append(entries("a"), begin_by=soon()) == 0
    second.close()
    third = open_committer(store, CONFIG, RUNTIME, Consumer)
    assert third is not first
    third.close()


def test_a_process_that_hosts_serves_and_leaves_when_its_last_producer_closes() -> None:
    store = MemoryStore()
    ours = open_committer(store, CONFIG, RUNTIME, Consumer, broker="host")
    eventually(lambda: announced(store))
    for number in range(3):
        ours.append(entries(str(number)), begin_by=soon())
    assert len(queued(store)) == 3
    ours.close()
    # It waits for the broker's last word for some seconds only.
    eventually(lambda: not announced(store))


def test_off_asks_nobody() -> None:
    ours = open_committer(MemoryStore(), CONFIG, RUNTIME, Consumer, broker="off")
    assert isinstance(ours, GroupCommitter)
    ours.close()


@pytest.fixture
def without_websockets(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec

    def missing(name: str, package: str | None = None) -> Any:
        return None if name == "websockets" else found(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", missing)


@pytest.mark.usefixtures("without_websockets")
def test_without_the_extra_a_process_appends_alone_and_cannot_host() -> None:
    ours = open_committer(MemoryStore(), CONFIG, RUNTIME, Consumer)
    assert isinstance(ours, GroupCommitter)
    ours.close()
    with pytest.raises(InvalidInput, match=r"pip install 'opendata-buffer\[broker\]'"):
        open_committer(MemoryStore(), CONFIG, RUNTIME, Consumer, broker="host")


def test_what_has_no_broker_does_not_load_websockets() -> None:
    import subprocess
    import sys

    code = (
        "from opendata_buffer import Producer, ProducerConfig\n"
        "import sys, tempfile\n"
        "with Producer(ProducerConfig(store=tempfile.mkdtemp())) as p: p.produce([b'x'])\n"
        "print('websockets' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


class Exhausted(SystemRuntime):
    """Has no thread for the first who asks for one."""

    def __init__(self) -> None:
        self.refused = False

    def spawn(self, target: Callable[[], None], name: str) -> Task:
        if not self.refused:
            self.refused = True
            raise RuntimeError("can't start new thread")
        return super().spawn(target, name)


def test_where_the_first_producer_of_a_process_fails_the_next_one_does_not_wait_for_it() -> None:
    store, runtime = MemoryStore(), Exhausted()
    with pytest.raises(RuntimeError, match="new thread"):
        open_committer(store, CONFIG, runtime, Consumer, broker="host")
    made: list[Committer] = []

    def open_next() -> None:
        made.append(open_committer(store, CONFIG, runtime, Consumer, broker="host"))

    threading.Thread(target=open_next, daemon=True).start()
    eventually(lambda: made)
    made[0].close()
