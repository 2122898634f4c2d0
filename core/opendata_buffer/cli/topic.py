"""Commands about a topic: ``topic create``, ``expand``, ``describe``, ``drain``."""

from __future__ import annotations

import json
from typing import Any

import click

from opendata_buffer.cli.options import (
    POSITIVE,
    SOON_MS,
    json_option,
    store_argument,
    store_options,
    store_options_of,
)
from opendata_buffer.cli.words import plural

__all__ = ["topic"]


@click.group()
def topic() -> None:
    """Make and change topics: many queues as one stream.

    Commands that take a queue take a topic, too: most are about all its partitions then, and each
    is about one with --partition.
    """


_total = click.option(
    "--partitions", type=POSITIVE, required=True, metavar="N", help="How many, in all."
)


@topic.command("create")
@store_argument
@_total
@store_options
@json_option
@click.pass_obj
def create(runtime: Any, /, store: str, partitions: int, as_json: bool, **options: Any) -> None:
    """Make a topic at the root of STORE."""
    from opendata_buffer.topic.topic import Topic

    made = Topic.create(_settings(store, options), partitions, runtime=runtime)
    _tell(made, as_json, f"created a topic at {made.url} with {plural(partitions, 'partition')}")


@topic.command("expand")
@store_argument
@_total
@store_options
@json_option
@click.pass_obj
def expand(runtime: Any, /, store: str, partitions: int, as_json: bool, **options: Any) -> None:
    """Add partitions until a topic has N that are written.

    Keys that move to a new partition lose their order once, against what they wrote before.
    """
    from opendata_buffer.topic.topic import Topic

    opened = Topic.open(_settings(store, options), runtime=runtime)
    had = len(opened.description.active)
    has = len(opened.expand(partitions).active)
    _tell(opened, as_json, f"the topic at {opened.url} has {plural(has, 'partition')}, had {had:,}")


@topic.command("describe")
@store_argument
@store_options
@json_option
@click.pass_obj
def describe(runtime: Any, /, store: str, as_json: bool, **options: Any) -> None:
    """Show a topic's partitions and what waits in each, changing nothing."""
    from rich.console import Console

    from opendata_buffer.admin.topic import read_topic
    from opendata_buffer.cli.terminal import topic_table
    from opendata_buffer.topic.topic import Topic

    settings = _settings(store, options)
    found = read_topic(Topic.open(settings, runtime=runtime), settings, runtime)
    if as_json:
        click.echo(json.dumps(found.as_json()))
    else:
        Console().print(topic_table(found))


@topic.command("drain")
@store_argument
@click.argument("partition")
@store_options
@json_option
@click.pass_obj
def drain(runtime: Any, /, store: str, partition: str, as_json: bool, **options: Any) -> None:
    """Let nothing more be written to PARTITION; it leaves the topic once it is empty.

    PARTITION is its name or its number. Its consumer takes it out when it has read everything, a
    minute after this at the earliest: producers finish what they have begun. Where no consumer
    runs, run the command again.
    """
    from opendata_buffer.topic.topic import Topic

    opened = Topic.open(_settings(store, options), runtime=runtime)
    known = opened.description
    has_left = known.has_left(partition)
    name = known.left_name(partition) if has_left else known.resolved(partition)
    opened.drain(name)
    opened.remove_drained()
    if name in opened.description.names:
        said = f"{name} drains: it leaves once what waits in it is read"
    else:
        said = f"{name} has left the topic"
    _tell(opened, as_json, said)


def _settings(store: str, options: dict[str, Any]) -> Any:
    from opendata_buffer.config import QueueConfig

    timeout_ms = options.get("timeout_ms", SOON_MS)
    return QueueConfig(
        store=store, cas_deadline_ms=timeout_ms, store_options=store_options_of(options)
    )


def _tell(topic: Any, as_json: bool, said: str) -> None:
    """What was done, or with --json the topic as it is now, as it is written on storage."""
    click.echo(topic.description.to_json().decode().strip() if as_json else said)
