"""Objects as JSON, against the values that the golden files were made from."""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from pathlib import Path
from typing import Any

import pytest

from opendata_buffer.cli.dump import Document, batch_document, manifest_document, read_object
from opendata_buffer.config import StoreOptions
from opendata_buffer.errors import (
    CorruptBatch,
    CorruptData,
    CorruptManifest,
    InvalidInput,
    ObjectNotFound,
)
from opendata_buffer.formats.batch import Compression, encode_batch
from opendata_buffer.formats.manifest import Manifest, Metadata, NewEntry
from opendata_buffer.stores.memory import MemoryStore

MAX = 1024 * 1024
OPTIONS = StoreOptions()


def parsed(document: Document) -> dict[str, Any]:
    value: dict[str, Any] = json.loads("".join(document.lines()))
    return value


def test_empty_manifest() -> None:
    text = "".join(manifest_document(Manifest.empty().raw).lines())
    assert text == '{"version": 1, "epoch": 0, "next_sequence": 0, "entries": []}\n'


def test_manifest_with_every_field() -> None:
    manifest = Manifest.empty().append(
        [
            NewEntry("ingest/a.batch"),
            NewEntry(
                "ingest/ü#1.batch",
                (Metadata(0, -1, b"\x00\xff"), Metadata(2**32 - 1, 2**63 - 1, b"")),
            ),
        ]
    )
    assert parsed(manifest_document(manifest.with_epoch(7).raw)) == {
        "version": 1,
        "epoch": 7,
        "next_sequence": 2,
        "entries": [
            {"sequence": 0, "location": "ingest/a.batch", "metadata": []},
            {
                "sequence": 1,
                "location": "ingest/ü#1.batch",
                "metadata": [
                    {"start_index": 0, "ingestion_time_ms": -1, "payload_base64": "AP8="},
                    {
                        "start_index": 2**32 - 1,
                        "ingestion_time_ms": 2**63 - 1,
                        "payload_base64": "",
                    },
                ],
            },
        ],
    }


def test_every_entry_has_a_line_of_its_own() -> None:
    manifest = Manifest.empty().append([NewEntry(f"ingest/{n}.batch") for n in range(3)])
    lines = "".join(manifest_document(manifest.raw).lines()).splitlines()
    assert len(lines) == 5
    assert lines[-1] == "]}"


def test_manifest_with_a_fault_far_from_the_ends_is_refused_before_anything_is_printed() -> None:
    manifest = Manifest.empty().append([NewEntry(f"ingest/{n}.batch") for n in range(3)])
    raw = bytearray(manifest.raw)
    second = len(raw) // 3
    raw[second + 5] ^= 1
    with pytest.raises(CorruptManifest):
        manifest_document(bytes(raw))


@pytest.mark.parametrize("compression", Compression)
def test_batch(compression: Compression) -> None:
    records = [b"", b"\x00\xff", b"text"]
    raw = encode_batch(records, compression)
    assert parsed(batch_document(raw, limit=None, max_bytes=MAX)) == {
        "version": 1,
        "compression": compression.name.lower(),
        "record_count": 3,
        "records_base64": ["", "AP8=", "dGV4dA=="],
    }


@pytest.mark.parametrize(("limit", "shown"), [(0, 0), (1, 1), (3, 3), (99, 3)])
def test_limit_shortens_the_list_and_not_the_count(limit: int, shown: int) -> None:
    found = parsed(batch_document(encode_batch([b"a"] * 3), limit=limit, max_bytes=MAX))
    assert (found["record_count"], len(found["records_base64"])) == (3, shown)


def test_f21_a_batch_beyond_the_cap_is_refused() -> None:
    raw = encode_batch([bytes(100_000)], Compression.ZSTD)
    with pytest.raises(CorruptBatch):
        batch_document(raw, limit=1, max_bytes=1000)


