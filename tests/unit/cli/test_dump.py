"""``dump``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from opendata_buffer.formats.batch import Compression, encode_batch
from opendata_buffer.formats.manifest import Manifest, Metadata, NewEntry
from opendata_buffer.stores.memory import MemoryStore
from tests.unit.cli.shell import fails, ok

KEYS = {"manifest": "ingest/manifest.broken-1", "batch": "ingest/x.batch"}


def dumped(kind: str, url: str, data: bytes) -> Any:
    MemoryStore.named(url.removeprefix("memory://")).put(KEYS[kind], data)
    return json.loads(ok("dump", url, KEYS[kind]).stdout)


@pytest.mark.parametrize("kind", KEYS)
def test_something_else_is_named_with_its_fault(kind: str, url: str, store: MemoryStore) -> None:
    store.put(KEYS[kind], b"not in this format at all")
    assert f"'{KEYS[kind]}' is not a valid {kind}: " in fails("dump", url, KEYS[kind])


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


@pytest.mark.parametrize("compression", Compression)
def test_batch(url: str, compression: Compression) -> None:
    assert dumped("batch", url, encode_batch([b"", b"\x00\xff", b"text"], compression)) == {
        "version": 1, "compression": compression.name.lower(), "record_count": 3,
        "records_base64": ["", "AP8=", "dGV4dA=="],
    }  # fmt: skip


def test_f21_a_batch_beyond_the_cap_is_refused(url: str, store: MemoryStore) -> None:
    store.put("ingest/x.batch", encode_batch([bytes(100_000)], Compression.ZSTD))
    line = fails("dump", url, "ingest/x.batch", "--max-batch-bytes", "1000")
    assert "more than max_batch_bytes 1000" in line or "more than --max-batch-bytes 1000" in line


@pytest.mark.parametrize("place", ["{}", "~/odd", "file://{}"])
def test_f24_a_key_is_read_under_its_raw_name(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    path = tmp_path / "odd" / "dir" / "100%#.batch"
    path.parent.mkdir(parents=True)
    path.write_bytes(encode_batch([b"a"]))
    found = json.loads(ok("dump", place.format(tmp_path / "odd"), "dir/100%#.batch").stdout)
    assert found["record_count"] == 1


def test_what_is_not_there_is_named(url: str) -> None:
    assert "'ingest/manifest'" in fails("dump", url)
    assert "'ingest/x.batch'" in fails("dump", url, "ingest/x.batch")
