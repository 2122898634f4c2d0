"""``topic`` and ``abort``."""

from __future__ import annotations

import json
from typing import Any

import pytest

from opendata_buffer.config import QueueConfig
from opendata_buffer.formats.batch import Transaction, batch_key, encode_batch
from opendata_buffer.formats.manifest import Metadata, NewEntry
from opendata_buffer.messages import CONTINUE_TXN, build_uuid
from opendata_buffer.queue.queue import Queue
from opendata_buffer.runtime import SystemRuntime
from opendata_buffer.stores.base import Store
from opendata_buffer.stores.memory import MemoryStore
from tests.unit.cli.shell import bytes_of, fails, fill, flat, json_of, ok, run


def description(store: MemoryStore) -> Any:
    return json.loads(bytes_of(store, "_topic.json"))


def test_a_topic_is_created_expanded_and_described(url: str, store: MemoryStore) -> None:
    assert ok("topic", "create", url, "--partitions", "2").stdout == (
        f"created a topic at {url} with 2 partitions\n"
    )
    printed = ok("topic", "expand", url, "--partitions", "3").stdout
    assert printed == f"the topic at {url} has 3 partitions, had 2\n"
    fill(url, [b"a"], [b"b"], data_path_prefix="p-00001-05mv")
    found = json_of("status", url)
    assert found["queue_length"] == 2
    assert [(each["name"], each["queue_length"]) for each in found["partitions"]] == [
        ("p-00000-04pn", 0), ("p-00001-05mv", 2), ("p-00002-0bvb", 0),
    ]  # fmt: skip
    assert found["partitions"][1]["oldest_age_seconds"] >= 0
    shown = ok("status", url).stdout
    assert "3 partitions, 2 batches wait" in " ".join(shown.split())
    assert "p-00002-0bvb" in shown


def test_a_partition_drains_until_it_is_empty_and_is_removed(url: str, store: MemoryStore) -> None:
    ok("topic", "create", url, "--partitions", "2")
    fill(url, [b"a"], data_path_prefix="p-00001-05mv")
    assert "drains: it leaves the topic when" in ok("topic", "drain", url, "p-00001").stdout
    found = json_of("status", url)["partitions"]
    assert [each["state"] for each in found] == ["active", "draining"]
    ok("consume", url, "--ack", "--partition", "p-00001")
    assert "drains" in ok("topic", "drain", url, "p-00001").stdout  # its producers may not know yet
    drained = description(store)
    drained["partitions"][1]["since"] -= 60_000
    store.put("_topic.json", json.dumps(drained).encode())
    assert ok("topic", "drain", url, "1").stdout == "p-00001-05mv has left the topic\n"
    assert description(store)["left"] == ["p-00001-05mv"]
    assert "has left" in ok("topic", "drain", url, "p-00001").stdout
    assert [each["name"] for each in description(store)["partitions"]] == ["p-00000-04pn"]


def test_the_error_of_a_queue_command_on_a_topic_says_how_to_name_a_partition(url: str) -> None:
    ok("topic", "create", url, "--partitions", "2")
    assert "'p-00001-05mv' of the topic" in fails("fsck", url, "--partition", "1")
    for command in ("produce", "consume", "status", "fsck", "gc"):
        ok(command, url)  # applies to all partitions
    for words in (
        ("work", url, "--", "cat"),
        ("skip", url, "0"),
        ("restore", url, "x"),
        ("dump", url),
    ):
        line = fails(*words)
        assert f"there is a topic at {url}, and one queue is needed" in line
        assert "Name a partition with --partition" in line


def test_a_partition_and_a_prefix_cannot_be_combined(url: str) -> None:
    result = run("status", url, "--partition", "p-00000", "--data-path-prefix", "x")
    assert result.exit_code == 2
    assert "leave --data-path-prefix" in result.stderr


# ---- transactions


A = b"\1AAAAA"
RUNTIME = SystemRuntime()


def pending(store: Store, url: str, name: str, age_s: int = 7_200) -> None:
    config = QueueConfig(store=url, data_path_prefix=name)
    message = build_uuid(A, 2, CONTINUE_TXN)
    location = batch_key(name, RUNTIME.ulid(), Transaction("orders", 7), message)
    store.put(location, encode_batch([b"x"]))
    metadata = (Metadata(0, RUNTIME.now_ms() - 1000 * age_s),)
    Queue(store, config, runtime=RUNTIME, role="test").append([NewEntry(location, metadata)])


def test_the_transactions_of_a_topic_are_listed_and_ended(url: str, store: MemoryStore) -> None:
    ok("topic", "create", url, "--partitions", "2")
    names = ["p-00000-04pn", "p-00001-05mv"]
    for name in names:
        pending(store, url, name)
    shown = flat("status", url)
    assert f"open: {A.hex()} app orders, batch 7 p-00000-04pn from 0 1 batch, 1 behind" in shown
    assert "2:00:00 old open" in shown
    found = json_of("status", url)
    assert [each["partition"] for each in found["transactions"]] == names
    assert (found["undecided"], len(found["notes"])) == (1, 1)
    assert len(json_of("status", url, "--partition", "1")["transactions"]) == 1
    printed = ok("abort", url, A.hex()).stdout.splitlines()
    assert printed == [f"aborted 1 batch of {A.hex()} in {name}" for name in names]
    assert json_of("status", url)["transactions"] == []


def test_a_missing_transaction_and_a_missing_queue_are_errors(url: str) -> None:
    assert "there is no queue" in fails("abort", url, A.hex())
    fill(url, [b"a"])
    assert f"'opendata-buffer status {url}'" in fails("abort", url, A.hex())


@pytest.mark.parametrize(("age_s", "warned"), [(60, False), (1_800, True)])
def test_f40_status_counts_undecided_transactions_and_warns_of_old_ones(
    url: str, store: MemoryStore, age_s: int, warned: bool
) -> None:
    ok("topic", "create", url, "--partitions", "1")
    pending(store, url, "p-00000-04pn", age_s)
    found = json_of("status", url, "--partition", "p-00000")
    assert found["undecided"] == 1
    assert age_s <= found["oldest_undecided_seconds"] < age_s + 60
    assert [f"opendata-buffer abort {url}" in each for each in found["notes"]] == [True] * warned
    shown = ok("status", url, "--partition", "p-00000").stdout
    assert "1 transaction, the oldest" in " ".join(shown.split())
    ended = json_of("abort", url, A.hex(), "--force")
    assert ([each["batches"] for each in ended["aborted"]], ended["committed"]) == ([1], [])