def test_a_file_is_read_by_path_home_path_and_url(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    path = tmp_path / "odd # name %20.manifest"
    path.write_bytes(b"bytes")
    assert read_object(str(path), OPTIONS, max_bytes=MAX) == b"bytes"
    assert read_object("~/odd # name %20.manifest", OPTIONS, max_bytes=MAX) == b"bytes"
    assert read_object(path.as_uri(), OPTIONS, max_bytes=MAX) == b"bytes"


def test_what_is_larger_than_the_limit_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "large"
    path.write_bytes(bytes(100))
    MemoryStore.named("dump-large").put("large", bytes(100))
    for target in (str(path), "memory://dump-large/large"):
        assert len(read_object(target, OPTIONS, max_bytes=100)) == 100
        with pytest.raises(CorruptData, match="99"):
            read_object(target, OPTIONS, max_bytes=99)


def test_a_device_without_a_size_does_not_fill_the_memory() -> None:
    with pytest.raises(CorruptData, match="more than 2000000 bytes"):
        read_object("/dev/zero", OPTIONS, max_bytes=2_000_000)


def test_f24_a_key_is_read_from_a_store_under_its_raw_name() -> None:
    MemoryStore.named("dump-keys").put("dir/100%#?.batch", b"bytes")
    assert read_object("memory://dump-keys/dir/100%#?.batch", OPTIONS, max_bytes=MAX) == b"bytes"


def test_a_directory_is_refused_with_the_object_to_name(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="is a directory: name one object in it"):
        read_object(str(tmp_path), OPTIONS, max_bytes=MAX)
    manifest = tmp_path / "ingest" / "manifest"
    manifest.parent.mkdir()
    manifest.write_bytes(b"")
    with pytest.raises(InvalidInput, match=f"for example {manifest}"):
        read_object(str(tmp_path), OPTIONS, max_bytes=MAX)


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("no/such/file", "there is no file 'no/such/file'"),
        ("memory://name", "names no object: append its key"),
        ("memory://name/dir/", "names no object: append its key"),
        ("s3://bucket", "for example s3://bucket/ingest/manifest"),
        ("file://host/x", "is no file URL"),
        ("file:///x?y", "is no file URL"),
        ("ftp://host/x", "unknown scheme"),
    ],
)
def test_what_names_no_object_is_refused(target: str, says: str) -> None:
    with pytest.raises(InvalidInput, match=says):
        read_object(target, OPTIONS, max_bytes=MAX)


def test_a_missing_key_is_said_to_be_missing() -> None:
    with pytest.raises(ObjectNotFound, match="'ingest/manifest' does not exist in memory://empty"):
        read_object("memory://empty/ingest/manifest", OPTIONS, max_bytes=MAX)


GOLDEN = Path(__file__).parents[2] / "golden"


def test_golden_manifests() -> None:
    for step in json.loads((GOLDEN / "manifests.json").read_text()):
        found = parsed(manifest_document((GOLDEN / step["file"]).read_bytes()))
        assert found["epoch"] == step["epoch"], step["file"]
        assert found["next_sequence"] == step["next_sequence"], step["file"]
        expected = [
            {
                "sequence": entry["sequence"],
                "location": entry["location"],
                "metadata": [
                    {
                        "start_index": each["start_index"],
                        "ingestion_time_ms": each["ingestion_time_ms"],
                        "payload_base64": b64encode(bytes.fromhex(each["payload_hex"])).decode(),
                    }
                    for each in entry["metadata"]
                ],
            }
            for entry in step["entries"]
        ]
        assert found["entries"] == expected, step["file"]


def test_golden_batches() -> None:
    for step in json.loads((GOLDEN / "batches.json").read_text()):
        raw = (GOLDEN / step["file"]).read_bytes()
        found = parsed(batch_document(raw, limit=None, max_bytes=64 * MAX))
        assert found["compression"] == step["compression"], step["file"]
        records = [b64decode(record).hex() for record in found["records_base64"]]
        assert records == step["records_hex"], step["file"]


def test_each_dump_names_the_version_of_its_own_format(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = Manifest.empty().raw
    empty = encode_batch([])
    monkeypatch.setattr("opendata_buffer.formats.batch.VERSION", 1)
    monkeypatch.setattr("opendata_buffer.formats.manifest.VERSION", 1)
    assert manifest_document(raw).head["version"] == 1
    monkeypatch.setattr("opendata_buffer.formats.batch.VERSION", 77)
    assert manifest_document(raw).head["version"] == 1
    monkeypatch.undo()
    monkeypatch.setattr("opendata_buffer.formats.manifest.VERSION", 77)
    assert batch_document(empty, limit=None, max_bytes=1).head["version"] == 1
