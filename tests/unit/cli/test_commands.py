"""The commands, in this process, on a store in memory. Processes are in tests/process."""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from opendata_buffer import Consumer, ConsumerConfig, Producer, ProducerConfig
from opendata_buffer.cli.commands import cli
from opendata_buffer.errors import PermanentStorageError
from opendata_buffer.formats.batch import decode_batch, encode_batch
from opendata_buffer.formats.manifest import Manifest, NewEntry
from opendata_buffer.runtime import SystemRuntime
from opendata_buffer.stores import Blob
from opendata_buffer.stores.memory import MemoryStore

_names = itertools.count()


@pytest.fixture
def name() -> str:
    return f"cli-{next(_names)}"


@pytest.fixture
def url(name: str) -> str:
    return f"memory://{name}"


@pytest.fixture
def store(name: str) -> MemoryStore:
    return MemoryStore.named(name)


@pytest.fixture(autouse=True)
def _log_handlers() -> Iterator[None]:
    root = logging.getLogger()
    handlers = list(root.handlers)
    yield
    root.handlers[:] = handlers


def run(*arguments: str, stdin: bytes = b"") -> Result:
    return CliRunner().invoke(cli, arguments, input=stdin)


def ok(*arguments: str, stdin: bytes = b"") -> Result:
    result = run(*arguments, stdin=stdin)
    assert result.exit_code == 0, result.output
    return result


def fails(*arguments: str, stdin: bytes = b"") -> str:
    """The one line of an error."""
    result = run(*arguments, stdin=stdin)
    assert result.exit_code == 1, result.output
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    return line


def fill(url: str, *batches: list[bytes], **settings: Any) -> None:
    with Producer(ProducerConfig(store=url, **settings)) as producer:
        for batch in batches:
            producer.produce(batch)
            producer.flush()


def manifest_of(store: MemoryStore, key: str = "ingest/manifest") -> Manifest:
    got = store.get(key)
    assert isinstance(got, Blob)
    return Manifest.parse(got.data)


def records_of(store: MemoryStore, key: str = "ingest/manifest") -> list[bytes]:
    found = []
    for entry in manifest_of(store, key).entries():
        got = store.get(entry.location)
        assert isinstance(got, Blob)
        found += decode_batch(got.data)
    return found


# ---- help and usage


def test_help_lists_every_command() -> None:
    out = ok("--help").stdout
    for command in ("manifest", "batch", "produce", "consume", "status", "gc", "fsck"):
        assert command in out


COMMANDS = [
    ("manifest", "dump"),
    ("batch", "dump"),
    ("produce",),
    ("consume",),
    ("status",),
    ("gc",),
    ("fsck",),
]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_has_help_and_the_store_options(command: tuple[str, ...]) -> None:
    out = ok(*command, "--help").stdout
    options = ["--endpoint-url", "--region", "--profile"]
    if command[-1] != "dump":
        options += ["--data-path-prefix", "--manifest-path"]
    assert [option for option in options if option not in out] == []


@pytest.mark.parametrize(
    "arguments",
    [
        ("status",),
        ("status", "a", "b"),
        ("nonsense",),
        ("produce", "memory://x", "--compression", "lz4"),
        ("produce", "memory://x", "--flush-interval-ms", "0"),
        ("consume", "memory://x", "--max-batches", "-1"),
        ("consume", "memory://x", "--last-acked-sequence", "x"),
        ("batch", "dump", "x", "--limit", "-1"),
    ],
)
def test_usage_errors_exit_2(arguments: tuple[str, ...]) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert "Usage:" in result.stderr


def test_version() -> None:
    assert "opendata-buffer" in ok("--version").stdout


# ---- dump


def test_manifest_dump(url: str) -> None:
    fill(url, [b"a"], [b"b"])
    found = json.loads(ok("manifest", "dump", f"{url}/ingest/manifest").stdout)
    assert list(found) == ["version", "epoch", "next_sequence", "entries"]
    assert [entry["sequence"] for entry in found["entries"]] == [0, 1]
    assert list(found["entries"][0]) == ["sequence", "location", "metadata"]
    assert list(found["entries"][0]["metadata"][0]) == [
        "start_index", "ingestion_time_ms", "payload_base64",
    ]  # fmt: skip


def test_batch_dump_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "a.batch"
    path.write_bytes(encode_batch([b"a", b"b", b"c"]))
    found = json.loads(ok("batch", "dump", str(path), "--limit", "2").stdout)
    assert found == {
        "version": 1,
        "compression": "none",
        "record_count": 3,
        "records_base64": ["YQ==", "Yg=="],
    }


