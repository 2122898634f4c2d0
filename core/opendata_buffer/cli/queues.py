"""Commands about a whole queue: ``status``, ``gc``, ``fsck``."""

from __future__ import annotations

import json
from typing import Any

import click

from opendata_buffer.cli.errors import Failure
from opendata_buffer.cli.options import (
    NATURAL,
    POSITIVE,
    allow_foreign_option,
    json_option,
    max_batch_bytes_option,
    queue_fields_of,
    queue_options,
)

__all__ = ["fsck", "gc", "status"]


@click.command()
@queue_options
@json_option
@click.option("--watch", is_flag=True, help="Show it again and again until interrupted.")
@click.option("--interval-ms", type=POSITIVE, default=1000, show_default=True, help="For --watch.")
@click.pass_obj
def status(runtime: Any, /, as_json: bool, watch: bool, interval_ms: int, **queue: Any) -> None:
    """Show what is in the queue, changing nothing.

    With --json and --watch, one JSON object per line.
    """
    from rich.console import Console
    from rich.live import Live

    from opendata_buffer.admin.observe import Observer
    from opendata_buffer.admin.status import read_status
    from opendata_buffer.broker.network import WebSocketNetwork, websockets_installed
    from opendata_buffer.cli.terminal import status_table
    from opendata_buffer.config import QueueConfig
    from opendata_buffer.stores.factory import open_store

    config = QueueConfig(**queue_fields_of(queue))
    store = open_store(config.store, config.store_options)
    observer = Observer(store, config, runtime)
    connect = WebSocketNetwork(runtime).connect if websockets_installed() else None
    console = Console()

    def look() -> Any:
        found = read_status(observer, connect)
        return json.dumps(found.as_json()) if as_json else status_table(found)

    if watch and console.is_terminal and not as_json:
        with Live(look(), console=console, auto_refresh=False) as live:
            while True:
                runtime.sleep(interval_ms / 1000)
                live.update(look(), refresh=True)
    while True:
        click.echo(look()) if as_json else console.print(look())
        if not watch:
            return
        runtime.sleep(interval_ms / 1000)


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
    """Delete batch objects that were consumed, once.

    A running consumer does this by itself. Refuses a data prefix of another queue, and a queue
    whose manifest is not found.
    """
    from opendata_buffer.admin.observe import Observer
    from opendata_buffer.cli.terminal import format_bytes
    from opendata_buffer.config import ConsumerConfig, GarbageCollectorConfig
    from opendata_buffer.gc import GarbageCollector
    from opendata_buffer.stores.factory import open_store

    config = ConsumerConfig(
        **queue_fields_of(queue),
        gc=GarbageCollectorConfig(grace_period_ms=grace_period_ms),
    )
    store = open_store(config.store, config.store_options)
    # Before the collector, which would claim the prefix for a manifest that is a typing error.
    Observer(store, config, runtime).manifest()
    report = GarbageCollector(store, config, runtime=runtime).run_once(dry_run=dry_run)
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
        total = f"{len(plan.delete):,} objects, {format_bytes(plan.delete_bytes)}"
        click.echo(
            f"{'would delete ' + total if dry_run else f'deleted {report.deleted:,} of {total}'}; "
            f"{plan.referenced:,} are queued, {plan.waiting:,} are too young"
        )
        if plan.held:
            click.echo(f"nothing was deleted: {plan.held}")
    if report.failed:
        first = report.failed[0]
        raise Failure(
            f"{len(report.failed)} objects could not be deleted, the first is {first.key!r}: "
            f"{first.reason}. Run it again."
        )


@click.command()
@queue_options
@max_batch_bytes_option
@allow_foreign_option
@json_option
@click.pass_obj
def fsck(
    runtime: Any,
    /,
    max_batch_bytes: int,
    allow_foreign_locations: bool,
    as_json: bool,
    **queue: Any,
) -> None:
    """Check that every queued batch exists and decodes; exits 1 with a list if not."""
    from opendata_buffer.admin.fsck import check_queue
    from opendata_buffer.cli.terminal import format_bytes, track
    from opendata_buffer.config import ConsumerConfig
    from opendata_buffer.stores.factory import open_store

    config = ConsumerConfig(
        **queue_fields_of(queue),
        max_batch_bytes=max_batch_bytes,
        allow_foreign_locations=allow_foreign_locations,
    )
    store = open_store(config.store, config.store_options)
    with track("checking") as advance:
        report = check_queue(store, config, runtime, advance=advance)
    if as_json:
        click.echo(json.dumps(report.as_json()))
    else:
        for finding in report.notes:
            click.echo(f"note: {finding}")
        for finding in report.problems:
            click.echo(f"problem: {finding}")
        click.echo(
            f"{report.batches:,} batches, {report.records:,} records, "
            f"{format_bytes(report.bytes)} checked"
        )
    if not report.ok:
        raise Failure(
            f"{len(report.problems)} problems in the queue with manifest {config.manifest_path!r}: "
            "restore the objects, or pass a batch by with 'opendata-buffer skip', which copies it "
            "first"
        )
