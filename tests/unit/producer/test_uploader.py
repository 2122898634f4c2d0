"""How a batch is encoded, named, written, and retried."""

from __future__ import annotations

from pathlib import Path

import pytest

from opendata_buffer.errors import TransientStorageError
from opendata_buffer.formats.batch import decode_batch
from opendata_buffer.producer.batching import Batch, Completion, ProduceRequest, Stage
from opendata_buffer.producer.uploader import Uploader
from opendata_buffer.stores.base import Store
from opendata_buffer.stores.local import LocalStore
from opendata_buffer.testing.runtime import ManualRuntime
from tests.unit.producer.in_memory import Scripted, bytes_of, config

RECORD = b"\x01\0\0\0a"
TAG = "TAG0V2"


def prepared(runtime: ManualRuntime) -> Batch:
    batch = Batch(Completion(runtime), deadline=runtime.monotonic() + 10)
    batch.add(ProduceRequest(RECORD, 1, b"m", 1_700))
    return batch


def stored(store: Store, key: str) -> list[bytes]:
    return decode_batch(bytes_of(store, key))


def test_a_store_of_files_gets_pieces_and_other_stores_get_whole_batches(tmp_path: Path) -> None:
    runtime = ManualRuntime()
    local = LocalStore(tmp_path)
    for store in (local, Scripted()):
        batch = prepared(runtime)
        batch.add(ProduceRequest(RECORD, 1, b"m", 1_700))
        uploader = Uploader(store, config(), runtime)
        uploader.upload(batch, TAG)
        assert isinstance(batch.data, list) is (store is local)
        assert stored(store, batch.location) == [b"a", b"a"]
        store.delete_many([batch.location])
        uploader.repair(batch)
        assert stored(store, batch.location) == [b"a", b"a"]


def test_f5_each_upload_of_a_batch_has_a_new_name() -> None:
    runtime, store = ManualRuntime(), Scripted()
    uploader = Uploader(store, config(), runtime)
    batch = prepared(runtime)
    uploader.upload(batch, TAG)
    first = batch.location
    runtime.advance(5)
    uploader.upload(batch, TAG)
    assert batch.location != first
    assert batch.named is not None
    assert batch.named.monotonic == 5
    assert stored(store, first) == stored(store, batch.location) == [b"a"]


def test_f29_a_transient_error_is_retried_under_the_same_name() -> None:
    runtime = ManualRuntime()
    store = Scripted(TransientStorageError("one"), TransientStorageError("two"))
    batch = prepared(runtime)
    Uploader(store, config(), runtime).upload(batch, TAG)
    assert store.puts == [batch.location] * 3
    assert str(batch.last_error) == "two"


def test_f29_retries_end_at_the_deadline() -> None:
    runtime = ManualRuntime()
    store = Scripted(*(TransientStorageError("slow down") for _ in range(10_000)))
    batch = prepared(runtime)
    with pytest.raises(TransientStorageError, match="slow down"):
        Uploader(store, config(), runtime).upload(batch, TAG)
    assert 7 < runtime.monotonic() <= 10
    assert len(store.puts) > 5


def test_an_upload_that_was_completed_meanwhile_is_not_written() -> None:
    runtime, store = ManualRuntime(), Scripted()
    uploader = Uploader(store, config(), runtime)
    batch = prepared(runtime)
    batch.stage = Stage.COMPLETED
    uploader.upload(batch, TAG)
    uploader.repair(batch)
    assert store.puts == []
