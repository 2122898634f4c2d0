"""Handshake and signed messages."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opendata_buffer.broker.protocol import (
    MAX_MESSAGE_BYTES,
    PRIME,
    SHARE_BYTES,
    BrokerEnd,
    ClientEnd,
    KeyPair,
    ProtocolError,
)
from tests.unit.broker.local import KEYS, NAME

SECRET = b"s" * 32
OTHERS = KeyPair.of(b"o" * 32)


def ends(
    client_secret: bytes = SECRET,
    client_term: int = 7,
    nonce: bytes = b"a",
    broker_keys: KeyPair = KEYS,
) -> tuple[BrokerEnd, ClientEnd]:
    return (
        BrokerEnd(SECRET, 7, broker_keys, nonce * 32, NAME),
        ClientEnd(client_secret, client_term, KEYS, KEYS.share),
    )


def shake(broker: BrokerEnd, client: ClientEnd) -> tuple[BrokerEnd, ClientEnd]:
    client.finish(broker.welcome(client.prove(broker.hello())))
    return broker, client


def shaken(nonce: bytes = b"a") -> tuple[BrokerEnd, ClientEnd]:
    return shake(*ends(nonce=nonce))


def test_both_talk_after_a_handshake() -> None:
    broker, client = shaken()
    assert broker.ready
    assert client.ready
    for number in range(3):
        assert broker.open(client.seal({"n": number})) == {"n": number}
        assert client.open(broker.seal({"answer": number})) == {"answer": number}


@pytest.mark.parametrize("share", [0, 1, PRIME - 1, PRIME + 5, -1])
def test_a_share_that_would_make_a_known_key_is_refused(share: int) -> None:
    data = b"short" if share < 0 else share.to_bytes(SHARE_BYTES, "big")
    with pytest.raises(ProtocolError, match="share"):
        OTHERS.agree(data)


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


def test_who_knows_the_secret_is_not_taken_for_the_broker() -> None:
    """A process that reads the record listens where a dead broker did."""
    _, client = ends(broker_keys=OTHERS)
    with pytest.raises(ProtocolError, match="not the announced broker"):
        shake(*ends(broker_keys=OTHERS))
    with pytest.raises(ProtocolError, match="names no object"):
        client.finish(b'{"proof": "%s", "name": "../../manifest"}' % (b"00" * 32))
    assert not client.ready


def test_the_bytes_that_prove_writing_are_good_for_one_connection() -> None:
    broker, client = shaken()
    assert broker.write_proof() == client.write_proof()
    # The same name, secret and keys, and another nonce of the broker's.
    assert shaken(b"b")[0].write_proof() != client.write_proof()


def test_a_broker_of_another_term_or_version_is_refused() -> None:
    broker, client = ends(client_term=8)
    with pytest.raises(ProtocolError, match="term 7, and term 8 is announced"):
        client.prove(broker.hello())
    with pytest.raises(ProtocolError, match=r"version 1 .* run one version"):
        client.prove(b'{"v": 1, "term": 7, "nonce": "00"}')
    for nonce in (b"00", b"no digits"):
        with pytest.raises(ProtocolError, match="nonce is not 32 bytes"):
            client.prove(b'{"v": 2, "term": 8, "nonce": "%b"}' % nonce)


def test_a_message_that_is_left_out_sent_back_or_of_another_connection_is_refused() -> None:
    broker, client = shaken()
    first = client.seal({"n": 1})
    left_out, _ = shaken()
    broker.open(first)
    _, other = shaken(b"c")
    for end, message in (
        (left_out, client.seal({"n": 2})),
        (client, first),
        (broker, other.seal({})),
        (broker, first),
    ):
        with pytest.raises(ProtocolError, match="came twice"):
            end.open(message)


@given(st.integers(0, 60), st.integers(1, 255))
def test_a_changed_byte_is_noticed(place: int, change: int) -> None:
    broker, client = shaken()
    message = bytearray(client.seal({"op": "append", "entries": ["ingest/1.batch"]}))
    message[place % len(message)] ^= change
    with pytest.raises(ProtocolError):
        broker.open(bytes(message))


FIELDS = st.sampled_from(["v", "nonce", "proof", "term", "share", "name"])
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
