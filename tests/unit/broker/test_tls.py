"""TLS between a client and a broker."""

from __future__ import annotations

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

from opendata_buffer.broker import tls
from opendata_buffer.broker.tls import (
    TlsEnd,
    TlsSocket,
    broker_context,
    client_context,
    fingerprint,
)
from tests.unit.broker.local import eventually


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


def test_each_end_of_tls_reads_the_messages_of_the_other() -> None:
    broker, client = tls_ends()
    large = bytes(range(256)) * 1_000
    for message in (b"a", large):
        assert broker.received(client.seal(message)) == message
    assert client.received(broker.seal(large)) == large


def test_a_modified_repeated_or_dropped_message_ends_the_connection() -> None:
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
        with suppress(OSError):  # The thread may not be waiting again yet.
            assert client.recv(65_536) == b""
        ended.set()

    reader = threading.Thread(target=read)
    reader.start()
    theirs.sendall(broker.seal(b"an answer")[:-1])
    eventually(
        lambda: not select.select([client], [], [], 0)[0]
    )  # The reader has received the bytes.
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


def test_a_handshake_that_arrives_byte_by_byte_times_out() -> None:
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
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


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
