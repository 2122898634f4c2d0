"""Fetching one batch by its descriptor, in every form."""

from __future__ import annotations

import errno
import pickle
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

from opendata_buffer.config import ConsumerConfig
from opendata_buffer.consumer.batches import ArrowBatch, ConsumedBatch
from opendata_buffer.consumer.fetch import AdaptiveConcurrency, FetchHandle, PooledBatch
from opendata_buffer.errors import BatchMissing, BatchUnreadable, ForeignLocation, InvalidInput
from opendata_buffer.formats import arrow
from opendata_buffer.formats.arrow import ReadBuffer
from opendata_buffer.formats.batch import Compression, encode_batch
from opendata_buffer.formats.manifest import BatchDescriptor, Metadata
from opendata_buffer.stores import local
from opendata_buffer.stores.base import Store, read_bytes
from opendata_buffer.stores.local import LocalStore
from opendata_buffer.stores.memory import MemoryStore
from opendata_buffer.stores.open import open_store
from opendata_buffer.testing.runtime import ManualRuntime

LOCATION = "ingest/01J5T4R3KXBMZ7QV9N2WG8YDHP.batch"
META = (Metadata(0, 1_767_225_600_000, b"host=a"),)


def _handle(store: Store, max_batch_bytes: int = 1024) -> FetchHandle:
    return FetchHandle(
        store, data_path_prefix="ingest", max_batch_bytes=max_batch_bytes, runtime=ManualRuntime()
    )


def _store(data: bytes = b"\x03\0\0\0abc\0\0\0\0\0\x02\0\0\0\x01\0") -> MemoryStore:
    store = MemoryStore()
    store.put(LOCATION, data)
    return store


def test_a_batch_carries_its_records_and_its_descriptor() -> None:
    handle, descriptor = _handle(_store()), BatchDescriptor(7, LOCATION, META)
    batch = handle.fetch(descriptor)
    assert batch.entries == [b"abc", b""]
    assert (batch.sequence, batch.location, batch.metadata) == (7, LOCATION, META)
    arrow = handle.fetch_arrow(descriptor)
    assert arrow.values.equals(pa.array([b"abc", b""], pa.binary()))
    assert (arrow.sequence, arrow.location, arrow.metadata) == (7, LOCATION, META)
    raw = handle._fetch_pooled(descriptor)
    assert handle._decode(raw) == batch
    assert handle._decode_arrow(raw).values.equals(arrow.values)


@pytest.mark.parametrize("compression", list(Compression))
@pytest.mark.parametrize("sizes", [[8] * 1000, [5000] * 1000, [8] * 5 + [5000] * 95 + [8] * 900])
def test_records_are_decoded_array_by_array(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compression: Compression, sizes: list[int]
) -> None:
    monkeypatch.setattr(arrow, "WHOLE_BYTES", 400_000)  # larger ones are read in parts
    records = [bytes([n % 251]) * size for n, size in enumerate(sizes)]
    data = encode_batch(records, compression)
    stores: list[Store] = [_store(data), LocalStore(tmp_path)]
    stores[1].put(LOCATION, data)
    for store in stores:
        pooled = _handle(store, 1 << 23)._fetch_pooled(BatchDescriptor(7, LOCATION, META))
        stored = pooled.data
        assert bytes(stored.whole().data if isinstance(stored, ReadBuffer) else stored) == data
        assert pooled.nbytes == len(data)
        for _ in range(2):  # it may be opened again
            found = _handle(store, 1 << 23)._records(pooled, sum(sizes) // 10 + 400)
            assert (found.count, found.sequence, found.location) == (1000, 7, LOCATION)
            assert found.metadata == META
            arrays = list(found.arrays)
            alike = sizes[-1] == sizes[5]
            assert [len(array) for array in arrays] == [100] * 10 or (not alike and len(arrays) > 1)
            assert pa.concat_arrays(arrays).to_pylist() == records
        assert _handle(store, 1 << 23)._decode(pooled).entries == records


def test_a_large_file_is_read_while_it_is_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrow, "WHOLE_BYTES", 10_000)
    store, records = LocalStore(tmp_path), [bytes([n % 251]) * 96 for n in range(1000)]
    store.put(LOCATION, encode_batch(records))
    read_into, reads = local.read_into, list[int]()

    def busy(fd: int, start: int, memory: memoryview) -> bool:
        reads.append(len(memory))
        if len(reads) == 4:
            raise OSError(errno.EAGAIN, "busy")
        return read_into(fd, start, memory)

    monkeypatch.setattr(local, "read_into", busy)
    handle, retrying = _handle(store, 1 << 20), ConsumerConfig(store="memory://a").retries
    pooled = handle._fetch_pooled(BatchDescriptor(7, LOCATION), retrying(ManualRuntime()))
    arrays = handle._records(pooled, 10_000).arrays
    found = [next(arrays), next(arrays)]
    assert len(reads) == 5, "reads of the footer and of two arrays, one of them twice"
    assert max(reads) < 12_000
    assert pa.concat_arrays([*found, *arrays]).to_pylist() == records
    arrays = handle._records(pooled, 10_000).arrays
    next(arrays)
    store.delete_many([LOCATION])
    with pytest.raises(BatchMissing, match=f"batch 7 at '{LOCATION}'"):
        next(arrays)


def _ways(handle: FetchHandle) -> list[Callable[[BatchDescriptor], object]]:
    def in_pieces(descriptor: BatchDescriptor) -> object:
        return list(handle._records(handle._fetch_pooled(descriptor), 1024).arrays)

    return [handle.fetch, handle.fetch_arrow, in_pieces]


