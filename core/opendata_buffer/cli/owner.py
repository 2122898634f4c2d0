"""Who reads a queue: ``owner``."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click

from opendata_buffer.cli.options import json_option, queue_options

if TYPE_CHECKING:
    from opendata_buffer.admin.owner import Ownership
    from opendata_buffer.queue.consumer_info import ConsumerInfo

__all__ = ["owner"]


@click.command()
@queue_options
@json_option
@click.pass_obj
def owner(runtime: Any, /, as_json: bool, **queue: Any) -> None:
    """Show who reads the queue, changing nothing.

    One line: the epoch, and host, process, program, streaming query and time of whoever claimed
    it. Of a topic one line for each partition that was ever written. That somebody claimed the
    queue does not say that he still runs: see the age of the oldest batch in 'status'.
    """
    from opendata_buffer.admin.observe import Observer
    from opendata_buffer.admin.owner import read_ownership
    from opendata_buffer.cli.places import place_of
    from opendata_buffer.concurrency import together

    place = place_of(runtime, queue)

    def look(config: Any) -> Ownership:
        return read_ownership(Observer(place.store, config, runtime))

    for found in together(runtime, look, place.written(runtime)):
        if as_json:
            click.echo(json.dumps(found.as_json()))
        else:
            click.echo(f"{found.partition}: {_told(found)}")


def _told(found: Ownership) -> str:
    if found.epoch == 0:
        return "nobody has read it yet"
    holder = found.holder
    if holder is None:
        return (
            f"epoch {found.epoch}, of a consumer that left no note: another client, or an older "
            "release"
        )
    if found.known:
        return f"epoch {found.epoch}, {_who(holder, found)}"
    return (
        f"epoch {found.epoch}, of a consumer that left no note: another client, an older release, "
        f"or a repair; epoch {holder.epoch} before it was {_who(holder, found)}"
    )


def _who(holder: ConsumerInfo, found: Ownership) -> str:
    from opendata_buffer.cli.terminal import format_age

    query = f", query {holder.query}" if holder.query else ""
    try:
        at = datetime.fromtimestamp(holder.since_ms / 1000, UTC).isoformat(timespec="seconds")
    except (OverflowError, ValueError, OSError):
        at = f"{holder.since_ms} ms"
    return (
        f"{holder.program}{query}, process {holder.process} on {holder.host}, since {at} "
        f"({format_age(found.since_seconds)} ago)"
    )
