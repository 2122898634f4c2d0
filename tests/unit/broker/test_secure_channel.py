"""Handshake and signed messages."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opendata_buffer.broker.secure_channel import (
    MAX_MESSAGE_BYTES,
    BrokerEnd,
    ClientEnd,
    ProtocolError,
)

SECRET = b"s" * 32


def ends(
    client_secret: bytes = SECRET, client_term: int = 7, nonces: tuple[bytes, bytes] = (b"a", b"b")
) -> tuple[BrokerEnd, ClientEnd]:
    return (
        BrokerEnd(SECRET, 7, nonces[0] * 32),
        ClientEnd(client_secret, client_term, nonces[1] * 32),
    )


def shaken() -> tuple[BrokerEnd, ClientEnd]:
    broker, client = ends()
    client.finish(broker.welcome(client.prove(broker.hello())))
    return broker, client


def test_both_talk_after_a_handshake() -> None:
    broker, client = shaken()
    assert broker.ready
    assert client.ready
    for number in range(3):
        assert broker.open(client.seal({"n": number})) == {"n": number}
        assert client.open(broker.seal({"answer": number})) == {"answer": number}


def test_the_secret_never_travels() -> None:
    broker, client = ends()
    hello = broker.hello()
    prove = client.prove(hello)
    for message in (hello, prove, broker.welcome(prove)):
        assert SECRET not in message
        assert SECRET.hex().encode() not in message


def test_either_side_without_the_secret_is_refused() -> None:
    broker, client = ends(client_secret=b"x" * 32)
    with pytest.raises(ProtocolError, match="does not know"):
        broker.welcome(client.prove(broker.hello()))
    assert not broker.ready
    with pytest.raises(ProtocolError, match="does not know the secret"):
        client.finish(b'{"proof": "%s"}' % (b"00" * 32))


def test_a_proof_cannot_be_sent_back_to_its_maker() -> None:
    _, client = ends(nonces=(b"b", b"b"))
    broker = BrokerEnd(SECRET, 7, b"b" * 32)
    with pytest.raises(ProtocolError):
        client.prove(broker.hello())


def test_a_broker_of_another_term_or_version_is_refused() -> None:
    broker, client = ends(client_term=8)
    with pytest.raises(ProtocolError, match="term 7, and term 8 is announced"):
        client.prove(broker.hello())
    with pytest.raises(ProtocolError, match=r"version 2 .* run one version"):
        client.prove(b'{"v": 2, "term": 7, "nonce": "00"}')


def test_a_message_that_comes_twice_is_refused() -> None:
    broker, client = shaken()
    message = client.seal({"op": "append"})
    broker.open(message)
    with pytest.raises(ProtocolError, match="came twice"):
        broker.open(message)


def test_a_message_that_is_left_out_sent_back_or_of_another_connection_is_refused() -> None:
    broker, client = shaken()
    first = client.seal({"n": 1})
    other_broker, other = ends(nonces=(b"c", b"d"))
    other.finish(other_broker.welcome(other.prove(other_broker.hello())))
    for end, message in (
        (broker, client.seal({"n": 2})),
        (client, first),
        (broker, other.seal({})),
    ):
        with pytest.raises(ProtocolError):
            end.open(message)


@given(st.integers(0, 60), st.integers(1, 255))
def test_a_changed_byte_is_noticed(place: int, change: int) -> None:
    broker, client = shaken()
    message = bytearray(client.seal({"op": "append", "entries": ["ingest/1.batch"]}))
    message[place % len(message)] ^= change
    with pytest.raises(ProtocolError):
        broker.open(bytes(message))


FIELDS = st.sampled_from(["v", "nonce", "proof", "term"])
JSON = st.recursive(
    st.none() | st.integers() | st.text(),
    lambda each: st.lists(each) | st.dictionaries(FIELDS, each),
)


@given(st.binary(max_size=300) | JSON.map(lambda value: json.dumps(value).encode()))
def test_garbage_is_refused_at_every_step(data: bytes) -> None:
    for use in (
        lambda: ends()[0].welcome(data),
        lambda: ends()[1].prove(data),
        lambda: ends()[1].finish(data),
        lambda: ends()[0].open(data),
        lambda: shaken()[0].open(data),
        lambda: shaken()[1].open(data),
    ):
        with pytest.raises(ProtocolError):
            use()


def test_before_the_handshake_or_too_large_nothing_is_sealed() -> None:
    with pytest.raises(ProtocolError, match="before the handshake"):
        ends()[1].seal({})
    _, client = shaken()
    with pytest.raises(ProtocolError, match="send less metadata"):
        client.seal({"x": "y" * MAX_MESSAGE_BYTES})
