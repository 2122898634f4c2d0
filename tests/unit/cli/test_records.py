"""``produce`` and ``consume``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from opendata_buffer import Consumer, ConsumerConfig, Producer, ProducerConfig
from opendata_buffer.cli.commands import cli
from opendata_buffer.errors import PermanentStorageError
from opendata_buffer.formats.batch import encode_batch
from opendata_buffer.formats.manifest import Manifest, NewEntry
from opendata_buffer.stores import Blob
from opendata_buffer.stores.memory import MemoryStore
from tests.unit.broker.local import eventually, host
from tests.unit.cli.shell import Ticks, fails, fill, manifest_of, ok, records_of, run


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


def test_consume_writes_and_acknowledges_everything(url: str, store: MemoryStore) -> None:
    fill(url, [b"a", b""], [b"\x00\xff"])
    result = ok("consume", url)
    assert result.stdout_bytes == b"a\n\n\x00\xff\n"
    assert json.loads(result.stderr) == {
        "records": 3, "batches": 2, "bytes": 3, "last_sequence": 1,
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


@pytest.mark.parametrize(
    "more", [(), ("--no-ack",), ("--no-ack", "--follow"), ("--follow",)], ids=" ".join
)
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
    assert f"'opendata-buffer skip {url} 1', which copies it" in result.stderr
    assert manifest_of(store).first_sequence == 1


@pytest.mark.parametrize("more", [(), ("--no-ack",)])
def test_consume_follow_polls_until_interrupted_and_says_what_it_wrote(
    url: str, capfd: pytest.CaptureFixture[str], more: tuple[str, ...]
) -> None:
    fill(url, [b"a"])
    result = CliRunner().invoke(
        cli, ["consume", url, "--follow", "--poll-interval-ms", "250", "--no-gc", *more],
        obj=Ticks(2),
    )  # fmt: skip
    assert (result.exit_code, result.stdout) == (130, "a\n")
    summary = json.loads(capfd.readouterr().err)
    assert summary == {"records": 1, "batches": 1, "bytes": 1, "last_sequence": 0}


def test_consume_makes_a_queue_only_when_it_is_told_to(url: str, store: MemoryStore) -> None:
    assert ok("consume", url, "--create-if-missing").stdout == ""
    assert manifest_of(store).epoch == 1


def test_consume_of_a_mistyped_path_makes_no_directory(tmp_path: Path) -> None:
    for command in ("consume", "status", "fsck", "gc"):
        fails(command, str(tmp_path / "typo"))
    fails("consume", str(tmp_path / "typo"), "--follow")
    fails("consume", str(tmp_path / "typo"), "--recreate")
    assert list(tmp_path.iterdir()) == []


def go_queue(store: MemoryStore) -> list[str]:
    """A queue as OpenData's Go producer writes it."""
    run_of = "ingest/01J5T4R3KXBMZ7QV9N2WG8YDHP"
    locations = [f"{run_of}/{n:016x}" for n in range(2)]
    for n, location in enumerate(locations):
        store.put(location, encode_batch([b"go %d" % n]))
    entries = [NewEntry(location) for location in locations]
    store.put("ingest/manifest", Manifest.empty().append(entries).raw)
    return locations


@pytest.mark.parametrize("more", [("--no-ack",), ()], ids=["looking", "owning"])
def test_a_queue_with_the_names_of_the_go_producer_is_read(
    url: str, store: MemoryStore, more: tuple[str, ...]
) -> None:
    go_queue(store)
    assert ok("fsck", url).exit_code == 0
    assert ok("consume", url, *more).stdout == "go 0\ngo 1\n"


@pytest.mark.parametrize("more", [("--no-ack",), ()], ids=["looking", "owning"])
def test_f23_batches_outside_the_prefix_are_read_when_that_is_allowed(
    url: str, store: MemoryStore, more: tuple[str, ...]
) -> None:
    store.put("elsewhere/a.batch", encode_batch([b"a"]))
    store.put("ingest/manifest", Manifest.empty().append([NewEntry("elsewhere/a.batch")]).raw)
    assert "set --allow-foreign-locations" in fails("consume", url, "--no-gc", *more)
    assert run("fsck", url).exit_code == 1
    assert ok("fsck", url, "--allow-foreign-locations").exit_code == 0
    assert ok("consume", url, "--allow-foreign-locations", *more).stdout == "a\n"


def test_produce_through_the_announced_broker_or_alone(url: str, store: MemoryStore) -> None:
    fill(url, [b"a"], broker="off")
    with_broker = host(store)
    try:
        eventually(lambda: with_broker.serving)
        ok("produce", url, stdin=b"b\n")
        assert with_broker.service is not None
        assert with_broker.service.appended == 1
        ok("produce", url, "--broker", "off", stdin=b"c\n")
        assert with_broker.service.appended == 1
    finally:
        with_broker.stop(10)
    ok("produce", url, "--broker", "host", stdin=b"d\n")
    assert records_of(store) == [b"a", b"b", b"c", b"d"]


