"""Files of the reference implementation are decoded to their values and reproduced exactly.

``batches.json`` and ``manifests.json``, next to the files, contain the values.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from opendata_buffer.formats.arrow import decode_arrow, encode_arrow_block
from opendata_buffer.formats.batch import (
    Compression,
    decode_batch,
    encode_batch,
    open_batch,
    seal_block,
)
from opendata_buffer.formats.manifest import (
    BatchDescriptor,
    Manifest,
    Metadata,
    NewEntry,
    check_transition,
)

HERE = Path(__file__).parent
BATCHES: list[dict[str, Any]] = json.loads((HERE / "batches.json").read_text())
MANIFESTS: list[dict[str, Any]] = json.loads((HERE / "manifests.json").read_text())

batches = pytest.mark.parametrize("golden", BATCHES, ids=[b["file"] for b in BATCHES])


def test_every_golden_file_is_described() -> None:
    described = {golden["file"] for golden in BATCHES + MANIFESTS}
    assert {path.name for path in HERE.glob("*.batch")} <= described
    assert {path.name for path in HERE.glob("*.manifest")} <= described
    assert len(described) >= 21


def records_of(golden: dict[str, Any]) -> list[bytes]:
    return [bytes.fromhex(record) for record in golden["records_hex"]]


@batches
def test_golden_batch_decodes_to_its_records(golden: dict[str, Any]) -> None:
    data = (HERE / golden["file"]).read_bytes()
    footer, _ = open_batch(data)
    assert footer.compression.name.lower() == golden["compression"]
    assert footer.record_count == len(golden["records_hex"])
    assert decode_batch(data) == records_of(golden)
    assert decode_arrow(data).to_pylist() == records_of(golden)


@batches
def test_golden_batch_is_reproduced_from_its_records(golden: dict[str, Any]) -> None:
    data = (HERE / golden["file"]).read_bytes()
    records = records_of(golden)
    compression = Compression[golden["compression"].upper()]
    block, count = encode_arrow_block(pa.array(records, pa.binary()))
    for ours in (encode_batch(records, compression), seal_block(block, count, compression)):
        if compression == Compression.NONE:
            assert ours == data
        else:
            # Frames may differ between versions of zstd, but block and footer may not.
            assert open_batch(ours) == open_batch(data)
            assert ours[-7:] == data[-7:]


def entries_of(golden: dict[str, Any]) -> tuple[BatchDescriptor, ...]:
    return tuple(
        BatchDescriptor(
            entry["sequence"],
            entry["location"],
            tuple(
                Metadata(
                    item["start_index"],
                    item["ingestion_time_ms"],
                    bytes.fromhex(item["payload_hex"]),
                )
                for item in entry["metadata"]
            ),
        )
        for entry in golden["entries"]
    )


@pytest.mark.parametrize("golden", MANIFESTS, ids=[m["file"] for m in MANIFESTS])
def test_golden_manifest_decodes_to_its_values(golden: dict[str, Any]) -> None:
    manifest = Manifest.parse((HERE / golden["file"]).read_bytes())
    manifest.entries()
    assert manifest.entries() == entries_of(golden)
    assert manifest.epoch == golden["epoch"]
    assert manifest.next_sequence == golden["next_sequence"]
    assert manifest.entry_count == len(golden["entries"])
    for entry in golden["entries"]:
        assert manifest.find(entry["location"]) == entry["sequence"]


def change(before: Manifest, golden: dict[str, Any]) -> Manifest:
    """Apply the operations that a golden step names."""
    step, wanted = golden["step"], entries_of(golden)
    after = before
    if "initialize" in step:
        after = after.with_epoch(after.epoch + 1)
    if "dequeue through" in step:
        after = after.drop_through(int(step.rsplit(" ", 1)[1]))
    if "enqueue" in step:
        news = [entry for entry in wanted if entry.sequence >= before.next_sequence]
        assert news, step
        after = after.append([NewEntry(entry.location, entry.metadata) for entry in news])
    assert after is not before, f"unknown step {step!r}"
    return after


def steps() -> Iterator[tuple[dict[str, Any] | None, dict[str, Any]]]:
    yield None, MANIFESTS[0]
    yield from pairwise(MANIFESTS)


@pytest.mark.parametrize(
    ("before", "golden"), list(steps()), ids=[m["step"].replace(" ", "-") for m in MANIFESTS]
)
def test_golden_manifest_is_reproduced_from_the_previous_one(
    before: dict[str, Any] | None, golden: dict[str, Any]
) -> None:
    start = Manifest.empty()
    if before is not None:
        start = Manifest.parse((HERE / before["file"]).read_bytes())
    after = change(start, golden)
    check_transition(start, after)
    assert after.raw == (HERE / golden["file"]).read_bytes()
