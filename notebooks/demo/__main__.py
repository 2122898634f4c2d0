"""``./run demo``: start the storage, three producers and the query; show; prove."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import click
from rich.console import Console

from notebooks.demo import report
from notebooks.demo.flights import AIRPORTS, Share, flights
from notebooks.demo.places import PARTITIONS, Places
from notebooks.demo.progress import Counters, Screen
from notebooks.demo.s3 import local_s3

STOP_S = 20.0
"""How long producers may take to make their last chunk durable."""


class Failed(Exception):
    """A part of the demo ended with an error; says where to look."""


@contextmanager
def producers(
    places: Places, first: dict[str, int], seconds: float, lock: int, counters: Counters
) -> Iterator[dict[str, subprocess.Popen[str]]]:
    """Run one producer for each airport, from its first chunk on."""
    running: dict[str, subprocess.Popen[str]] = {}

    def listen(airport: str, process: subprocess.Popen[str]) -> None:
        for line in process.stdout or ():
            counters.on_durable(airport, int(line))

    listeners = []
    try:
        for airport, chunk in first.items():
            arguments = [places.store, airport, str(chunk), str(seconds)]
            with places.log(f"producer-{airport}").open("w") as log:
                running[airport] = subprocess.Popen(
                    [sys.executable, "-m", "notebooks.demo.replay", *arguments],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                    pass_fds=[lock],
                    process_group=0,  # Ctrl-C is for the demo, which then stops them in order
                )
            listener = threading.Thread(target=listen, args=(airport, running[airport]))
            listener.start()
            listeners.append(listener)
        yield running
    finally:
        for process in running.values():
            if process.stdin is not None:
                process.stdin.close()
        deadline = time.monotonic() + STOP_S
        for process in running.values():
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
        for listener in listeners:
            listener.join()


def run(places: Places, seconds: float, console: Console) -> bool:
    """One run from wherever the last one ended; true when every record arrived once."""
    from notebooks.demo import query  # after the storage's environment is set

    lock = places.lock()
    places.make()
    first, written = places.resume()
    shares = {airport: Share.of(airport) for airport in AIRPORTS}
    durable = {airport: shares[airport].rows_before(chunk) for airport, chunk in first.items()}
    counters = Counters(len(flights()), durable, written)
    if written or any(first.values()):
        console.print(
            f"resuming: {sum(durable.values()):,} records are durable, {written:,} in Parquet "
            "([dim]--fresh starts over[/])"
        )
    with producers(places, first, seconds, lock, counters) as running, ExitStack() as stack:
        screen = stack.enter_context(Screen(counters, console))
        ready: list[query.SparkSession] = []
        spark_log = places.log("spark")
        starter = threading.Thread(target=lambda: ready.append(query.session(spark_log)))
        starter.start()
        while starter.is_alive():
            screen.show("starting Spark")
            starter.join(0.2)
        if not ready:
            raise Failed(f"Spark did not start: see {spark_log}")
        stack.callback(_end, ready[0].stop)
        stream = query.start(ready[0], places, counters.on_batch)
        stack.callback(_end, stream.stop)
        while True:
            time.sleep(0.2)
            screen.show("")
            if (error := stream.exception()) is not None:
                cause = str(error).split("=== Streaming Query")[0]
                raise Failed(f"the query failed: {cause}\nsee {spark_log}")
            for airport, process in running.items():
                if process.poll():
                    log = places.log(f"producer-{airport}")
                    raise Failed(f"producer {airport} failed:\n{log.read_text()[-2000:]}")
            now = counters.samples[-1]
            if all(each.poll() == 0 for each in running.values()) and now.written >= now.durable:
                break
        # Whatever should not be there any more would arrive now.
        stream.processAllAvailable()
        screen.show("done")
        stream.stop()
    console.print(report.carriers(places))
    report.plot(places, counters.samples)
    console.print(f"plot: {places.plot}\nParquet: {places.flights}, {places.delays}")
    left, _ = places.queued()
    console.print(f"batches left in the queue: {left}")
    return report.prove(places, console)


def _end(stop: Callable[[], object]) -> None:
    """Stop Spark while the demo ends, as far as it can still be told to.

    Ctrl-C in the middle of a call to the JVM cuts that connection, and the next call may find the
    JVM on its way out. It ends with this process, and the next start resumes.
    """
    with suppress(Exception):
        stop()


@click.command()
@click.option(
    "--s3", is_flag=True, help="Buffer on a local S3 server (moto) instead of a directory."
)
@click.option(
    "--topic",
    is_flag=True,
    help="Buffer in a topic of 4 partitions, by carrier, instead of a queue.",
)
@click.option("--fresh", is_flag=True, help="Delete what an earlier run left and start over.")
@click.option("--seconds", default=45.0, show_default=True, help="Time to replay the year in.")
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    default=Path("demo-output"),
    show_default=True,
    help="Where buffer, checkpoint, Parquet, plot and logs go.",
)
def main(s3: bool, topic: bool, fresh: bool, seconds: float, output: Path) -> None:
    """Replay 336,776 flights through a buffer into Spark and prove that each arrived once.

    Stop it with Ctrl-C and start it again: it resumes. With --s3 the server keeps its state in
    memory and ends with the demo, so each such run starts over.
    """
    console = Console()
    started = time.monotonic()
    with ExitStack() as stack:
        root = output.resolve() / (("s3" if s3 else "local") + ("-topic" if topic else ""))
        store = stack.enter_context(local_s3()) if s3 else str(root / "buffer")
        places = Places(root, store, topic)
        if fresh or s3:
            places.start_over()
        kind = f", a topic of {PARTITIONS} partitions" if topic else ""
        console.print(f"buffer: {store}{kind}")
        try:
            exact = run(places, seconds, console)
        except KeyboardInterrupt:
            again = "" if s3 else ": the same command resumes"
            console.print(f"stopped{again}")
            sys.exit(130)
        except Failed as error:
            console.print(f"error: {error}", style="red", markup=False, soft_wrap=True)
            console.print("the same command goes on from here")
            sys.exit(1)
    console.print(f"took {time.monotonic() - started:.0f} s")
    sys.exit(not exact)


if __name__ == "__main__":
    main()