FOREIGN = [b"a\nb", b"", b"\x00\xff\n", b"\r"]


@pytest.mark.parametrize("framing", ["length", "protobuf-fixed"])
def test_records_of_any_bytes_pass_through_a_pipe(
    url: str, store: MemoryStore, framing: str
) -> None:
    fill(url, FOREIGN)
    stream = ok("consume", url, "--framing", framing).stdout_bytes
    assert json.loads(ok("produce", url, "--framing", framing, stdin=stream).stdout)["records"] == 4
    assert records_of(store) == FOREIGN


def test_rows_and_values_are_taken_apart_and_put_together(url: str, store: MemoryStore) -> None:
    ok("produce", url, "--framing", "csv", stdin=b'a,"b\nc"\r\nd,e')
    assert records_of(store) == [b'a,"b\nc"', b"d,e"]
    assert ok("consume", url, "--framing", "csv").stdout_bytes == b'a,"b\nc"\r\nd,e\r\n'
    ok("produce", url, "--framing", "ndjson", stdin=b'{"a": 1}\n\n[2]\n')
    assert records_of(store) == [b'{"a": 1}', b"[2]"]


@pytest.mark.parametrize(
    ("framing", "stdin", "told"),
    [
        ("ndjson", b"1\n2\nx\n4\n", "record 3, at byte 4 of the input: no JSON value"),
        ("csv", b'a,b\nc,d\n"open', "record 3, at byte 8 of the input: the input ends inside"),
        ("length", b"\1\0\0\0a\1\0\0\0b\x09\0\0\0c", "record 3, at byte 10 of the input"),
        (
            "protobuf-fixed",
            2 * b"\x66\x33\x93\x36\1\0\0\0a" + b"junk" * 3,
            "record 3, at byte 18 of the input: no magic word",
        ),
    ],
)
def test_bad_input_says_which_record_and_byte_and_what_is_durable(
    url: str, store: MemoryStore, framing: str, stdin: bytes, told: str
) -> None:
    line = fails("produce", url, "--framing", framing, stdin=stdin)
    assert told in line
    assert line.endswith("Of the input, records 1 to 2 are durable.")
    assert len(records_of(store)) == 2
    line = fails("produce", url, "--framing", "ndjson", stdin=b"x")
    assert line.endswith("Of the input, not one record is known to be durable.")


def test_a_record_that_cannot_be_written_stays_in_the_queue_with_its_batch(
    url: str, store: MemoryStore
) -> None:
    fill(url, [b"1"], [b"2", b"two\nlines"])
    result = run("consume", url, "--framing", "ndjson")
    assert (result.exit_code, result.stdout_bytes) == (1, b"1\n")
    assert "record 1 of batch 1 cannot be written as ndjson" in result.stderr
    assert records_of(store) == [b"2", b"two\nlines"]


# ---- where it begins


def test_consume_looks_from_where_it_is_told_to(url: str, store: MemoryStore) -> None:
    fill(url, [b"a"], [b"b"], [b"c"])
    assert ok("consume", url, "--no-ack", "--from", "1").stdout == "b\nc\n"
    assert ok("consume", url, "--no-ack", "--from", "earliest").stdout == "a\nb\nc\n"
    assert ok("consume", url, "--no-ack", "--from", "latest").stdout == ""
    assert ok("consume", url, "--no-ack", "--from", "2001-01-01").stdout == "a\nb\nc\n"
    assert ok("consume", url, "--no-ack", "--from", "2999-01-01T00:00:00Z").stdout == ""
    assert manifest_of(store).entry_count == 3


def test_consume_does_not_drop_what_it_would_pass_by(url: str, store: MemoryStore) -> None:
    fill(url, [b"a"], [b"b"], [b"c"])
    line = fails("consume", url, "--from", "2")
    assert "--from 2 would drop 2 batches unread, up to sequence 1" in line
    assert f"'opendata-buffer seek {url} --to 2', which keeps a copy" in line
    assert "1 batch unread" in fails("consume", url, "--from", "1")
    assert manifest_of(store).entry_count == 3
    assert ok("consume", url, "--from", "0").stdout == "a\nb\nc\n"
    assert ok("consume", url, "--from", "latest").stdout == ""


