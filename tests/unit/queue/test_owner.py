"""The marker that ties a data prefix to one manifest."""

from __future__ import annotations

import pytest

from opendata_buffer import outcomes
from opendata_buffer.config import QueueConfig
from opendata_buffer.errors import CorruptData, PrefixConflict, TransientStorageError, UnsafeStore
from opendata_buffer.queue.ownership import (
    MARKER,
    check_owner,
    claim_for_use,
    claim_queue,
    marker_key,
)
from opendata_buffer.stores.base import ABSENT, Absent, Blob, IfVersion, PutOutcome
from opendata_buffer.stores.memory import MemoryStore
from opendata_buffer.testing.runtime import ManualRuntime


def _read(store: MemoryStore, key: str) -> bytes:
    got = store.get(key)
    assert isinstance(got, Blob)
    return got.data


INGEST = QueueConfig(store="memory://unused")


def _config(prefix: str, manifest: str) -> QueueConfig:
    return QueueConfig(store="memory://unused", data_path_prefix=prefix, manifest_path=manifest)


def _claim(store: MemoryStore, prefix: str, manifest: str) -> str:
    return claim_queue(store, _config(prefix, manifest)).queue_id


def _owned(store: MemoryStore, prefix: str, manifest: str) -> bool:
    return check_owner(store, _config(prefix, manifest)) is not None


def test_each_queue_gets_a_marker_with_an_id_of_its_own() -> None:
    store = MemoryStore()
    first = _claim(store, "ingest", "ingest/manifest")
    assert _read(store, "ingest/_owner.json") == (
        b'{"version": 1, "manifest": "manifest", "id": "%s"}\n' % first.encode()
    )
    second = _claim(store, "other", "queues/b")
    assert len({first, second, ""}) == 3


def test_f4_a_queue_made_anew_has_another_id_and_the_first_stays_until_then() -> None:
    store = MemoryStore()
    first = _claim(store, "ingest", "ingest/manifest")
    assert _claim(store, "ingest", "ingest/manifest") == first
    store.delete_many(["ingest/_owner.json"])
    assert _claim(store, "ingest", "ingest/manifest") not in ("", first)


def test_a_marker_without_an_id_is_accepted() -> None:
    store = MemoryStore()
    store.put("ingest/_owner.json", b'{"version": 1, "manifest": "manifest"}\n')
    assert _claim(store, "ingest", "ingest/manifest") == ""


def test_claiming_again_writes_nothing() -> None:
    store = MemoryStore()
    _claim(store, "ingest", "ingest/manifest")
    before = store.get(marker_key("ingest"))
    _claim(store, "ingest", "ingest/manifest")
    assert store.get(marker_key("ingest")) == before


def test_f7_a_prefix_of_another_queue_is_refused_naming_both_manifests() -> None:
    store = MemoryStore()
    _claim(store, "ingest", "a/manifest")
    for refuse in (_claim, _owned):
        with pytest.raises(PrefixConflict, match=r"'a/manifest'.*'b/manifest'") as caught:
            refuse(store, "ingest", "b/manifest")
        assert (caught.value.owner, caught.value.manifest_path) == ("a/manifest", "b/manifest")


def test_an_unclaimed_prefix_belongs_to_nobody() -> None:
    store = MemoryStore()
    assert _owned(store, "ingest", "ingest/manifest") is False
    assert store.list("").objects == ()


def test_an_unreadable_marker_is_neither_trusted_nor_replaced() -> None:
    store = MemoryStore()
    data = b'{"version": 2, "manifest": "m"}'
    store.put("ingest/_owner.json", data)
    said = r"'ingest/_owner\.json' in .*: the owner marker is not readable: .*delete the object\.$"
    with pytest.raises(CorruptData, match=said):
        _claim(store, "ingest", "ingest/manifest")
    assert _read(store, "ingest/_owner.json") == data


class _LosesAnswers(MemoryStore):
    def __init__(self, applied: bool) -> None:
        super().__init__()
        self.applied = applied

    def put_if(self, key: str, data: bytes, condition: Absent | IfVersion) -> PutOutcome:
        if self.applied:
            super().put_if(key, data, condition)
        return outcomes.Unknown("connection reset")


def test_f2_a_lost_answer_is_settled_by_reading() -> None:
    store = _LosesAnswers(applied=True)
    _claim(store, "ingest", "ingest/manifest")
    assert _owned(store, "ingest", "ingest/manifest")


def test_f2_a_claim_that_never_lands_is_a_transient_error() -> None:
    with pytest.raises(
        TransientStorageError,
        match=r"written within 60 s: answers were lost: connection reset\. Try",
    ):
        claim_queue(_LosesAnswers(applied=False), INGEST, runtime=ManualRuntime())


def test_of_two_claims_at_once_the_first_stays() -> None:
    class Late(MemoryStore):
        def put_if(self, key: str, data: bytes, condition: Absent | IfVersion) -> PutOutcome:
            rival = b'{"version": 1, "manifest": "../rival"}'
            super().put_if(key, rival, ABSENT)
            return super().put_if(key, data, condition)

    with pytest.raises(PrefixConflict, match="'rival'"):
        _claim(Late(), "ingest", "ingest/manifest")


def test_a_marker_that_is_too_large_is_told_with_its_place_and_what_to_do() -> None:
    store = MemoryStore()
    store.put("ingest/_owner.json", bytes(MARKER.max_bytes + 1))
    with pytest.raises(
        CorruptData,
        match=r"^'ingest/_owner\.json' in memory://\S*: the owner marker is not readable: .* 65537 "
        r"bytes .* limit of 65536: .*\. If one queue alone uses this data prefix, delete",
    ):
        claim_queue(store, INGEST)


def test_f7_f12_a_claim_for_use_probes_the_store_then_claims_the_prefix() -> None:
    class Unsafe(MemoryStore):
        def check_conditional_writes(self, near: str) -> None:
            raise UnsafeStore(f"no compare-and-swap near {near}")

    config = QueueConfig(store="memory://unused")
    store = MemoryStore()
    first = claim_for_use(store, config, runtime=ManualRuntime())
    assert first.queue_id
    assert claim_for_use(store, config, runtime=ManualRuntime()).queue_id == first.queue_id

    unsafe = Unsafe()
    with pytest.raises(UnsafeStore, match="near ingest/manifest"):
        claim_for_use(unsafe, config, runtime=ManualRuntime())
    assert unsafe.list("").objects == ()
