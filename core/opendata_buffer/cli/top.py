"""A live view of a queue or a topic: ``top``."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from opendata_buffer.cli.options import POSITIVE, json_option, queue_options

if TYPE_CHECKING:
    from opendata_buffer.admin.watch import Watch

__all__ = ["top"]

FRAME_S = 0.25
"""Between two frames: ages go on where looks do not."""


@click.command()
@queue_options
@click.option("--once", is_flag=True, help="Look twice, print one frame, and end.")
@click.option(
    "--interval-ms", type=POSITIVE, default=1000, show_default=True, help="Between looks."
)
@json_option
@click.pass_obj
def top(runtime: Any, /, once: bool, interval_ms: int, as_json: bool, **queue: Any) -> None:
    """Watch backlog, age, rates, writers, consumer and broker of a queue or of a whole topic.

    Runs until Ctrl-C, also while the store fails: it then shows since when, and what was last
    seen. It reads manifests and lists nothing. Without a terminal it prints a frame for each look;
    with --json an object on a line of its own.
    """
    from rich.console import Console
    from rich.live import Live

    from opendata_buffer.admin.overview import Overseer
    from opendata_buffer.admin.watch import Watch
    from opendata_buffer.broker.network import WebSocketNetwork
    from opendata_buffer.cli.frame import frame
    from opendata_buffer.cli.places import place_of

    place = place_of(runtime, queue)
    connect = WebSocketNetwork(runtime).connect
    is_topic = place.topic is not None
    overseer = Overseer(place.store, place.config, runtime, connect, topic=is_topic)
    watch = Watch(overseer.look, runtime)
    watch.step(raises=True)  # a queue that is not there is no store that fails for a while
    console = Console()
    if console.is_terminal and not once and not as_json:
        watch.start(interval_ms / 1000)
        try:
            with Live(console=console, screen=True, auto_refresh=False) as live:
                while True:
                    live.update(frame(watch.view(), console.height, console.width), refresh=True)
                    runtime.sleep(FRAME_S)
        finally:
            watch.end()
    while True:
        runtime.sleep(interval_ms / 1000)
        watch.step(raises=once)
        click.echo(_line(watch)) if as_json else console.print(
            frame(watch.view(), None, console.width)
        )
        if once:
            return


def _line(watch: Watch) -> str:
    return json.dumps(watch.view().as_json())
