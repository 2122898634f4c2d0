"""Looking at a queue that somebody else owns."""

from __future__ import annotations

import pytest

from opendata_buffer.admin.observe import Observer
from opendata_buffer.config import QueueConfig
from opendata_buffer.errors import InvalidInput
from opendata_buffer.formats.manifest import Manifest
from opendata_buffer.runtime import SystemRuntime
from opendata_buffer.stores.memory import MemoryStore


def test_no_manifest_is_an_error_that_says_where_it_looked_and_how_to_fix_it() -> None:
    store = MemoryStore("nowhere")
    config = QueueConfig(store="memory://nowhere", data_path_prefix="a/b")
    with pytest.raises(InvalidInput) as raised:
        Observer(store, config, SystemRuntime()).manifest()
    for part in ("'a/b/manifest'", "memory://nowhere", "data_path_prefix", "manifest_path"):
        assert part in str(raised.value)
    assert store.list("").objects == ()


def test_every_look_sees_the_manifest_as_it_is() -> None:
    store = MemoryStore("looked-at")
    config = QueueConfig(store="memory://looked-at")
    store.put("ingest/manifest", Manifest.empty().raw)
    observer = Observer(store, config, SystemRuntime())
    assert observer.manifest().epoch == 0
    store.put("ingest/manifest", Manifest.empty().with_epoch(1).raw)
    assert observer.manifest().epoch == 1
