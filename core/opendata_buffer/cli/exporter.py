"""``exporter``: serve metrics of queues and topics to Prometheus, while no program of theirs runs.

The problem: a consumer measures its own lag, so the gauge disappears with the consumer. An alert on
it is silent when it matters most, and an autoscaler that has stopped the last consumer does not
learn that batches wait.

The idea: a thread per STORE reads the store every few seconds and keeps the result. A scrape prints
the last result. So any number of scrapes cost the store nothing, a store that hangs delays only its
own thread, and a broken store does not hide the others.

The format is Prometheus' text format, version 0.0.4. Only gauges are served, so it takes a function
and no package.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import click

from opendata_buffer.admin.levels import Level, LevelReader
from opendata_buffer.admin.target import Target
from opendata_buffer.cli import options
from opendata_buffer.cli.errors import TERMINATED, Failure, log, one_line, shown
from opendata_buffer.cli.options import command
from opendata_buffer.cli.target import config_of, find_queue, reach_store, with_topic
from opendata_buffer.cli.text import plural
from opendata_buffer.config import QueueConfig
from opendata_buffer.errors import OpenDataBufferError
from opendata_buffer.metrics import EXPORTED
from opendata_buffer.runtime import Runtime, deadline
from opendata_buffer.stores.base import Store
from opendata_buffer.stores.open import open_store

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

KEPT = 3
"""Intervals for which the values of the last read are served if later reads fail. One slow answer
of a store must not reset an alert, and old values must not hide that nothing is known."""

REQUEST_S = 5.0  # Seconds after which a silent client loses its connection.
MOST_REQUESTS = 16  # Requests that are answered at the same time; others are refused.


@command()
@click.argument("stores", metavar="STORE...", nargs=-1, required=True)
@options.place
@options.text(
    "--listen",
    "HOST:PORT",
    "The address to listen on. Port 0 means a free port, and host 0.0.0.0 all interfaces.",
    default="127.0.0.1:9465",
    callback=options.host_and_port,
)
@options.number("--interval", 30, "Seconds between two reads of a store.")
@click.pass_obj
def exporter(
    runtime: Any, /, stores: tuple[str, ...], listen: str, interval: int, **place: Any
) -> None:
    """Serve metrics of queues and topics to Prometheus, also while no consumer runs.

    Reads each STORE every --interval seconds, and serves the last result at /metrics: how many
    batches wait, and for how long, for each queue, partition, and reader. Changes nothing, and
    needs only the right to read and list. The number of requests to a store does not depend on the
    number of scrapes. If a store does not answer, its gauge buffer_exporter_up is 0, and the others
    are still served. Runs until it is interrupted; SIGTERM ends it at once with exit code 0.
    """
    store_options = reach_store(place)
    timeout_s = store_options.timeout_ms / 1000
    watches: dict[str, Watch] = {}
    for url in stores:
        given = {**place, "store": url}
        config = config_of(given, store_options)
        store = open_store(config.store, config.store_options)
        opened = _opens(store, config, given, runtime)
        watches[store.url] = Watch(store.url, opened, runtime, timeout_s, interval)
    options.remember_opened()
    server = _server(listen, lambda: render(samples_of(watches.values())))
    try:
        for watch in watches.values():
            runtime.spawn(watch.run, "opendata-buffer-exporter")
        host, port = server.server_address[:2]
        where = f"[{host!s}]" if ":" in str(host) else str(host)
        click.echo(
            f"serving http://{where}:{port}/metrics: {plural(len(watches), 'store')}, read every "
            f"{interval} s"
        )
        server.serve_forever()
    except SystemExit as ended:
        if ended.code != TERMINATED:
            raise
    finally:
        server.server_close()


def _opens(
    store: Store, config: QueueConfig, given: dict[str, Any], runtime: Runtime
) -> Callable[[], LevelReader]:
    """Return a function that finds the queue or the topic, and starts to read it."""

    def opened() -> LevelReader:
        target: Target = find_queue(store, config, given, runtime)
        return LevelReader(with_topic(target, given))

    return opened


# ---- Reading


class Sample(NamedTuple):
    """A value of one of the gauges in :data:`.EXPORTED`. Labels without a value are left out."""

    name: str
    labels: dict[str, str]
    value: float


@dataclass(frozen=True)
class _Found:
    """The result of the last successful read."""

    levels: Sequence[Level]
    at_ms: int
    at: float  # monotonic seconds


class Watch:
    """Reads one store again and again, and knows whether it answers.

    Args:
        url: The URL of the store.
        open_reader: Finds the queue or the topic in it. Called again after an error.
        runtime: Clock and sleep.
        timeout_s: Seconds that a read may take.
        interval_s: Seconds between two reads.
    """

    def __init__(
        self,
        url: str,
        open_reader: Callable[[], LevelReader],
        runtime: Runtime,
        timeout_s: float,
        interval_s: float,
    ) -> None:
        self.url = url
        self._open = open_reader
        self._runtime = runtime
        self._limit_s = max(timeout_s, interval_s)
        self._interval_s = interval_s
        self._reader: LevelReader | None = None
        # Another thread reads these. Each is replaced as a whole.
        self._found: _Found | None = None
        self._began: float | None = None
        self._took_s: float | None = None
        self._fault = "not read yet"
        self._refused: dict[str, str] = {}  # Only the reading thread uses it.

    def run(self) -> None:
        """Read for ever."""
        while True:
            self.read()
            self._runtime.sleep(self._interval_s)

    def read(self) -> None:
        """Read once. Log an error that is new, and the end of it."""
        self._began = began = self._runtime.monotonic()
        fault = ""
        try:
            # Every operation has a timeout, but a topic takes many of them.
            with deadline(self._runtime, self._limit_s):
                self._reader = self._reader or self._open()
                levels = self._reader.read()
        except OpenDataBufferError as error:
            fault = one_line(shown(error))
        except Exception as error:
            log.debug("failed", exc_info=True)
            fault = one_line(f"internal error, {type(error).__name__}: {error}")
        else:
            self._found = _Found(levels, self._runtime.now_ms(), self._runtime.monotonic())
            self._log_refusals(levels)
        if fault:
            self._reader = None
        if fault and fault != self._fault:
            log.warning("cannot read %s: %s", self.url, fault)
        elif not fault and self._took_s is not None and self._fault:
            log.warning("%s can be read again", self.url)
        self._took_s, self._fault = self._runtime.monotonic() - began, fault
        self._began = None

    def _log_refusals(self, levels: Sequence[Level]) -> None:
        """Log why producers, consumers or workers of a queue are refused, when that is new."""
        refused = {level.queue: level.refused for level in levels if level.refused}
        for queue, reason in refused.items():
            if self._refused.get(queue) != reason:
                log.warning("%s: producers, consumers or workers are refused: %s", queue, reason)
        self._refused = refused

    def samples(self) -> Iterator[Sample]:
        """Yield the last values of the store. Makes no request and never waits."""
        now, began, found = self._runtime.monotonic(), self._began, self._found
        is_late = began is not None and now - began > self._limit_s
        store = {"store": self.url}
        yield Sample("exporter_up", store, float(not (self._fault or is_late)))
        if self._took_s is not None:
            yield Sample("exporter_read_seconds", store, self._took_s)
        if found is None:
            return
        yield Sample("exporter_last_success_timestamp_seconds", store, found.at_ms / 1000)
        if now - found.at <= KEPT * self._interval_s + self._limit_s:
            for level in found.levels:
                yield from _samples_of(level, store)


def samples_of(watches: Iterable[Watch]) -> Iterator[Sample]:
    """Yield the last values of all stores."""
    for watch in watches:
        yield from watch.samples()


def _samples_of(level: Level, store: dict[str, str]) -> Iterator[Sample]:
    labels = {**store, "queue": level.queue, "partition": level.partition}
    values: dict[str, float] = {
        "queue_length": level.waiting,
        "consumer_lag_seconds": level.oldest_seconds,
        "next_sequence": level.next_sequence,
        "epoch": level.epoch,
        "manifest_bytes": level.manifest_bytes,
        "manifest_share": level.manifest_share,
        "queue_refused": bool(level.refused),
        "partition_draining": level.is_draining,
        "quarantined": level.quarantined,
        "claims_held": level.claimed or 0,
        "transactions_open": level.transactions,
        "oldest_transaction_seconds": level.oldest_transaction_seconds,
    }
    if level.claimed is None:
        del values["claims_held"]
    if not level.partition:
        del values["partition_draining"]
    if not level.is_measured:
        values = {"queue_refused": True}
    for name, value in values.items():
        yield Sample(name, labels, float(value))
    for reader in level.readers:
        of_reader = {**labels, "reader": reader.name}
        yield Sample("reader_lag", of_reader, reader.lag)
        yield Sample("reader_lag_seconds", of_reader, max(0.0, reader.oldest_unread_seconds or 0.0))
        yield Sample("reader_expires_seconds", of_reader, reader.expires_seconds)
        if reader.v1 is None:
            yield Sample("reader_runs", of_reader, float(reader.runs))
        else:  # Whether a v1 consumer runs cannot be known.
            yield Sample("reader_unfed", of_reader, reader.unfed)
            yield Sample("reader_feeding_stopped", of_reader, float(bool(reader.stopped)))


# ---- Serving

_ESCAPED = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


def render(samples: Iterable[Sample]) -> str:
    """Write samples in Prometheus' text format, grouped by gauge.

    Args:
        samples: The values.

    Returns:
        The text. Names are those of OpenTelemetry's exporter: ``buffer_queue_length``.
    """
    groups: dict[str, list[str]] = {}
    for name, labels, value in samples:
        pairs = ",".join(
            f'{label}="{text.translate(_ESCAPED)}"' for label, text in labels.items() if text
        )
        full = EXPORTED[name].name.replace(".", "_")
        groups.setdefault(name, []).append(f"{full}{{{pairs}}} {value:.17g}\n")
    lines: list[str] = []
    for name, gauge in EXPORTED.items():
        if name in groups:
            full = gauge.name.replace(".", "_")
            lines += [f"# HELP {full} {gauge.meaning}\n", f"# TYPE {full} gauge\n", *groups[name]]
    return "".join(lines)


class _Server(ThreadingHTTPServer):
    """Answers requests in threads, up to :data:`MOST_REQUESTS` at the same time."""

    daemon_threads = True
    request_queue_size = 128  # The default of 5 would let clients wait for seconds.

    def server_bind(self) -> None:
        # HTTPServer's own asks DNS for the name of the address, which may take long.
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]

    def __init__(self, address: tuple[str, int], scrape: Callable[[], str]) -> None:
        self.scrape = scrape
        self._free = threading.Semaphore(MOST_REQUESTS)
        super().__init__(address, _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("a request failed", exc_info=True)  # A client that went away.


class _Server6(_Server):
    address_family = socket.AF_INET6


class _Handler(BaseHTTPRequestHandler):
    timeout = REQUEST_S
    server: _Server

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        if path == "/metrics":
            self._answer(200, CONTENT_TYPE, self.server.scrape())
        elif path == "/":
            self._answer(200, "text/plain; charset=utf-8", "The metrics are at /metrics.\n")
        else:
            self._answer(404, "text/plain; charset=utf-8", "The metrics are at /metrics.\n")

    def _answer(self, status: int, content_type: str, text: str) -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        if log.isEnabledFor(logging.DEBUG):
            log.debug("request: %s", one_line(format % args))


def _server(listen: str, scrape: Callable[[], str]) -> _Server:
    """Listen on an address.

    Args:
        listen: Host and port.
        scrape: Returns what ``/metrics`` shows.

    Returns:
        The server.

    Raises:
        Failure: The address cannot be used.
    """
    parts = urlsplit(f"//{listen}")
    host, port = str(parts.hostname), int(parts.port or 0)
    try:
        return (_Server6 if ":" in host else _Server)((host, port), scrape)
    except OSError as error:
        raise Failure(
            f"cannot listen on {listen}: {error.strerror or error}. Give another address with "
            "--listen, or end the process that uses it"
        ) from error
