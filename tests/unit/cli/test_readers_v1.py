"""``readers``, ``status`` and ``fsck`` on a log with v1 consumers."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import pytest

from opendata_buffer import InvalidInput, admin
from opendata_buffer.formats.manifest import SEALED_EPOCH, NewEntry
from opendata_buffer.queue.log_index import LogIndex
from opendata_buffer.stores.memory import MemoryStore
from tests.support.v1_consumer import V1Consumer
from tests.unit.cli.shell import bytes_of, fails, fill, json_of, manifest_of, misused, ok, run
from tests.unit.cli.test_readers import flat_of, lines_of, log_of, small_segments

__all__ = ["small_segments"]

QUEUE = "other/manifest"


def index_of(store: MemoryStore) -> LogIndex:
    return LogIndex.from_json(bytes_of(store, "ingest/_log.json"))


def reader(url: str, name: str = "other") -> dict[str, Any]:
    (found,) = [each for each in lines_of("readers", "list", url) if each["name"] == name]
    return found


def test_a_v1_consumer_is_added_fed_listed_and_deleted(url: str, store: MemoryStore) -> None:
    log_of(url, 30)
    added = ok("readers", "add", url, "other", "--v1", "other")
    assert "from sequence 0 on" in added.stdout
    assert "manifest_path: other/manifest" in added.stdout
    assert "data_path_prefix: other" in added.stdout
    assert "its collector would delete the log's batches" in added.stderr
    assert ok("readers", "feed", url).stdout == "other: other/manifest: fed up to sequence 30\n"
    consumer = V1Consumer(store, "other")
    assert consumer.claim()
    assert len(consumer.next_entries()) == 30
    consumer.dequeue(9)
    found = reader(url)
    assert (found["v1"], found["next_sequence"], found["lag"]) == ("other", 10, 20)
    assert (found["fed"], found["unfed"], found["stopped"], found["epoch"]) == (30, 0, "", 1)
    assert "v1 consumer of other/manifest" in flat_of(ok("readers", "list", url))
    assert "fed up to 30, 0 batches to go" in flat_of(ok("readers", "describe", url, "other"))
    assert "consumer v1 consumer of other/manifest" in flat_of(ok("status", url))
    assert ok("readers", "delete", url, "other").stdout == "ingest: deleted reader other\n"
    assert manifest_of(store, QUEUE).epoch == SEALED_EPOCH
    assert manifest_of(store, QUEUE).entry_count == 0
    assert "no v1 consumers" in ok("readers", "feed", url).stderr


@pytest.mark.parametrize(("where", "begins"), [("earliest", 0), ("latest", 8), ("3", 3)])
def test_a_v1_consumer_begins_where_the_operator_says(
    url: str, store: MemoryStore, where: str, begins: int
) -> None:
    log_of(url, 8)
    found = json_of("readers", "add", url, "other", "--v1", "a/b", "--from", where, "--json")
    assert found == {
        "reader": "other",
        "manifest_path": "a/b/manifest",
        "data_path_prefix": "a/b",
        "begins": begins,
    }
    assert manifest_of(store, "a/b/manifest").next_sequence == begins


def test_a_reset_of_a_v1_consumer_is_refused_with_a_way_out(url: str) -> None:
    log_of(url, 8)
    ok("readers", "add", url, "other", "--v1", "other")
    line = fails("readers", "reset", url, "other", "--to-latest")
    assert "only moves forward" in line
    assert "delete it and add it again with another prefix" in line
    with pytest.raises(InvalidInput, match="only moves forward"):
        admin.reset_reader(url, "other", "earliest")
    assert "only moves forward" in fails("consume", url, "--reader", "other", "--ack")


def test_a_v1_consumer_needs_a_log_that_is_not_a_topic(url: str) -> None:
    assert "--v1" in misused("readers", "add", url, "other")
    fill(url, [b"a"])
    assert "is not a log" in fails("readers", "add", url, "other", "--v1", "other")
    topic = url + "-topic"
    ok("topic", "create", topic, "--partitions", "2")
    assert "cannot follow partitions" in fails("readers", "add", topic, "other", "--v1", "other")


def test_a_prefix_that_cannot_be_a_key_is_named_as_the_prefix(url: str) -> None:
    log_of(url, 1)
    refused = fails("readers", "add", url, "other", "--v1", "/other")
    assert "error: prefix is '/other'" in refused
    assert "relative name" in refused


def test_feeding_that_has_stopped_is_shown_with_the_reason(url: str, store: MemoryStore) -> None:
    log_of(url, 8)
    ok("readers", "add", url, "other", "--v1", "other")
    ok("readers", "feed", url)
    foreign = manifest_of(store, QUEUE).append([NewEntry("other/x.batch")])
    store.put(QUEUE, foreign.raw)
    for line in (
        fails("readers", "feed", url),
        reader(url)["stopped"],
        " ".join(json_of("status", url)["notes"]),
    ):
        assert "'other/manifest' of reader 'other'" in line
        assert "another producer writes to it" in line
    assert "FEEDING HAS STOPPED" in flat_of(ok("readers", "list", url))
    assert "add it again with another prefix" in " ".join(json_of("status", url)["notes"])


def test_an_expired_v1_consumer_is_shown_with_the_entries_whose_batches_are_gone(
    url: str, store: MemoryStore
) -> None:
    log_of(url, 8)
    ok("readers", "add", url, "other", "--v1", "other")
    ok("readers", "feed", url)
    index = index_of(store).without_readers(["other"]).with_floor(5)
    store.put("ingest/_log.json", index.to_json())
    stopped = reader(url)["stopped"]
    assert "did not move for too long, and has expired" in stopped
    assert "the batches of 5 entries of 'other/manifest' were deleted" in stopped
    ok("readers", "delete", url, "other")
    assert index_of(store).v1 == {}


def test_a_rebuilt_index_knows_v1_consumers(url: str, store: MemoryStore) -> None:
    log_of(url, 40)
    ok("readers", "add", url, "other", "--v1", "other")
    ok("readers", "feed", url)
    store.delete_many(["ingest/_log.json"])
    ok("fsck", url, "--repair", "--yes")
    assert index_of(store).v1 == {"other": "other"}
    assert "other" in index_of(store).readers
    assert reader(url)["stopped"] == ""


def test_a_v1_consumer_is_added_from_python(url: str) -> None:
    log_of(url, 8)
    assert admin.add_v1_reader(url, "other", "other", start=datetime.now(UTC)) == 8
    assert [each.v1 for each in admin.list_readers(url)] == ["other"]


def test_following_feeds_until_it_is_interrupted(
    url: str, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    log_of(url, 3)
    ok("readers", "add", url, "other", "--v1", "other")
    slept = []

    def sleep(runtime: object, seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 1:
            fill(url, [b"more"])
        if len(slept) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr("opendata_buffer.runtime.SystemRuntime.sleep", sleep)
    result = run("readers", "feed", url, "--follow", "--json")
    assert [json.loads(line)["fed"] for line in result.stdout.splitlines()] in ([3, 4], [3, 4, 4])
    assert slept[0] == 0.5
