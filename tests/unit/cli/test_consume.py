"""``consume``."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from opendata_buffer import Consumer, Publisher
from opendata_buffer.admin.target import Target
from opendata_buffer.cli.consume import (
    BatchSource,
    ReadOnlyTopic,
    RecordWriter,
    as_framing,
    json_lines,
    write_out,
)
from opendata_buffer.cli.main import cli
from opendata_buffer.config import ConsumerConfig
from opendata_buffer.consumer.batches import ArrowBatch
from opendata_buffer.consumer.place import Place
from opendata_buffer.errors import DataLoss
from opendata_buffer.formats.batch import encode_batch
from opendata_buffer.formats.manifest import Manifest, Metadata, NewEntry
from opendata_buffer.framing import FRAMINGS
from opendata_buffer.queue.consumer_note import TRIM
from opendata_buffer.runtime import SystemRuntime
from opendata_buffer.stores.memory import MemoryStore
from opendata_buffer.topic.topic import Topic
from tests.unit.cli.shell import (
    Ticks,
    Until,
    bytes_of,
    fails,
    fill,
    manifest_of,
    ok,
    records_of,
    run,
    runner,
    topic_of,
)


def test_consume_writes_and_acknowledges_everything(url: str, store: MemoryStore) -> None:
    fill(url, [b"a", b""], [b"\x00\xff"])
    result = ok("consume", url, "--ack")
    assert result.stdout_bytes == b"a\n\n\x00\xff\n"
    assert json.loads(result.stderr) == {
        "records": 3, "batches": 2, "bytes": 3, "last_sequence": 1,
    }  # fmt: skip
    manifest = manifest_of(store)
    assert (manifest.entry_count, manifest.next_sequence, manifest.epoch) == (0, 2, 1)


def test_consume_without_ack_changes_nothing(url: str, store: MemoryStore) -> None:
    fill(url, [b"a"], [b"b"])
    before = store.list("").objects
    assert ok("consume", url).stdout == "a\nb\n"
    assert ok("consume", url, "--max-batches", "1").stdout == "a\n"
    assert store.list("").objects == before


def test_reading_from_the_start_of_a_consumed_queue_warns_about_the_gap(
    url: str, store: MemoryStore
) -> None:
    fill(url, [b"a"], [b"b"])
    ok("consume", url, "--ack")
    line = ok("consume", url, "--from", "earliest").stderr
    assert "2 batches were read and removed before this" in line
    assert f"'opendata-buffer readers enable {url} --retention 7d'" in line
    for words in (("consume", url), ("consume", url, "--ack")):
        assert "removed" not in ok(*words).stderr, "a restarted consumer gets no warning"


def test_f25_consume_stops_at_a_missing_batch_and_acknowledges_earlier_ones(
    url: str, store: MemoryStore
) -> None:
    fill(url, [b"a"], [b"b"], [b"c"])
    store.delete_many([manifest_of(store).entries()[1].location])
    result = run("consume", url, "--ack")
    assert (result.exit_code, result.stdout) == (1, "a\n")
    assert "batch 1 at 'ingest/" in result.stderr
    assert f"'opendata-buffer skip {url} 1', which copies it" in result.stderr
    assert manifest_of(store).first_sequence == 1


@pytest.mark.parametrize("more", [("--ack",), ()])
def test_consume_follow_polls_until_it_is_interrupted_and_prints_a_summary(
    url: str, capfd: pytest.CaptureFixture[str], more: tuple[str, ...]
) -> None:
    fill(url, [b"a"])
    result = runner().invoke(
        cli, ["consume", url, "--follow", *more],
        obj=Ticks(2),
    )  # fmt: skip
    assert (result.exit_code, result.stdout) == (130, "a\n")
    summary = json.loads(capfd.readouterr().err)
    assert summary == {"records": 1, "batches": 1, "bytes": 1, "last_sequence": 0}


def test_consume_of_a_mistyped_path_creates_no_directory(tmp_path: Path) -> None:
    for words in ("consume", "status", "fsck", "gc", "consume --ack"):
        command, *more = words.split()
        line = fails(command, str(tmp_path / "typo"), "--data-path-prefix", "x", *more)
        assert "'x/manifest'" in line
        assert "--data-path-prefix" in line
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("more", [(), ("--ack",)], ids=["read only", "consumer"])
def test_f23_batches_outside_the_prefix_are_not_read(
    url: str, store: MemoryStore, more: tuple[str, ...]
) -> None:
    store.put("elsewhere/a.batch", encode_batch([b"a"]))
    store.put("ingest/manifest", Manifest.empty().append([NewEntry("elsewhere/a.batch")]).raw)
    assert "it is not below the data prefix 'ingest'" in fails("consume", url, *more)
    (advised,) = re.findall(r"'opendata-buffer (skip [^']*)'", run("fsck", url, "--repair").stderr)
    ok(*advised.split())
    assert ok("consume", url, *more).stdout == ""
    copied = [each.key for each in store.list("ingest/_quarantine/").objects]
    assert [each for each in copied if each.endswith(".object")] == []


def test_a_record_that_cannot_be_written_stays_in_the_queue_with_its_batch(
    url: str, store: MemoryStore
) -> None:
    fill(url, [b"1"], [b"2", b"two\nlines"])
    result = run("consume", url, "--ack", "--framing", "ndjson")
    assert (result.exit_code, result.stdout_bytes) == (1, b"1\n")
    assert "record 1 of batch 1 cannot be written as ndjson" in result.stderr
    assert records_of(store) == [b"2", b"two\nlines"]


def noted(url: str, store: MemoryStore, **fields: Any) -> None:
    """Claim the queue as a consumer with a note that has these fields."""
    with Consumer(ConsumerConfig(store=url)):
        pass
    note = json.loads(bytes_of(store, "ingest/_consumer.json"))
    store.put("ingest/_consumer.json", json.dumps({**note, "ended_epoch": None, **fields}).encode())


@pytest.mark.parametrize(
    "fields",
    [
        {"host": "elsewhere"},
        {"host": "elsewhere", "ended_epoch": 0},
        {"process": os.getppid()},
        {"process": 1},
    ],
    ids=["another host", "the one before was closed", "here, and alive", "here, another user's"],
)
def test_consume_with_ack_asks_if_another_consumer_seems_to_run(
    url: str, store: MemoryStore, fields: dict[str, Any]
) -> None:
    fill(url, [b"a"])
    noted(url, store, program="Spark", **fields)
    before = store.list("").objects
    line = fails("consume", url, "--ack")
    assert "the consumer of 'ingest' (Spark, process" in line
    assert "seems to run. It will be fenced" in line
    assert ok("consume", url).stdout == "a\n"  # Reading without --ack asks nothing.
    assert store.list("").objects == before
    assert ok("consume", url, "--ack", "--yes").stdout == "a\n"


@pytest.mark.parametrize(
    "fields",
    [
        {"process": 2**22 + 1},
        {"host": "elsewhere", "epoch": 0},
        {"host": "elsewhere", "ended_epoch": 1},
        {"program": TRIM},
    ],
    ids=["ended", "fenced", "closed", "a trim"],
)
def test_consume_with_ack_does_not_ask_about_a_stopped_consumer(
    url: str, store: MemoryStore, fields: dict[str, Any]
) -> None:
    fill(url, [b"a"])
    noted(url, store, **fields)
    assert ok("consume", url, "--ack").stdout == "a\n"


def test_a_queue_is_created_only_on_request(url: str, store: MemoryStore) -> None:
    assert "or create it with --create-if-missing" in fails("consume", url, "--ack")
    assert "create" not in fails("consume", url)
    assert store.list("").objects == ()
    assert ok("consume", url, "--ack", "--create-if-missing").stdout == ""
    assert manifest_of(store).epoch == 1


def test_a_topic_is_piped_into_another_store_with_metadata_keys_and_order(url: str) -> None:
    source, target = f"{url}-source", f"{url}-target"
    topic_of(source, 2)
    topic_of(target, 3)
    records = "".join(f'{{"value": "{n}", "metadata": "{n % 5}"}}\n' for n in range(20))
    ok("produce", source, "--json", "--key-is-metadata", stdin=records.encode())
    printed = ok("consume", source, "--json")
    piped = ok("produce", target, "--json", "--key-is-metadata", stdin=printed.stdout_bytes)
    assert json.loads(piped.stdout)["records"] == json.loads(printed.stderr)["records"] == 20
    lines = [json.loads(line) for line in ok("consume", target, "--json").stdout.splitlines()]
    for key in "01234":
        values = [int(each["value"]) for each in lines if each["metadata"] == key]
        assert values == [n for n in range(20) if n % 5 == int(key)]
    ok("trim", source, "--to", "latest", "--yes")
    assert ok("consume", source, "--ack").stdout == ""


# ---- a topic


def topic_with(url: str, *partitions: list[list[bytes]]) -> list[str]:
    """Create a topic with batches in its partitions."""
    names = topic_of(url, len(partitions))
    for name, batches in zip(names, partitions, strict=True):
        if batches:
            fill(url, *batches, data_path_prefix=name)
    return names


def test_all_partitions_of_a_topic_are_consumed_and_each_record_names_its_own(
    url: str, store: MemoryStore
) -> None:
    first, _, third = topic_with(url, [[b"a"], [b"b", b"c"]], [], [[b"d"]])
    result = ok("consume", url, "--ack", "--json")
    found = [json.loads(line) for line in result.stdout.splitlines()]
    assert sorted((each["partition"], each["sequence"], each["value"]) for each in found) == [
        (first, 0, "a"), (first, 1, "b"), (first, 1, "c"), (third, 0, "d"),
    ]  # fmt: skip
    assert [each["value"] for each in found if each["partition"] == first] == ["a", "b", "c"]
    assert json.loads(result.stderr) == {
        "records": 4, "batches": 3, "bytes": 4, "last_sequences": {first: 1, third: 0},
    }  # fmt: skip
    assert manifest_of(store, f"{first}/manifest").entry_count == 0
    assert ok("consume", url, "--ack", "--json").stdout == ""
    assert "opendata-buffer consume" in ok("status", url, "--json").stdout


@pytest.mark.parametrize("more", [("--ack",), ()], ids=["consumer", "read only"])
def test_only_the_requested_number_of_batches_of_a_topic_is_consumed(
    url: str, more: tuple[str, ...]
) -> None:
    topic_with(url, [[b"a"], [b"b"]], [[b"c"], [b"d"]])
    first_of_each = ["a", "c", "b"] if more else ["a", "b", "c"]
    out = ok("consume", url, "--max-batches", "3", *more).stdout
    assert out.split() == first_of_each


@pytest.mark.parametrize("more", [("--ack",), ()], ids=["consumer", "read only"])
def test_only_committed_transactions_of_a_topic_are_consumed(
    url: str, more: tuple[str, ...]
) -> None:
    names = topic_of(url, 2)
    with Publisher(url, name="p") as publisher:
        for number, name in enumerate(names):
            publisher.publish_uncommitted([b"committed %d" % number], partition=name)
        publisher.commit()
        publisher.publish_uncommitted([b"undecided"], partition=names[0]).result()
        assert ok("consume", url, *more).stdout == "committed 0\ncommitted 1\n"
    assert "undecided" not in ok("consume", url, *more).stdout


@pytest.mark.parametrize("more", [("--ack",), ()], ids=["consumer", "read only"])
def test_the_error_of_a_bad_batch_of_a_topic_names_the_command_that_skips_it(
    url: str, store: MemoryStore, more: tuple[str, ...]
) -> None:
    _, second = topic_with(url, [[b"a"]], [[b"bad"], [b"c"]])
    store.delete_many([manifest_of(store, f"{second}/manifest").entries()[0].location])
    result = run("consume", url, *more)
    assert result.exit_code == 1
    words = result.stderr.splitlines()[-1].split("'opendata-buffer ")[1].partition("'")[0]
    assert shlex.split(words) == ["skip", url, "--partition", second, "0"]
    ok(*shlex.split(words))
    assert "c\n" in ok("consume", url, *more).stdout


def test_a_topic_is_read_from_its_start(url: str) -> None:
    topic_with(url, [[b"a"], [b"b"]], [[b"c"], [b"d"]])
    for where, found in (("earliest", "abcd"), ("latest", ""), ("2999-01-01", "")):
        out = ok("consume", url, "--from", where).stdout
        assert sorted(out.split()) == [*found]
    result = run("consume", url, "--from", "1")
    assert result.exit_code == 2
    assert "partitions count separately" in result.stderr


# ---- a topic that is only read


def read_only(url: str, start: str = "earliest") -> ReadOnlyTopic:
    topic, config = Topic.open(url), ConsumerConfig(store=url)
    store = MemoryStore.named(url.removeprefix("memory://"))
    return ReadOnlyTopic(Target(store, config, SystemRuntime(), topic), Place.parse(start))


def seen(reader: ReadOnlyTopic, limit: int = 100) -> list[tuple[str, int]]:
    found = []
    for batch in reader.read(limit):
        found.append((batch.partition, batch.sequence))
    return found


def test_a_partition_that_is_added_or_first_written_is_read(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("opendata_buffer.cli.consume.REFRESH_S", 0.0)
    first, second = topic_of(url, 2)
    reader = read_only(url, "latest")
    assert seen(reader) == []
    # It was empty at the first read, so all its batches came later.
    fill(url, [b"a"], data_path_prefix=first)
    third = Topic.open(url).expand(3).names[2]
    fill(url, [b"b"], data_path_prefix=third)
    assert seen(reader) == [(first, 0), (third, 0)]
    fill(url, [b"c"], data_path_prefix=second)
    assert seen(reader) == [(second, 0)]


def test_f28_batches_of_a_topic_that_were_consumed_meanwhile_are_an_error(url: str) -> None:
    first, _ = topic_of(url, 2)
    fill(url, [b"a"], data_path_prefix=first)
    reader = read_only(url)
    assert seen(reader) == [(first, 0)]
    fill(url, [b"b"], [b"c"], data_path_prefix=first)
    ok("consume", url, "--ack")
    with pytest.raises(DataLoss, match="read what is left"):
        seen(reader)


# ---- writing records out


def test_json_has_all_fields_of_each_record() -> None:
    batch = ArrowBatch(
        pa.array([b"a", b"\n\xff", "ü".encode()], pa.binary()),
        41,
        "ingest/x.batch",
        (Metadata(1, 1_767_225_600_123, b"m"), Metadata(2, 2**63 - 1, b"\xfe")),
    )
    lines = bytes(json_lines("ingest")(batch)).split(b"\n")
    assert lines.pop() == b""
    where = {"partition": "ingest", "sequence": 41, "location": "ingest/x.batch"}
    assert [json.loads(line) for line in lines] == [
        {**where, "index": 0, "time": None, "metadata": "", "value": "a"},
        {
            **where, "index": 1, "time": "2026-01-01T00:00:00.123Z", "metadata": "m",
            "value_base64": "Cv8=",
        },
        # A time outside every calendar is shown by 'dump'.
        {**where, "index": 2, "time": None, "metadata_base64": "/g==", "value": "ü"},
    ]  # fmt: skip


class Out(io.BytesIO):
    """Records each write and flush. Its reader closes the pipe after a number of writes."""

    def __init__(self, log: list[Any], broken_after: int = 9) -> None:
        super().__init__()
        self.log = log
        self.left = broken_after

    def write(self, data: Any) -> int:
        if not self.left:
            raise BrokenPipeError
        self.left -= 1
        self.log.append(bytes(data))
        return super().write(data)

    def flush(self) -> None:
        self.log.append("flush")


def write_to(out: Out, *batches: list[bytes]) -> dict[str, Any]:
    """Write batches out, and record all steps in the log of ``out``."""
    left = deque(enumerate(batches))

    def read(limit: int) -> Iterator[ArrowBatch]:
        out.log.append(("read", limit))
        while left:
            sequence, records = left.popleft()
            yield ArrowBatch(pa.array(records, pa.binary()), sequence, "ingest/x.batch", ())

    writer = RecordWriter(out, as_framing(FRAMINGS["lines"]))
    writer.persist = lambda: out.log.append("persist")  # type: ignore[method-assign]
    write_out(BatchSource(read, lambda written: out.log.append([*written])), writer)
    return writer.total


def test_records_are_written_and_flushed_before_they_are_acknowledged() -> None:
    out = Out([])
    total = write_to(out, [b"a", b""], [b"\x00\xff"])
    assert total == {"records": 3, "batches": 2, "bytes": 3, "last_sequence": 1}
    assert out.log == [
        ("read", 100), b"a\n\n", "flush", b"\x00\xff\n", "flush", "persist", [("", 0), ("", 1)],
        ("read", 100),
    ]  # fmt: skip


def test_written_batches_are_acknowledged_after_an_interrupt() -> None:
    class Interrupted(Out):
        def flush(self) -> None:
            if self.getvalue().endswith(b"b\n"):
                raise KeyboardInterrupt

    out = Interrupted([])
    with pytest.raises(KeyboardInterrupt):
        write_to(out, [b"a"], [b"b"])
    assert out.log[-1] == [("", 0)]


def test_a_group_is_delivered_again_if_the_reader_of_the_pipe_has_gone() -> None:
    out = Out([], broken_after=2)
    with pytest.raises(BrokenPipeError):
        write_to(out, [b"a"], [b"b"], [b"c"])
    assert "persist" not in out.log


@pytest.mark.parametrize("more", [(), ("--ack",), ("--from", "latest")])
def test_a_partition_without_batches_is_read_like_an_empty_one(
    url: str, store: MemoryStore, more: tuple[str, ...]
) -> None:
    topic_of(url, 2)
    before = store.list("").objects
    result = ok("consume", url, "--partition", "1", *more)
    assert json.loads(result.stderr)["records"] == 0
    assert result.stdout == ""
    assert store.list("").objects == before
    unknown = ("consume", url, "--partition", "p-00009-aaaa")
    assert "'p-00009-aaaa' of the topic at" in fails(*unknown, *more)


def test_consume_follows_a_partition_that_is_written_later(url: str) -> None:
    name = topic_of(url, 2)[1]
    waited: list[str] = []

    def write_once() -> bool:
        if not waited:
            fill(url, [b"late"], data_path_prefix=name)
        waited.append(name)
        return len(waited) == 3

    words = ["consume", url, "--partition", "1", "--follow"]
    result = runner().invoke(cli, words, obj=Until(write_once))
    assert (result.exit_code, result.stdout) == (130, "late\n")
