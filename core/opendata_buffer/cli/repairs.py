"""Commands that mend a queue: ``skip``, ``quarantine`` and ``manifest rebuild``."""

from __future__ import annotations

import json
from typing import Any

import click

from opendata_buffer.cli.errors import Failure
from opendata_buffer.cli.options import (
    NATURAL,
    allow_foreign_option,
    json_option,
    max_batch_bytes_option,
    queue_fields_of,
    queue_options,
)
from opendata_buffer.cli.words import plural

__all__ = ["quarantine", "rebuild", "skip"]


@click.command()
@queue_options
@click.argument("sequence", type=NATURAL)
@click.option("--force", is_flag=True, help="Skip the batch although it can be read.")
@max_batch_bytes_option
@allow_foreign_option
@json_option
@click.pass_obj
def skip(
    runtime: Any,
    /,
    sequence: int,
    force: bool,
    max_batch_bytes: int,
    allow_foreign_locations: bool,
    as_json: bool,
    **queue: Any,
) -> None:
    """Pass by the one batch that stops a queue; every other one is kept.

    SEQUENCE is the batch's, as fsck and errors show it. The batch is copied to the quarantine
    first, and an empty one takes its place. Stop the queue's consumer or Spark query before, and
    start it again behind: one that still runs is fenced.
    """
    from opendata_buffer.admin.skip import skip_batch
    from opendata_buffer.config import ConsumerConfig
    from opendata_buffer.stores.open import open_store

    config = ConsumerConfig(
        **queue_fields_of(queue),
        max_batch_bytes=max_batch_bytes,
        allow_foreign_locations=allow_foreign_locations,
    )
    store = open_store(config.store, config.store_options)
    done = skip_batch(store, config, sequence, runtime, force=force)
    if as_json:
        click.echo(json.dumps({**done.report.as_json(), "epoch": done.epoch}))
        return
    report = done.report
    copied = "there was no object to copy" if report.copied_bytes is None else "copied"
    click.echo(
        f"skipped batch {sequence} at {report.location!r} ({report.error}); in the quarantine as "
        f"{report.id}, {copied}"
    )


@click.group()
def quarantine() -> None:
    """List batches that were passed by, and bring them back."""


@quarantine.command("list")
@queue_options
@json_option
@click.pass_obj
def quarantine_list(runtime: Any, /, as_json: bool, **queue: Any) -> None:
    """Show the batches in a queue's quarantine, changing nothing.

    One per line: id, time, size of the copy, where the batch was restored to, and why it could
    not be delivered. With --json one report per line.
    """
    from opendata_buffer.admin.observe import Observer
    from opendata_buffer.cli.terminal import format_bytes
    from opendata_buffer.config import QueueConfig
    from opendata_buffer.errors import CorruptData
    from opendata_buffer.quarantine import list_quarantine
    from opendata_buffer.stores.open import open_store

    config = QueueConfig(**queue_fields_of(queue))
    store = open_store(config.store, config.store_options)
    faults: list[CorruptData] = []
    prefix = config.data_path_prefix
    reports = list_quarantine(store, prefix, runtime, unreadable=faults.append)
    if not reports and not faults:
        # An empty quarantine and a mistyped path look alike.
        Observer(store, config, runtime).manifest()
    for each in reports:
        if as_json:
            click.echo(json.dumps(each.as_json()))
            continue
        size = "no copy" if each.copied_bytes is None else format_bytes(each.copied_bytes)
        where = each.restored_sequence
        restored = "" if where is None else f"restored as {where}  "
        click.echo(f"{each.id}  {each.time}  {size}  {restored}{each.error}")
    if faults:
        others = f" So are {len(faults) - 1} others." if len(faults) > 1 else ""
        raise Failure(f"{faults[0]}{others}")


@quarantine.command("restore")
@queue_options
@click.argument("ids", metavar="ID...", nargs=-1, required=True)
@max_batch_bytes_option
@click.pass_obj
def quarantine_restore(
    runtime: Any, /, ids: tuple[str, ...], max_batch_bytes: int, **queue: Any
) -> None:
    """Produce batches from the quarantine again, behind all that is queued.

    ID is as 'quarantine list' shows it. The copy must be readable; if it is not, repair the
    object <data-path-prefix>/_quarantine/<ID>.object first. Copy and report stay. To restore a
    batch twice does nothing.
    """
    from opendata_buffer.admin.skip import restore_batch
    from opendata_buffer.config import ConsumerConfig
    from opendata_buffer.stores.open import open_store

    config = ConsumerConfig(**queue_fields_of(queue), max_batch_bytes=max_batch_bytes)
    store = open_store(config.store, config.store_options)
    for each in ids:
        report = restore_batch(store, config, each, runtime)
        click.echo(f"restored batch {report.id} as sequence {report.restored_sequence}")


@click.command()
@queue_options
@click.option("--dry-run", is_flag=True, help="Only tell what would be done.")
@json_option
@click.pass_obj
def rebuild(runtime: Any, /, dry_run: bool, as_json: bool, **queue: Any) -> None:
    """Make a manifest again that is gone, damaged or restored from an old copy.

    Stop producers, consumers and collectors first. Batches that no consumer is known to have
    read are enqueued in the order of their names; none is lost, and some records may be
    delivered twice. The old manifest's bytes are saved beside it. A sound manifest is left alone.
    """
    from opendata_buffer.admin.rebuild import rebuild as rebuild_manifest
    from opendata_buffer.config import QueueConfig
    from opendata_buffer.stores.open import open_store

    config = QueueConfig(**queue_fields_of(queue))
    store = open_store(config.store, config.store_options)
    plan, saved = rebuild_manifest(store, config, runtime, dry_run=dry_run)
    first = plan.manifest.first_sequence
    if as_json:
        found = {
            "dry_run": dry_run,
            "fault": plan.fault,
            "kept": plan.kept,
            "found": plan.found,
            "missing": plan.missing,
            "read": plan.read,
            "first_sequence": first,
            "epoch": plan.manifest.epoch,
            "saved": saved,
        }
        click.echo(json.dumps(found))
        return
    if plan.fault is None:
        click.echo("nothing to do: the manifest is sound, and not behind what its marker has seen")
        return
    would = "would enqueue" if dry_run else "enqueued"
    click.echo(f"manifest {config.manifest_path!r}: {plan.fault}")
    for location in plan.found:
        click.echo(f"{would} {location}")
    for location in plan.missing:
        click.echo(f"missing {location}: it was queued, and its object is gone")
    click.echo(
        f"{would} {plural(plan.kept + len(plan.found), 'batch')} from sequence {first} on, "
        f"{plan.kept:,} of them as the old manifest has them; {plan.read:,} were read before"
    )
    if saved is not None:
        click.echo(f"the old manifest is saved as {saved}")
    if not dry_run:
        click.echo(
            "Spark queries go on with failOnDataLoss=false once; a consumer that keeps its own "
            f"position starts with {first - 1}"
        )
