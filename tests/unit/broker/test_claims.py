"""The claims of workers: the stored value, and when claims expire."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opendata_buffer.broker.claims import (
    CLAIMS,
    MAX_OPEN,
    MOST_TOKENS,
    ClaimHolder,
    Claims,
    Heartbeats,
    decode,
    encode,
)
from opendata_buffer.errors import CorruptData
from opendata_buffer.testing.runtime import ManualRuntime

NEW = Claims(epoch=3, frontier=10)


def test_the_frontier_is_the_first_unfinished_batch() -> None:
    claims = NEW.claim([10, 11, 12], "a", 1_000).finish(12).finish(11)
    assert (claims.frontier, claims.done) == (10, {11, 12})
    claims = claims.finish(10)
    assert (claims.frontier, claims.done, claims.held) == (13, frozenset(), {})
    assert claims.deliveries == {}
    assert claims.finish(11) is claims


@pytest.mark.parametrize("name", ["\U0001f600" * 256, "\udc80" * 256, '"' * 256])
def test_the_object_can_be_read_with_worker_names_of_any_length(name: str) -> None:
    first = 2**63 - MAX_OPEN
    claims = Claims(1, first, tokens=first, queue="q").claim(
        range(first, first + MAX_OPEN), name, 2**63 - 1
    )
    data = encode(claims)
    assert len(data) <= CLAIMS.max_bytes
    assert decode(data) == claims
    assert claims.free(2**63 + 10) == []


def test_the_object_stays_bounded_although_one_batch_is_never_finished() -> None:
    claims = Claims(1, 0, done=frozenset(range(1, MAX_OPEN)))
    assert json.loads(encode(claims))["done"] == [[1, MAX_OPEN - 1]]
    assert claims.free(MAX_OPEN + 10) == [0]
    assert claims.claim([0], "a", 1_000).free(MAX_OPEN + 10) == []


ACTIONS = st.lists(
    st.tuples(st.sampled_from(["claim", "finish", "release", "dequeue"]), st.integers(0, 12))
)


@given(ACTIONS)
def test_a_batch_is_always_in_one_place_and_the_object_can_be_read(
    actions: list[tuple[str, int]],
) -> None:
    claims = Claims(1, 0)
    finished: set[int] = set()
    gone = 0
    for action, number in actions:
        if action == "claim" and number in claims.free(13):
            claims = claims.claim([number], "w", 1_000)
        elif action == "finish" and number in claims.held:
            claims = claims.finish(number)
            finished.add(number)
        elif action == "release":
            claims = claims.release(number)
        elif action == "dequeue":
            gone = max(gone, number)
            claims = claims.dequeued_to(number)
        assert not set(claims.held) & claims.done
        assert all(each >= claims.frontier for each in (*claims.held, *claims.done))
        assert all(each in finished or each < gone for each in range(claims.frontier))
        assert claims.frontier not in claims.done
        assert decode(encode(claims)) == claims


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"null",
        b"[" * 50_000,
        encode(NEW).replace(b'"tokens":0', b'"tokens":1e999'),
        encode(NEW).replace(b'"version":1', b'"version":2'),
        encode(NEW).replace(b'"done":[]', b'"done":[[0,99999999999]]'),
        encode(NEW).replace(b'"done":[]', b'"done":[[5,4]]'),
        encode(NEW).replace(b'"held":[]', b'"held":[[1]]'),
        encode(NEW).replace(b'"frontier":10', b'"frontier":-1'),
    ],
)
def test_the_error_about_unreadable_claims_says_what_deleting_them_means(data: bytes) -> None:
    with pytest.raises(CorruptData, match="handed out again"):
        decode(data)


HOLDER = ClaimHolder("w", token=5, timeout_ms=1_000)


def test_tokens_without_a_claim_are_forgotten_and_bounded() -> None:
    beats = Heartbeats(ManualRuntime().condition(), lambda: float("-inf"), {7: HOLDER}, 100.0)
    beats.receive(range(MOST_TOKENS + 1), now=100.5)
    assert len(beats._alive) == MOST_TOKENS
    beats.forget({7: HOLDER})
    assert beats._alive == {5: 100.5}
    for first in range(1_000, 4 * MOST_TOKENS, MOST_TOKENS):
        beats.receive(range(first, first + MOST_TOKENS), 0.0)
        beats.receive([5], now=100.75)
    assert len(beats._alive) == 2 * MOST_TOKENS
    assert beats.prolong(7, HOLDER, now=101.0)
    assert beats.lapses == {7: 101.75}
