"""Which queues and topics there are: ``list``."""

from __future__ import annotations

import json
import shlex
from typing import TYPE_CHECKING, Any

import click

from opendata_buffer.cli.options import json_option, store_argument, store_options, store_options_of
from opendata_buffer.cli.words import plural

if TYPE_CHECKING:
    from opendata_buffer.admin.find import Found

__all__ = ["list_"]


@click.command("list")
@store_argument
@store_options
@json_option
@click.pass_obj
def list_(runtime: Any, /, store: str, as_json: bool, **options: Any) -> None:
    """List the queues and topics below a bucket or directory, changing nothing.

    A line for each: what it is, how commands name it, and how much waits. Batches are not read
    and not listed one by one; a bucket with many objects of others takes a request for every
    thousand of them. Exits 0 also when there are none.
    """
    from opendata_buffer.admin.find import find
    from opendata_buffer.config import QueueConfig
    from opendata_buffer.stores.open import open_store

    timeout_ms = options["timeout_ms"]
    config = QueueConfig(
        store=store, cas_deadline_ms=timeout_ms, store_options=store_options_of(options)
    )
    opened = open_store(config.store, config.store_options)
    found = find(opened, config, runtime)
    for each in found:
        if as_json:
            click.echo(json.dumps({**each.as_json(), "words": each.words}))
        else:
            click.echo(f"{each.kind}  {shlex.join(each.words)}  {_told(each)}")
    if not found and not as_json:
        click.echo(f"no queue and no topic below {opened.url}", err=True)


def _told(found: Found) -> str:
    from opendata_buffer.cli.terminal import format_age

    if found.error is not None:
        return f"cannot be read: {found.error}"
    waits = plural(found.batches or 0, "batch")
    if found.partitions is not None:
        waits = f"{plural(found.partitions, 'partition')}, {waits}"
    if not found.batches:
        return waits
    return f"{waits}, the oldest {format_age(found.oldest_age_seconds)} old"
