"""``work``: run a command for each batch, in any number of processes."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import click
import pyarrow as pa

from opendata_buffer.broker.worker import ClaimedBatch, Worker
from opendata_buffer.cli import options
from opendata_buffer.cli.errors import Failure, one_line
from opendata_buffer.cli.options import LONG_MS, command
from opendata_buffer.cli.signals import print_summary
from opendata_buffer.cli.target import one_queue
from opendata_buffer.cli.text import plural
from opendata_buffer.config import WorkerConfig
from opendata_buffer.errors import ClaimLost, Closed, InvalidInput, OpenDataBufferError
from opendata_buffer.framing import FRAMINGS
from opendata_buffer.runtime import Runtime

CLAIM_S = 1.0
"""Longest wait of one claim, so that a signal is noticed."""

POLL_S = 0.1
"""Seconds between two checks whether all threads still work."""

TERM_S = 1.5
"""Seconds from a signal until a command that still runs is killed."""

END_S = 3.0
"""Seconds from a signal until threads are no longer waited for; their claims expire then."""


def rest_s(delivery_count: int) -> float:
    """The back-off of a batch after so many failures: doubled each time, a minute at most."""
    return min(2.0 ** min(delivery_count - 1, 30), 60.0)


@command(timeout_ms=LONG_MS)
@options.queue
@click.option("--parallel", type=options.POSITIVE, default=1, help="Batches at once.")
@click.option(
    "--claim-timeout-ms",
    type=options.POSITIVE,
    default=60_000,
    help="After so long without a heartbeat of this process, other workers get its batches.",
)
@click.option(
    "--max-deliveries",
    type=options.NATURAL,
    default=5,
    help="A batch that failed so often goes to the quarantine; 0 retries for ever.",
)
@click.option(
    "--broker",
    type=click.Choice(["auto", "host"]),
    default="host",
    help="host: be the queue's broker while there is none; auto: wait for one.",
)
@options.framing
@options.create_if_missing
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@click.pass_obj
def work(
    runtime: Any,
    /,
    parallel: int,
    framing: str,
    command: tuple[str, ...],
    **queue: Any,
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
    worker = Worker(target.config, store=target.store, runtime=runtime)
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
    """Threads that claim batches and run the command for each."""

    claim: Callable[[int, float], Sequence[ClaimedBatch]]
    command: Sequence[str]  # a program and its arguments
    parallel: int  # threads
    runtime: Runtime
    report: Callable[[str], None]
    max_deliveries: int = 0  # a batch that failed so often is rejected; 0 never rejects
    framing: str = "lines"  # how records are separated on the command's standard input
    done: int = 0
    released: int = 0
    rejected: int = 0

    def __post_init__(self) -> None:
        self._lock = self.runtime.condition()
        self._running: set[subprocess.Popen[bytes]] = set()
        self._stopping = False
        self._error: BaseException | None = None

    def run(self) -> None:
        """Work until a signal, or until an error that is not about one batch."""
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
        """The outcomes of the batches, when a signal ends the command."""
        return (
            f"ended by a signal: {plural(self.done, 'batch')} done, {self.released} released, "
            f"{self.rejected} in the quarantine"
        )

    def _stop(self, end: float) -> None:
        with self._lock:
            self._stopping = True
        self._signal(signal.SIGTERM)
        kill_at = min(end, self.runtime.monotonic() + TERM_S)
        while self._running and self.runtime.monotonic() < kill_at:
            self.runtime.sleep(POLL_S / 2)
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        with self._lock:
            running = list(self._running)
        for process in running:
            _signal_group(process, number)

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
            records = pa.array(batch.entries, pa.binary())
            data = FRAMINGS[self.framing].framed(records, batch.sequence)
            code = self._run(batch, bytes(data))
        except InvalidInput as error:
            self._fail(batch, one_line(str(error)))
            return
        except OSError as error:
            # The command cannot be started, so the next batch would fail, too.
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
            # A group of its own: Ctrl-C in a terminal signals this process, which ends the group.
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
            # Started after _stop() had signalled the others: a command that ignores SIGTERM would
            # outlive this process.
            _signal_group(process, signal.SIGKILL)
        try:
            # The exit code decides, also of a command that did not read all its input.
            process.communicate(data)
        finally:
            with self._lock:
                self._running.discard(process)
        return process.returncode

    def _finish(self, batch: ClaimedBatch) -> None:
        try:
            batch.done()
        except ClaimLost as error:
            self.report(f"batch {batch.sequence} was processed, and comes again: {error}")
            return
        with self._lock:
            self.done += 1

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
        rest = rest_s(count)
        self.report(f"{what}: delivered again after {rest:g} s")
        self._release(batch, rest)

    def _release(self, batch: ClaimedBatch, rest: float) -> None:
        # A claim that expired is released already; one that cannot be released expires.
        with suppress(ClaimLost, OpenDataBufferError):
            batch.release(delay=rest)
        with self._lock:
            self.released += 1


def _signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    # The whole group: the command may be a shell with children of its own.
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)
