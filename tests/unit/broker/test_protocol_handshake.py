"""The handshake of a client and a broker, and its proofs."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opendata_buffer.broker.protocol import (
    MAX_MESSAGE_BYTES,
    BrokerEnd,
    ClientEnd,
    ProtocolError,
)
from tests.unit.broker.local import NAME

SECRET = b"s" * 32
CERTIFICATE = "ab" * 32


def ends(
    client_secret: bytes = SECRET,
    client_term: int = 7,
    nonce: bytes = b"a",
    client_certificate: str = CERTIFICATE,
    name: str = NAME,
) -> tuple[BrokerEnd, ClientEnd]:
    return (
        BrokerEnd(SECRET, 7, CERTIFICATE, nonce * 32, name),
        ClientEnd(client_secret, client_term, client_certificate),
    )


def shaken(
    nonce: bytes = b"a", certificate: str = CERTIFICATE, name: str = NAME
) -> tuple[BrokerEnd, ClientEnd]:
    broker, client = ends(nonce=nonce, client_certificate=certificate, name=name)
    broker.admit(client.prove(broker.hello()))
    return broker, client


def test_both_ends_exchange_messages_after_the_handshake() -> None:
    broker, client = shaken()
    assert broker.is_ready
    assert client.is_ready
    for number in range(3):
        assert broker.decode(client.encode({"n": number})) == {"n": number}
        assert client.decode(broker.encode({"answer": number})) == {"answer": number}


def test_a_client_without_the_secret_is_refused() -> None:
    for secret in (b"x" * 32, b"", SECRET + b"s"):
        broker, client = ends(client_secret=secret)
        with pytest.raises(ProtocolError, match="does not know"):
            broker.admit(client.prove(broker.hello()))
        assert not broker.is_ready


def test_a_client_writes_no_object_whose_name_is_not_a_proof_name() -> None:
    for name in ("../../manifest", "", NAME.lower(), f"{NAME}/../x"):
        broker, client = ends(name=name)
        with pytest.raises(ProtocolError, match="names no object"):
            client.prove(broker.hello())
        assert not client.is_ready


def test_a_write_proof_is_valid_for_one_connection_and_one_broker() -> None:
    broker, client = shaken()
    assert broker.write_proof() == client.write_proof()
    assert client.proof_name == NAME
    others = (
        shaken(nonce=b"b"),  # another connection to this broker
        shaken(certificate="cd" * 32),  # a connection to a process that forwards messages
        shaken(name=NAME[:-1] + "X"),
    )
    for _, other in others:
        assert other.write_proof() != client.write_proof()


def test_a_broker_of_another_term_or_version_is_refused() -> None:
    broker, client = ends(client_term=8)
    with pytest.raises(ProtocolError, match="term 7, and term 8 is announced"):
        client.prove(broker.hello())
    with pytest.raises(ProtocolError, match=r"version 2 .* run one version"):
        client.prove(b'{"v": 2, "term": 7, "nonce": "00"}')
    with pytest.raises(ProtocolError, match=r"version 2 .* run one version"):
        broker.admit(b'{"v": 2, "share": "00", "proof": "00"}')
    for nonce in (b"00", b"no digits"):
        with pytest.raises(ProtocolError, match="nonce is not 32 bytes"):
            client.prove(b'{"v": 3, "term": 8, "nonce": "%b"}' % nonce)


FIELDS = st.sampled_from(["v", "nonce", "secret", "term", "name"])
JSON = st.recursive(
    st.none() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(FIELDS, inner),
)


@given(st.binary(max_size=300) | JSON.map(lambda value: json.dumps(value).encode()))
def test_garbage_is_refused_at_every_step(data: bytes) -> None:
    for use in (
        lambda: ends()[0].admit(data),
        lambda: ends()[1].prove(data),
        lambda: ends()[0].decode(data),
    ):
        with pytest.raises(ProtocolError):
            use()


def test_a_message_that_is_too_large_or_is_not_an_object_is_refused() -> None:
    broker, client = shaken()
    with pytest.raises(ProtocolError, match="send less metadata"):
        client.encode({"x": "y" * MAX_MESSAGE_BYTES})
    for data in (b"", b"[]", b"1", b"\xff", b"[" * 50_000):
        with pytest.raises(ProtocolError, match="not a JSON object"):
            broker.decode(data)