def test_consume_from_nowhere_says_what_there_is(url: str) -> None:
    fill(url, [b"a"])
    ok("consume", url)
    fill(url, [b"b"])
    assert "it holds 1 to 1" in fails("consume", url, "--no-ack", "--from", "0")
    assert "it holds 1 to 1" in fails("consume", url, "--no-ack", "--from", "7")
    assert "'soon' is no place in a queue" in fails("consume", url, "--from", "soon")


@pytest.mark.parametrize(
    "options",
    [
        ("--json", "--format", "%s"),
        ("--json", "--framing", "csv"),
        ("--from", "0", "--last-acked-sequence", "0"),
    ],
)
def test_consume_refuses_what_contradicts_itself(url: str, options: tuple[str, ...]) -> None:
    result = run("consume", url, *options)
    assert result.exit_code == 2
    assert "cannot be used together" in result.stderr


# ---- JSON, formats, metadata, files


def test_what_consume_prints_as_json_is_what_produce_reads(url: str, store: MemoryStore) -> None:
    with Producer(ProducerConfig(store=url)) as producer:
        producer.produce([b"a\nb", "ü".encode()], b"m")
        producer.produce([b"\xff"], b"\xfe")
    printed = ok("consume", url, "--json").stdout_bytes
    lines = [json.loads(line) for line in printed.splitlines()]
    assert [(each["sequence"], each["index"]) for each in lines] == [(0, 0), (0, 1), (0, 2)]
    assert [each.get("value") for each in lines] == ["a\nb", "ü", None]
    assert lines[2]["value_base64"] == "/w=="
    assert all(each["time"].startswith("20") for each in lines)
    found = json.loads(ok("produce", url, "--json", stdin=printed).stdout)
    assert found == {"records": 3, "batches": 1, "bytes": 6}
    assert records_of(store) == [b"a\nb", "ü".encode(), b"\xff"]
    (entry,) = manifest_of(store).entries()
    assert [(each.start_index, each.payload) for each in entry.metadata] == [
        (0, b"m"), (2, b"\xfe"),
    ]  # fmt: skip


def test_produce_tells_which_line_is_no_json_record(url: str, store: MemoryStore) -> None:
    line = fails("produce", url, "--json", stdin=b'{"value": "a"}\n{"value": 1}\n')
    assert "line 2 is no record as 'consume --json' prints it: 'value' is not text" in line
    assert line.endswith("Of the input, lines 1 to 1 are durable.")
    assert records_of(store) == [b"a"]


def test_consume_by_a_format(url: str) -> None:
    fill(url, [b"a", b"bc"])
    assert ok("consume", url, "--no-ack", "--format", "%p %o.%i %S %s\\n").stdout == (
        "ingest 0.0 1 a\ningest 0.1 2 bc\n"
    )
    assert "'%k' shows nothing" in fails("consume", url, "--format", "%k")


def test_produce_with_a_line_of_metadata_for_each_record(
    url: str, store: MemoryStore, tmp_path: Path
) -> None:
    lines = tmp_path / "lines"
    lines.write_bytes(b"x\nx\ny\n")
    ok("produce", url, "--metadata-from", str(lines), stdin=b"1\n2\n3\n")
    (entry,) = manifest_of(store).entries()
    assert [(each.start_index, each.payload) for each in entry.metadata] == [(0, b"x"), (2, b"y")]
    line = fails("produce", url, "--metadata-from", str(lines), stdin=b"1\n2\n3\n4\n")
    assert "record 4 has no metadata" in line
    assert line.endswith("lines 1 to 3 are durable.")
    line = fails("produce", url, "--metadata-from", str(lines), stdin=b"1\n")
    assert "more lines of metadata than the input has records, 1" in line


def test_produce_files_as_one_record_each(url: str, store: MemoryStore, tmp_path: Path) -> None:
    (tmp_path / "one").write_bytes(b"1\n2\n")
    (tmp_path / "two").write_bytes(b"")
    names = [str(tmp_path / name) for name in ("one", "two")]
    out = ok("produce", url, "--file", names[0], "--file", names[1], stdin=b"not read\n").stdout
    assert json.loads(out) == {"records": 2, "batches": 1, "bytes": 4}
    assert records_of(store) == [b"1\n2\n", b""]
    line = fails("produce", url, "--file", names[0], "--max-batch-bytes", "7")
    assert f"'{names[0]}' has more than 3 bytes, and is one record: raise --max-batch-bytes" in line
    assert run("produce", url, "--file", str(tmp_path / "typo")).exit_code == 2


@pytest.mark.parametrize(
    "options", [("--json", "--framing", "csv"), ("--json", "--metadata", "m")], ids=" ".join
)
def test_produce_refuses_what_contradicts_itself(url: str, options: tuple[str, ...]) -> None:
    result = run("produce", url, *options)
    assert result.exit_code == 2
    assert "cannot be used together" in result.stderr
