"""Encrypt the connection between a client and a broker with TLS.

A broker makes a certificate when it opens its port, or an operator provides one. The broker
announces the certificate's fingerprint in the discovery record, and a client accepts only that
certificate. Authorities and host names are not involved. Python's ``ssl`` does the cryptography.

Both ends use :class:`TlsEnd`, which turns bytes into bytes and does not know about sockets. There
are two reasons not to use an ``SSLSocket`` and asyncio's TLS:

* A client reads in one thread and writes in another. OpenSSL allows one call at a time for a
  connection, and an ``SSLSocket`` makes two. Here a lock protects the calls, and no thread holds it
  while it waits for the network.
* asyncio takes a buffer of 256 KiB for each connection with TLS: 2.5 GiB for 10,000 clients.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import socket
import ssl
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from opendata_buffer.runtime import SystemRuntime

_READ_BYTES = 32 * 1024
"""Largest read from a socket. Together with the earlier part of a record, at most 16 KiB, this is
less than ``websockets`` takes at once. That library waits for the socket itself, so it would not
notice bytes that are left in a TlsSocket."""


def client_context() -> ssl.SSLContext:
    """Return the context of a client, which checks the certificate's fingerprint itself.

    The handshake still proves that the other side has the private key of its certificate.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def broker_context(certificate: str = "", key: str = "") -> tuple[ssl.SSLContext, str]:
    """Return the context of a broker and the fingerprint of its certificate.

    Args:
        certificate: Path of a PEM file; empty to make a self-signed certificate.
        key: Path of its private key, PEM; empty if it is in the same file.

    Returns:
        The context, and the SHA-256 of the certificate in hexadecimal digits.

    Raises:
        OSError: A file cannot be read. ``ssl.SSLError``, which is one: it has no certificate, or
            another key.
        ValueError: The certificate is not PEM.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0  # No client resumes a session.
    if not certificate:
        with _making_certificate:
            return context, _load_self_signed(context)
    context.load_cert_chain(certificate, key or None)
    pem = Path(certificate).read_text()
    end = "-----END CERTIFICATE-----"
    first = pem[: pem.index(end) + len(end)] + "\n"
    return context, fingerprint(ssl.PEM_cert_to_DER_cert(first))


def fingerprint(certificate: bytes) -> str:
    """Return the SHA-256 of a certificate in DER, in hexadecimal digits."""
    return hashlib.sha256(certificate).hexdigest()


_making_certificate = threading.Lock()
"""Held while a thread imports ``cryptography`` and makes a certificate. A fork waits for it: the
child would have a half-loaded module, or a lock of OpenSSL whose thread does not exist in it."""

os.register_at_fork(
    before=_making_certificate.acquire,
    after_in_parent=_making_certificate.release,
    after_in_child=_making_certificate.release,
)


def _load_self_signed(context: ssl.SSLContext) -> str:
    # Imported here because only a process that becomes a broker needs it: the import takes 32 to
    # 35 ms of CPU (decision 0032).
    import datetime

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "opendata-buffer broker")])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        # Clients do not check dates: the certificate is valid while the record announces it.
        .not_valid_before(datetime.datetime(2020, 1, 1))
        .not_valid_after(datetime.datetime(9999, 12, 31))
        .sign(key, hashes.SHA256())
    )
    # `ssl` reads keys from files only. The file is encrypted: the key itself is never stored.
    password = os.urandom(32).hex().encode()
    pem = certificate.public_bytes(serialization.Encoding.PEM) + key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(password),
    )
    with TemporaryDirectory(prefix="opendata-buffer-") as folder:
        path = Path(folder) / "broker.pem"
        path.write_bytes(pem)
        context.load_cert_chain(path, password=password)
    return fingerprint(certificate.public_bytes(serialization.Encoding.DER))


class TlsEnd:
    """One end of a TLS connection, without a network. Thread-safe."""

    def __init__(self, context: ssl.SSLContext, *, server_side: bool) -> None:
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=server_side)
        self._lock = threading.Lock()
        self.has_shaken_hands = False
        self.has_ended = False
        """Whether the other side has closed the connection, or the connection was cut off."""

    @property
    def peer_certificate(self) -> bytes:
        """The other side's certificate in DER; empty if it has none."""
        return self._tls.getpeercert(binary_form=True) or b""

    def begin(self) -> None:
        """Begin the handshake; a client does this before anything is received."""
        with self._lock, suppress(ssl.SSLWantReadError):
            self._tls.do_handshake()

    def received(self, data: bytes) -> bytes:
        """Decrypt bytes from the network.

        Args:
            data: The bytes; empty when the connection has ended.

        Returns:
            Plain bytes. During the handshake they are empty; :meth:`to_send` has the answer to it.

        Raises:
            ssl.SSLError: The other side did not send these bytes, or sent others before them.
        """
        plain = b""
        with self._lock:
            if data:
                self._incoming.write(data)
            else:
                self._incoming.write_eof()
            try:
                if not self.has_shaken_hands:
                    self._tls.do_handshake()
                    self.has_shaken_hands = True
                while part := self._tls.read(_READ_BYTES):
                    plain += part
                self.has_ended = True
            except ssl.SSLWantReadError:
                pass
            except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
                self.has_ended = True
        return plain

    def to_send(self) -> bytes:
        """Return the bytes that the handshake has to send."""
        with self._lock:
            return self._outgoing.read()

    def seal(self, data: bytes | bytearray | memoryview) -> bytes:
        """Return the bytes to send for some plain bytes; they must be sent in this order."""
        left = memoryview(data)
        with self._lock:
            while left:
                left = left[self._tls.write(left) :]
            return self._outgoing.read()


