"""``owner``."""

from __future__ import annotations

import json
import os

from opendata_buffer import Consumer, ConsumerConfig
from opendata_buffer.queue.consumer_info import add_query_id
from opendata_buffer.runtime import SystemRuntime
from opendata_buffer.stores.memory import MemoryStore
from tests.unit.cli.shell import fails, fill, manifest_of, ok, topic_of


def test_owner_names_host_process_program_query_and_time(url: str, store: MemoryStore) -> None:
    fill(url, [b"a"])
    assert ok("owner", url).stdout == "ingest: nobody has read it yet\n"
    with Consumer(ConsumerConfig(store=url), program="Spark") as consumer:
        add_query_id(store, ConsumerConfig(store=url), SystemRuntime(), consumer.epoch, "q-1")
    said = ok("owner", url).stdout
    assert said.startswith(
        f"ingest: epoch 1, Spark, query q-1, process {os.getpid()} on {os.uname().nodename}, since "
    )
    assert said.endswith(" s ago)\n")
    found = json.loads(ok("owner", url, "--json").stdout)
    assert (found["known"], found["query"], found["host"]) == (True, "q-1", os.uname().nodename)
    ok("consume", url)
    assert "epoch 2, opendata-buffer consume, process" in ok("owner", url).stdout


def test_a_consumer_that_left_no_note_is_not_taken_for_the_one_before(
    url: str, store: MemoryStore
) -> None:
    fill(url, [b"a"])
    ok("consume", url)
    store.put("ingest/manifest", manifest_of(store).with_epoch(7).raw)
    said = ok("owner", url).stdout
    assert "epoch 7, of a consumer that left no note" in said
    assert "epoch 1 before it was opendata-buffer consume" in said
    assert json.loads(ok("owner", url, "--json").stdout)["known"] is False
    store.delete_many(["ingest/_consumer.json"])
    assert "epoch 7, of a consumer that left no note" in ok("owner", url).stdout
    assert json.loads(ok("owner", url, "--json").stdout)["host"] is None


def test_owner_of_a_topic_is_a_line_for_each_partition_in_use(url: str) -> None:
    _, second, _ = topic_of(url, 3)
    fill(url, [b"a"], data_path_prefix=second)
    ok("consume", url, "--partition", second)
    (line,) = ok("owner", url).stdout.splitlines()
    assert line.startswith(f"{second}: epoch 1, opendata-buffer consume")


def test_owner_of_no_queue_says_where_it_looked(url: str) -> None:
    assert "'ingest/manifest'" in fails("owner", url)
