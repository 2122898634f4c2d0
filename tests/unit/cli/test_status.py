"""``status`` and ``dump``."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from rich.console import Console

from opendata_buffer.broker.client import DiscoveryRecord, Lease
from opendata_buffer.broker.worker import Worker
from opendata_buffer.cli.main import cli
from opendata_buffer.config import QueueConfig, WorkerConfig
from opendata_buffer.formats.batch import Compression, encode_batch
from opendata_buffer.formats.manifest import Manifest, Metadata, NewEntry
from opendata_buffer.stores.memory import MemoryStore
from tests.unit.broker.local import RUNTIME, eventually, host
from tests.unit.cli.shell import (
    Ticks,
    fails,
    fill,
    flat,
    json_of,
    manifest_of,
    ok,
    run,
    runner,
    topic_of,
)


def test_status_prints_the_state_of_a_queue(url: str, store: MemoryStore) -> None:
    fill(url, [b"a"], [b"b"])
    ok("consume", url, "--ack", "--max-batches", "1")
    out = ok("status", url).stdout
    lines = [" ".join(each.split()) for each in out.splitlines()]
    assert {"records 1", "grace period 0:10:00"} <= set(lines)
    for part in (url, "queue length", "1 batch, 12 bytes stored", "orphans", "1 object, 12 bytes"):
        assert part in out
    assert "missing" not in out
    store.delete_many([manifest_of(store).entries()[0].location])
    assert "run fsck" in ok("status", url).stdout


def test_f15_status_reports_a_corrupt_manifest(url: str, store: MemoryStore) -> None:
    store.put("ingest/manifest", b"\xff" * 30)
    assert fails("status", url)


@pytest.mark.parametrize(("more", "shown"), [(("--json",), '"queue_length": 1'), ((), "1 batch,")])
def test_status_watch_continues_until_it_is_interrupted(
    url: str, more: tuple[str, ...], shown: str
) -> None:
    fill(url, [b"a"])
    result = runner().invoke(cli, ["status", url, "--watch", *more], obj=Ticks(2))
    assert result.exit_code == 130
    # Output is not a terminal, so each status is printed.
    assert result.stdout.count(shown) == 3


def test_status_watch_redraws_the_screen_of_a_terminal(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(url, [b"a"])
    monkeypatch.setattr(Console, "is_terminal", True)
    result = runner().invoke(cli, ["status", url, "--watch"], obj=Ticks(1))
    assert (result.exit_code, "1 batch," in result.stdout) == (130, True)


def test_status_shows_whether_the_broker_is_alive(url: str, store: MemoryStore) -> None:
    fill(url, [b"a"])
    config = QueueConfig(store=url)
    lease = Lease(store, config, RUNTIME)
    assert lease.take(DiscoveryRecord(0, "dead", "127.0.0.1:9", b"d" * 32, "00" * 32), None)
    assert "127.0.0.1:9, DEAD or not reached: no process listens" in flat("status", url)
    found = json_of("status", url)["broker"]
    assert (found["term"], found["id"], found["alive"]) == (1, "dead", False)
    serving = host(store)
    try:
        eventually(lambda: serving.serving)
        assert serving.serving is not None
        address = serving.serving.address
        fill(url, [b"b"])
        text = flat("status", url)
        found = json_of("status", url)["broker"]
    finally:
        serving.stop(10)
    assert f"{address}, alive broker term 2, id 0" in text
    assert "1.0 entries each, 0 conflicts" in text
    assert (found["alive"], found["commits"], found["appended"]) == (True, 1, 1)
    assert found["group_size"] == 1.0
    assert "none, the last one has stopped broker term 2" in flat("status", url)


def test_status_shows_the_claims_of_workers(url: str, store: MemoryStore) -> None:
    fill(url, *([b"%d" % number] for number in range(5)))
    with Worker(WorkerConfig(store=url, name="alice"), store=store) as worker:
        batches = worker.claim(3)
        batches[1].done()
        text = flat("status", url)
        claims = json_of("status", url)["claims"]
        for batch in (batches[0], batches[2]):
            batch.done()
        assert "0 held, 0 done beyond 3" in flat("status", url)
    shown = "2 held, 1 done beyond 0; the oldest held is 0, by alice, delivery 1"
    assert shown in text
    assert (claims["frontier"], claims["held"], claims["done"]) == (0, 2, 1)


def test_status_notes_damaged_objects_next_to_the_manifest(url: str, store: MemoryStore) -> None:
    fill(url, [b"a"])
    store.put("ingest/_broker.json", b"garbage")
    store.put("ingest/_claims.json", b"garbage")
    store.put("ingest/_consumer.json", b"garbage")
    found = json_of("status", url)
    assert (found["queue_length"], found["broker"], found["claims"]) == (1, None, None)
    assert (found["consumer"], len(found["notes"])) == (None, 3)
    assert "every batch in the queue is handed out again" in flat("status", url)


# ---- probes and topics


def test_the_exit_code_of_a_probe_shows_whether_the_backlog_is_too_large(url: str) -> None:
    fill(url, [b"a"], [b"b"])
    assert ok("status", url, "--max-backlog", "2").stdout.startswith("ok: 2 batches wait, the old")
    result = run("status", url, "--max-backlog", "1")
    assert (result.exit_code, result.stdout) == (3, "")
    assert "2 batches wait, more than 1" in result.stderr
    assert f"'opendata-buffer status {url}'" in result.stderr
    result = run("status", url, "--max-lag", "0", "--max-backlog", "0", "--json")
    assert result.exit_code == 3
    found = json.loads(result.stdout)
    assert (found["ok"], found["batches"]) == (False, 2)
    assert found["lag_seconds"] > 0
    assert "the oldest batch waits" in result.stderr
    ok("consume", url, "--ack")
    found = json_of("status", url, "--max-lag", "0", "--max-backlog", "0")
    assert found.pop("manifest_bytes") == 22
    assert found == {"ok": True, "batches": 0, "lag_seconds": 0.0}


@pytest.mark.parametrize(("share", "says"), [(0.6, "half full: it has 60%"), (0.9, "nearly full")])
def test_status_and_probe_warn_about_a_manifest_that_fills_up(
    url: str, store: MemoryStore, share: float, says: str
) -> None:
    name = topic_of(url, 2)[1]
    payload = Metadata(0, 0, bytes(int(share * 2**26)))
    full = Manifest.empty().append([NewEntry(f"{name}/a.batch", (payload,))])
    store.put(f"{name}/manifest", full.raw)
    for options in (("--max-lag", "1e12"), ()):
        assert f"warning: the manifest is {says}" in ok("status", url, *options).stderr
        one = ok("status", url, "--partition", "1", *options)
        assert says in " ".join((one.stdout + one.stderr).split())


def test_a_probe_without_a_result_has_another_exit_code(url: str) -> None:
    assert "there is no queue" in fails("status", url, "--max-lag", "5")
    assert run("status", url, "--max-lag", "5", "--watch").exit_code == 2


def test_a_probe_reads_the_manifest_and_lists_nothing(
    url: str, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(url, [b"a"])
    monkeypatch.setattr(store, "list", None)
    assert ok("status", url, "--max-lag", "60").exit_code == 0


def test_status_loads_neither_arrow_nor_the_network() -> None:
    code = (
        "import sys, opendata_buffer.cli.status\n"
        "assert not {'pyarrow', 'numpy', 'websockets', 'boto3'} & set(sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# ---- the consumer


def test_a_consumer_without_a_note_is_not_mistaken_for_the_previous_one(
    url: str, store: MemoryStore
) -> None:
    fill(url, [b"a"])
    ok("consume", url, "--ack")
    store.put("ingest/manifest", manifest_of(store).with_epoch(7).raw)
    assert "epoch 7 consumer without a record: another client" in flat("status", url)
    assert "; epoch 1 was opendata-buffer consume" in flat("status", url)
    store.delete_many(["ingest/_consumer.json"])
    assert "epoch 7 consumer without a record" in flat("status", url)
    assert json_of("status", url)["consumer"] is None


# ---- dump


KEYS = {"manifest": "ingest/manifest.broken-1", "batch": "ingest/x.batch"}


def dumped(kind: str, url: str, data: bytes) -> Any:
    MemoryStore.named(url.removeprefix("memory://")).put(KEYS[kind], data)
    return json.loads(ok("dump", url, KEYS[kind]).stdout)


@pytest.mark.parametrize("kind", KEYS)
def test_dump_reports_the_fault_of_an_unknown_object(
    kind: str, url: str, store: MemoryStore
) -> None:
    store.put(KEYS[kind], b"not in this format at all")
    assert f"'{KEYS[kind]}' is not a valid {kind}: " in fails("dump", url, KEYS[kind])


def test_dump_shows_every_field_of_a_manifest(url: str) -> None:
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
def test_dump_shows_a_batch(url: str, compression: Compression) -> None:
    assert dumped("batch", url, encode_batch([b"", b"\x00\xff", b"text"], compression)) == {
        "version": 1, "compression": compression.name.lower(), "record_count": 3,
        "records_base64": ["", "AP8=", "dGV4dA=="],
    }  # fmt: skip


def test_dump_names_a_missing_object(url: str) -> None:
    assert "'ingest/manifest'" in fails("dump", url)
    assert "'ingest/x.batch'" in fails("dump", url, "ingest/x.batch")