class TlsSocket:
    """A client's connected socket with TLS, for the library ``websockets``.

    The end of the client's handshake stays here until the first :meth:`sendall`, because the client
    sends nothing to a broker before it has checked the certificate. One thread reads, and one
    thread at a time sends.

    Args:
        raw: The connected socket.
        timeout: Seconds for the handshake.

    Raises:
        OSError: The connection ended, or the time is over; ``ssl.SSLError`` if the other side does
            not speak TLS 1.3.
    """

    def __init__(self, raw: socket.socket, timeout: float) -> None:
        self._raw = raw
        self._end = TlsEnd(client_context(), server_side=False)
        self._plain = b""
        until = SystemRuntime.monotonic() + timeout
        self._end.begin()
        while not self._end.has_shaken_hands:
            raw.sendall(self._end.to_send())
            # One limit for all reads together: the other side may send a byte now and then.
            raw.settimeout(max(0.001, until - SystemRuntime.monotonic()))
            self._plain += self._end.received(raw.recv(_READ_BYTES))
            if self._end.has_ended:
                raise ConnectionResetError("the connection ended during the handshake of TLS")
        raw.settimeout(None)

    @property
    def peer_fingerprint(self) -> str:
        """The fingerprint of the other side's certificate."""
        return fingerprint(self._end.peer_certificate)

    def recv(self, size: int) -> bytes:
        """See ``socket.recv``."""
        while not self._plain and not self._end.has_ended:
            self._plain = self._end.received(self._raw.recv(_READ_BYTES))
        found, self._plain = self._plain[:size], self._plain[size:]
        return found

    def sendall(self, data: bytes) -> None:
        """See ``socket.sendall``."""
        self._raw.sendall(self._end.seal(data))

    def close(self) -> None:
        """See ``socket.close``; a thread that waits for the rest of a record wakes up."""
        with suppress(OSError):
            self._raw.shutdown(socket.SHUT_RDWR)
        self._raw.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._raw, name)  # The socket has the other methods.


class TlsTransport:
    """An asyncio transport with TLS; other methods are those of the raw transport."""

    def __init__(self, raw: asyncio.Transport, context: ssl.SSLContext) -> None:
        self._raw = raw
        self._end = TlsEnd(context, server_side=True)

    def received(self, data: bytes, take: Callable[[bytes], None]) -> None:
        """Hand plain bytes to ``take``; end the connection if the bytes are not valid TLS."""
        try:
            plain = self._end.received(data)
        except ssl.SSLError:
            self._raw.abort()
            return
        if to_send := self._end.to_send():
            self._raw.write(to_send)
        if plain:
            take(plain)
        if self._end.has_ended:
            self._raw.abort()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """See ``asyncio.WriteTransport``."""
        try:
            self._raw.write(self._end.seal(data))
        except ssl.SSLError:  # Before the handshake is over.
            self._raw.abort()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._raw, name)
