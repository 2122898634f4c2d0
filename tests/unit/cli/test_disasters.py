"""The page "When objects are gone", played through with the commands that it names."""

from __future__ import annotations

import json

import pytest

from opendata_buffer.config import ConsumerConfig
from opendata_buffer.consumer.consumer import Consumer
from opendata_buffer.errors import DataLoss, QueueReset
from opendata_buffer.stores.memory import MemoryStore
from tests.unit.cli.shell import (
    bytes_of,
    fails,
    fill,
    json_of,
    manifest_of,
    ok,
    records_of,
    run,
    topic_of,
)


def everything_in(store: MemoryStore) -> dict[str, bytes]:
    return {each.key: bytes_of(store, each.key) for each in store.list("").objects}


def restore(store: MemoryStore, objects: dict[str, bytes], *but: str) -> None:
    """What bucket versioning brings back."""
    for key, data in objects.items():
        if key not in but:
            store.put(key, data)


def three_of_which_one_is_read(url: str) -> str:
    """A queue in use. The position that its reader has saved."""
    fill(url, [b"a"], [b"b"], [b"c"])
    with Consumer(ConsumerConfig(store=url)) as consumer:
        batch = consumer.next_batch()
        assert batch is not None
        consumer.ack_through(batch.sequence)
        return str(consumer.position)


def test_a_lost_manifest_of_a_partition_is_no_empty_partition(url: str, store: MemoryStore) -> None:
    first, second = topic_of(url, 2)
    assert json_of("status", url)["queue_length"] == 0  # never written
    fill(url, [b"a"], data_path_prefix=first)
    fill(url, [b"b"], [b"c"], data_path_prefix=second)
    store.delete_many([f"{second}/manifest"])
    for command in (
        ("status", url), ("status", url, "--max-backlog", "9"),
        ("trim", url, "--to", "latest", "--dry-run"),
        ("consume", url), ("consume", url, "--ack"), ("gc", url),
    ):  # fmt: skip
        result = run(*command)
        assert result.exit_code == 1, command
        line = result.stderr.splitlines()[-1]
        assert f"manifest '{second}/manifest' is gone" in line, command
        assert f"fsck {url} --data-path-prefix {second} --repair'" in line, command
    assert f"{second}: problem: manifest" in run("fsck", url).stdout
    ok("fsck", url, "--repair", "--yes")
    assert sorted(ok("consume", url, "--ack").stdout.split()) == ["a", "b", "c"]


def test_a_lost_manifest(url: str, store: MemoryStore) -> None:
    position = three_of_which_one_is_read(url)
    store.delete_many(["ingest/manifest"])
    for command in (
        ("status", url), ("consume", url), ("consume", url, "--ack"),
        ("produce", url), ("gc", url), ("trim", url, "--to", "latest"),
        ("skip", url, "0"),
    ):  # fmt: skip
        assert f"'opendata-buffer fsck {url} --repair'" in fails(*command), command
    assert len(store.list("ingest/0").objects) == 3
    result = run("fsck", url)
    assert result.exit_code == 1
    assert "problem: manifest 'ingest/manifest'" in result.stdout
    assert "note: 3 batches that no entry names" in result.stdout
    would = ok("fsck", url, "--repair", "--dry-run").stdout
    assert would.count("note: unread batch 'ingest/") == 3
    assert "repair: manifest 'ingest/manifest' is rebuilt from the batches" in would
    assert not store.list("ingest/manifest").objects
    assert "failOnDataLoss=false" in ok("fsck", url, "--repair", "--yes").stdout
    before = store.list("").objects
    ok("fsck", url, "--repair", "--yes")
    assert store.list("").objects == before  # A sound manifest stays.
    ok("fsck", url)
    assert set(records_of(store)) >= {b"b", b"c"}
    with pytest.raises(DataLoss, match="is needed but manifest"):
        Consumer(ConsumerConfig(store=url), position)
    fill(url, [b"d"])
    out = ok("consume", url, "--ack").stdout.splitlines()
    assert {"b", "c"} <= set(out)
    assert out[-1] == "d"


def test_a_manifest_of_yesterday(url: str, store: MemoryStore) -> None:
    fill(url, [b"a"])
    yesterday = manifest_of(store).raw
    fill(url, [b"b"], [b"c"])
    store.put("ingest/manifest", yesterday)
    assert "went backwards" in fails("consume", url, "--ack")
    for options in ((), ("--max-lag", "600"), ("--json",)):
        error = fails("status", url, *options).removeprefix("error: ")
        assert error.startswith("producers and consumers are refused: manifest 'ingest/manifest'")
        assert f"fsck {url} --repair'" in error
    assert json.loads(run("status", url, "--json").stdout)["notes"] == [error]
    ok("fsck", url, "--repair", "--yes")
    assert json_of("status", url)["notes"] == []
    # In the order of names: those of one millisecond are in no order.
    assert sorted(records_of(store)) == [b"a", b"b", b"c"]
    assert any(each.key.startswith("ingest/manifest.broken-") for each in store.list("").objects)


