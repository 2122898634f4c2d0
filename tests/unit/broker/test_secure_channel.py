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


def test_a_client_without_the_secret_is_refused() -> None:
    broker, client = ends(client_secret=b"x" * 32)
    with pytest.raises(ProtocolError, match="does not know"):
        broker.welcome(client.prove(broker.hello()))
    assert not broker.ready


def test_a_broker_without_the_secret_is_refused() -> None:
    broker, _ = ends()
    _, client = ends(client_secret=b"x" * 32)
    client.prove(broker.hello())
    with pytest.raises(ProtocolError, match="does not know the secret"):
        client.finish(b'{"proof": "%s"}' % (b"00" * 32))


def test_a_proof_cannot_be_sent_back_to_who_made_it() -> None:
    _, client = ends(nonces=(b"b", b"b"))
    broker = BrokerEnd(SECRET, 7, b"b" * 32)
    with pytest.raises(ProtocolError):
        client.prove(broker.hello())


def test_a_broker_of_another_term_is_refused() -> None:
    broker, client = ends(client_term=8)
    with pytest.raises(ProtocolError, match="term 7, and term 8 is announced"):
        client.prove(broker.hello())


def test_another_version_says_which_and_what_to_do() -> None:
    _, client = ends()
    with pytest.raises(ProtocolError, match=r"version 2 .* run one version"):
        client.prove(b'{"v": 2, "term": 7, "nonce": "00"}')


def test_a_message_that_comes_twice_is_refused() -> None:
    broker, client = shaken()
    message = client.seal({"op": "append"})
    broker.open(message)
    with pytest.raises(ProtocolError, match="came twice"):
        broker.open(message)


def test_a_message_that_is_left_out_is_noticed() -> None:
    broker, client = shaken()
    client.seal({"n": 1})
    with pytest.raises(ProtocolError):
        broker.open(client.seal({"n": 2}))


def test_a_message_cannot_be_sent_back() -> None:
    _, client = shaken()
    with pytest.raises(ProtocolError):
        client.open(client.seal({"n": 1}))


def test_a_message_of_another_connection_is_refused() -> None:
    broker, _ = shaken()
    other_broker, other = ends(nonces=(b"c", b"d"))
    other.finish(other_broker.welcome(other.prove(other_broker.hello())))
    with pytest.raises(ProtocolError):
        broker.open(other.seal({"n": 1}))


@given(st.integers(0, 60), st.integers(1, 255))
def test_a_changed_byte_is_noticed(place: int, change: int) -> None:
    broker, client = shaken()
    message = bytearray(client.seal({"op": "append", "entries": ["ingest/1.batch"]}))
    message[place % len(message)] ^= change
    with pytest.raises(ProtocolError):
        broker.open(bytes(message))


@given(st.binary(max_size=300))
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


FIELDS = st.sampled_from(["v", "nonce", "proof", "term"])


JSON = st.recursive(
    st.none() | st.integers() | st.text(),
    lambda each: st.lists(each) | st.dictionaries(FIELDS, each),
)


@given(JSON)
def test_json_of_any_shape_is_refused(value: object) -> None:
    data = json.dumps(value).encode()
    for use in (lambda: ends()[0].welcome(data), lambda: ends()[1].prove(data)):
        with pytest.raises(ProtocolError):
            use()


def test_nothing_is_sealed_before_the_handshake() -> None:
    with pytest.raises(ProtocolError, match="before the handshake"):
        ends()[1].seal({})


def test_a_message_larger_than_the_other_side_takes_is_not_made() -> None:
    _, client = shaken()
    with pytest.raises(ProtocolError, match="send less metadata"):
        client.seal({"x": "y" * MAX_MESSAGE_BYTES})
