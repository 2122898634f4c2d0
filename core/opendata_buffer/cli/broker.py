"""``broker``: run a broker as its own process; ``work``: run a command for each batch."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlsplit

import click
import pyarrow as pa

from opendata_buffer.broker.election import LeaderElection
from opendata_buffer.broker.network import WebSocketNetwork, listen_for
from opendata_buffer.broker.worker import ClaimedBatch, Worker
from opendata_buffer.cli import options
from opendata_buffer.cli.errors import Failure, one_line, print_summary, shown
from opendata_buffer.cli.options import LONG_MS, command
from opendata_buffer.cli.target import one_queue, target_of
from opendata_buffer.cli.text import plural
from opendata_buffer.config import ConsumerConfig, WorkerConfig
from opendata_buffer.errors import ClaimLost, Closed, InvalidInput, OpenDataBufferError
from opendata_buffer.framing import FRAMINGS
from opendata_buffer.internal_parts import internals
from opendata_buffer.queue.not_found import no_such_queue
from opendata_buffer.runtime import Runtime

POLL_S = 0.1  # Seconds between two checks if a broker still serves, or threads still work.
WAIT_S = 2.0  # Seconds between two checks if a queue has been created.
STOP_S = 3.5  # Seconds for an orderly stop; the process always ends within five seconds.
CLAIM_S = 1.0  # Longest wait for a claim, in seconds, so that a signal is noticed.
TERM_S = 1.5  # Seconds from a signal until a command that is still running is killed.

END_S = 3.0
"""Seconds from a signal until the command stops waiting for its threads. The claims of these
threads then expire."""


@command(timeout_ms=LONG_MS)
@options.queue
@options.text(
    "--listen",
    "HOST:PORT",
    "The address to listen on. Port 0 means a free port, and host 0.0.0.0 all interfaces. "
    "Default: a free port of this machine's address, or of the loopback address for a queue in a "
    "directory.",
    callback=options.host_and_port,
)
@options.text(
    "--advertise",
    "HOST:PORT",
    "The address that clients connect to, if not the one above. Each broker needs its own "
    "address: do not use a load balancer's.",
    callback=options.host_and_port,
)
@options.text("--tls-cert", "FILE", "Certificate, PEM. Default: the broker makes one.")
@options.text("--tls-key", "FILE", "Its private key, PEM.")
@options.create_if_missing
@click.pass_obj
def broker(
    runtime: Any,
    /,
    listen: str | None,
    advertise: str | None,
    tls_cert: str | None,
    tls_key: str | None,
    **queue: Any,
) -> None:
    """Commit for all producers of a queue, and deliver its batches to workers.

    A broker stores nothing: it coordinates commits. It stands by while another broker serves and
    takes over when that one ends, so start two. Waits for a queue that does not exist yet. Runs
    until it is interrupted. Producers and workers find it through the queue. Nothing is lost when
    it is killed.
    """
    if bool(tls_cert) is not bool(tls_key):
        raise click.UsageError("--tls-cert and --tls-key go together")
    target = target_of(runtime, queue, ConsumerConfig)
    store = target.store
    if target.topic is not None:
        raise no_such_queue(store, target.config)
    where = replace(listen_for(store), certificate=tls_cert or "", key=tls_key or "")
    if listen is not None:
        parts = urlsplit(f"//{listen}")
        where = replace(where, host=str(parts.hostname), port=int(parts.port or 0))
    if advertise is not None:
        where = replace(where, advertise=advertise)
    network = WebSocketNetwork(runtime, where)
    # A standby listens only while it serves: clients of a dead broker must find that its address
    # refuses connections, even after it was started again. Listening briefly here reports a wrong
    # address immediately.
    network.listen().close()
    reader = target.reader()
    if not target.config.create_if_missing and reader.find() is None:
        click.echo(
            f"waiting: there is no manifest {target.config.manifest_path!r} in {store.url} yet. "
            "A producer creates it, or --create-if-missing"
        )
        while reader.find() is None:
            runtime.sleep(WAIT_S)
    election = LeaderElection(store, target.config, runtime, network)
    try:
        _report(election, store.url, runtime)
    finally:
        election.stop(STOP_S)


def _report(election: LeaderElection, url: str, runtime: Runtime) -> None:
    """Print which broker serves, whenever that changes, until this broker cannot serve."""
    printed = ""
    while election.failure is None:
        line = printed
        if mine := election.serving:
            line = f"serving {url} at {mine.address} (term {mine.term}, broker {mine.id})"
        elif other := election.stands_by_for:
            term = f"(term {other.term}, broker {other.id})"
            line = f"standing by: {other.address} is announced {term}"
        if line != printed:
            click.echo(line)
            printed = line
        runtime.sleep(POLL_S)
    raise election.failure


@command(timeout_ms=LONG_MS)
@options.queue
@options.number("--parallel", 1, "Batches at once.")
@options.number(
    "--claim-timeout-ms",
    60_000,
    "If this process sends no heartbeat for this time, other workers get its batches.",
)
@options.number(
    "--max-deliveries",
    5,
    "Number of failures after which a batch goes to the quarantine; 0 retries forever.",
    least=0,
)
@click.option(
    "--broker",
    type=click.Choice(["auto", "host"]),
    default="host",
    help="host: be the queue's broker unless another process is; auto: wait for a broker.",
)
@options.framing
@options.create_if_missing
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@click.pass_obj
def work(
    runtime: Any, /, parallel: int, framing: str, command: tuple[str, ...], **queue: Any
) -> None:
    """Run COMMAND for each batch.

    COMMAND gets the records on standard input, by default one line each. Put -- before it. Any
    number of workers share a queue: each batch is given to one of them, and leaves the queue when
    the command exits 0. Otherwise it is released and delivered again, after a second at first and
    later each time. The command's environment has OPENDATA_BUFFER_SEQUENCE,
    OPENDATA_BUFFER_LOCATION and OPENDATA_BUFFER_DELIVERY_COUNT.
    """
    if shutil.which(command[0]) is None:
        raise Failure(f"there is no command {command[0]!r}: check its name and PATH")
    target = one_queue(runtime, queue, WorkerConfig)
    worker = Worker(target.config, **internals(store=target.store, runtime=runtime))
    pool = CommandPool(
        worker.claim,
        command,
        parallel,
        runtime,
        lambda line: click.echo(one_line(line), err=True),
        target.config.max_deliveries,
        framing,
    )
    with print_summary(pool.summary), worker:
        pool.run()


@dataclass(eq=False)
class CommandPool:
    """Threads that claim batches and run the command for each batch."""

    claim: Callable[[int, float], Sequence[ClaimedBatch]]
    command: Sequence[str]  # A program and its arguments.
    parallel: int  # Threads.
    runtime: Runtime
    report: Callable[[str], None]
    max_deliveries: int = 0  # Reject a batch after this many failures; 0 never rejects.
    framing: str = "lines"  # Separates records on the command's standard input.
    done: int = 0
    released: int = 0
    rejected: int = 0

    def __post_init__(self) -> None:
        self._lock = self.runtime.condition()
        self._running: set[subprocess.Popen[bytes]] = set()
        self._stopping = False
        self._error: BaseException | None = None

    def run(self) -> None:
        """Work until a signal, or until an error that is not about a single batch."""
        tasks = [
            self.runtime.spawn(self._work, f"opendata-buffer-work-{number}")
            for number in range(self.parallel)
        ]
        try:
            while not self._stopping:
                self.runtime.sleep(POLL_S)
        finally:
            end = self.runtime.monotonic() + END_S
            self._stop(end)
            for task in tasks:
                task.join(max(0.0, end - self.runtime.monotonic()))
        if self._error is not None:
            raise self._error

    def summary(self) -> str:
        """Return the outcomes of the batches, for a command that a signal ends."""
        return (
            f"ended by a signal: {plural(self.done, 'batch')} done, {self.released} released, "
            f"{self.rejected} in the quarantine"
        )

    def _stop(self, end: float) -> None:
        kill_at = min(end, self.runtime.monotonic() + TERM_S)
        for number in (signal.SIGTERM, signal.SIGKILL):
            with self._lock:
                self._stopping = True
                running = list(self._running)
            for process in running:
                _signal_group(process, number)
            while self._running and self.runtime.monotonic() < kill_at:
                self.runtime.sleep(POLL_S / 2)

    def _work(self) -> None:
        try:
            while not self._stopping:
                for batch in self.claim(1, CLAIM_S):
                    self._process(batch)
        except Closed:
            return
        except BaseException as error:
            with self._lock:
                self._error = self._error or error
                self._stopping = True

    def _process(self, batch: ClaimedBatch) -> None:
        if self._stopping:
            self._release(batch, 0)
            return
        try:
            records = pa.array(batch.values, pa.binary())
            data = FRAMINGS[self.framing].framed(records, batch.sequence)
            code = self._run(batch, bytes(data))
        except InvalidInput as error:
            self._fail(batch, one_line(str(error)))
            return
        except OSError as error:
            # The command cannot be started, so the next batch would also fail.
            self._release(batch, 0)
            raise Failure(f"cannot run {self.command[0]!r}: {error.strerror or error}") from error
        if code == 0:
            self._finish(batch)
        elif self._stopping:
            self._release(batch, 0)
        else:
            self._fail(batch, f"exit code {code}" if code > 0 else f"signal {-code}")

    def _run(self, batch: ClaimedBatch, data: bytes) -> int:
        process = subprocess.Popen(
            list(self.command),
            stdin=subprocess.PIPE,
            # A separate group, so that Ctrl-C only signals this process, which ends the group.
            process_group=0,
            env={
                **os.environ,
                "OPENDATA_BUFFER_SEQUENCE": str(batch.sequence),
                "OPENDATA_BUFFER_LOCATION": batch.location,
                "OPENDATA_BUFFER_DELIVERY_COUNT": str(batch.delivery_count),
            },
        )
        with self._lock:
            self._running.add(process)
            stopping = self._stopping
        if stopping:
            # This command started after _stop() had signalled the others. Without SIGKILL, a
            # command that ignores SIGTERM would outlive this process.
            _signal_group(process, signal.SIGKILL)
        try:
            # Only the exit code counts, even if the command did not read all of its input.
            process.communicate(data)
        finally:
            with self._lock:
                self._running.discard(process)
        return process.returncode

    def _finish(self, batch: ClaimedBatch) -> None:
        try:
            batch.done()
            with self._lock:
                self.done += 1
        except ClaimLost as error:
            self.report(f"batch {batch.sequence} was processed, and comes again: {shown(error)}")

    def _fail(self, batch: ClaimedBatch, how: str) -> None:
        count = batch.delivery_count
        what = f"batch {batch.sequence} failed with {how} in delivery {count}"
        if 0 < self.max_deliveries <= count:
            self.report(f"{what}: it goes to the quarantine")
            with suppress(ClaimLost):
                batch.reject(f"{self.command[0]} ended with {how} in delivery {count}")
                with self._lock:
                    self.rejected += 1
            return
        rest = min(2.0 ** min(count - 1, 30), 60.0)  # Doubles up to a minute.
        self.report(f"{what}: delivered again after {rest:g} s")
        self._release(batch, rest)

    def _release(self, batch: ClaimedBatch, rest: float) -> None:
        # An expired claim is already released. A claim that cannot be released will expire.
        with suppress(ClaimLost, OpenDataBufferError):
            batch.release(delay=rest)
        with self._lock:
            self.released += 1


def _signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    # Signal the whole group: the command may be a shell with children.
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)
