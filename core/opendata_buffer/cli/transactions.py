"""Commands about undecided transactions: ``transactions list`` and ``transactions abort``."""

from __future__ import annotations

import json
from typing import Any

import click

from opendata_buffer.cli.options import json_option, queue_fields_of, queue_options
from opendata_buffer.cli.words import plural

__all__ = ["transactions"]


@click.group()
def transactions() -> None:
    """List transactions that are neither committed nor rolled back, and end them.

    Of a topic, where there is one at STORE; else of the queue.
    """


@transactions.command("list")
@queue_options
@json_option
@click.pass_obj
def transactions_list(runtime: Any, /, as_json: bool, **queue: Any) -> None:
    """Show the undecided transactions, changing nothing.

    A line for each partition that a transaction has batches in: partition, producer, whose it
    is, first sequence, batches, age, and whether it is committed. One that is committed is only
    to be acknowledged, which its writer does when it is started again, and abort does, too.
    """
    from opendata_buffer.admin.transactions import list_open
    from opendata_buffer.cli.terminal import format_age

    for each in list_open(_place(runtime, queue)):
        if as_json:
            click.echo(json.dumps(each.as_json()))
            continue
        whose = "no name" if each.app is None else f"app {each.app}, batch {each.batch}"
        age = "age unknown" if each.age_seconds is None else f"{format_age(each.age_seconds)} old"
        state = "committed, not acknowledged" if each.committed else "undecided"
        click.echo(
            f"{each.partition}  {each.producer}  {whose}  from {each.first_sequence}  "
            f"{plural(each.batches, 'batch')}, {each.behind} behind  {age}  {state}"
        )


@transactions.command("abort")
@queue_options
@click.argument("producer")
@click.option(
    "--force",
    is_flag=True,
    help="Also one that is younger than 15 minutes, or has no name: nobody applies its intents.",
)
@json_option
@click.pass_obj
def transactions_abort(
    runtime: Any, /, producer: str, force: bool, as_json: bool, **queue: Any
) -> None:
    """End the transaction of a producer that does not come back, in all partitions.

    PRODUCER is as 'transactions list' shows it. What is committed according to the app's commit
    record is completed, everything else of that app is rolled back, and is never delivered. A
    writer that still lives fails. A publisher without a name keeps its intents itself: applied
    after its transaction was rolled back they would commit it in some partitions only. So that
    takes --force, once you are sure that nobody will.
    """
    from opendata_buffer.admin.transactions import abort

    done = abort(_place(runtime, queue), producer, force=force)
    if as_json:
        click.echo(json.dumps(done.as_json()))
        return
    for said, ended in (("committed", done.committed), ("rolled back", done.rolled_back)):
        for each in ended:
            click.echo(
                f"{said} {plural(each.batches, 'batch')} of {each.producer} in {each.partition}"
            )


def _place(runtime: Any, queue: dict[str, Any]) -> Any:
    from opendata_buffer.admin.transactions import Place
    from opendata_buffer.config import QueueConfig
    from opendata_buffer.stores.open import open_store
    from opendata_buffer.topic.topic import Topic, is_topic

    named = ("partition", "data_path_prefix", "manifest_path")
    one = any(queue[name] is not None for name in named)
    config = QueueConfig(**queue_fields_of(queue))
    store = open_store(config.store, config.store_options)
    topic = None
    if not one and is_topic(store):
        topic = Topic.open(config, store=store, runtime=runtime)
    return Place(config, store, runtime, topic)
