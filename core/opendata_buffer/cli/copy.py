"""Copy a queue to another one: ``copy``."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from opendata_buffer.cli.ending import last_words
from opendata_buffer.cli.options import (
    REACHES_STORE,
    allow_foreign_option,
    flags_of,
    max_batch_bytes_option,
    patient_queue_options,
    poll_interval_option,
    queue_words,
    store_options_of,
)
from opendata_buffer.cli.words import plural

if TYPE_CHECKING:
    from opendata_buffer.admin.copy import Copier
    from opendata_buffer.admin.copy_target import Side
    from opendata_buffer.cli.places import Place

__all__ = ["copy"]

_TO = ("partition", "data_path_prefix", "manifest_path", *REACHES_STORE)


@click.command()
@patient_queue_options
@click.argument("target")
@click.option("--to-data-path-prefix", metavar="PREFIX", help="The target's. Default: ingest.")
@click.option("--to-manifest-path", metavar="KEY", help="The target's manifest.")
@click.option("--to-partition", metavar="NAME", help="The target is this partition of a topic.")
@click.option("--to-endpoint-url", metavar="URL", help="Of the target's store.")
@click.option("--to-region", metavar="NAME", help="Of the target's store; AWS only.")
@click.option("--to-profile", metavar="NAME", help="Of the target's store; AWS only.")
@click.option("--to-role-arn", metavar="ARN", help="Of the target's store; AWS only.")
@click.option("--to-external-id", metavar="TEXT", help="Of that role.")
@click.option("--to-session-name", metavar="TEXT", help="Of that role.")
@click.option("--to-anonymous", is_flag=True, help="Send the target's store no credentials.")
@click.option("--follow", is_flag=True, help="Wait for more when all is copied.")
@poll_interval_option
@click.option(
    "--allow-data-loss",
    is_flag=True,
    help="Go on behind batches that the source's consumer took before they were copied.",
)
@max_batch_bytes_option
@allow_foreign_option
@click.pass_obj
def copy(
    runtime: Any,
    /,
    target: str,
    follow: bool,
    poll_interval_ms: int,
    allow_data_loss: bool,
    max_batch_bytes: int,
    allow_foreign_locations: bool,
    **queue: Any,
) -> None:
    """Copy what waits in STORE to the queue in TARGET, each batch once.

    May be interrupted or killed, and goes on where it ended when it is run again. Order, metadata
    and times are kept; of transactions what is committed is copied. STORE is only read: stop its
    consumer, or that may take batches before they are copied. Of a topic all partitions are
    copied, to a topic with as many. The last line of stdout is JSON: the number of "batches", the
    size of their objects as "stored_bytes", and by partition the "next" sequence of the source.
    """
    from opendata_buffer.admin.copy import Copier, step_all
    from opendata_buffer.cli.places import place_of
    from opendata_buffer.config import ConsumerConfig

    to = {name: queue.pop(f"to_{name}") for name in _TO}
    settings = {
        "max_batch_bytes": max_batch_bytes,
        "allow_foreign_locations": allow_foreign_locations,
    }
    there = _place_of_target(runtime, {**to, "store": target, "timeout_ms": queue["timeout_ms"]})
    place = place_of(runtime, queue, ConsumerConfig, **settings)
    copiers = [
        Copier(source, target_, runtime, allow_data_loss=allow_data_loss)
        for source, target_ in _pairs(place, there, runtime)
    ]
    with last_words(lambda: _report(copiers)):
        try:
            while True:
                if step_all(copiers, runtime):
                    continue
                if not follow:
                    break
                runtime.sleep(poll_interval_ms / 1000)
        finally:
            for each in copiers:
                each.close()
    click.echo(_report(copiers))
    _tell_what_is_left(copiers, place)


def _place_of_target(runtime: Any, to: dict[str, Any]) -> Place:
    """As for the source."""
    from opendata_buffer.cli.places import Place, open_place
    from opendata_buffer.config import DEFAULT_DATA_PATH_PREFIX, ConsumerConfig

    timeout_ms = to["timeout_ms"]
    partition, prefix = to.pop("partition"), to.pop("data_path_prefix")
    if partition is not None and (prefix is not None or to["manifest_path"] is not None):
        raise click.UsageError(
            "--to-partition says where the target is: leave --to-data-path-prefix and "
            "--to-manifest-path out"
        )
    one = prefix is not None or to["manifest_path"] is not None
    with flags_of("--to-", _TO):
        config = ConsumerConfig(
            store=to.pop("store"),
            data_path_prefix=DEFAULT_DATA_PATH_PREFIX if prefix is None else prefix,
            manifest_path=to.pop("manifest_path") or "",
            cas_deadline_ms=timeout_ms,
            store_options=store_options_of(to),
        )
        found: Place = open_place(runtime, config, one)
    if partition is None:
        return found
    if found.topic is None:
        raise click.UsageError(
            f"--to-partition {partition}: there is no topic at {found.store.url}"
        )
    name = found.topic.description.resolved(partition)
    return Place(found.store, found.topic.config_of(name, found.config), None)


def _pairs(place: Place, there: Place, runtime: Any) -> list[tuple[Side, Side]]:
    from opendata_buffer.admin.copy_target import Side

    if place.topic is None:
        if there.topic is not None:
            raise click.UsageError(
                f"there is a topic at {there.store.url}: name the partition to copy to with "
                "--to-partition"
            )
        return [(Side(place.store, place.config), Side(there.store, there.config))]
    if there.topic is None:
        number = len(place.topic.description.names)
        raise click.UsageError(
            f"{place.store.url} is a topic, and there is none at {there.store.url}: make one with "
            f"'opendata-buffer topic create {there.store.url} --partitions {number}', or copy one "
            "partition with --partition"
        )
    here, other = place.topic.description.names, there.topic.description.names
    if len(here) != len(other):
        raise click.UsageError(
            f"the topic at {place.store.url} has {plural(len(here), 'partition')}, the one at "
            f"{there.store.url} {len(other)}: keys keep their order only if there are as many. "
            "Copy first, then expand; or copy one partition with --partition and --to-partition"
        )
    targets = dict(zip(here, other, strict=True))
    return [
        (
            Side(place.store, config),
            Side(
                there.store,
                there.topic.config_of(targets[config.data_path_prefix], there.config),
            ),
        )
        for config in place.written(runtime)
    ]


def _report(copiers: list[Copier]) -> str:
    totals = [each.total for each in copiers]
    return json.dumps(
        {
            "batches": sum(each.batches for each in totals),
            "stored_bytes": sum(each.stored_bytes for each in totals),
            "lost": sum(each.lost for each in totals),
            "next": {each.partition: each.total.next_sequence for each in copiers},
        }
    )


def _tell_what_is_left(copiers: list[Copier], place: Place) -> None:
    for each in copiers:
        words = queue_words()
        if place.topic is not None:
            words = f"{words} --partition {each.partition}"
        if each.total.held_from is not None:
            click.echo(
                f"note: a transaction of {each.partition} is undecided from sequence "
                f"{each.total.held_from} on and was not copied; see 'opendata-buffer transactions "
                f"list {words}'",
                err=True,
            )
        else:
            click.echo(
                f"note: all before sequence {each.total.next_sequence} of {each.partition} is "
                f"copied; 'opendata-buffer seek {words} --to {each.total.next_sequence}' lets it "
                "leave the source",
                err=True,
            )
