"""Commands on a queue that another client keeps in its own layout."""

from __future__ import annotations

import json

import pytest

from opendata_buffer.config import QueueConfig
from opendata_buffer.formats.manifest import Manifest
from opendata_buffer.queue.marker import owner_key
from opendata_buffer.queue.ownership import claim_queue
from opendata_buffer.stores.base import read_bytes
from opendata_buffer.stores.memory import MemoryStore
from tests.support.exporter import DATA, MANIFEST, export, there
from tests.unit.cli.shell import fails, ok

PREFIX = ("--data-path-prefix", DATA)
QUEUE = (*PREFIX, "--manifest-path", MANIFEST)


@pytest.mark.parametrize(
    "command",
    [
        ("consume", "--ack"),
        ("consume", "--ack", "--create-if-missing"),
        ("consume",),
        ("produce",),
        ("produce", "--recreate"),
        ("status",),
        ("status", "--max-lag", "5"),
        ("gc",),
        ("fsck",),
        ("fsck", "--repair", "--yes"),
        ("trim", "--to", "latest", "--yes"),
        ("readers", "enable", "--yes"),
        ("dump",),
    ],
)
def test_f51_every_command_names_the_manifest_of_an_exporter_and_changes_nothing(
    url: str, store: MemoryStore, command: tuple[str, ...]
) -> None:
    batches = export(store, b"a", b"b", b"c")
    before = store.list("").objects
    words = 2 if command[0] == "readers" else 1
    line = fails(*command[:words], url, *command[words:], *PREFIX, stdin=b"x\n")
    assert f"--manifest-path='{MANIFEST}'" in line
    assert "create-if-missing" not in line
    assert there(store) == batches
    assert store.list("").objects == before
    assert ok("consume", url, "--ack", *QUEUE).stdout == "a\nb\nc\n"


def test_f51_the_error_about_the_parent_folder_names_both_options(
    url: str, store: MemoryStore
) -> None:
    batches = export(store, b"a", b"b", b"c")
    line = fails("consume", url, "--ack", "--data-path-prefix", "ingest/otel/logs")
    assert f"Use --data-path-prefix='{DATA}' and --manifest-path='{MANIFEST}'" in line
    assert there(store) == batches


def test_f51_gc_keeps_the_batches_of_an_exporter_below_a_queue_of_an_earlier_release(
    url: str, store: MemoryStore
) -> None:
    store._now_ms = lambda: 1_767_225_600_000  # the batches are old
    batches = export(store, b"a", b"b", b"c")
    store._now_ms = MemoryStore()._now_ms
    config = QueueConfig(store=url, data_path_prefix=DATA)
    claim_queue(store, config)
    store.put(config.manifest_path, Manifest.empty().with_epoch(1).raw)
    out = ok("gc", url, *PREFIX).stdout
    assert f"nothing was deleted: manifest '{MANIFEST}' names batches" in out
    assert f"--manifest-path='{MANIFEST}'" in out
    assert json.loads(ok("gc", url, *PREFIX, "--json").stdout)["held"]
    assert there(store)[:3] == batches
    assert "deletes nothing" in json.loads(ok("status", url, *PREFIX, "--json").stdout)["notes"][0]
    ok("fsck", url, *QUEUE, "--repair", "--yes")
    assert json.loads(read_bytes(store, owner_key(DATA)))["manifest"] == "../manifest"
    assert ok("consume", url, "--ack", *QUEUE).stdout == "a\nb\nc\n"
