"""``transactions list`` and ``transactions abort``, and the warning of ``status``."""

from __future__ import annotations

import json

import pytest

from opendata_buffer.config import QueueConfig
from opendata_buffer.formats.batch import encode_batch
from opendata_buffer.formats.keys import Transaction, batch_key
from opendata_buffer.formats.manifest import Metadata, NewEntry
from opendata_buffer.messages.message_ids import CONTINUE_TXN, build_uuid
from opendata_buffer.queue.queue import Queue
from opendata_buffer.runtime import SystemRuntime
from opendata_buffer.stores.memory import MemoryStore
from tests.unit.cli.shell import fails, fill, ok

A = b"\1AAAAA"
RUNTIME = SystemRuntime()


def pending(store: MemoryStore, url: str, name: str, age_s: int = 7_200) -> None:
    config = QueueConfig(store=url, data_path_prefix=name)
    message = build_uuid(A, 2, CONTINUE_TXN)
    location = batch_key(name, RUNTIME.ulid(), Transaction("orders", 7), message)
    store.put(location, encode_batch([b"x"]))
    metadata = (Metadata(0, RUNTIME.now_ms() - 1000 * age_s),)
    Queue(store, config, runtime=RUNTIME, role="test").append([NewEntry(location, metadata)])


def test_the_transactions_of_a_topic_are_listed_and_ended(url: str, store: MemoryStore) -> None:
    ok("topic", "create", url, "--partitions", "2")
    assert ok("transactions", "list", url).stdout == ""
    names = ["p-00000-04pn", "p-00001-05mv"]
    for name in names:
        pending(store, url, name)
    lines = ok("transactions", "list", url).stdout.splitlines()
    assert lines[0].startswith(f"p-00000-04pn  {A.hex()}  app orders, batch 7  from 0  1 batch,")
    assert lines[1].endswith("2 h 0 min old  undecided")
    found = [
        json.loads(line)
        for line in ok("transactions", "list", url, "--json").stdout.split("\n")
        if line
    ]
    assert [each["partition"] for each in found] == names
    assert len(ok("transactions", "list", url, "--partition", "1").stdout.splitlines()) == 1
    said = ok("transactions", "abort", url, A.hex()).stdout.splitlines()
    assert said == [f"rolled back 1 batch of {A.hex()} in {name}" for name in names]
    assert ok("transactions", "list", url).stdout == ""


def test_abort_as_json(url: str, store: MemoryStore) -> None:
    ok("topic", "create", url, "--partitions", "1")
    pending(store, url, "p-00000-04pn")
    done = json.loads(ok("transactions", "abort", url, A.hex(), "--json").stdout)
    assert done["committed"] == []
    assert done["rolled_back"][0]["producer"] == A.hex()


def test_a_young_one_is_ended_by_force_only(url: str, store: MemoryStore) -> None:
    ok("topic", "create", url, "--partitions", "1")
    pending(store, url, "p-00000-04pn", age_s=60)
    assert "pass --force" in fails("transactions", "abort", url, A.hex())
    ok("transactions", "abort", url, A.hex(), "--force")


def test_one_that_is_not_there_and_a_queue_that_is_not_there(url: str) -> None:
    assert "there is no queue" in fails("transactions", "list", url)
    fill(url, [b"a"])
    assert ok("transactions", "list", url).stdout == ""
    assert "transactions list" in fails("transactions", "abort", url, A.hex())


@pytest.mark.parametrize(("age_s", "warned"), [(60, False), (1_800, True)])
def test_f40_status_tells_of_undecided_transactions_and_warns_of_old_ones(
    url: str, store: MemoryStore, age_s: int, warned: bool
) -> None:
    ok("topic", "create", url, "--partitions", "1")
    pending(store, url, "p-00000-04pn", age_s)
    found = json.loads(ok("status", url, "--partition", "p-00000", "--json").stdout)
    assert found["undecided"] == 1
    assert age_s <= found["oldest_undecided_seconds"] < age_s + 60
    assert [f"transactions list {url}" in each for each in found["notes"]] == [True] * warned
    shown = ok("status", url, "--partition", "p-00000").stdout
    assert "1 transaction, the oldest" in " ".join(shown.split())
