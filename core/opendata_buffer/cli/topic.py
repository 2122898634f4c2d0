"""``topic`` and ``abort``: create and change topics, abort open transactions."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import click

from opendata_buffer.admin.target import drain_partition
from opendata_buffer.admin.transactions import abort as end_transactions
from opendata_buffer.cli import options
from opendata_buffer.cli.options import NAMES_ONE_QUEUE, Command, Group, command
from opendata_buffer.cli.target import one_queue, target_of
from opendata_buffer.cli.text import plural
from opendata_buffer.topic.description import MAX_PARTITIONS
from opendata_buffer.topic.topic import Topic


@click.group(cls=Group)
def topic() -> None:
    """Create and change topics.

    A topic is many queues as one stream. Commands that take a queue also take a topic: most work
    on all its partitions then, and each works on one with --partition.
    """


_total = click.option(
    "--partitions",
    type=click.IntRange(1, MAX_PARTITIONS),
    required=True,
    metavar="N",
    help="Total number of active partitions.",
)


@topic.command(cls=Command)
@options.store_argument
@_total
@click.pass_obj
def create(runtime: Any, /, partitions: int, **store: Any) -> None:
    """Create a topic at the root of STORE."""
    made = Topic.create(_config(runtime, store), partitions, runtime=runtime)
    click.echo(f"created a topic at {made.url} with {plural(partitions, 'partition')}")


@topic.command(cls=Command)
@options.store_argument
@_total
@click.pass_obj
def expand(runtime: Any, /, partitions: int, **store: Any) -> None:
    """Add partitions until a topic has N that are written.

    Keys that move to a new partition lose their order once, against their older records.
    """
    opened = Topic.open(_config(runtime, store), runtime=runtime)
    had = len(opened.description.active)
    has = len(opened.expand(partitions).active)
    click.echo(f"the topic at {opened.url} has {plural(has, 'partition')}, had {had:,}")


@topic.command(cls=Command)
@options.store_argument
@click.argument("partition")
@click.pass_obj
def drain(runtime: Any, /, partition: str, **store: Any) -> None:
    """Stop writes to PARTITION; it leaves the topic when it is empty.

    PARTITION is its name or its number. Its consumer removes it after it has read everything, but
    not within the first minute, because producers finish their writes. If no consumer runs, run the
    command again.
    """
    opened = Topic.open(_config(runtime, store), runtime=runtime)
    name, has_left = drain_partition(opened, partition)
    if not has_left:
        click.echo(f"{name} drains: it leaves the topic when its batches are read")
    else:
        click.echo(f"{name} has left the topic")


def _config(runtime: Any, store: dict[str, Any]) -> Any:
    """Return the settings of the topic's root."""
    return one_queue(runtime, dict.fromkeys(NAMES_ONE_QUEUE) | store).config


@command()
@options.queue
@click.argument("producer")
@options.flag(
    "--force",
    "Also end a transaction that is younger than 15 minutes or has no name. Make sure that no "
    "process applies its intents.",
)
@options.as_json
@click.pass_obj
def abort(runtime: Any, /, producer: str, force: bool, as_json: bool, **queue: Any) -> None:
    """End the transaction of a producer that will not be started again.

    In all partitions. PRODUCER is as 'status' shows it. A transaction that the app's commit record
    names is completed. All others of that app are aborted, and are never delivered. A writer that
    still runs fails. A publisher without a name has its intents to itself: intents that are applied
    after the abort commit the transaction in some partitions only. So that takes --force.
    """
    ended = end_transactions(target_of(runtime, queue), producer, force=force)
    if as_json:
        committed = [asdict(each) for each in ended if each.committed]
        aborted = [asdict(each) for each in ended if not each.committed]
        click.echo(json.dumps({"committed": committed, "aborted": aborted}))
        return
    for each in ended:
        outcome = "committed" if each.committed else "aborted"
        click.echo(
            f"{outcome} {plural(each.batches, 'batch')} of {each.producer} in {each.partition}"
        )
