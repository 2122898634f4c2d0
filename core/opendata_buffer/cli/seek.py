"""Drop what waits before a place in the queue: ``seek``."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from opendata_buffer.cli.asking import confirm, yes_option
from opendata_buffer.cli.ending import last_words
from opendata_buffer.cli.options import (
    allow_foreign_option,
    json_option,
    patient_queue_options,
    queue_words,
)
from opendata_buffer.cli.words import plural

if TYPE_CHECKING:
    from opendata_buffer.admin.seek import SeekPlan

__all__ = ["seek"]


@click.command()
@patient_queue_options
@click.option(
    "--to",
    required=True,
    metavar="WHERE",
    help="Where the queue shall begin: a sequence, a time such as 2026-01-31T03:00:00Z (UTC "
    "without a zone), or 'latest', which drops all that waits now; in a topic also sequences by "
    "partition such as '{\"0\": 42}'.",
)
@click.option(
    "--copy/--no-copy",
    default=True,
    show_default=True,
    help="Copy what is dropped to the quarantine first. Nothing brings back what was not copied.",
)
@click.option("--dry-run", is_flag=True, help="Only tell what would be dropped.")
@allow_foreign_option
@yes_option
@json_option
@click.pass_obj
def seek(
    runtime: Any,
    /,
    to: str,
    copy: bool,
    dry_run: bool,
    allow_foreign_locations: bool,
    yes: bool,
    as_json: bool,
    **queue: Any,
) -> None:
    """Let batches leave the queue unread, up to a place in it.

    Asks first. Prints how many are dropped and where their copies are: 'quarantine list' shows
    them, 'quarantine restore' produces one again. Stop the queue's consumer or Spark query
    before: one that still runs is fenced. Of a topic all partitions are moved by a time or to the
    latest, and those that are named by sequences. With --json a line for each queue.
    """
    from opendata_buffer.admin.seek import plan_seek
    from opendata_buffer.admin.seek import seek as move
    from opendata_buffer.admin.start import Starts
    from opendata_buffer.cli.places import place_of
    from opendata_buffer.cli.progress import track
    from opendata_buffer.config import ConsumerConfig

    starts = Starts.parse(to)
    place = place_of(
        runtime, queue, ConsumerConfig, allow_foreign_locations=allow_foreign_locations
    )
    start_of = place.starts(starts, "--to")
    plans: list[tuple[Any, SeekPlan]] = [
        (config, plan_seek(place.store, config, start_of(config.data_path_prefix), runtime))
        for config in place.written(runtime)
    ]
    dropped = sum(len(plan.dropped) for _, plan in plans)
    for config, plan in plans:
        if plan.cut:
            click.echo(
                f"note: {config.data_path_prefix}: {plural(plan.cut, 'transaction')} on both sides "
                f"of sequence {plan.target}: what lies behind it stays, and is delivered if it is "
                "committed",
                err=True,
            )
    if dropped and not dry_run:
        where = place.store.url
        kept = "copied to the quarantine first" if copy else "NOT copied: nothing brings them back"
        confirm(f"{plural(dropped, 'batch')} of {where} will be dropped, {kept}", yes)
    ended = _ended()  # Here: the thread that says it when all else hangs has no context.
    for config, plan in plans:
        done = None
        if plan.dropped and not dry_run:
            with last_words(lambda: ended), track("copying") as advance:
                done = move(place.store, config, plan, runtime, copy=copy, advance=advance)
        if as_json:
            fields: dict[str, Any] = {
                "partition": config.data_path_prefix,
                "dry_run": dry_run,
                "dropped": len(plan.dropped),
                "first_sequence": plan.target if done is None else done.first,
                "epoch": None if done is None else done.epoch,
                "copies": [] if done is None else done.copies,
            }
            click.echo(json.dumps(fields))
            continue
        would = "would drop" if dry_run else "dropped"
        click.echo(
            f"{config.data_path_prefix}: {would} {plural(len(plan.dropped), 'batch')}; the queue "
            f"begins at sequence {plan.target if done is None else done.first}"
        )
        if done is not None and done.copies:
            click.echo(
                f"{config.data_path_prefix}: copies are {done.copies[0]} to {done.copies[-1]} "
                f"below {config.data_path_prefix}/_quarantine/; bring one back with "
                f"'opendata-buffer quarantine restore {place.words(config)} {done.copies[0]}'"
            )
    if dropped and not dry_run and not as_json:
        click.echo(
            "Spark queries go on with failOnDataLoss=false once; a consumer that keeps its own "
            "position starts without it"
        )


def _ended() -> str:
    return (
        f"ended by a signal: 'opendata-buffer status {queue_words()}' shows what still waits. What "
        "is copied drops nothing: run it again, and no batch is copied twice"
    )
