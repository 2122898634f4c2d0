"""The discovery record: its bytes, and how it is changed."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opendata_buffer import outcomes
from opendata_buffer.broker.discovery_record import (
    DiscoveryRecord,
    Lease,
    decode,
    discovery_record_key,
    encode,
)
from opendata_buffer.config import QueueConfig
from opendata_buffer.errors import CorruptData
from opendata_buffer.stores.base import Absent, IfVersion, PutOutcome
from opendata_buffer.stores.memory import MemoryStore
from opendata_buffer.testing.runtime import ManualRuntime

ONE = DiscoveryRecord(
    3, "01K9", "10.0.0.7:9100", b"s" * 32, certificate="ab" * 32, beat=4, seen_ms=1_700
)


def test_it_lies_beside_the_manifest() -> None:
    assert discovery_record_key("ingest") == "ingest/_broker.json"


def test_what_is_written_is_read() -> None:
    for each in (ONE, replace(ONE, certificate=""), ONE.left(99), ONE.beaten(1_800)):
        assert decode(encode(each)) == each


def test_fields_of_later_versions_are_passed_over() -> None:
    assert decode(encode(ONE).replace(b'"term"', b'"more": [1], "term"')) == ONE


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"\xff",
        b"[" * 50_000,
        encode(ONE).replace(b'"version": 1', b'"version": 2'),
        encode(ONE).replace(b'"term": 3', b'"term": -1'),
        encode(replace(ONE, secret=b"short")),
        encode(ONE).replace(ONE.secret.hex().encode(), b"no hex"),
    ],
)
def test_what_is_no_announcement_says_that_it_may_be_deleted(data: bytes) -> None:
    with pytest.raises(CorruptData, match="delete the object"):
        decode(data)


@given(st.binary(max_size=200))
def test_any_bytes_are_an_announcement_or_corrupt(data: bytes) -> None:
    try:
        decode(data)
    except CorruptData:
        return


def test_the_secret_is_not_shown() -> None:
    assert ONE.secret.hex() not in repr(ONE)
    assert str(ONE.secret) not in repr(ONE)


def test_a_broker_that_left_serves_no_more_and_keeps_its_term() -> None:
    left = ONE.left(5_000)
    assert ONE.serves
    assert not left.serves
    assert left.same_broker(ONE)
    assert left.secret == b""


def test_another_term_or_another_id_is_another_broker() -> None:
    assert ONE.same_broker(ONE.beaten(2_000))
    assert not ONE.same_broker(replace(ONE, term=4))
    assert not ONE.same_broker(replace(ONE, id="01KA"))
    assert not ONE.same_broker(None)


CONFIG = QueueConfig(store="memory://unused")


RUNTIME = ManualRuntime()


def lease(store: MemoryStore) -> Lease:
    return Lease(store, CONFIG, RUNTIME)


def broker(name: str) -> DiscoveryRecord:
    return DiscoveryRecord(0, name, f"{name}:1", b"s" * 32)


def test_nobody_is_announced_at_first() -> None:
    assert lease(MemoryStore()).read() is None


def test_of_many_that_take_over_one_gets_through() -> None:
    store = MemoryStore()
    leases = [lease(store) for _ in range(4)]
    seen = [each.read() for each in leases]
    taken = [
        each.take(broker(f"b{number}"), before)
        for number, (each, before) in enumerate(zip(leases, seen, strict=True))
    ]
    assert [each is not None for each in taken] == [True, False, False, False]
    announced = lease(store).read()
    assert announced == replace(broker("b0"), term=1)


def test_each_broker_has_the_next_term() -> None:
    store = MemoryStore()
    first = lease(store).take(broker("a"), None)
    assert first is not None
    second = lease(store).take(broker("b"), first)
    assert second is not None
    assert (first.term, second.term) == (1, 2)


def test_a_sign_of_life_is_counted_and_none_of_a_replaced_broker_is() -> None:
    store = MemoryStore()
    ours = lease(store)
    first = ours.take(broker("a"), None)
    assert first is not None
    beaten = ours.beat(first)
    assert beaten is not None
    assert beaten.beat == first.beat + 1
    second = lease(store).take(broker("b"), beaten)
    assert ours.beat(beaten) is None
    assert lease(store).read() == second


def test_a_broker_whose_announcement_was_deleted_steps_down() -> None:
    store = MemoryStore()
    ours = lease(store)
    first = ours.take(broker("a"), None)
    assert first is not None
    store.delete_many([ours.key])
    assert ours.beat(first) is None
    assert ours.read() is None
    assert ours.take(broker("a"), None) is not None


def test_who_leaves_says_so_unless_replaced() -> None:
    store = MemoryStore()
    ours = lease(store)
    first = ours.take(broker("a"), None)
    assert first is not None
    ours.leave(first)
    left = lease(store).read()
    assert left is not None
    assert not left.serves
    second = lease(store).take(broker("b"), left)
    ours.leave(first)
    assert lease(store).read() == second


class AnswerLost(MemoryStore):
    lose = True

    def put_if(self, key: str, data: bytes, condition: Absent | IfVersion) -> PutOutcome:
        outcome = super().put_if(key, data, condition)
        if self.lose:
            self.lose = False
            return outcomes.Unknown("injected")
        return outcome


def test_a_lost_answer_is_looked_up() -> None:
    taken = lease(AnswerLost()).take(broker("a"), None)
    assert taken is not None
    assert taken.id == "a"


def test_an_object_that_is_no_announcement_is_named() -> None:
    store = MemoryStore()
    store.put("ingest/_broker.json", b"{}")
    with pytest.raises(CorruptData, match=r"ingest/_broker\.json"):
        lease(store).read()
