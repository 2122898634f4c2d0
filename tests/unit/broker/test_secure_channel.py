"""The handshake of a client and a broker, its proof, and TLS around them."""

from __future__ import annotations

import json
import select
import socket
import ssl
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest
from cryptography import x509
from hypothesis import given
from hypothesis import strategies as st

from opendata_buffer.broker import tls
from opendata_buffer.broker.protocol import (
    MAX_MESSAGE_BYTES,
    BrokerEnd,
    ClientEnd,
    ProtocolError,
)
from opendata_buffer.broker.tls import (
    TlsEnd,
    TlsSocket,
    broker_context,
    client_context,
    fingerprint,
)
from tests.unit.broker.local import NAME, eventually

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


def test_both_talk_after_a_handshake() -> None:
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


def test_a_broker_that_names_another_object_gets_none_written() -> None:
    for name in ("../../manifest", "", NAME.lower(), f"{NAME}/../x"):
        broker, client = ends(name=name)
        with pytest.raises(ProtocolError, match="names no object"):
            client.prove(broker.hello())
        assert not client.is_ready


def test_the_bytes_that_prove_writing_are_good_for_one_connection_and_one_broker() -> None:
    broker, client = shaken()
    assert broker.write_proof() == client.write_proof()
    assert client.proof_name == NAME
    others = (
        shaken(nonce=b"b"),  # another connection to this broker
        shaken(certificate="cd" * 32),  # a connection to a process that passes messages on
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


# ---- TLS


def tls_ends() -> tuple[TlsEnd, TlsEnd]:
    context, announced = broker_context()
    broker = TlsEnd(context, server_side=True)
    client = TlsEnd(client_context(), server_side=False)
    client.begin()
    while not (client.has_shaken_hands and broker.has_shaken_hands):
        for source, target in ((client, broker), (broker, client)):
            if sent := source.to_send():
                assert target.received(sent) == b""
    assert fingerprint(client.peer_certificate) == announced
    return broker, client


def test_both_ends_of_tls_read_what_the_other_wrote() -> None:
    broker, client = tls_ends()
    large = bytes(range(256)) * 1_000
    for message in (b"a", large):
        assert broker.received(client.seal(message)) == message
    assert client.received(broker.seal(large)) == large


def test_a_message_that_is_changed_repeated_or_left_out_on_the_way_ends_the_connection() -> None:
    for change in ("change", "repeat", "leave out", "reflect"):
        broker, client = tls_ends()
        first, second = client.seal(b"first"), client.seal(b"second")
        assert b"first" not in first
        if change == "change":
            sent = first[:-1] + bytes([first[-1] ^ 1])
        elif change == "repeat":
            assert broker.received(first) == b"first"
            sent = first
        else:
            sent = second
        with pytest.raises(ssl.SSLError):
            (client if change == "reflect" else broker).received(sent)


def test_bytes_of_another_connection_are_refused() -> None:
    (broker, _), (_, other) = tls_ends(), tls_ends()
    with pytest.raises(ssl.SSLError):
        broker.received(other.seal(b"first"))


def test_a_connection_that_is_cut_off_has_ended() -> None:
    broker, client = tls_ends()
    sent = client.seal(b"first")
    assert broker.received(sent[:-1]) == b""
    assert not broker.has_ended
    assert broker.received(b"") == b""
    assert broker.has_ended


def connected_sockets() -> tuple[TlsSocket, TlsEnd, socket.socket]:
    """Return a client's socket with TLS, the broker's end, and the broker's socket."""
    ours, theirs = socket.socketpair()
    broker = TlsEnd(broker_context()[0], server_side=True)

    made: list[TlsSocket] = []
    thread = threading.Thread(target=lambda: made.append(TlsSocket(ours, 60.0)))
    thread.start()
    broker.received(theirs.recv(65_536))
    theirs.sendall(broker.to_send())
    thread.join()
    made[0].sendall(b"hello")
    assert broker.received(theirs.recv(65_536)) == b"hello"
    return made[0], broker, theirs


def test_closing_a_connection_wakes_the_thread_that_waits_for_the_rest_of_a_record() -> None:
    client, broker, theirs = connected_sockets()
    ended = threading.Event()

    def read() -> None:
        with suppress(OSError):  # It may not be waiting again yet.
            assert client.recv(65_536) == b""
        ended.set()

    reader = threading.Thread(target=read)
    reader.start()
    theirs.sendall(broker.seal(b"an answer")[:-1])
    eventually(lambda: not select.select([client], [], [], 0)[0])  # The reader has what came.
    assert not ended.is_set()
    client.close()
    assert ended.wait(60)
    reader.join()
    theirs.close()


def test_a_client_sends_only_the_first_message_of_tls_before_it_has_seen_the_certificate() -> None:
    ours, theirs = socket.socketpair()
    broker = TlsEnd(broker_context()[0], server_side=True)
    thread = threading.Thread(target=lambda: TlsSocket(ours, 60.0))
    thread.start()
    broker.received(theirs.recv(65_536))
    theirs.sendall(broker.to_send())
    thread.join()
    assert not broker.has_shaken_hands
    theirs.setblocking(False)
    with pytest.raises(BlockingIOError):
        theirs.recv(1)
    for each in (ours, theirs):
        each.close()


def test_a_handshake_that_comes_byte_by_byte_is_given_up_in_time() -> None:
    ours, theirs = socket.socketpair()
    over = threading.Event()

    def drip() -> None:
        theirs.sendall(b"\x16\x03\x03\x3f\xff")  # a record of 16 KiB
        while not over.wait(0.02):
            theirs.sendall(b"\x00")

    thread = threading.Thread(target=drip)
    thread.start()
    with pytest.raises(TimeoutError):
        TlsSocket(ours, 0.3)
    over.set()
    thread.join()
    for each in (ours, theirs):
        each.close()


def test_only_a_process_that_becomes_a_broker_loads_cryptography() -> None:
    code = (
        "import sys; from opendata_buffer.broker import election, network, tls; "
        "assert 'cryptography' not in sys.modules; "
        "tls.broker_context(); assert 'cryptography' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_older_tls_is_refused() -> None:
    context, _ = broker_context()
    old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    old.check_hostname = False
    old.verify_mode = ssl.CERT_NONE
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    broker, client = TlsEnd(context, server_side=True), TlsEnd(old, server_side=False)
    client.begin()
    with pytest.raises(ssl.SSLError):
        broker.received(client.to_send())


def test_the_private_key_is_not_stored_in_plain_text(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stored: list[bytes] = []
    write = Path.write_bytes

    def keep(path: Path, data: bytes) -> int:
        stored.append(data)
        return write(path, data)

    monkeypatch.setattr(tls.Path, "write_bytes", keep)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    _, announced = broker_context()
    (pem,) = stored
    assert b"BEGIN ENCRYPTED PRIVATE KEY" in pem
    assert b"BEGIN PRIVATE KEY" not in pem
    assert list(tmp_path.iterdir()) == []
    assert fingerprint(ssl.PEM_cert_to_DER_cert(x509_of(pem))) == announced


def x509_of(pem: bytes) -> str:
    end = b"-----END CERTIFICATE-----\n"
    text = pem[: pem.index(end) + len(end)]
    assert x509.load_pem_x509_certificate(text).subject
    return text.decode()
