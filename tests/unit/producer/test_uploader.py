from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from opendata_buffer.config import ProducerConfig
from opendata_buffer.errors import PermanentStorageError, TransientStorageError
from opendata_buffer.formats.batch import decode_batch
from opendata_buffer.formats.keys import Transaction
from opendata_buffer.formats.manifest import Metadata
from opendata_buffer.producer.append_buffer import Call
from opendata_buffer.producer.batching import Batch
from opendata_buffer.producer.handle import Completion
from opendata_buffer.producer.ordered_uploads import Stage, Upload
from opendata_buffer.producer.sender import Uploader
from opendata_buffer.stores.base import NotModified
from opendata_buffer.stores.local import LocalStore
from opendata_buffer.stores.memory import MemoryStore
from opendata_buffer.testing.runtime import ManualRuntime

RECORD = b"\x01\0\0\0a"
TAG = "TAG0V2"


class Scripted(MemoryStore):
    """Puts fail with these errors first."""

    def __init__(self, *errors: Exception) -> None:
        super().__init__()
        self.errors = list(errors)
        self.puts: list[str] = []

    def put(self, key: str, data: bytes | memoryview) -> None:
        self.puts.append(key)
        if self.errors:
            raise self.errors.pop(0)
        super().put(key, data)


def config(**settings: Any) -> ProducerConfig:
    return ProducerConfig(store="memory://unused", **settings)


def prepared(
    runtime: ManualRuntime, transaction: Transaction | None = None
) -> tuple[Upload, Batch]:
    batch = Batch(Completion(runtime), 0.0)
    batch.add(Call(RECORD, 1, b"m", 1_700, transaction))
    return batch.upload(runtime.monotonic() + 10), batch


def stored(store: MemoryStore | LocalStore, key: str) -> list[bytes]:
    blob = store.get(key)
    assert not isinstance(blob, NotModified)
    return decode_batch(blob.data)


def test_an_upload_gets_its_object_its_name_and_what_was_counted() -> None:
    runtime, store = ManualRuntime(), Scripted()
    upload, batch = prepared(runtime, Transaction("app", 7))
    Uploader(store, config(), runtime).upload(upload, batch, TAG)
    assert upload.location.startswith("ingest/app=app/batch=7/")
    assert stored(store, upload.location) == [b"a"]
    assert (upload.count, upload.size, upload.metadata) == (1, 5, (Metadata(0, 1_700, b"m"),))


def test_a_store_of_files_gets_the_pieces_and_any_other_one_the_whole(tmp_path: Path) -> None:
    runtime = ManualRuntime()
    local = LocalStore(tmp_path)
    for store in (local, Scripted()):
        upload, batch = prepared(runtime)
        batch.add(Call(RECORD, 1, b"m", 1_700))
        uploader = Uploader(store, config(), runtime)
        uploader.upload(upload, batch, TAG)
        assert isinstance(upload.data, list) is (store is local)
        assert stored(store, upload.location) == [b"a", b"a"]
        store.delete_many([upload.location])
        uploader.repair(upload)
        assert stored(store, upload.location) == [b"a", b"a"]


def test_f5_each_upload_of_a_batch_has_a_new_name() -> None:
    runtime, store = ManualRuntime(), Scripted()
    uploader = Uploader(store, config(), runtime)
    upload, batch = prepared(runtime)
    uploader.upload(upload, batch, TAG)
    first = upload.location
    runtime.advance(5)
    uploader.upload(upload, None, TAG)
    assert upload.location != first
    assert upload.minted is not None
    assert upload.minted.monotonic == 5
    assert stored(store, first) == stored(store, upload.location) == [b"a"]


def test_f29_what_is_transient_is_tried_again_under_the_same_name() -> None:
    runtime = ManualRuntime()
    store = Scripted(TransientStorageError("one"), TransientStorageError("two"))
    upload, batch = prepared(runtime)
    Uploader(store, config(), runtime).upload(upload, batch, TAG)
    assert store.puts == [upload.location] * 3
    assert str(upload.trouble) == "two"


def test_f29_retries_end_at_the_deadline() -> None:
    runtime = ManualRuntime()
    store = Scripted(*(TransientStorageError("slow down") for _ in range(1_000)))
    upload, batch = prepared(runtime)
    with pytest.raises(TransientStorageError, match="slow down"):
        Uploader(store, config(), runtime).upload(upload, batch, TAG)
    assert 7 < runtime.monotonic() <= 10
    assert len(store.puts) > 5


def test_what_is_permanent_is_not_tried_again() -> None:
    runtime, store = ManualRuntime(), Scripted(PermanentStorageError("denied"))
    upload, batch = prepared(runtime)
    with pytest.raises(PermanentStorageError):
        Uploader(store, config(), runtime).upload(upload, batch, TAG)
    assert len(store.puts) == 1


def test_an_upload_that_was_settled_meanwhile_is_not_written() -> None:
    runtime, store = ManualRuntime(), Scripted()
    uploader = Uploader(store, config(), runtime)
    upload, batch = prepared(runtime)
    upload.stage = Stage.SETTLED
    uploader.upload(upload, batch, TAG)
    uploader.repair(upload)
    assert store.puts == []


def test_f5_an_object_is_repaired_under_the_name_that_its_entry_has() -> None:
    runtime, store = ManualRuntime(), Scripted()
    uploader = Uploader(store, config(), runtime)
    upload, batch = prepared(runtime)
    uploader.upload(upload, batch, TAG)
    store.delete_many([upload.location])
    uploader.repair(upload)
    assert stored(store, upload.location) == [b"a"]
