"""The discovery record: its bytes, and how it is updated."""

from __future__ import annotations

from dataclasses import replace

import pytest

from opendata_buffer.broker.client import DISCOVERY_RECORD, DiscoveryRecord, Lease
from opendata_buffer.config import QueueConfig
from opendata_buffer.errors import CorruptData
from opendata_buffer.stores.base import read_bytes
from opendata_buffer.stores.memory import MemoryStore
from opendata_buffer.testing.runtime import ManualRuntime
from tests.unit.broker.local import Hooked

ONE = DiscoveryRecord(3, "01K9", "10.0.0.7:9100", b"s" * 32, "ab" * 32, beat=4, seen_ms=1_700)


def test_a_written_record_can_be_read() -> None:
    for each in (
        ONE,
        replace(ONE, certificate=""),
        replace(ONE, address="", secret=b""),
    ):
        assert DiscoveryRecord.from_json(each.to_json()) == each


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"\xff",
        b"[" * 50_000,
        ONE.to_json().replace(b'"version": 1', b'"version": 2'),
        ONE.to_json().replace(b'"term": 3', b'"term": -1'),
        replace(ONE, secret=b"short").to_json(),
        ONE.to_json().replace(ONE.secret.hex().encode(), b"no hex"),
        b"x" * (DISCOVERY_RECORD.max_bytes + 1),
    ],
)
def test_an_unreadable_record_is_an_error_and_the_next_broker_replaces_it(data: bytes) -> None:
    with pytest.raises(CorruptData, match="a broker that is started replaces it"):
        DiscoveryRecord.from_json(data)
    store = MemoryStore()
    store.put("ingest/_broker.json", data)
    found = lease(store).read()
    assert found is not None
    assert "'ingest/_broker.json'" in found.fault
    assert not found.serves
    # A broker does not replace the record of another one, or mistake it for its own.
    assert lease(store).beat(broker("a")) is None
    assert read_bytes(store, "ingest/_broker.json") == data
    taken = take(store, "a", found)
    assert lease(store).read() == taken


def test_a_record_of_another_release_is_read_and_its_other_fields_are_kept() -> None:
    certificate = b'"certificate": "%s"' % ONE.certificate.encode()
    # An earlier release had half of a key in its record.
    assert certificate in ONE.to_json()
    found = DiscoveryRecord.from_json(ONE.to_json().replace(certificate, b'"share": "70"'))
    assert found == replace(ONE, certificate="", others={"share": "70"})


def test_the_secret_is_not_shown() -> None:
    assert ONE.secret.hex() not in repr(ONE)
    assert str(ONE.secret) not in repr(ONE)


CONFIG = QueueConfig(store="memory://unused")


RUNTIME = ManualRuntime()


def lease(store: MemoryStore) -> Lease:
    return Lease(store, CONFIG, RUNTIME)


def broker(name: str) -> DiscoveryRecord:
    return DiscoveryRecord(0, name, f"{name}:1", b"s" * 32)


def take(store: MemoryStore, name: str, over: DiscoveryRecord | None = None) -> DiscoveryRecord:
    taken = lease(store).take(broker(name), over)
    assert taken is not None
    return taken


def test_only_one_of_many_concurrent_takeovers_succeeds() -> None:
    store = MemoryStore()
    leases = [lease(store) for _ in range(4)]
    seen = [each.read() for each in leases]
    assert seen == [None] * 4
    taken = [
        each.take(broker(f"b{number}"), before)
        for number, (each, before) in enumerate(zip(leases, seen, strict=True))
    ]
    assert [each is not None for each in taken] == [True, False, False, False]
    announced = lease(store).read()
    assert announced == replace(broker("b0"), term=1)


def test_a_broker_renews_its_record_until_it_is_replaced_or_deleted() -> None:
    store = MemoryStore()
    ours = lease(store)
    first = take(store, "a")
    beaten = ours.beat(first)
    assert beaten is not None
    assert beaten.beat == first.beat + 1
    second = take(store, "b", beaten)
    assert ours.beat(beaten) is None
    assert lease(store).read() == second
    store.delete_many(["ingest/_broker.json"])
    assert lease(store).beat(second) is None
    assert ours.read() is None
    assert ours.take(broker("a"), None) is not None


def test_a_takeover_with_a_lost_answer_is_verified_with_a_read() -> None:
    store = Hooked("_broker.json")
    store.lost_answers = 1
    assert take(store, "a").id == "a"
