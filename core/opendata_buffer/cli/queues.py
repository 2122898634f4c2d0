"""Commands about a whole queue: ``status`` and ``gc``."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from opendata_buffer.cli.errors import Exceeded, Failure
from opendata_buffer.cli.options import (
    NATURAL,
    POSITIVE,
    json_option,
    queue_options,
    queue_words,
)
from opendata_buffer.cli.words import plural, waiting

if TYPE_CHECKING:
    from opendata_buffer.cli.places import Place

__all__ = ["gc", "status"]


@click.command()
@queue_options
@json_option
@click.option("--watch", is_flag=True, help="Show it again and again until interrupted.")
@click.option(
    "--interval-ms",
    type=POSITIVE,
    default=1000,
    show_default=True,
    help="For --watch: between two looks.",
)
@click.option(
    "--max-lag",
    type=click.FloatRange(min=0),
    metavar="SECONDS",
    help="Only check that the oldest batch does not wait longer; exit code 3 if it does.",
)
@click.option(
    "--max-backlog",
    type=NATURAL,
    metavar="N",
    help="Only check that no more than N batches wait; exit code 3 if more do.",
)
@click.pass_obj
def status(
    runtime: Any,
    /,
    as_json: bool,
    watch: bool,
    interval_ms: int,
    max_lag: float | None,
    max_backlog: int | None,
    **queue: Any,
) -> None:
    """Show what is in the queue, or in the topic's partitions, changing nothing.

    Sizes are those of stored objects. With --json and --watch, one JSON object per line. With
    --max-lag or --max-backlog it is a probe: it reads manifests and nothing else, prints one
    line, and exits 0 while all is well, 3 when too much waits, 1 when that cannot be told.
    """
    from opendata_buffer.cli.places import place_of

    place = place_of(runtime, queue)
    if max_lag is not None or max_backlog is not None:
        if watch:
            raise click.UsageError("--watch shows, and a probe answers once: leave one out")
        _probe(place, runtime, max_lag, max_backlog, as_json)
        return

    from rich.console import Console
    from rich.live import Live

    console = Console()
    look = _topic_look(place, runtime) if place.topic else _queue_look(place, runtime)

    def show() -> Any:
        found, as_table = look()
        return json.dumps(found.as_json()) if as_json else as_table(found)

    if watch and console.is_terminal and not as_json:
        with Live(show(), console=console, auto_refresh=False) as live:
            while True:
                runtime.sleep(interval_ms / 1000)
                live.update(show(), refresh=True)
    while True:
        click.echo(show()) if as_json else console.print(show())
        if not watch:
            return
        runtime.sleep(interval_ms / 1000)


def _queue_look(place: Place, runtime: Any) -> Callable[[], tuple[Any, Callable[[Any], Any]]]:
    from opendata_buffer.admin.observe import Observer
    from opendata_buffer.admin.status import read_status
    from opendata_buffer.broker.client import Connection
    from opendata_buffer.broker.discovery_record import DiscoveryRecord
    from opendata_buffer.cli.terminal import status_table

    observer = Observer(place.store, place.config, runtime)

    def connect(announced: DiscoveryRecord) -> Connection:
        # Loading the network takes longer than all else, and most queues have no broker.
        from opendata_buffer.broker.network import WebSocketNetwork

        return WebSocketNetwork(runtime).connect(announced)

    return lambda: (read_status(observer, connect), status_table)


def _topic_look(place: Place, runtime: Any) -> Callable[[], tuple[Any, Callable[[Any], Any]]]:
    from opendata_buffer.admin.topic import read_topic
    from opendata_buffer.cli.terminal import topic_table

    assert place.topic is not None
    topic = place.topic
    return lambda: (read_topic(topic, place.config, runtime), topic_table)


def _probe(
    place: Place, runtime: Any, max_lag: float | None, max_backlog: int | None, as_json: bool
) -> None:
    from opendata_buffer.admin.backlog import read_backlog

    configs = place.configs()
    found = read_backlog(place.store, configs, runtime, topic=place.topic is not None)
    excess = found.excess(max_lag, max_backlog)
    if as_json:
        said = {"ok": not excess, "batches": found.batches, "lag_seconds": found.lag_seconds}
        click.echo(json.dumps(said))
    if excess:
        raise Exceeded(
            f"too much waits in {place.store.url}: of the batches {' and '.join(excess)}. "
            f"'opendata-buffer owner {queue_words()}' says who should read it"
        )
    if not as_json:
        click.echo(f"ok: {waiting(found.batches)}, the oldest for {found.lag_seconds:.1f} s")


@click.command()
@queue_options
@click.option("--dry-run", is_flag=True, help="Only tell what would be deleted.")
@click.option(
    "--grace-period-ms",
    type=NATURAL,
    default=600_000,
    show_default=True,
    help="Least age of what is deleted. Below that of the producers, it takes batches that are "
    "being uploaded right now: then only while no producer runs.",
)
@json_option
@click.pass_obj
def gc(runtime: Any, /, dry_run: bool, grace_period_ms: int, as_json: bool, **queue: Any) -> None:
    """Delete batch objects that were consumed, once; of a topic, in all its partitions.

    A running consumer does this by itself, but not in partitions that have left the topic. Refuses
    a data prefix of another queue, and a queue whose manifest is not found.
    """
    from opendata_buffer.admin.collect import collect
    from opendata_buffer.cli.places import place_of
    from opendata_buffer.cli.terminal import format_bytes
    from opendata_buffer.config import ConsumerConfig, GarbageCollectorConfig

    place = place_of(
        runtime,
        queue,
        ConsumerConfig,
        gc=GarbageCollectorConfig(grace_period_ms=grace_period_ms),
    )
    report = collect(place.store, place.config, place.topic, runtime, dry_run=dry_run)
    plan = report.plan
    if as_json:
        found = {
            "dry_run": dry_run,
            "delete": [{"key": each.key, "size": each.size} for each in plan.delete],
            "delete_bytes": plan.delete_bytes,
            "deleted": report.deleted,
            "failed": [{"key": each.key, "reason": each.reason} for each in report.failed],
            "abandoned": report.abandoned,
            "referenced": plan.referenced,
            "waiting": plan.waiting,
            "ignored": plan.ignored,
            "held": plan.held,
        }
        click.echo(json.dumps(found))
    else:
        for each in plan.delete:
            click.echo(f"{'would delete' if dry_run else 'delete'} {each.key}")
        total = f"{plural(len(plan.delete), 'object')}, {format_bytes(plan.delete_bytes)}"
        click.echo(
            f"{'would delete ' + total if dry_run else f'deleted {report.deleted:,} of {total}'}; "
            f"{plan.referenced:,} are queued, {plan.waiting:,} are too young"
        )
        if plan.held:
            click.echo(f"nothing was deleted: {plan.held}")
    if report.failed:
        first = report.failed[0]
        raise Failure(
            f"{plural(len(report.failed), 'object')} could not be deleted, the first is "
            f"{first.key!r}: {first.reason}. Run it again."
        )
