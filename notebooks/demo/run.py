"""One run of the demo, from the point where the last one ended."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from datetime import datetime
from importlib.metadata import version
from typing import TYPE_CHECKING, TypeVar

from rich.console import Console

from notebooks.demo import findings, page, plot
from notebooks.demo.flights import AIRPORTS, Share, flights
from notebooks.demo.places import Places
from notebooks.demo.producers import Failed, Producers, producers
from notebooks.demo.progress import Counters, Screen, micro_batches
from notebooks.demo.tables import show_carriers, show_proof

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

__all__ = ["run"]

Made = TypeVar("Made")

LOOK_S = 0.2
"""Seconds between two samples."""


def run(
    places: Places, *, seconds: float, pause: float, command: str, buffer: str, console: Console
) -> bool:
    """Replay the rest of the year.

    Args:
        places: The directories and the buffer.
        seconds: Time to replay the whole year in.
        pause: Seconds for which the query is stopped in the middle; 0 to not stop it.
        command: The command that repeats the run, for the report.
        buffer: A short description of the buffer.
        console: The console to print to.

    Returns:
        Whether every record arrived exactly once.

    Raises:
        Failed: A producer or the query ended with an error.
    """
    lock = places.lock()
    places.make()
    first = places.resume()
    shares = {airport: Share.of(airport) for airport in AIRPORTS}
    durable = {airport: shares[airport].rows_before(chunk) for airport, chunk in first.items()}
    counters = Counters(len(flights()), durable, places.batches())
    if places.page.exists() and counters.written == sum(durable.values()) == counters.total:
        made = datetime.fromtimestamp(places.page.stat().st_mtime)
        console.print(
            f"complete since {made:%Y-%m-%d %H:%M}: nothing is left to replay, and plot and report "
            "stay as they are ([dim]--fresh starts over[/])"
        )
        return _tell(places, console).is_exact
    if counters.written or any(first.values()):
        console.print(
            f"resuming: {sum(durable.values()):,} records are durable, {counters.written:,} in "
            "Parquet ([dim]--fresh starts over[/])"
        )
    with ExitStack() as stack:
        running = stack.enter_context(producers(places, first, seconds, lock, counters))
        screen = stack.enter_context(Screen(counters, console))
        Course(places, counters, running, screen, stack).follow(pause)
    proof = _tell(places, console)
    days = findings.days(places)
    plot.save_picture(places.plot, days, counters.samples, counters.marks)
    made_by = page.Run(
        buffer,
        command,
        counters.samples,
        counters.marks,
        counters.batches,
        counters.durable_ms,
        counters.micro_batches,
    )
    text = page.render(made_by, days, findings.carriers(places), proof, version("opendata-buffer"))
    new = places.page.with_suffix(".new")
    new.write_text(text, encoding="utf-8")
    new.replace(places.page)
    console.print(f"plot: {places.plot}\nreport: {places.page.as_uri()}", soft_wrap=True)
    return proof.is_exact


def _tell(places: Places, console: Console) -> findings.Proof:
    """Print the results, and compare the output with the input."""
    show_carriers(findings.carriers(places), console)
    console.print(f"Parquet: {places.flights}, {places.delays}", soft_wrap=True)
    left, _ = places.queued()
    console.print(f"batches left in the queue: {left:,}")
    proof = findings.prove(places)
    show_proof(proof, console)
    return proof


class Course:
    """The steps of a run: start Spark, replay the year, kill and restart Spark in the middle."""

    def __init__(
        self,
        places: Places,
        counters: Counters,
        running: Producers,
        screen: Screen,
        stack: ExitStack,
    ) -> None:
        self._places = places
        self._counters = counters
        self._running = running
        self._screen = screen
        self._stack = stack
        self._log = places.log("spark")
        self._stream: StreamingQuery | None = None
        self._starts = 0
        self._ahead: list[tuple[Callable[[], bool], str, str]] = []
        """The events to come: their conditions, and the names and texts to mark them with."""

    def follow(self, pause: float) -> None:
        """Run until every record is in Parquet."""
        spark = self._session()
        self._start(spark)
        self._await("starting: Spark compiles its first batch", self._is_ready)
        took = self._counters.seconds
        self._screen.mark(
            plot.READY,
            f"the first {self._counters.written:,} rows are in Parquet. The replay starts",
        )
        self._running.go()
        self._ahead.append((self._is_durable, "all durable", "every flight is in the buffer"))
        if pause and self._counters.samples[-1].durable < self._counters.total / 2:
            self._await("replaying", self._is_half)
            self._pause(pause)
        self._await("replaying", self._is_durable)
        self._await("Spark reads what is left", self._has_all)
        # Records that should not exist would arrive now.
        assert self._stream is not None
        self._stream.processAllAvailable()
        self._screen.mark("all in Parquet", f"{self._counters.seconds - took:.0f} s of replay")
        self._screen.show("done")
        self._stop()

    def _session(self) -> SparkSession:
        from notebooks.demo import query  # Needs the storage's environment.

        session = self._made("starting Spark", lambda: query.session(self._log))
        self._stack.callback(_end, session.stop)
        return session

    def _start(self, spark: SparkSession) -> None:
        from notebooks.demo import query

        self._starts += 1
        self._counters.has_batch = False
        self._stream = self._made(
            "starting the query",
            lambda: query.start(spark, self._places, self._counters.on_batch),
        )
        self._stack.callback(_end, self._stream.stop)

    def _stop(self) -> None:
        """Stop the query, and keep Spark's measurements."""
        assert self._stream is not None
        self._counters.micro_batches += micro_batches(self._starts, self._stream.recentProgress)
        self._stream.stop()
        self._stream = None

    def _made(self, status: str, make: Callable[[], Made]) -> Made:
        """Return the result of ``make``, which takes seconds; update the screen meanwhile."""
        with ThreadPoolExecutor(1) as pool:
            made = pool.submit(make)
            while not made.done():
                self._look(status)
        if (error := made.exception()) is not None:
            raise Failed(f"{status} failed: {error}\nsee {self._log}")
        return made.result()

    def _pause(self, seconds: float) -> None:
        """Kill Spark during the replay, and start another one."""
        from notebooks.demo import query

        assert self._stream is not None
        self._counters.micro_batches += micro_batches(self._starts, self._stream.recentProgress)
        self._stream = None
        query.kill(self._log)
        self._screen.mark(
            plot.STOPPED, "by SIGKILL, in the middle of its work. The producers go on"
        )
        end = time.monotonic() + seconds
        self._await("Spark is dead, producers go on", lambda: time.monotonic() >= end)
        spark = self._session()
        waited = self._counters.samples[-1]
        self._screen.mark(
            plot.AGAIN, f"from its checkpoint, while {waited.backlog:,} rows wait in the buffer"
        )
        self._ahead.append(
            (
                lambda: self._counters.written >= waited.durable,
                plot.CAUGHT_UP,
                "every row that waited then is in Parquet",
            )
        )
        self._start(spark)
        self._await("starting the query: its first micro-batch", self._has_begun)

    def _is_ready(self) -> bool:
        """Return whether the query has written a batch, or has no rows to write."""
        now = self._counters.samples[-1]
        begun = self._running.have_begun()
        return self._counters.has_batch or (begun and now.written >= now.durable)

    def _has_begun(self) -> bool:
        return self._counters.has_batch or (self._is_durable() and self._has_all())

    def _is_half(self) -> bool:
        ended = self._running.have_ended()
        return ended or self._counters.samples[-1].durable >= self._counters.total / 2

    def _is_durable(self) -> bool:
        ended = self._running.have_ended()
        return ended or self._counters.samples[-1].durable >= self._counters.total

    def _has_all(self) -> bool:
        now = self._counters.samples[-1]
        return now.written >= now.durable

    def _await(self, status: str, happened: Callable[[], bool]) -> None:
        self._look(status)
        while not happened():
            self._look(status)

    def _look(self, status: str) -> None:
        time.sleep(LOOK_S)
        self._screen.show(status)
        for each in [each for each in self._ahead if each[0]()]:
            self._ahead.remove(each)
            self._screen.mark(*each[1:])
        self._running.check()
        if self._stream is not None and (error := self._stream.exception()) is not None:
            cause = str(error).split("=== Streaming Query")[0]
            raise Failed(f"the query failed: {cause}\nsee {self._log}")


def _end(stop: Callable[[], object]) -> None:
    """Stop Spark at the end of the demo, if it still responds.

    Ctrl-C in the middle of a call to the JVM closes that connection, and the next call may find the
    JVM shutting down. Spark ends with this process anyway, and the next start resumes.
    """
    with suppress(Exception):
        stop()
