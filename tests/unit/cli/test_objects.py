"""``manifest dump`` and ``batch dump``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from opendata_buffer.formats.batch import encode_batch
from tests.unit.cli.shell import fails, fill, ok


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