@pytest.mark.parametrize("kind", ["manifest", "batch"])
def test_dumping_something_else_names_the_object_and_the_fault(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "other"
    path.write_bytes(b"not in this format at all")
    line = fails(kind, "dump", str(path))
    assert f"'{path}' is no sound {kind}: " in line


def test_dumping_a_directory_says_what_to_name(tmp_path: Path) -> None:
    assert "is a directory: name one object in it" in fails("batch", "dump", str(tmp_path))


# ---- produce


def test_produce(url: str, store: MemoryStore) -> None:
    out = ok("produce", url, stdin=b"one\n\ntwo\r\n\xff\x00").stdout
    assert json.loads(out.splitlines()[-1]) == {"records": 4, "batches": 1, "bytes": 9}
    assert records_of(store) == [b"one", b"", b"two\r", b"\xff\x00"]


def test_produce_nothing(url: str) -> None:
    out = ok("produce", url).stdout
    assert json.loads(out) == {"records": 0, "batches": 0, "bytes": 0}


def test_produce_with_every_option(url: str, store: MemoryStore) -> None:
    lines = b"".join(b"%09d\n" % n for n in range(1000))
    out = ok(
        "produce", url, "--data-path-prefix", "a/ü", "--manifest-path", "q/m", "--compression",
        "zstd", "--metadata", "Käse", "--flush-size-bytes", "1000", "--flush-interval-ms", "60000",
        stdin=lines,
    ).stdout  # fmt: skip
    assert json.loads(out) == {"records": 1000, "batches": 13, "bytes": 9000}
    manifest = manifest_of(store, "q/m")
    assert manifest.entry_count == 13
    assert all(entry.location.startswith("a/ü/") for entry in manifest.entries())
    payloads = {each.payload for entry in manifest.entries() for each in entry.metadata}
    assert payloads == {"Käse".encode()}
    assert records_of(store, "q/m") == lines.splitlines()
    raw = store.get(manifest.entries()[0].location)
    assert isinstance(raw, Blob)
    assert raw.data[-7] == 1  # zstd


def test_produce_tells_which_lines_are_durable_when_it_fails(url: str, store: MemoryStore) -> None:
    line = fails("produce", url, "--max-batch-bytes", "12", stdin=b"1\n2\n123456789\n4\n")
    assert "line 3 has more than 8 bytes" in line
    assert line.endswith("Of the input, lines 1 to 2 are durable.")
    assert records_of(store) == [b"1", b"2"]
    line = fails("produce", url, "--max-batch-bytes", "12", stdin=b"123456789")
    assert line.endswith("Of the input, not one line is known to be durable.")


def test_f29_a_failed_batch_is_told_once(
    url: str, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(key: str, data: bytes | memoryview) -> None:
        raise PermanentStorageError(f"cannot write {key!r}: no space. Free some space.")

    monkeypatch.setattr(store, "put", full)
    # One line, checked there, although the handle, flush() and close() all say so.
    line = fails("produce", url, stdin=b"1\n2\n")
    assert "no space. Free some space. " in line
    assert line.endswith("Of the input, not one line is known to be durable.")


def test_f7_produce_into_a_prefix_of_another_queue(url: str) -> None:
    ok("produce", url, stdin=b"a\n")
    line = fails("produce", url, "--manifest-path", "other/manifest", stdin=b"b\n")
    assert "'ingest/manifest'" in line
    assert "'other/manifest'" in line


def test_a_store_below_a_dangling_link_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    assert "cannot write" in fails("produce", str(tmp_path / "link"), stdin=b"a\n")


# ---- consume


def test_consume_writes_and_acknowledges_everything(url: str, store: MemoryStore) -> None:
    fill(url, [b"a", b""], [b"\x00\xff"])
    result = ok("consume", url)
    assert result.stdout_bytes == b"a\n\n\x00\xff\n"
    assert json.loads(result.stderr) == {
        "records": 3, "batches": 2, "bytes": 6, "last_sequence": 1,
    }  # fmt: skip
    manifest = manifest_of(store)
    assert (manifest.entry_count, manifest.next_sequence, manifest.epoch) == (0, 2, 1)


def test_consume_no_more_than_asked_for(url: str, store: MemoryStore) -> None:
    fill(url, [b"a"], [b"b"], [b"c"])
    assert ok("consume", url, "--max-batches", "2").stdout == "a\nb\n"
    assert manifest_of(store).first_sequence == 2
    assert ok("consume", url, "--max-batches", "2").stdout == "c\n"


def test_consume_no_ack_changes_nothing_at_all(url: str, store: MemoryStore) -> None:
    fill(url, [b"a"], [b"b"])
    before = store.list("").objects
    assert ok("consume", url, "--no-ack").stdout == "a\nb\n"
    assert ok("consume", url, "--no-ack", "--max-batches", "1").stdout == "a\n"
    assert ok("consume", url, "--no-ack", "--last-acked-sequence", "0").stdout == "b\n"
    assert store.list("").objects == before


def test_consume_no_ack_does_not_disturb_the_consumer(url: str) -> None:
    fill(url, [b"a"], [b"b"])
    with Consumer(ConsumerConfig(store=url)) as consumer:
        first = consumer.next_batch()
        assert ok("consume", url, "--no-ack").stdout == "a\nb\n"
        assert first is not None
        consumer.ack(first.sequence)
        consumer.flush()
        assert ok("consume", url, "--no-ack").stdout == "b\n"


def test_consume_after_a_sequence(url: str, store: MemoryStore) -> None:
    fill(url, [b"a"], [b"b"], [b"c"])
    assert ok("consume", url, "--last-acked-sequence", "1").stdout == "c\n"
    assert manifest_of(store).entry_count == 0


def test_f27_consume_after_a_sequence_the_queue_never_had(url: str, store: MemoryStore) -> None:
    fill(url, [b"a"])
    assert "ends at 0" in fails("consume", url, "--last-acked-sequence", "7")
    assert "ends at 0" in fails("consume", url, "--last-acked-sequence", "7", "--no-ack")
    assert manifest_of(store).entry_count == 1


@pytest.mark.parametrize("more", [(), ("--no-ack",), ("--no-ack", "--follow")])
def test_consume_from_no_queue_says_where_it_looked(
    url: str, store: MemoryStore, more: tuple[str, ...]
) -> None:
    line = fails("consume", url, "--data-path-prefix", "x", *more)
    assert "'x/manifest'" in line
    assert "--data-path-prefix" in line
    assert store.list("").objects == ()


def test_f25_consume_stops_at_a_missing_batch_and_keeps_what_came_before(
    url: str, store: MemoryStore
) -> None:
    fill(url, [b"a"], [b"b"], [b"c"])
    store.delete_many([manifest_of(store).entries()[1].location])
    result = run("consume", url)
    assert (result.exit_code, result.stdout) == (1, "a\n")
    assert "batch 1 at 'ingest/" in result.stderr
    assert manifest_of(store).first_sequence == 1


# ---- status, gc, fsck


def test_status_json(url: str) -> None:
    fill(url, [b"a"], [b"b"])
    found = json.loads(ok("status", url, "--json").stdout)
    assert found["queue_length"] == 2
    assert (found["oldest_sequence"], found["newest_sequence"], found["next_sequence"]) == (0, 1, 2)
    assert (found["epoch"], found["orphans"], found["missing"]) == (0, 0, 0)
    assert found["bytes_queued"] == 2 * 12
    assert 0 <= found["newest_age_seconds"] <= found["oldest_age_seconds"] < 600


def test_status_for_a_person(url: str, store: MemoryStore) -> None:
    fill(url, [b"a"], [b"b"])
    ok("consume", url, "--max-batches", "1")
    out = ok("status", url).stdout
    for part in (url, "queue length", "1 batches, 12 B", "orphans", "1 objects, 12 B"):
        assert part in out
    assert "missing" not in out
    store.delete_many([manifest_of(store).entries()[0].location])
    assert "run fsck" in ok("status", url).stdout


def test_status_changes_nothing(url: str, store: MemoryStore) -> None:
    fill(url, [b"a"])
    before = store.list("").objects
    ok("status", url)
    assert store.list("").objects == before


def test_f15_status_of_a_corrupt_manifest(url: str, store: MemoryStore) -> None:
    store.put("ingest/manifest", b"\xff" * 30)
    assert fails("status", url)


class Ticks:
    """A runtime that is interrupted after some sleeps."""

    def __init__(self, ticks: int) -> None:
        self._real = SystemRuntime()
        self.left = ticks

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self._real, attribute)

    def sleep(self, seconds: float) -> None:
        assert seconds == 0.25
        if not self.left:
            raise KeyboardInterrupt
        self.left -= 1


def test_status_watch_json_prints_a_line_per_look_until_interrupted(url: str) -> None:
    fill(url, [b"a"])
    result = CliRunner().invoke(
        cli, ["status", url, "--watch", "--json", "--interval-ms", "250"], obj=Ticks(2)
    )
    assert result.exit_code == 130
    assert [json.loads(line)["queue_length"] for line in result.stdout.splitlines()] == [1, 1, 1]


def test_status_watch_shows_the_table_until_interrupted(url: str) -> None:
    fill(url, [b"a"])
    result = CliRunner().invoke(
        cli, ["status", url, "--watch", "--interval-ms", "250"], obj=Ticks(2)
    )
    assert result.exit_code == 130
    # No terminal: nothing to draw over, so each look is printed.
    assert result.stdout.count("queue length") == 3


@pytest.mark.parametrize("more", [(), ("--no-ack",)])
def test_consume_follow_polls_until_interrupted(url: str, more: tuple[str, ...]) -> None:
    fill(url, [b"a"])
    result = CliRunner().invoke(
        cli, ["consume", url, "--follow", "--poll-interval-ms", "250", "--no-gc", *more],
        obj=Ticks(2),
    )  # fmt: skip
    assert (result.exit_code, result.stdout) == (130, "a\n")


def test_gc(url: str, store: MemoryStore) -> None:
    # Collection needs objects older than the next batch and than the clock, in milliseconds.
    for record in (b"a", b"b"):
        fill(url, [record])
        SystemRuntime().sleep(0.005)
    gone = manifest_of(store).entries()[0].location
    ok("consume", url, "--max-batches", "1")
    dry = ["gc", url, "--grace-period-ms", "0", "--dry-run"]
    before = store.list("").objects
    assert f"would delete {gone}\n" in ok(*dry).stdout
    found = json.loads(ok(*dry, "--json").stdout)
    assert found["delete"] == [{"key": gone, "size": 12}]
    assert (found["dry_run"], found["deleted"], found["referenced"]) == (True, 0, 1)
    assert store.list("").objects == before
    assert json.loads(ok("gc", url, "--json").stdout)["deleted"] == 0  # too young
    found = json.loads(ok("gc", url, "--grace-period-ms", "0", "--json").stdout)
    assert (found["deleted"], found["failed"], found["dry_run"]) == (1, [], False)
    assert ok("fsck", url).exit_code == 0


@pytest.mark.parametrize("more", [(), ("--dry-run",)])
def test_f4_gc_without_a_manifest_deletes_nothing_and_claims_nothing(
    url: str, store: MemoryStore, more: tuple[str, ...]
) -> None:
    location = "ingest/01J5T4R3KXBMZ7QV9N2WG8YDHP.batch"
    store.put(location, encode_batch([b"a"]))
    line = fails("gc", url, "--manifest-path", "typo", "--grace-period-ms", "0", *more)
    assert "'typo'" in line
    assert [each.key for each in store.list("").objects] == [location]


def test_f7_gc_refuses_the_prefix_of_another_queue(url: str, store: MemoryStore) -> None:
    fill(url, [b"a"])
    store.put("other/manifest", Manifest.empty().raw)
    line = fails("gc", url, "--manifest-path", "other/manifest", "--grace-period-ms", "0")
    assert "belongs to the queue with manifest 'ingest/manifest'" in line
    assert records_of(store) == [b"a"]


def test_fsck_of_a_sound_queue(url: str) -> None:
    fill(url, [b"a"], [b"b"])
    assert ok("fsck", url).stdout == "2 batches, 2 records, 24 B checked\n"
    assert json.loads(ok("fsck", url, "--json").stdout) == {
        "ok": True, "batches": 2, "records": 2, "bytes": 24, "problems": [], "notes": [],
    }  # fmt: skip


def test_fsck_lists_the_problems_and_exits_1(url: str, store: MemoryStore) -> None:
    fill(url, [b"a"], [b"b"], [b"c"])
    first, second, _ = manifest_of(store).entries()
    store.delete_many([first.location])
    store.put(second.location, b"garbage")
    result = run("fsck", url)
    assert result.exit_code == 1
    problems = [line for line in result.stdout.splitlines() if line.startswith("problem: ")]
    assert [first.location in problems[0], second.location in problems[1]] == [True, True]
    assert result.stderr.startswith("error: 2 problems in the queue")
    result = run("fsck", url, "--json")
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert (found["ok"], [each["sequence"] for each in found["problems"]]) == (False, [0, 1])


def test_fsck_of_a_manifest_of_garbage(url: str, store: MemoryStore) -> None:
    store.put("ingest/manifest", Manifest.empty().append([NewEntry("x")]).raw[:-1] + b"\x07")
    result = run("fsck", url)
    assert result.exit_code == 1
    assert "problem: manifest 'ingest/manifest'" in result.stdout


# ---- wrong stores


@pytest.mark.parametrize("command", ["produce", "consume", "status", "gc", "fsck"])
@pytest.mark.parametrize(
    ("store_url", "says"),
    [
        ("", "store is ''"),
        ("s4://bucket", "unknown scheme"),
        ("s3://key:secret@bucket", "carries credentials"),
        ("s3://", "names no bucket"),
    ],
)
def test_a_wrong_store_is_one_line(command: str, store_url: str, says: str) -> None:
    line = fails(command, store_url)
    assert says in line
    assert "secret" not in line


@pytest.mark.parametrize("prefix", ["", "/a", "a/../b"])
def test_a_wrong_prefix_is_one_line(url: str, prefix: str) -> None:
    assert "data_path_prefix" in fails("status", url, "--data-path-prefix", prefix)
