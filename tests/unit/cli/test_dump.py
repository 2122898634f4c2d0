"""``manifest dump`` and ``batch dump``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from opendata_buffer.cli.dump import read_object
from opendata_buffer.config import StoreOptions
from opendata_buffer.errors import CorruptData
from opendata_buffer.formats.batch import Compression, encode_batch
from opendata_buffer.formats.manifest import Manifest, Metadata, NewEntry
from opendata_buffer.stores.memory import MemoryStore
from tests.unit.cli.shell import fails, ok, run


@pytest.mark.parametrize("kind", ["manifest", "batch"])
def test_dumping_something_else_names_the_object_and_the_fault(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "other"
    path.write_bytes(b"not in this format at all")
    line = fails(kind, "dump", str(path))
    assert f"'{path}' is not a valid {kind}: " in line


def dumped(kind: str, url: str, data: bytes) -> Any:
    MemoryStore.named(url.removeprefix("memory://")).put("dumped", data)
    return json.loads(ok(kind, "dump", f"{url}/dumped").stdout)


def test_manifest_with_every_field(url: str) -> None:
    metadata = Metadata(0, -1, b"\x00\xff"), Metadata(2**32 - 1, 2**63 - 1, b"")
    entries = [NewEntry("ingest/a.batch"), NewEntry("ingest/ü#1.batch", metadata)]
    assert dumped("manifest", url, Manifest.empty().append(entries).with_epoch(7).raw) == {
        "version": 1, "epoch": 7, "next_sequence": 2,
        "entries": [
            {"sequence": 0, "location": "ingest/a.batch", "metadata": []},
            {"sequence": 1, "location": "ingest/ü#1.batch", "metadata": [
                {"start_index": 0, "ingestion_time_ms": -1, "payload_base64": "AP8="},
                {"start_index": 2**32 - 1, "ingestion_time_ms": 2**63 - 1, "payload_base64": ""},
            ]},
        ],
    }  # fmt: skip


def test_manifest_with_a_fault_far_from_the_ends_is_refused_before_anything_is_printed(
    tmp_path: Path,
) -> None:
    manifest = Manifest.empty().append([NewEntry(f"ingest/{n}.batch") for n in range(3)])
    raw = bytearray(manifest.raw)
    raw[len(raw) // 3 + 5] ^= 1
    (tmp_path / "manifest").write_bytes(raw)
    result = run("manifest", "dump", str(tmp_path / "manifest"))
    assert (result.exit_code, result.stdout) == (1, "")


@pytest.mark.parametrize("compression", Compression)
def test_batch(url: str, compression: Compression) -> None:
    assert dumped("batch", url, encode_batch([b"", b"\x00\xff", b"text"], compression)) == {
        "version": 1, "compression": compression.name.lower(), "record_count": 3,
        "records_base64": ["", "AP8=", "dGV4dA=="],
    }  # fmt: skip


def test_f21_a_batch_beyond_the_cap_is_refused(tmp_path: Path) -> None:
    (tmp_path / "batch").write_bytes(encode_batch([bytes(100_000)], Compression.ZSTD))
    line = fails("batch", "dump", str(tmp_path / "batch"), "--max-batch-bytes", "1000")
    assert "more than max_batch_bytes 1000" in line


MAX = 1024 * 1024
OPTIONS = StoreOptions()


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


def test_f24_a_key_is_read_from_a_store_under_its_raw_name() -> None:
    MemoryStore.named("dump-keys").put("dir/100%#?.batch", b"bytes")
    assert read_object("memory://dump-keys/dir/100%#?.batch", OPTIONS, max_bytes=MAX) == b"bytes"


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("/tmp/", "names no object: append its key"),
        ("memory://name", "names no object: append its key"),
        ("memory://name/dir/", "names no object: append its key"),
        ("s3://bucket", "for example s3://bucket/ingest/manifest"),
        ("file://host/x", "names the host"),
        ("ftp://host/x", "unknown scheme"),
    ],
)
def test_a_target_that_names_no_object_is_refused(target: str, says: str) -> None:
    assert says in fails("manifest", "dump", target)