def test_f25_a_missing_batch_names_sequence_and_location() -> None:
    handle = _handle(MemoryStore())
    for way in _ways(handle):
        with pytest.raises(BatchMissing, match=rf"batch 7 at '{LOCATION}'.*skip\(7\)") as caught:
            way(BatchDescriptor(7, LOCATION))
        assert (caught.value.sequence, caught.value.location) == (7, LOCATION)


def test_f25_an_unreadable_batch_names_sequence_and_location() -> None:
    for way in _ways(_handle(_store(b"no batch at all"))):
        with pytest.raises(BatchUnreadable, match=f"batch 7 at '{LOCATION}'") as caught:
            way(BatchDescriptor(7, LOCATION))
        assert pickle.loads(pickle.dumps(caught.value)).sequence == 7


@pytest.mark.parametrize("compression", list(Compression))
def test_f21_a_batch_above_the_limit_is_refused(compression: Compression) -> None:
    for way in _ways(_handle(_store(encode_batch([b"x" * 100_000], compression)))):
        with pytest.raises(BatchUnreadable):
            way(BatchDescriptor(7, LOCATION))


def test_a_batch_at_the_limit_is_accepted_even_if_compression_makes_it_larger() -> None:
    noise = bytes(range(256)) * 3 + bytes(252)
    for compression in Compression:
        handle = _handle(_store(encode_batch([noise], compression)))
        assert handle.fetch(BatchDescriptor(0, LOCATION)).entries == [noise]


@pytest.mark.parametrize(
    "location",
    [
        "secrets/01J5T4R3KXBMZ7QV9N2WG8YDHP.batch",
        "ingest/../secrets/01J5T4R3KXBMZ7QV9N2WG8YDHP.batch",
        "/ingest/01J5T4R3KXBMZ7QV9N2WG8YDHP.batch",
        "ingest2/01J5T4R3KXBMZ7QV9N2WG8YDHP.batch",
        "ingest/\n01J5T4R3KXBMZ7QV9N2WG8YDHP.batch",
        "",
    ],
)
def test_f23_a_location_outside_the_prefix_is_not_fetched(location: str) -> None:
    class Untouched(MemoryStore):
        def get(self, *_: object, **__: object) -> object:  # type: ignore[override]
            raise AssertionError("the store was asked")

    for way in _ways(_handle(Untouched())):
        with pytest.raises(ForeignLocation, match=r"data prefix 'ingest'|no object can h"):
            way(BatchDescriptor(7, location))


def test_an_object_with_any_name_below_the_prefix_is_fetched() -> None:
    store = _store()
    run = "01J5T4R3KXBMZ7QV9N2WG8YDHP"
    for location in (f"ingest/{run}/000000000000002a", "ingest/any/name"):
        store.put(location, b"\x01\0\0\0x\0\x01\0\0\0\x01\0")
        assert _handle(store).fetch(BatchDescriptor(7, location)).entries == [b"x"]


def test_a_handle_for_another_prefix_reads_only_there() -> None:
    store = _store()
    store.put("other/a.batch", read_bytes(store, LOCATION))
    handle = _handle(store)
    other = handle._within("other")
    assert other.fetch(BatchDescriptor(7, "other/a.batch")).entries == [b"abc", b""]
    for each, elsewhere in ((other, LOCATION), (handle, "other/a.batch")):
        with pytest.raises(ForeignLocation):
            each.fetch(BatchDescriptor(7, elsewhere))


def test_a_handle_is_pickled_with_the_url_of_its_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_store(str(tmp_path / "queue")).put(LOCATION, b"\0\0\0\0\0\x01\0")
    monkeypatch.chdir(tmp_path)
    sent = pickle.dumps(FetchHandle.of(ConsumerConfig(store="queue")))
    monkeypatch.chdir("/")
    received = pickle.loads(sent)
    assert received.fetch(BatchDescriptor(7, LOCATION)).entries == []
    assert len(sent) < 2_000


def test_a_handle_on_a_named_memory_store_can_be_pickled_within_the_process() -> None:
    store = MemoryStore.named("test_fetch")
    store.put(LOCATION, b"\0\0\0\0\0\x01\0")
    received = pickle.loads(pickle.dumps(_handle(store)))
    assert received.fetch(BatchDescriptor(7, LOCATION)).entries == []


def test_the_error_about_pickling_a_handle_on_a_private_store_has_the_reason() -> None:
    with pytest.raises(InvalidInput, match="cannot be pickled"):
        pickle.dumps(_handle(MemoryStore()))


@pytest.mark.parametrize(
    ("size", "waited", "worked", "near"),
    [
        (0, 0.001, 0.0, True),
        (0, 0.0011, 0.0, None),
        (8_000_000, 0.009, 0.0, True),
        (8_000_000, 0.010, 0.0, None),
        (0, 0.030, 0.030, True),
        (0, 0.031, 0.030, None),
    ],
)
def test_a_fetch_that_hardly_waits_marks_the_store_as_near(
    size: int, waited: float, worked: float, near: bool | None
) -> None:
    adaptive = AdaptiveConcurrency()
    adaptive.fetched(size, waited, worked)
    assert adaptive.near is near


VALUES = pa.array([b"ab", b""], pa.binary())


@pytest.mark.parametrize(
    ("value", "nbytes"),
    [
        (ConsumedBatch([b"ab", b""], 3, "x", META), 2),
        (PooledBatch(b"abc", 3, "x", META), 3),
        (ArrowBatch(VALUES, 3, "x", META), VALUES.nbytes),
    ],
    ids=lambda each: type(each).__name__,
)
def test_batches_can_be_pickled_and_know_their_size(
    value: ConsumedBatch | PooledBatch | ArrowBatch, nbytes: int
) -> None:
    assert pickle.loads(pickle.dumps(value)) == value
    assert value.nbytes == nbytes