def test_a_deleted_prefix_that_comes_back_whole_or_without_its_manifest(
    url: str, store: MemoryStore
) -> None:
    three_of_which_one_is_read(url)
    versions = everything_in(store)
    store.delete_many(versions)
    assert "there is no queue" in fails("fsck", url)
    assert "there is no queue" in fails("consume", url, "--ack")
    assert store.list("").objects == ()
    restore(store, versions)
    ok("fsck", url)
    assert records_of(store) == [b"b", b"c"]
    store.delete_many(versions)
    restore(store, versions, "ingest/manifest", "ingest/_owner.json")
    ok("fsck", url, "--repair", "--yes")
    # Nothing tells any more what was read: rather twice than never.
    assert sorted(records_of(store)) == [b"a", b"b", b"c"]
    ok("fsck", url)


def test_a_deleted_prefix_that_does_not_come_back(url: str, store: MemoryStore) -> None:
    position = three_of_which_one_is_read(url)
    store.delete_many(everything_in(store))
    fill(url, [b"new 0"], [b"new 1"])
    with pytest.raises(QueueReset, match="belongs to queue"):
        Consumer(ConsumerConfig(store=url), position)
    assert ok("consume", url, "--ack").stdout == "new 0\nnew 1\n"


def test_a_lifecycle_rule_that_expired_the_oldest_batches(url: str, store: MemoryStore) -> None:
    fill(url, [b"a"], [b"b"], [b"c"])
    versions = everything_in(store)
    expired = [entry.location for entry in manifest_of(store).entries()[:2]]
    store.delete_many(expired)
    result = run("fsck", url)
    assert [f"sequence {n} " in result.stdout for n in range(3)] == [True, True, False]
    assert result.stderr.startswith("error: 2 problems in the queue")
    assert "does not exist" in fails("consume", url, "--ack")
    # With versions nothing is lost.
    restore(store, {expired[0]: versions[expired[0]]})
    ok("fsck", url, "--repair", "--yes")
    (report,) = json_of("status", url)["quarantine"]
    assert (report["sequence"], report["copied_bytes"]) == (1, None)
    assert report["metadata"][0]["ingestion_time_ms"] > 0
    assert ok("consume", url, "--ack").stdout == "a\nc\n"


def test_a_lost_description_of_a_topic(url: str, store: MemoryStore) -> None:
    topic_of(url, 2)
    fill(url, [b"a"], data_path_prefix="p-00000-04pn")
    store.delete_many(["_topic.json"])
    for command in (
        ("status", url), ("consume", url, "--ack"), ("produce", url), ("gc", url),
    ):  # fmt: skip
        assert "description '_topic.json' is gone" in fails(*command), command
    assert not store.list("ingest").objects
    partitions = [{"name": each, "state": "active"} for each in ("p-00000-04pn", "p-00001-05mv")]
    again = {"version": 1, "id": "written again", "next": 100, "partitions": partitions}
    store.put("_topic.json", json.dumps(again).encode())
    fill(url, [b"b"], data_path_prefix="p-00001-05mv")
    assert sorted(ok("consume", url, "--ack").stdout.split()) == ["a", "b"]
    ok("topic", "expand", url, "--partitions", "3")
    assert "p-00100-" in ok("status", url).stdout


@pytest.mark.parametrize(
    ("marker", "says"),
    [
        (b'{"hello": [1]}', "'ingest/_owner.json' in memory://"),
        (b'{"version": 1, "manifest": "other"}', "belongs to the queue with manifest"),
    ],
)
def test_a_marker_that_has_everybody_refused_shows_in_the_status(
    url: str, store: MemoryStore, marker: bytes, says: str
) -> None:
    fill(url, [b"a"])
    store.put("ingest/_owner.json", marker)
    (note,) = json.loads(run("status", url, "--json").stdout)["notes"]
    assert says in note
    assert note.removeprefix("producers and consumers are refused: ")[:30] in fails(
        "consume", url, "--ack"
    )
    assert note in fails("status", url, "--max-backlog", "9")


def test_a_lost_marker(url: str, store: MemoryStore) -> None:
    position = three_of_which_one_is_read(url)
    marker = json.loads(everything_in(store)["ingest/_owner.json"])
    store.delete_many(["ingest/_owner.json"])
    fill(url, [b"d"])
    with pytest.raises(QueueReset, match="write the old id back"):
        Consumer(ConsumerConfig(store=url), position)
    assert position.split(":")[0] == marker["id"]
    now = json.loads(everything_in(store)["ingest/_owner.json"])
    store.put("ingest/_owner.json", json.dumps({**now, "id": marker["id"]}).encode())
    with Consumer(ConsumerConfig(store=url), position) as consumer:
        batch = consumer.next_batch()
        assert batch is not None
        assert batch.entries == [b"b"]
