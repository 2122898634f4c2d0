"""``readers``, and the other commands on a log."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace

import pytest
from click.testing import Result

from opendata_buffer import Consumer, TopicProducer
from opendata_buffer.config import ConsumerConfig, QueueConfig
from opendata_buffer.errors import BatchMissing, Fenced
from opendata_buffer.formats.manifest import Manifest, NewEntry
from opendata_buffer.gc import GarbageCollector
from opendata_buffer.queue.log import Log
from opendata_buffer.queue.log_index import LogIndex
from opendata_buffer.queue.reader_positions import ReaderPosition
from opendata_buffer.runtime import SystemRuntime
from opendata_buffer.stores.memory import MemoryStore
from opendata_buffer.topic.topic import Topic
from tests.unit.cli.shell import (
    bytes_of,
    fails,
    fill,
    flat,
    json_of,
    manifest_of,
    misused,
    ok,
    run,
    topic_of,
)

DAY_MS = 86_400_000
MANIFEST = "ingest/manifest"
INDEX, POSITION = "ingest/_log.json", "ingest/_readers/{}.json"


@pytest.fixture(autouse=True)
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Log, "most_entries", 16)
    monkeypatch.setattr(Log, "left_entries", 4)


def index_of(store: MemoryStore) -> LogIndex:
    return LogIndex.from_json(bytes_of(store, INDEX))


def position_of(store: MemoryStore, name: str) -> ReaderPosition:
    return ReaderPosition.from_json(bytes_of(store, POSITION.format(name)))


def set_position(store: MemoryStore, name: str, **fields: object) -> None:
    changed = replace(position_of(store, name), **fields)  # type: ignore[arg-type]
    store.put(POSITION.format(name), changed.to_json())


def log_of(url: str, batches: int, *more: str) -> None:
    """Create a log of this number of batches with one record each, most of them in segments."""
    fill(url, [b"0"])
    ok("readers", "enable", url, "--yes", *more)
    fill(url, *([b"%d" % number] for number in range(1, batches)))


def flat_of(result: Result) -> str:
    return " ".join(result.stdout.split())


def records(*arguments: str) -> list[bytes]:
    return ok(*arguments).stdout_bytes.splitlines()


def numbers(begin: int, end: int) -> list[bytes]:
    return [b"%d" % number for number in range(begin, end)]


def lines_of(*arguments: str) -> list[dict[str, object]]:
    return [json.loads(each) for each in ok(*arguments, "--json").stdout.splitlines()]


# ---- enable


def test_enabling_readers_asks_and_explains_the_limits_of_other_consumers(
    url: str, store: MemoryStore
) -> None:
    fill(url, [b"a"])
    line = fails("readers", "enable", url)
    for part in ("Producers go on", "take batches from all readers", "garbage collectors", "--yes"):
        assert part in line
    assert [each.key for each in store.list(INDEX).objects] == []


def test_f42_a_running_consumer_is_named_and_fenced(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(url, [b"a"], [b"b"])
    consumer = Consumer(url)
    batch = consumer.next_batch()
    assert batch is not None
    monkeypatch.setattr(
        "opendata_buffer.cli.readers.running_consumer", lambda *_: "the consumer of 'ingest'"
    )
    result = ok("readers", "enable", url, "--yes")
    assert "warning: the consumer of 'ingest' seems to run: it is fenced" in result.stderr
    with pytest.raises(Fenced):
        consumer.ack_through(batch.sequence)
    assert records("consume", url) == [b"a", b"b"]


def test_enabling_readers_warns_about_collectors_without_support_for_logs(url: str) -> None:
    fill(url, [b"a"])
    warning = "no garbage collector of another library"
    assert warning in ok("readers", "enable", url, "--yes").stderr
    assert warning not in ok("readers", "enable", url, "--yes").stderr


def test_status_names_the_command_that_raised_the_epoch(url: str, store: MemoryStore) -> None:
    log_of(url, 40)
    assert "consumer opendata-buffer readers enable, process" in flat("status", url)
    store.delete_many([INDEX])
    ok("fsck", url, "--repair", "--yes")
    assert "consumer opendata-buffer fsck --repair, process" in flat("status", url)
    store.delete_many(["ingest/manifest"])
    ok("fsck", url, "--repair", "--yes")
    shown = flat("status", url)
    assert "consumer opendata-buffer fsck --repair, process" in shown
    assert "another client" not in shown
    assert json_of("status", url)["consumer"]["epoch"] == manifest_of(store).epoch


def test_enabling_again_changes_only_the_given_times(url: str, store: MemoryStore) -> None:
    log_of(url, 1, "--retention", "7d")
    made = json_of("readers", "enable", url, "--reader-expiry", "P2DT12H")
    assert made["made"] is False
    index = index_of(store)
    assert (index.retention_ms, index.reader_expiry_ms) == (7 * DAY_MS, DAY_MS * 5 // 2)
    ok("readers", "enable", url, "--retention", "none")
    assert index_of(store).retention_ms is None
    assert index_of(store).reader_expiry_ms == DAY_MS * 5 // 2
    result = ok("readers", "enable", url, "--retention-bytes", "2GiB")
    assert "retention: 2,147,483,648 bytes at least" in result.stdout
    assert index_of(store).retention_bytes == 2 << 30
    ok("readers", "enable", url, "--retention-bytes", "none", "--retention", "1d")
    assert (index_of(store).retention_bytes, index_of(store).retention_ms) == (None, DAY_MS)


@pytest.mark.parametrize(
    ("option", "value", "why"),
    [
        ("--retention", "0s", "a retention of 0"),
        ("--retention", "soon", "invalid duration 'soon': use one such as 7d"),
        ("--retention", "", "invalid duration"),
        ("--retention", "-1d", "invalid duration"),
        ("--retention-bytes", "0", "a retention of 0"),
        ("--retention-bytes", "many", "invalid size 'many': use one such as 500GB"),
        ("--retention-bytes", "-1", "invalid size"),
        ("--retention-bytes", "1XB", "invalid size"),
        ("--reader-expiry", "none", "invalid duration"),
        ("--reader-expiry", "9m", "10 minutes at least"),
    ],
)
def test_invalid_times_are_refused(
    url: str, store: MemoryStore, option: str, value: str, why: str
) -> None:
    fill(url, [b"a"])
    assert why in misused("readers", "enable", url, "--yes", option, value)
    assert not store.list(INDEX).objects


@pytest.mark.parametrize(
    ("size", "bytes_"), [("2KB", 2_000), ("2kB", 2_000), ("2KiB", 2_048), ("3MiB", 3 * 2**20)]
)
def test_a_size_may_have_any_usual_unit(url: str, size: str, bytes_: int) -> None:
    fill(url, [b"a"])
    (made,) = lines_of("readers", "enable", url, "--yes", "--retention-bytes", size)
    assert made["retention_bytes"] == bytes_


def test_f45_a_log_whose_index_is_lost_is_not_created_again(url: str, store: MemoryStore) -> None:
    log_of(url, 40)
    store.delete_many([INDEX])
    for words in (("readers", "list"), ("readers", "enable"), ("status",), ("gc",)):
        assert "is gone. Restore its latest version" in run(*words, url).stderr
    assert "is gone" in fails("consume", url, "--ack", "--reader", "x")
    assert not store.list(INDEX).objects


def test_an_interrupted_enable_can_be_repeated(url: str, store: MemoryStore) -> None:
    log_of(url, 3)
    store.delete_many([INDEX])  # as between the writes of the marker and the index
    assert "was interrupted, run it again" in fails("readers", "list", url)
    made = json_of("readers", "enable", url, "--yes")
    assert (made["made"], made["first_sequence"]) == (True, 0)
    assert records("consume", url) == numbers(0, 3)


def test_enabling_readers_does_not_create_a_queue(url: str, store: MemoryStore) -> None:
    assert "there is no queue" in fails("readers", "enable", url, "--yes")
    assert not store.list("").objects


def test_every_partition_of_a_topic_becomes_a_log(url: str, store: MemoryStore) -> None:
    names = topic_of(url, 2)
    assert "was ever written" in fails("readers", "list", url)
    made = lines_of("readers", "enable", url, "--yes")
    assert [(each["partition"], each["made"]) for each in made] == [(name, True) for name in names]
    lines_of("readers", "reset", url, "x", "--to-earliest")
    listed = lines_of("readers", "list", url)
    assert [(each["partition"], each["name"]) for each in listed] == [(name, "x") for name in names]
    one = lines_of("readers", "describe", url, "x", "--partition", "1")
    assert [each["partition"] for each in one] == [names[1]]
    ok("readers", "delete", url, "x")
    assert "there is no reader 'x'" in fails("readers", "describe", url, "x")
    assert "there is no reader 'x'" in fails("readers", "delete", url, "x")


# ---- list, describe, delete


def test_readers_are_listed_with_their_lag(url: str) -> None:
    log_of(url, 40)
    ok("consume", url, "--ack", "--reader", "slow", "--max-batches", "1")
    ok("consume", url, "--ack", "--reader", "quick")
    quick, slow = lines_of("readers", "list", url)
    assert (quick["name"], quick["lag"], quick["next_sequence"]) == ("quick", 0, 40)
    assert (slow["name"], slow["lag"], slow["next_sequence"]) == ("slow", 39, 1)
    assert quick["oldest_unread_seconds"] is None
    assert isinstance(slow["oldest_unread_seconds"], float)
    assert (slow["program"], slow["runs"]) == ("opendata-buffer consume", False)
    assert "slow" in ok("readers", "list", url).stdout
    shown = flat("readers", "describe", url, "slow")
    assert "ingest: reader slow" in shown
    assert "behind 39 batches" in shown


def test_the_error_about_an_unknown_reader_lists_the_known_ones(url: str) -> None:
    log_of(url, 1)
    assert "readers of this log: none yet" in fails("readers", "describe", url, "x")
    for name in ("b", "a"):
        ok("readers", "reset", url, name, "--to-earliest")
    for words in (
        ("describe", url, "x"),
        ("delete", url, "x"),
        ("reset", url, "x", "--shift-by=1"),
    ):
        assert fails("readers", *words).endswith("no reader 'x'; readers of this log: a, b")
    assert "there is no reader 'x'" in fails("consume", url, "--reader", "x")


def test_the_error_about_a_queue_without_readers_names_the_command_that_enables_them(
    url: str,
) -> None:
    fill(url, [b"a"])
    for words in (("readers", "list", url), ("readers", "reset", url, "x", "--to-latest")):
        assert f"'opendata-buffer readers enable {url}' makes it one" in fails(*words)
    assert "is not a log" in fails("consume", url, "--reader", "x")
    assert "is not a log" in fails("consume", url, "--reader", "x", "--ack")


def test_a_deleted_reader_starts_again_from_the_beginning(url: str, store: MemoryStore) -> None:
    log_of(url, 3, "--retention", "7d")
    assert records("consume", url, "--ack", "--reader", "x") == numbers(0, 3)
    store.put("ingest/_readers/x/claims.json", b"{}")  # the claims of its workers
    ok("readers", "delete", url, "x")
    assert index_of(store).readers == ()
    assert not store.list("ingest/_readers/").objects
    assert records("consume", url, "--ack", "--reader", "x") == numbers(0, 3)


# ---- reset


@pytest.mark.parametrize(
    ("option", "after", "again", "passed"),
    [
        (("--to-earliest",), 0, 10, 0),
        (("--to-latest",), 40, 0, 30),
        (("--to-sequence", "12"), 12, 0, 2),
        (("--shift-by", "-3"), 7, 3, 0),
        (("--shift-by", "5"), 15, 0, 5),
        (("--shift-by", "-99"), 0, 10, 0),
        (("--shift-by", "99"), 40, 0, 30),
        (("--to-datetime", "2020-01-31T03:00:00Z"), 0, 10, 0),
        (("--to-datetime", "2999-01-31T03:00:00Z"), 40, 0, 30),
        (("--by-duration", "1h"), 0, 10, 0),
    ],
)
def test_a_reset_follows_its_printed_plan(
    url: str, store: MemoryStore, option: tuple[str, ...], after: int, again: int, passed: int
) -> None:
    log_of(url, 40, "--retention", "7d")
    ok("consume", url, "--ack", "--reader", "x", "--max-batches", "10")
    objects = store.list("").objects
    planned = json_of("readers", "reset", url, "x", *option, "--dry-run")
    assert store.list("").objects == objects
    assert planned == {
        "dry_run": True,
        "partition": "ingest",
        "reader": "x",
        "before": 10,
        "after": after,
        "again": again,
        "passed": passed,
        "runs": "",
    }
    done = json_of("readers", "reset", url, "x", *option)
    assert done == {**planned, "dry_run": False}
    assert position_of(store, "x").next == after
    assert records("consume", url, "--ack", "--reader", "x") == numbers(after, 40)


def test_a_running_reader_is_reset_only_with_force_and_is_fenced(url: str) -> None:
    log_of(url, 40)
    config = ConsumerConfig(store=url, reader="x")
    consumer = Consumer(config, program="billing.py")
    batch = consumer.next_batch()
    assert batch is not None
    for words in (("reset", url, "x", "--to-latest"), ("delete", url, "x")):
        line = fails("readers", *words)
        assert "reader 'x' runs: billing.py on " in line
        assert "--force" in line
    assert "from 0, to 40" in ok("readers", "reset", url, "x", "--to-latest", "--force").stdout
    with pytest.raises(Fenced, match="another consumer or query reads by this name"):
        consumer.ack_through(batch.sequence)


@pytest.mark.parametrize(
    ("words", "code", "why"),
    [
        (("x",), 2, "give exactly one of --to-earliest, --to-latest"),
        (("x", "--to-earliest", "--to-latest"), 2, "give exactly one of"),
        (("x", "--to-sequence", "99"), 1, "sequence 99 is beyond the end of the queue"),
        (("x", "--to-datetime", "monday"), 2, "invalid position 'monday'"),
        (("x", "--to-datetime", "latest"), 2, "invalid time 'latest'"),
        (("a b", "--to-latest"), 2, "reader is 'a b': use 1 to 100 letters"),
        (("../x", "--to-latest"), 2, "reader is '../x'"),
    ],
)
def test_an_impossible_reset_changes_nothing(
    url: str, store: MemoryStore, words: tuple[str, ...], code: int, why: str
) -> None:
    log_of(url, 40)
    before = store.list("").objects
    result = run("readers", "reset", url, *words)
    assert result.exit_code == code
    assert why in result.stderr
    assert store.list("").objects == before


@pytest.mark.parametrize("times", [1, 3])
def test_a_reset_to_the_earliest_batch_next_to_a_collector_is_planned_again(
    url: str, store: MemoryStore, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    names = topic_of(url, 2)
    ok("readers", "enable", url, "--yes", "--retention", "7d")
    for name in names:
        fill(url, *([each] for each in numbers(0, 30)), data_path_prefix=name)
    ok("consume", url, "--reader", "billing", "--ack")
    ok("readers", "reset", url, "other", "--to-latest")
    really, raised = MemoryStore.put_if, [0]

    def put_if(self: MemoryStore, key: str, *rest: object) -> object:
        if key.endswith("billing.json") and raised[0] < times:
            raised[0] += 1
            path = key.replace("_readers/billing.json", "_log.json")
            index = LogIndex.from_json(bytes_of(store, path))
            store.put(path, index.with_floor(index.floor + 1).to_json())
        return really(self, key, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(MemoryStore, "put_if", put_if)
    lines = lines_of("readers", "reset", url, "billing", "--to-earliest")
    assert raised[0] == times
    assert [each["after"] for each in lines] == [times, 0]
    assert [each["again"] for each in lines] == [30 - times, 30]


def test_a_reset_to_the_earliest_batch_is_not_replanned_forever(
    url: str, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    log_of(url, 30, "--retention", "7d")
    ok("consume", url, "--reader", "billing", "--ack")
    really = MemoryStore.put_if

    def put_if(self: MemoryStore, key: str, *rest: object) -> object:
        if key.endswith("billing.json"):
            index = index_of(store)
            store.put(INDEX, index.with_floor(index.floor + 1).to_json())
        return really(self, key, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(MemoryStore, "put_if", put_if)
    line = fails("readers", "reset", url, "billing", "--to-earliest")
    assert "rose to" in line
    assert "again" in line


def test_a_reset_to_a_sequence_needs_one_partition_because_each_has_its_own_sequences(
    url: str,
) -> None:
    topic_of(url, 2)
    ok("readers", "enable", url, "--yes")
    for option in ("--shift-by", "--to-sequence"):
        result = run("readers", "reset", url, "x", option, "1")
        assert result.exit_code == 2
        assert "name one with --partition" in result.stderr


# ---- consume


def test_a_reader_is_set_to_the_first_sequence_of_a_log(url: str) -> None:
    ok("produce", url, stdin=b"a\nb\n")
    ok("readers", "enable", url, "--yes")
    ok("readers", "reset", url, "billing", "--to-latest")
    ok("readers", "reset", url, "billing", "--to-sequence", "0")
    assert json_of("readers", "describe", url, "billing")["next_sequence"] == 0


def test_consume_with_a_reader_moves_its_position_only_with_ack(url: str) -> None:
    log_of(url, 40, "--retention", "7d")
    assert records("consume", url, "--ack", "--reader", "x", "--max-batches", "3") == numbers(0, 3)
    assert records("consume", url, "--reader", "x", "--max-batches", "3") == numbers(3, 6)
    assert records("consume", url, "--ack", "--reader", "x") == numbers(3, 40)
    assert records("consume", url, "--ack", "--reader", "y") == numbers(0, 40)


def test_consume_asks_before_it_fences_a_reader(url: str, store: MemoryStore) -> None:
    log_of(url, 3)
    ok("consume", url, "--ack", "--reader", "x", "--max-batches", "1")
    set_position(store, "x", host="elsewhere", process=7)
    assert "reader 'x' (opendata-buffer consume on elsewhere, process 7) seems to run" in fails(
        "consume", url, "--ack", "--reader", "x"
    )
    assert records("consume", url, "--ack", "--reader", "x", "--yes") == numbers(1, 3)


# ---- status


def test_status_shows_the_retained_batches_and_the_position_of_each_reader(
    url: str, store: MemoryStore
) -> None:
    log_of(url, 40, "--retention", "36h")
    ok("consume", url, "--ack", "--reader", "slow", "--max-batches", "2")
    ok("consume", url, "--ack", "--reader", "quick", "--max-batches", "39")
    before = store.list("").objects
    found = json_of("status", url)
    assert (found["queue_length"], found["oldest_sequence"], found["newest_sequence"]) == (
        40,
        0,
        39,
    )
    assert (found["orphans"], found["missing"], found["refused"]) == (0, 0, "")
    log = found["log"]
    assert (log["floor"], log["end"], log["kept"]) == (0, 40, 40)
    assert log["in_segments"] == manifest_of(store).first_sequence
    assert log["in_segments"] >= 16
    assert (log["retention_ms"], log["reader_expiry_ms"]) == (DAY_MS * 3 // 2, DAY_MS * 7)
    quick, slow = log["readers"]
    assert (quick["name"], quick["lag"]) == ("quick", 1)
    assert quick["lag_bytes"] == 13
    assert (slow["name"], slow["lag"], slow["lag_bytes"]) == ("slow", 38, None)
    shown = flat("status", url)
    assert "log 40 batches kept, 0 to 39;" in shown
    assert "retention 1d12h at least; readers expire after 7d" in shown
    assert "reader slow: 38 batches behind, the oldest 0:00:0" in shown
    assert store.list("").objects == before


def test_status_of_a_log_counts_batches_before_the_floor_as_consumed(
    url: str, store: MemoryStore
) -> None:
    log_of(url, 40)
    ok("consume", url, "--ack", "--reader", "x")
    ok("gc", url)
    found = json_of("status", url)
    assert (found["log"]["floor"], found["log"]["kept"]) == (40, 0)
    assert (found["queue_length"], found["oldest_sequence"]) == (0, None)
    assert (found["orphans"], found["missing"]) == (40, 0)
    assert "nothing kept, the next is 40" in flat("status", url)


def test_status_warns_about_a_reader_that_expires_soon(url: str, store: MemoryStore) -> None:
    log_of(url, 3, "--reader-expiry", "4d")
    ok("consume", url, "--ack", "--reader", "x", "--max-batches", "1")
    assert json_of("status", url)["notes"] == []
    moved_ms = position_of(store, "x").moved_ms - 3 * DAY_MS - 60_000
    set_position(store, "x", moved_ms=moved_ms)
    (note,) = json_of("status", url)["notes"]
    assert note.startswith("reader 'x' expires in 24.0 h")
    assert "23:58:5" in flat("status", url)
    assert "SOON" in flat("status", url)


def test_status_shows_that_the_position_of_a_reader_is_missing(
    url: str, store: MemoryStore
) -> None:
    log_of(url, 30)
    for name in ("billing", "search"):
        ok("consume", url, "--reader", name, "--ack")
    store.delete_many([POSITION.format("billing")])
    (note,) = json_of("status", url)["notes"]
    for part in (
        "the position of reader 'billing' is missing",
        "keeps everything from sequence 0 on",
        f"'opendata-buffer readers delete {url} billing'",
    ):
        assert part in note
    (first, second) = lines_of("readers", "list", url)
    assert (first["position_missing"], second["position_missing"]) == (True, False)
    assert "position is missing" in flat("readers", "list", url)
    ok("readers", "delete", url, "billing")
    assert json_of("status", url)["notes"] == []


def test_an_unreadable_position_does_not_hide_other_readers(url: str, store: MemoryStore) -> None:
    log_of(url, 3, "--retention", "7d")
    for name in ("a", "b"):
        ok("consume", url, "--reader", name, "--ack")
    store.put(POSITION.format("a"), b"{")
    result = run("readers", "list", url, "--json")
    assert result.exit_code == 1
    assert [json.loads(each)["name"] for each in result.stdout.splitlines()] == ["b"]
    for part in ("_readers/a.json", f"'opendata-buffer readers reset {url} a --to-earliest'"):
        assert part in result.stderr
    found = json_of("status", url)
    assert [each["name"] for each in found["log"]["readers"]] == ["b"]
    assert any("_readers/a.json" in each for each in found["notes"])
    ok("readers", "reset", url, "b", "--to-earliest")
    ok("readers", "describe", url, "b")
    assert position_of(store, "b").next == 0


def test_f42_status_shows_the_batches_that_a_consumer_without_a_reader_dequeued(
    url: str, store: MemoryStore
) -> None:
    log_of(url, 3)
    store.put("ingest/manifest", manifest_of(store).drop_through(1).raw)
    (note,) = json_of("status", url)["notes"]
    assert "sequences 0 to 1 are gone: a consumer that knows no readers (v1) took them off" in note


@pytest.mark.parametrize("damage", ["gone", "damaged"])
def test_status_exits_1_if_a_reader_cannot_continue(
    url: str, store: MemoryStore, damage: str
) -> None:
    log_of(url, 40)
    ok("readers", "reset", url, "x", "--to-earliest")
    first = store.list("ingest/_log/").objects[0].key
    if damage == "gone":
        store.delete_many([first])
    else:
        store.put(first, b"\xff" * 40)
    result = run("status", url)
    assert result.exit_code == 1
    assert f"readers are refused at sequence 0: {first!r}" in result.stderr
    assert f"'opendata-buffer readers list {url}' shows where they are" in result.stderr
    line = fails("consume", url, "--ack", "--reader", "x")
    assert f"'opendata-buffer readers reset {url} x --to-sequence" in line


def collect_as_v1(store: MemoryStore) -> None:
    """Delete the batches that are not in the manifest, as a v1 collector does."""
    named = {*manifest_of(store).locations()}
    batches = (each.key for each in store.list("ingest/").objects if each.key.endswith(".batch"))
    store.delete_many([each for each in batches if each not in named])


def command_in(text: str, words: str) -> list[str]:
    """Return the arguments of the first printed command that starts with these words."""
    found = re.findall(rf"'opendata-buffer ({words} [^']*)'", text)
    assert found, text
    return shlex.split(found[0])


@pytest.mark.parametrize("takes", [0, 2])
def test_f42_batches_that_a_v1_collector_deleted_are_counted_and_readers_learn_where_to_continue(
    url: str, store: MemoryStore, takes: int
) -> None:
    log_of(url, 100)
    for name, first in (("behind", 3), ("end", 98)):
        ok("readers", "reset", url, name, "--to-sequence", str(first))
    kept = manifest_of(store)
    thief = kept.with_epoch(kept.epoch + 1)
    gone = index_of(
        store
    ).end  # Batches that were dequeued from the manifest are lost, and not missing.
    first = gone + takes
    store.put("ingest/manifest", thief.drop_through(first - 1).raw)
    collect_as_v1(store)
    result = run("status", url, "--json")
    assert result.exit_code == 1
    shown = json.loads(result.stdout)
    assert (shown["queue_length"], shown["oldest_sequence"]) == (100 - first, first)
    log = shown["log"]
    assert (log["missing"], log["first_readable"]) == (gone, first)
    assert [each["lag"] for each in log["readers"]] == [100 - first, 2]
    text = " ".join(shown["notes"])
    assert f"the objects of {gone} batches (sequences 0 to {first - 1}) are gone" in text
    assert "stop it first" in text
    assert " end " not in text
    assert " end " not in result.stderr
    readable = f"first sequence that can be read is {first}"
    with Consumer(url, reader="new") as new, pytest.raises(BatchMissing, match=readable):
        new.next_batch()
    ok("readers", "delete", url, "new")
    for words in (("fsck", url), ("consume", url, "--ack", "--reader", "behind")):
        result = run(*words)
        assert result.exit_code == 1
        assert str(first) in command_in(result.stdout + result.stderr, "readers reset")
    ok(*command_in(result.stderr, "readers reset"))
    assert records("consume", url, "--ack", "--reader", "behind") == numbers(first, 100)
    assert run("status", url).exit_code == 0


def test_f42_fsck_reports_missing_batches_of_a_log_as_one_problem(
    url: str, store: MemoryStore
) -> None:
    log_of(url, 100)
    collect_as_v1(store)
    first = manifest_of(store).first_sequence
    (problem,) = json.loads(run("fsck", url, "--json").stdout)["problems"]
    assert (problem["count"], problem["sequence"]) == (first, 0)
    assert problem["last_sequence"] == first - 1
    assert f"problem: sequences 0 to {first - 1}: the objects of {first} batches" in flat_of(
        run("fsck", url)
    )


def test_f42_a_reader_learns_the_dequeued_batches_and_the_command_that_accepts_the_loss(
    url: str, store: MemoryStore
) -> None:
    log_of(url, 10)
    ok("readers", "reset", url, "x", "--to-earliest")
    store.put("ingest/manifest", manifest_of(store).drop_through(6).raw)
    (reader,) = lines_of("readers", "list", url)
    assert reader["lag"] == 3
    assert json_of("status", url)["log"]["kept"] == 3
    line = fails("consume", url, "--ack", "--reader", "x")
    assert "reader 'x' needs sequence 0, and the log continues at 7: 7 batches are gone" in line
    assert "manifest" not in line.split("gone")[0]
    ok(*command_in(line, "readers reset"))
    assert records("consume", url, "--ack", "--reader", "x") == numbers(7, 10)


def test_the_error_about_missing_batches_tells_a_read_only_reader_how_to_continue(
    url: str, store: MemoryStore
) -> None:
    log_of(url, 40)
    collect_as_v1(store)
    first = manifest_of(store).first_sequence
    line = fails("consume", url)
    assert f"the first sequence that can be read is {first}" in line
    assert "skip" not in line
    assert records(*command_in(line, "consume")) == numbers(first, 40)


def test_in_a_partition_of_a_topic_a_printed_command_names_the_partition(
    url: str, store: MemoryStore
) -> None:
    (name,) = topic_of(url, 1)
    ok("readers", "enable", url, "--yes")
    with TopicProducer(url) as producer:
        for number in range(40):
            producer.produce([b"%d" % number])
            producer.flush()
    ok("readers", "reset", url, "x", "--to-earliest")
    manifest = manifest_of(store, f"{name}/manifest")
    assert manifest.first_sequence
    gone = {*(each.key for each in store.list(f"{name}/").objects if each.key.endswith(".batch"))}
    store.delete_many([*gone - {*manifest.locations()}])
    store.put(f"{name}/manifest", manifest.with_epoch(manifest.epoch + 1).raw)
    line = fails("consume", url)
    assert "--partition" in line
    assert records(*command_in(line, "consume")) == numbers(manifest.first_sequence, 40)
    for words in (("status",), ("fsck",), ("consume", "--ack", "--reader", "x")):
        result = run(words[0], url, *words[1:])
        assert result.exit_code == 1
        found = command_in(result.stderr, "readers reset")
        assert found[-1] == str(manifest.first_sequence), words
    ok(*found)
    assert records("consume", url, "--ack", "--reader", "x") == numbers(manifest.first_sequence, 40)


def test_fsck_does_not_suggest_skip_for_a_batch_of_a_log(url: str, store: MemoryStore) -> None:
    log_of(url, 3)
    outside = NewEntry("elsewhere/x.batch")
    store.put("ingest/manifest", manifest_of(store).append([outside]).raw)
    ok("readers", "reset", url, "x", "--to-sequence", "3")
    result = run("fsck", url, "--repair", "--yes")
    assert result.exit_code == 1
    assert "opendata-buffer skip" not in result.stdout + result.stderr
    ok(*command_in(result.stderr, "readers reset"))
    assert lines_of("readers", "list", url)[0]["lag"] == 0


def test_a_probe_of_a_log_uses_the_reader_with_the_largest_lag(url: str) -> None:
    log_of(url, 40)
    assert json_of("status", url, "--max-backlog", "0")["batches"] == 0
    ok("consume", url, "--ack", "--reader", "quick", "--max-batches", "39")
    ok("readers", "reset", url, "slow", "--to-sequence", "10")
    assert json_of("status", url, "--max-backlog", "30")["batches"] == 30
    assert run("status", url, "--max-backlog", "29").exit_code == 3


def test_status_reads_the_same_number_of_objects_for_a_long_log_as_for_a_short_one(
    url: str, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    log_of(url, 40)
    ok("readers", "reset", url, "x", "--to-earliest")
    read: list[str] = []
    really = MemoryStore.get

    def get(self: MemoryStore, key: str, **options: object) -> object:
        read.append(key)
        return really(self, key, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(MemoryStore, "get", get)
    ok("status", url, "--json")
    short = len(read)
    fill(url, *([b"more"] for _ in range(200)))
    assert len(index_of(store).parts()) > 5
    read.clear()
    ok("status", url, "--json")
    assert len(read) <= short


def test_the_status_of_a_topic_shows_the_readers_of_each_partition(url: str) -> None:
    names = topic_of(url, 2)
    ok("readers", "enable", url, "--yes")
    ok("readers", "reset", url, "x", "--to-earliest")
    found = json_of("status", url)
    shown = [[each["name"] for each in part["log"]["readers"]] for part in found["partitions"]]
    assert shown == [["x"], ["x"]]
    assert f"{names[1]}: reader x: 0 batches behind" in flat("status", url)


# ---- readers of a topic


def named_in(url: str) -> dict[str, list[str]]:
    """Return the partitions that list each reader."""
    found: dict[str, list[str]] = {}
    for each in lines_of("readers", "list", url):
        found.setdefault(str(each["name"]), []).append(str(each["partition"]))
    return found


def test_f47_a_reader_missing_in_a_partition_is_shown_and_registered_by_enabling_again(
    url: str,
) -> None:
    names = topic_of(url, 2)
    ok("readers", "enable", url, "--yes")
    ok("readers", "reset", url, "billing", "--to-earliest")
    assert json_of("status", url)["notes"] == []
    ok("readers", "delete", url, "billing", "--partition", "1")
    warning = f"reader 'billing' is missing from {names[1]}"
    help_ = f"'opendata-buffer readers enable {url}'"
    (note,) = json_of("status", url)["notes"]
    shown = (note, flat("status", url), run("readers", "list", url).stderr)
    assert all(warning in text and help_ in text for text in shown)
    again = ok("readers", "enable", url).stdout
    assert f"{names[1]}: registered reader billing, from sequence 0 on" in again
    assert f"{names[0]}: registered" not in again
    assert named_in(url) == {"billing": names}
    assert json_of("status", url)["notes"] == []
    found = lines_of("readers", "enable", url)
    assert [each["registered"] for each in found] == [{}, {}]


def test_f47_a_reset_of_a_new_reader_is_known_to_a_later_expansion(url: str) -> None:
    topic_of(url, 2)
    ok("readers", "enable", url, "--yes")
    ok("readers", "reset", url, "billing", "--to-latest")
    ok("topic", "expand", url, "--partitions", "4")
    assert len(named_in(url)["billing"]) == 4


def test_a_reader_that_was_deleted_from_a_topic_is_not_added_to_new_partitions(
    url: str,
) -> None:
    topic_of(url, 2)
    ok("readers", "enable", url, "--yes")
    for name in ("billing", "search"):
        ok("readers", "reset", url, name, "--to-earliest")
    deleted = lines_of("readers", "delete", url, "billing")
    assert len(deleted) == 2
    ok("topic", "expand", url, "--partitions", "3")
    assert {name: len(found) for name, found in named_in(url).items()} == {"search": 3}


def test_f47_partitions_that_are_added_while_readers_are_enabled_become_logs(
    url: str, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = topic_of(url, 2)
    really, added = MemoryStore.put_if, [False]

    def put_if(self: MemoryStore, key: str, *rest: object) -> object:
        if key.endswith("_log.json") and not added[0]:
            added[0] = True
            Topic.open(url, store=store).expand(3)
        return really(self, key, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(MemoryStore, "put_if", put_if)
    made = lines_of("readers", "enable", url, "--yes")
    assert added[0]
    assert [each["made"] for each in made] == [True] * 3
    assert [each["partition"] for each in made][:2] == names


def test_f47_a_reader_of_one_partition_is_known_to_a_later_expansion(url: str) -> None:
    """Workers of a reader open a partition like a queue."""
    names = topic_of(url, 2)
    ok("readers", "enable", url, "--yes")
    for partition in ("0", "1"):
        ok("consume", url, "--partition", partition, "--reader", "billing", "--ack")
    ok("topic", "expand", url, "--partitions", "3")
    found = named_in(url)["billing"]
    assert (found[:2], len(found)) == (names, 3)


def leave_behind(url: str, store: MemoryStore) -> list[str]:
    """Let ``billing`` expire with 3 unread batches in partition 0, which then leaves the topic."""
    names = topic_of(url, 2)
    ok("readers", "enable", url, "--yes")
    for name in ("billing", "search"):
        ok("readers", "reset", url, name, "--to-earliest")
    fill(url, [b"0"], [b"1"], [b"2"], data_path_prefix=names[0])
    assert records("consume", url, "--ack", "--reader", "search") == numbers(0, 3)
    config = QueueConfig(store=url, data_path_prefix=names[0])
    Log(store, config, SystemRuntime()).change(
        lambda index: index and index.without_readers(["billing"]).with_floor(3)
    )
    ok("topic", "drain", url, "0")
    assert Topic.open(url, store=store).remove_drained(0) == [names[0]]
    return names


@pytest.mark.parametrize("accept", ["as printed", "--to-earliest", "--to-latest", "delete"])
def test_f53_losses_of_an_expired_reader_in_a_removed_partition_are_shown_and_accepted(
    url: str, store: MemoryStore, accept: str
) -> None:
    left, other = leave_behind(url, store)
    (note,) = json_of("status", url)["notes"]
    assert f"reader 'billing' had expired and had not read {left} to the end" in note
    assert note in run("readers", "list", url).stderr.replace("warning: ", "")
    line = fails("consume", url, "--ack", "--reader", "billing")
    assert "needs sequence 0, and the log continues at 3: 3 batches are gone" in line
    if accept == "delete":
        deleted = lines_of(*command_in(note, "readers delete"))
        assert [each["partition"] for each in deleted] == [other, left]
        assert "billing" not in named_in(url)
    elif accept == "as printed":
        ok(*command_in(line, "readers reset"))
    else:
        ok("readers", "reset", url, "billing", accept)
    fill(url, [b"3"], data_path_prefix=other)
    assert records("consume", url, "--ack", "--reader", "billing") == [b"3"]
    assert json_of("status", url)["notes"] == []
    fails("readers", "delete", url, "nobody")


# ---- repair


@pytest.mark.parametrize(
    ("words", "instead"),
    [
        (("trim", "--to", "latest", "--yes"), "'opendata-buffer readers enable {url} --retention"),
        (("skip", "3", "--force"), "'opendata-buffer readers reset {url} x --to-sequence 4'"),
    ],
)
def test_the_error_about_an_unsupported_command_names_the_one_for_logs(
    url: str, store: MemoryStore, words: tuple[str, ...], instead: str
) -> None:
    log_of(url, 40)
    ok("readers", "reset", url, "x", "--to-earliest")
    ok("readers", "reset", url, "past", "--to-sequence", "4")
    before = store.list("").objects
    line = fails(words[0], url, *words[1:])
    assert "is a log with named readers: " in line
    assert instead.format(url=url) in line
    assert " past " not in line
    assert store.list("").objects == before


def test_the_error_about_consuming_a_log_without_a_reader_says_how_to_name_one(
    url: str, store: MemoryStore
) -> None:
    log_of(url, 40)
    line = fails("consume", url, "--ack", "--yes")
    assert "is a log with named readers. Add --reader NAME" in line
    assert ok("consume", url, "--ack", "--reader", "billing", "--max-batches", "1").stdout


def test_fsck_checks_a_log_from_its_floor_on(url: str, store: MemoryStore) -> None:
    log_of(url, 40)
    found = json_of("fsck", url)
    assert (found["ok"], found["batches"], found["records"]) == (True, 40, 40)
    locations = [each["location"] for each in lines_of("consume", url)]
    ok("consume", url, "--ack", "--reader", "x", "--max-batches", "10")
    ok("gc", url)
    store.delete_many([str(each) for each in locations[:10]])
    found = json_of("fsck", url)
    assert (found["ok"], found["batches"]) == (True, 30)


def test_fsck_names_a_bad_batch_of_a_log_and_how_readers_skip_it(
    url: str, store: MemoryStore
) -> None:
    log_of(url, 40)
    location = str(lines_of("consume", url)[3]["location"])
    store.delete_many([location])
    result = run("fsck", url, "--repair", "--yes")
    assert result.exit_code == 1
    assert f"problem: sequence 3 {location!r}" in result.stdout
    assert "all that there are have passed" in result.stderr
    ok("readers", "reset", url, "behind", "--to-sequence", "3")
    ok("readers", "reset", url, "past", "--to-sequence", "4")
    result = run("fsck", url, "--repair", "--yes")
    assert f"'opendata-buffer readers reset {url} behind --to-sequence 4'" in result.stderr
    assert " past " not in result.stderr
    assert records("consume", url, "--from", "4") == numbers(4, 40)


@pytest.mark.parametrize("damage", ["gone", "damaged"])
def test_fsck_names_a_bad_segment_and_checks_all_others(
    url: str, store: MemoryStore, damage: str
) -> None:
    log_of(url, 60)
    parts = index_of(store).parts()
    key = f"ingest/_log/{parts[0].name}"
    if damage == "gone":
        store.delete_many([key])
    else:
        store.put(key, b"\xff" * 40)
    result = run("fsck", url, "--json")
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    (problem,) = found["problems"]
    assert (problem["location"], problem["kind"], problem["what"]) == (key, "segment", "segment")
    assert f"to sequence {parts[0].end} with 'readers reset'" in problem["problem"]
    assert found["batches"] == 60 - parts[0].end
    assert "restore the object (bucket versioning)" in run("fsck", url).stderr


@pytest.mark.parametrize("damaged", [False, True])
def test_f45_fsck_rebuilds_a_lost_or_damaged_index(
    url: str, store: MemoryStore, damaged: bool
) -> None:
    log_of(url, 300, "--retention", "7d")
    ok("readers", "reset", url, "x", "--to-sequence", "3")
    ok("readers", "reset", url, "other", "--to-sequence", "290")
    store.put("ingest/_readers/x/claims.json", b"{}")
    before = index_of(store)
    # A mover that lost its race left a segment with most of the entries of the first one.
    part, segment = next(
        Log(store, ConsumerConfig(store=url), SystemRuntime()).segments.each(before)
    )
    assert isinstance(segment, Manifest)
    orphan = f"ingest/_log/{0:020d}-{part.end - 1:020d}-x.segment"
    store.put(orphan, segment.part(0, part.end - 1).raw)
    store.delete_many([INDEX])
    if damaged:
        store.put(INDEX, b"no json")
    result = run("fsck", url)
    assert result.exit_code == 1
    assert f"problem: index of the log {INDEX!r}: " in result.stdout
    assert "keeps everything for 100 years" in ok("fsck", url, "--repair", "--yes").stdout
    found = index_of(store)
    assert (found.floor, found.end, found.readers) == (0, before.end, before.readers)
    assert [(p.first, p.end) for p in found.parts()] == [(p.first, p.end) for p in before.parts()]
    assert len(store.list(f"{INDEX}.broken").objects) == damaged
    for name, first in (("x", 3), ("other", 290), ("new", 0)):
        assert records("consume", url, "--ack", "--reader", name) == numbers(first, 300)
    assert json_of("gc", url)["deleted"] == 0


def test_a_rebuilt_index_starts_at_the_first_existing_batch(url: str, store: MemoryStore) -> None:
    log_of(url, 40)
    log = Log(store, ConsumerConfig(store=url), SystemRuntime())
    gone = [each.location for each in log.segments.entries(log.need(), 0, 5)]
    store.delete_many([INDEX, *gone])
    ok("fsck", url, "--repair", "--yes")
    assert index_of(store).floor == 5
    assert records("consume", url, "--ack", "--reader", "new") == numbers(5, 40)


@pytest.mark.parametrize("index", [None, b"{", b"no json"], ids=["gone", "cut", "overwritten"])
@pytest.mark.parametrize("manifest", [None, b"", b"cut"], ids=["gone", "empty", "cut"])
def test_f45_one_repair_rebuilds_a_log_whose_manifest_and_index_are_both_lost(
    url: str, store: MemoryStore, manifest: bytes | None, index: bytes | None
) -> None:
    log_of(url, 60)
    ok("readers", "reset", url, "x", "--to-sequence", "3")
    raw = bytes_of(store, MANIFEST)
    store.delete_many([INDEX, MANIFEST])
    for key, data in ((INDEX, index), (MANIFEST, raw[:30] if manifest == b"cut" else manifest)):
        if data is not None:
            store.put(key, data)
    assert run("fsck", url).exit_code == 1
    shown = ok("fsck", url, "--repair", "--yes").stdout
    ok("fsck", url)
    assert index_of(store).readers == ("x",)
    found = run("consume", url, "--ack", "--reader", "x").stdout_bytes.splitlines()
    # The rebuilt manifest continues far above the segments, so the reader is moved past the gap.
    ok(*command_in(shown, "readers reset"))
    found += records("consume", url, "--ack", "--reader", "x")
    assert sorted(found, key=int) == numbers(3, 60)


def test_f45_a_segment_that_a_killed_mover_stored_is_not_queued_a_second_time(
    url: str, store: MemoryStore
) -> None:
    log_of(url, 40)
    ok("readers", "reset", url, "x", "--to-sequence", "3")
    end, manifest = index_of(store).end, manifest_of(store)
    assert end + 2 < manifest.next_sequence
    unnamed = f"ingest/_log/{end:020d}-{end + 2:020d}-killed.segment"
    store.put(unnamed, manifest.part(end, end + 2).raw)
    store.delete_many([MANIFEST])
    shown = ok("fsck", url, "--repair", "--yes").stdout
    ok("fsck", url)
    assert index_of(store).end == end + 2
    stored = {each.location for each in manifest.entries(end, 2)}
    assert not stored.intersection(manifest_of(store).locations())
    found = run("consume", url, "--ack", "--reader", "x").stdout_bytes.splitlines()
    ok(*command_in(shown, "readers reset"))
    found += records("consume", url, "--ack", "--reader", "x")
    assert sorted(found, key=int) == numbers(3, 40)


# ---- an index that was restored from an old copy


def forget_mark(store: MemoryStore) -> None:
    """Remove the mark of the index from the owner marker, as if the marker were old."""
    marker = json.loads(bytes_of(store, "ingest/_owner.json"))
    del marker["index_changes"]
    store.put("ingest/_owner.json", json.dumps(marker).encode())


def restore_old_index(url: str, store: MemoryStore, *, batches: int = 60) -> LogIndex:
    """Restore an old index of a log, and return the index that this replaces.

    Reader ``early`` registered before the copy was made, and ``late`` after it.
    """
    log_of(url, 40, "--retention", "7d")
    ok("readers", "reset", url, "early", "--to-sequence", "3")
    copy = bytes_of(store, INDEX)
    fill(url, *([b"%d" % number] for number in range(40, batches)))
    ok("readers", "reset", url, "late", "--to-sequence", "5")
    hidden = index_of(store)
    store.put(INDEX, copy)
    return hidden


@pytest.mark.parametrize("marker_lags", [False, True])
def test_f46_an_old_index_is_refused_and_fsck_finds_everything_that_it_lacks(
    url: str, store: MemoryStore, marker_lags: bool
) -> None:
    hidden = restore_old_index(url, store)
    old = index_of(store)
    assert (old.end, hidden.end) == (24, 56) or old.end < hidden.end
    if marker_lags:
        forget_mark(store)
    fill(url, *([b"%d" % number] for number in range(60, 100)))  # Producers continue.
    assert index_of(store).lost == ()
    before = {each.key for each in store.list("ingest/").objects}
    for words in (("status",), ("gc",), ("consume", "--ack", "--reader", "early")):
        result = run(words[0], url, *words[1:])
        assert result.exit_code == 1, words
        assert "'ingest/_log.json' in" in result.stderr
        assert "went backwards" in result.stderr
        assert f"fsck {url} --repair" in result.stderr
        assert "v1" not in result.stdout + result.stderr
    assert {each.key for each in store.list("ingest/").objects} == before
    assert [each["kind"] for each in json.loads(run("fsck", url, "--json").stdout)["problems"]] == [
        "old index"
    ]
    ok("fsck", url, "--repair", "--yes")
    found = index_of(store)
    assert (found.lost, found.readers) == ((), ("early", "late"))
    assert (found.retention_ms, found.floor) == (7 * DAY_MS, old.floor)
    assert found.changes > hidden.changes
    for name, first in (("early", 3), ("late", 5), ("new", 0)):
        assert records("consume", url, "--ack", "--reader", name) == numbers(first, 100)
    assert json_of("status", url)["notes"] == []


def test_f46_an_old_index_that_lacks_only_a_reader_and_a_retention_is_refused(
    url: str, store: MemoryStore
) -> None:
    log_of(url, 40)
    copy = bytes_of(store, INDEX)
    ok("readers", "enable", url, "--retention", "7d")
    ok("readers", "reset", url, "late", "--to-sequence", "5")
    store.put(INDEX, copy)
    assert "went backwards" in fails("gc", url)
    assert "went backwards" in fails("readers", "reset", url, "other", "--to-latest")
    ok("fsck", url, "--repair", "--yes")
    assert index_of(store).readers == ("late",)
    assert records("consume", url, "--ack", "--reader", "late") == numbers(5, 40)


@pytest.mark.parametrize("floor_passed", [False, True])
def test_f46_fsck_restores_batches_that_an_old_index_calls_lost(
    url: str, store: MemoryStore, monkeypatch: pytest.MonkeyPatch, floor_passed: bool
) -> None:
    """An earlier release, which did not look for stored segments, noted them as lost."""
    restore_old_index(url, store)
    forget_mark(store)
    with monkeypatch.context() as earlier:
        earlier.setattr(Log, "check_gap", lambda *_: None)
        earlier.setattr(GarbageCollector, "_unnamed_readers", lambda *_: {})
        fill(url, *([b"%d" % number] for number in range(60, 100)))
        ((first, end),) = index_of(store).lost
        if floor_passed:
            ok("readers", "reset", url, "early", "--to-latest")
            ok("readers", "enable", url, "--retention", "none")
            ok("gc", url)
            assert index_of(store).floor == 100
    result = run("fsck", url)
    assert result.exit_code == 1
    assert f"it says that sequences {first} to {end - 1} were lost" in result.stdout
    ok("fsck", url, "--repair", "--yes")
    assert index_of(store).lost == ()
    begin = first if floor_passed else 0
    assert records("consume", url, "--ack", "--reader", "new") == numbers(begin, 100)
    ok("fsck", url)


def test_f46_a_manifest_and_an_index_that_were_restored_together_lose_nothing(
    url: str, store: MemoryStore
) -> None:
    log_of(url, 40)
    copies = {key: bytes_of(store, key) for key in (INDEX, "ingest/manifest")}
    fill(url, *([b"%d" % number] for number in range(40, 100)))
    for key, data in copies.items():
        store.put(key, data)
    repaired = ok("fsck", url, "--repair", "--yes").stdout
    assert "repaired manifest" in repaired
    assert "repaired index of the log" in repaired
    found = []
    with Consumer(url, reader="x", allow_data_loss=True) as consumer:
        while (batch := consumer.next_batch()) is not None:
            found += [each.value for each in batch.records()]
            batch.ack()
    assert {*found} == {*numbers(0, 100)}


def test_an_index_of_an_earlier_queue_is_not_used_for_a_rebuild(
    url: str, store: MemoryStore
) -> None:
    log_of(url, 40)
    store.put(INDEX, replace(index_of(store), queue_id="another").to_json())
    result = run("fsck", url, "--repair", "--yes")
    assert result.exit_code == 1
    assert "of a queue that was started over: delete them" in result.stderr
    assert index_of(store).queue_id == "another"


def test_a_rebuilt_manifest_does_not_repeat_batches_of_segments(
    url: str, store: MemoryStore
) -> None:
    log_of(url, 40)
    ok("readers", "reset", url, "x", "--to-sequence", "2")
    end = index_of(store).end
    waits = manifest_of(store).entries(end)
    assert waits
    store.delete_many(["ingest/manifest"])
    assert run("status", url).exit_code == 1
    shown = ok("fsck", url, "--repair", "--yes").stdout
    assert f"reader 'x': It reads up to sequence {end - 1} first" in shown
    rebuilt = manifest_of(store)
    assert rebuilt.first_sequence > 1_000_000
    assert sorted(rebuilt.locations()) == sorted(each.location for each in waits)
    result = run("consume", url, "--ack", "--reader", "x")
    assert result.stdout_bytes.splitlines() == numbers(2, end)
    assert result.exit_code == 1
    assert command_in(result.stderr, "readers reset") == command_in(shown, "readers reset")
    first = rebuilt.first_sequence
    assert f"Sequences 40 to {first - 1} never held batches" in result.stderr
    assert f"The {40 - end} batches before them were queued again from {first} on" in result.stderr
    assert "consumer" not in result.stderr, "no consumer is to blame"
    (note,) = (line for line in json_of("status", url)["notes"] if "sequences" in line)
    assert f"sequences {end} to 39 are gone from the log" in note
    assert f"sequences 40 to {first - 1} never held batches" in note
    ok(*command_in(shown, "readers reset"))
    assert sorted(records("consume", url, "--ack", "--reader", "x")) == numbers(end, 40)


def test_a_rebuilt_manifest_does_not_repeat_the_batches_of_a_lost_segment(
    url: str, store: MemoryStore
) -> None:
    log_of(url, 40)
    store.delete_many(["ingest/manifest", store.list("ingest/_log/").objects[0].key])
    assert "is gone. It names sequences 0 to" in run("fsck", url, "--repair", "--yes").stderr
    assert not store.list("ingest/manifest").objects


@pytest.mark.parametrize("command", ["list", "describe"])
def test_json_of_a_log_without_readers_is_an_empty_list(url: str, command: str) -> None:
    log_of(url, 1)
    result = ok("readers", command, url, "--json")
    assert (json.loads(result.stdout), result.stdout) == ([], "[]\n")
