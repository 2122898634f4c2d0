"""``produce``."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from io import BytesIO
from pathlib import Path

import pytest

from opendata_buffer.cli import produce as produce_module
from opendata_buffer.cli.errors import Failure
from opendata_buffer.cli.main import cli
from opendata_buffer.cli.produce import JsonRecords, Run, same_label
from opendata_buffer.config import QueueConfig
from opendata_buffer.errors import InvalidInput, PermanentStorageError
from opendata_buffer.stores.memory import MemoryStore
from opendata_buffer.topic import partitioner as mapping
from tests.unit.cli.shell import LATER, bytes_of, fails, manifest_of, ok, records_of, run, topic_of


def test_produce_writes_the_lines_of_its_input(url: str, store: MemoryStore) -> None:
    out = ok("produce", url, *LATER, stdin=b"one\n\ntwo\r\n\xff\x00").stdout
    assert json.loads(out.splitlines()[-1]) == {"records": 4, "batches": 1, "bytes": 9}
    assert records_of(store) == [b"one", b"", b"two\r", b"\xff\x00"]


def test_produce_into_the_data_prefix_of_a_queue_names_the_queue(tmp_path: Path) -> None:
    ok("produce", str(tmp_path), "--broker", "off", stdin=b"one\n")
    text = " ".join(fails("produce", f"{tmp_path}/ingest", stdin=b"two\n").split())
    assert f"file://{tmp_path}/ingest is the data prefix of a queue" in text
    assert text.endswith(f"Name the queue file://{tmp_path}.")


def test_produce_accepts_every_option(url: str, store: MemoryStore) -> None:
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
    assert bytes_of(store, manifest.entries()[0].location)[-7] == 1  # zstd


def test_a_failed_produce_reports_which_lines_are_durable(
    url: str, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(QueueConfig, "max_batch_bytes", 12)
    line = fails("produce", url, stdin=b"1\n2\n123456789\n4\n")
    assert "line 3 has more than 8 bytes" in line
    assert line.endswith("Of the input, lines 1 to 2 are durable.")
    assert records_of(store) == [b"1", b"2"]
    line = fails("produce", url, stdin=b"123456789")
    assert line.endswith("Of the input, not one line is known to be durable.")


def test_f29_a_failed_batch_is_reported_once(
    url: str, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(key: str, data: bytes | memoryview) -> None:
        raise PermanentStorageError(f"cannot write {key!r}: no space. Free some space.")

    monkeypatch.setattr(store, "put", full)
    # fails() checks that it is one line, although the handle, flush(), and close() all raise it.
    line = fails("produce", url, stdin=b"1\n2\n")
    assert "no space. Free some space. " in line
    assert line.endswith("Of the input, not one line is known to be durable.")


@pytest.mark.parametrize(
    ("framing", "stdin", "reason"),
    [
        ("ndjson", b"1\n2\nx\n4\n", "record 3, at byte 4 of the input: it is not a JSON value"),
        ("length", b"\1\0\0\0a\1\0\0\0b\x09\0\0\0c", "record 3, at byte 10 of the input"),
        (
            "protobuf-fixed",
            2 * b"\x66\x33\x93\x36\1\0\0\0a" + b"junk" * 3,
            "record 3, at byte 18 of the input: it starts with",
        ),
    ],
)
def test_the_error_about_bad_input_has_its_record_and_byte_and_the_durable_records(
    url: str, store: MemoryStore, framing: str, stdin: bytes, reason: str
) -> None:
    line = fails("produce", url, "--framing", framing, stdin=stdin)
    assert reason in line
    assert line.endswith("Of the input, records 1 to 2 are durable.")
    assert len(records_of(store)) == 2


# ---- a topic


def by_partition(store: MemoryStore, names: list[str]) -> dict[str, list[bytes]]:
    """Return the records of the partitions that were written."""
    return {
        name: records_of(store, f"{name}/manifest")
        for name in names
        if store.list(f"{name}/manifest").objects
    }


def mapped(keys: list[bytes], names: list[str], records: list[bytes]) -> dict[str, list[bytes]]:
    """Return the partitions of records with these keys."""
    found: dict[str, list[bytes]] = {}
    for index, record in zip(mapping.modulo(keys, names), records, strict=True):
        found.setdefault(names[index], []).append(record)
    return dict(sorted(found.items()))


KEYS = [b"key %d" % (n % 7) for n in range(50)]
RECORDS = [b"%d" % n for n in range(50)]


def test_records_are_assigned_to_partitions_by_their_metadata_or_a_key_in_json(
    url: str, store: MemoryStore
) -> None:
    names = topic_of(url, 4)

    def lines(name: str) -> bytes:
        pairs = zip(KEYS, RECORDS, strict=True)
        found = [json.dumps({"value": value.decode(), name: key.decode()}) for key, value in pairs]
        return "\n".join(found).encode()

    out = ok("produce", url, "--json", *LATER, stdin=lines("key")).stdout
    expected = mapped(KEYS, names, RECORDS)
    assert len(expected) > 1
    assert by_partition(store, names) == expected
    assert json.loads(out) == {"records": 50, "batches": len(expected), "bytes": 90}
    ok("consume", url, "--ack")
    ok("produce", url, "--json", "--key-is-metadata", stdin=lines("metadata"))
    assert by_partition(store, names) == expected
    printed = ok("consume", url, "--ack", "--json").stdout_bytes
    ok("produce", url, "--json", "--key-is-metadata", stdin=printed)
    assert by_partition(store, names) == expected


def test_one_key_for_all_records_and_another_partitioner_can_be_chosen(
    url: str, store: MemoryStore
) -> None:
    names = topic_of(url, 4)
    for _ in range(3):
        ok("produce", url, "--key", "k", "--partitioner", "rendezvous", stdin=b"a\nb\n")
    (only,) = mapping.rendezvous([b"k"], names)
    assert by_partition(store, names) == {names[only]: [b"a", b"b"] * 3}


def test_the_records_before_a_bad_one_are_produced(url: str, store: MemoryStore) -> None:
    names = topic_of(url, 2)
    line = fails("produce", url, "--json", stdin=b'{"value": "1"}\n{"value": "2"}\n{}\n')
    assert line.endswith("lines 1 to 2 are durable; of those behind some may be.")
    assert sum(map(len, by_partition(store, names).values())) == 2


@pytest.mark.parametrize("options", [("--key", "k"), ("--key-is-metadata",)], ids=" ".join)
def test_a_key_for_a_queue_is_refused(url: str, options: tuple[str, ...]) -> None:
    result = run("produce", url, *options, stdin=b"a\n")
    assert result.exit_code == 2
    assert f"{options[0]} chooses a partition, and records go to one queue" in result.stderr
    topic_of(url, 2)
    assert run("produce", url, "--partition", "0", *options, stdin=b"a\n").exit_code == 2
    assert run("produce", url, "--key", "k", "--key-is-metadata").exit_code == 2


def test_no_call_exceeds_the_largest_batch(
    url: str, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(QueueConfig, "max_batch_bytes", 12)
    lines = b"12345\n12345\n12345678\n1\n"
    out = ok("produce", url, *LATER, stdin=lines).stdout
    assert json.loads(out)["batches"] == 4
    assert records_of(store) == lines.split()


# ---- metadata and keys


def error_of(runs: Iterable[Run]) -> str:
    with pytest.raises(InvalidInput) as raised:
        list(runs)
    return str(raised.value)


def test_metadata_that_is_too_long_for_the_manifest_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(produce_module, "MAX_METADATA_BYTES", 3)
    error = error_of(JsonRecords().runs([b'{"value": "", "metadata": "abcd"}']))
    assert "metadata has more than 3 bytes" in error


def test_json_input_may_have_value_and_metadata_as_text_or_base64() -> None:
    lines = [
        b'{"value": "\xc3\xa4", "metadata": "m", "sequence": 7}',
        b" ",
        b'{"value_base64": "/w==", "metadata_base64": "AP8="}',
        b'{"value": ""}',
    ]
    assert list(JsonRecords().runs(lines)) == [
        Run(["ä".encode()], b"m"), Run([b"\xff"], b"\0\xff"), Run([b""], b""),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b"{", "no JSON"),
        (b"[1]", "no JSON object"),
        (b'{"key": "a"}', "neither 'value' nor 'value_base64'"),
        (b'{"value": 1}', "'value' is not text"),
        (b'{"value_base64": "a"}', "'value_base64' is not base64"),
        (b'{"value": "a", "value_base64": "YQ=="}', "both"),
        (b'{"value": "a", "metadata": {}}', "'metadata' is not text"),
        (b'{"value": "\\ud800"}', "'value' is not text"),
    ],
)
def test_the_error_about_an_invalid_line_has_its_number(line: bytes, why: str) -> None:
    error = error_of(JsonRecords().runs([b'{"value": "a"}', line]))
    assert error.startswith("line 2 is not a record")
    assert why in error


def test_json_input_may_have_keys_and_records_without_a_key_are_sent_separately() -> None:
    lines = [
        b'{"value": "1", "key": "a"}',
        b'{"value": "2", "key_base64": "/w=="}',
        b'{"value": "3"}',
        b'{"value": "4", "key": "", "metadata": "m"}',
    ]
    assert list(JsonRecords(with_keys=True).runs(lines)) == [
        Run([b"1", b"2"], b"", [b"a", b"\xff"]),
        Run([b"3"], b""),
        Run([b"4"], b"m", [b""]),
    ]
    wrong = [b'{"value": "1", "key": 7}']
    assert list(JsonRecords().runs(wrong)) == [Run([b"1"], b"")]
    error = error_of(JsonRecords(with_keys=True).runs(wrong))
    assert "'key' is not text" in error


def test_one_key_or_the_metadata_replaces_the_key_of_a_record() -> None:
    lines = [b'{"value": "1", "key": "a", "metadata": "m"}']
    assert list(JsonRecords(True, b"").runs(lines)) == [Run([b"1"], b"m", [b""])]
    by_metadata = JsonRecords(True, key_is_metadata=True)
    assert list(by_metadata.runs(lines)) == [Run([b"1"], b"m", [b"m"])]
    assert list(same_label(b"m", b"k")([b"1", b"2"])) == [Run([b"1", b"2"], b"m", [b"k", b"k"])]


class Interrupted(BytesIO):
    """Input that ends with Ctrl-C."""

    def read1(self, size: int | None = -1) -> bytes:
        if found := super().read1(size):
            return found
        raise KeyboardInterrupt


def test_the_message_after_an_interrupt_has_the_number_of_durable_records(
    url: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run("produce", url, stdin=Interrupted(b"a\nb\n")).exit_code == 130
    said = capfd.readouterr().err
    assert said == "ended by a signal: of the input, lines 1 to 2 are durable\n"


def test_a_closed_standard_input_is_an_error_and_not_an_empty_input(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(Failure, match="standard input is closed"):
        cli(["produce", "memory://x"], standalone_mode=False)
