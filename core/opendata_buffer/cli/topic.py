"""``topic`` and ``transactions``: create and change topics, end undecided transactions."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import click

from opendata_buffer.admin.transactions import TransactionScope, abort, list_open
from opendata_buffer.cli.options import (
    NAMES_ONE_QUEUE,
    POSITIVE,
    json_option,
    queue_options,
    store_argument,
    store_options,
)
from opendata_buffer.cli.output import format_age, plural
from opendata_buffer.cli.target import one_queue, store_options_of
from opendata_buffer.config import QueueConfig
from opendata_buffer.runtime import Runtime
from opendata_buffer.topic.description import is_topic
from opendata_buffer.topic.topic import Topic


@click.group()
def topic() -> None:
    """Create and change topics.

    A topic is many queues as one stream. Commands that take a queue also take a topic: most work
    on all its partitions then, and each works on one with --partition.
    """


_total = click.option(
    "--partitions", type=POSITIVE, required=True, metavar="N", help="How many in total."
)


@topic.command("create")
@store_argument
@_total
@store_options
@json_option
@click.pass_obj
def create(runtime: Any, /, store: str, partitions: int, as_json: bool, **options: Any) -> None:
    """Create a topic at the root of STORE."""
    made = Topic.create(_config(store, options), partitions, runtime=runtime)
    _print(made, as_json, f"created a topic at {made.url} with {plural(partitions, 'partition')}")


@topic.command("expand")
@store_argument
@_total
@store_options
@json_option
@click.pass_obj
def expand(runtime: Any, /, store: str, partitions: int, as_json: bool, **options: Any) -> None:
    """Add partitions until a topic has N that are written.

    Keys that move to a new partition lose their order once, against their older records.
    """
    opened = Topic.open(_config(store, options), runtime=runtime)
    had = len(opened.description.active)
    has = len(opened.expand(partitions).active)
    text = f"the topic at {opened.url} has {plural(has, 'partition')}, had {had:,}"
    _print(opened, as_json, text)


@topic.command("drain")
@store_argument
@click.argument("partition")
@store_options
@json_option
@click.pass_obj
def drain(runtime: Any, /, store: str, partition: str, as_json: bool, **options: Any) -> None:
    """Stop writes to PARTITION; it leaves the topic when it is empty.

    PARTITION is its name or its number. Its consumer removes it when it has read everything, a
    minute after this at the earliest: producers finish what they have begun. Where no consumer
    runs, run the command again.
    """
    opened = Topic.open(_config(store, options), runtime=runtime)
    known = opened.description
    has_left = known.has_left(partition)
    name = known.left_name(partition) if has_left else known.resolved(partition)
    opened.drain(name)
    opened.remove_drained()
    if name in opened.description.names:
        text = f"{name} drains: it leaves the topic when its batches are read"
    else:
        text = f"{name} has left the topic"
    _print(opened, as_json, text)


def _config(store: str, options: dict[str, Any]) -> QueueConfig:
    timeout_ms = options["timeout_ms"]
    return QueueConfig(
        store=store, cas_deadline_ms=timeout_ms, store_options=store_options_of(options)
    )


def _print(topic: Topic, as_json: bool, text: str) -> None:
    """Print the text, or with --json the topic's description as it is stored now."""
    click.echo(topic.description.to_json().decode().strip() if as_json else text)


@click.group()
def transactions() -> None:
    """List undecided transactions, and end them.

    Of a topic, where there is one at STORE; otherwise of the queue.
    """


@transactions.command("list")
@queue_options
@json_option
@click.pass_obj
def transactions_list(runtime: Any, /, as_json: bool, **queue: Any) -> None:
    """Show the undecided transactions, changing nothing.

    A line for each partition that a transaction has batches in: partition, producer, app, first
    sequence, batches, age, and whether it is committed. A committed one only lacks its
    acknowledgement, which its writer appends when it is started again, and so does abort.
    """
    for each in list_open(_scope(runtime, queue)):
        if as_json:
            click.echo(json.dumps(asdict(each)))
            continue
        app = "no name" if each.app is None else f"app {each.app}, batch {each.batch}"
        age = "age unknown" if each.age_seconds is None else f"{format_age(each.age_seconds)} old"
        state = "committed, not acknowledged" if each.committed else "undecided"
        click.echo(
            f"{each.partition}  {each.producer}  {app}  from {each.first_sequence}  "
            f"{plural(each.batches, 'batch')}, {each.behind} behind  {age}  {state}"
        )


@transactions.command("abort")
@queue_options
@click.argument("producer")
@click.option(
    "--force",
    is_flag=True,
    help="Also end one that is younger than 15 minutes, or has no name: make sure that no process "
    "applies its intents.",
)
@json_option
@click.pass_obj
def transactions_abort(
    runtime: Any, /, producer: str, force: bool, as_json: bool, **queue: Any
) -> None:
    """End the transaction of a producer that will not be started again, in all partitions.

    PRODUCER is as 'transactions list' shows it. A transaction that the app's commit record names
    is completed. All others of that app are rolled back, and are never delivered. A writer that
    still runs fails. A publisher without a name has its intents to itself: intents that are applied
    after the roll-back commit the transaction in some partitions only. So that takes --force.
    """
    ended = abort(_scope(runtime, queue), producer, force=force)
    if as_json:
        committed = [asdict(each) for each in ended if each.committed]
        rolled_back = [asdict(each) for each in ended if not each.committed]
        click.echo(json.dumps({"committed": committed, "rolled_back": rolled_back}))
        return
    for each in ended:
        outcome = "committed" if each.committed else "rolled back"
        click.echo(
            f"{outcome} {plural(each.batches, 'batch')} of {each.producer} in {each.partition}"
        )


def _scope(runtime: Runtime, options: dict[str, Any]) -> TransactionScope:
    target = one_queue(options)
    topic = None
    if all(options[name] is None for name in NAMES_ONE_QUEUE) and is_topic(target.store):
        topic = Topic.open(target.config, store=target.store, runtime=runtime)
    return TransactionScope(target.config, target.store, runtime, topic)
