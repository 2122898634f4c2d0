"""``./run demo``: start the storage, three producers and the query; show and prove the results."""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack
from pathlib import Path

import click
from rich.console import Console

from notebooks.demo.places import PARTITIONS, Places
from notebooks.demo.producers import Failed
from notebooks.demo.run import run
from notebooks.demo.s3 import is_real, local_s3


@click.command()
@click.option(
    "--s3",
    is_flag=True,
    help="Buffer on a local S3 server instead of a directory: versitygw where './run servers' has "
    "got it, else moto, a simulator.",
)
@click.option(
    "--topic",
    is_flag=True,
    help="Buffer in a topic of 4 partitions, by carrier, instead of a queue.",
)
@click.option("--fresh", is_flag=True, help="Delete what an earlier run left and start over.")
@click.option("--seconds", default=35.0, show_default=True, help="Time to replay the year in.")
@click.option(
    "--pause",
    default=4.0,
    show_default=True,
    help="How many seconds Spark is dead for in the middle; 0: do not kill it.",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    default=Path("demo-output"),
    show_default=True,
    help="Where buffer, checkpoint, Parquet, plot, report and logs go.",
)
def main(s3: bool, topic: bool, fresh: bool, seconds: float, pause: float, output: Path) -> None:
    """Replay 336,776 flights through a buffer into Spark and prove that each arrived once.

    The replay starts when Spark has its first batch. In the middle Spark is killed (SIGKILL), and
    started again after some seconds: the buffer keeps what comes meanwhile. Stop the demo with
    Ctrl-C and start it again:
    it resumes. Only moto keeps its state in memory, and each run on it starts over.
    """
    console = Console()
    started = time.monotonic()
    root = output.resolve() / (("s3" if s3 else "local") + ("-topic" if topic else ""))
    places = Places(root, str(root / "buffer"), topic)
    resumes = not s3 or is_real()
    if fresh or not resumes:
        places.start_over()
    kind = f"a topic of {PARTITIONS} partitions" if topic else "a queue"
    command = "./run demo" + " --s3" * s3 + " --topic" * topic
    with ExitStack() as stack:
        if s3:
            root.mkdir(parents=True, exist_ok=True)
            server = stack.enter_context(local_s3(places.objects, places.lock_file))
            places = Places(root, server.store, topic)
            where = f"on a local S3 server ({server.name})"
        else:
            where = "in a directory"
        console.print(f"buffer: {places.store}, {kind} {where}", soft_wrap=True)
        try:
            exact = run(
                places,
                seconds=seconds,
                pause=pause,
                command=command,
                buffer=f"{kind} {where}",
                console=console,
            )
        except KeyboardInterrupt:
            console.print("stopped" + ": the same command resumes" * resumes)
            sys.exit(130)
        except Failed as error:
            console.print(f"error: {error}", style="red", markup=False, soft_wrap=True)
            console.print("the same command goes on from here")
            sys.exit(1)
    console.print(f"took {time.monotonic() - started:.0f} s")
    sys.exit(not exact)


if __name__ == "__main__":
    main()
