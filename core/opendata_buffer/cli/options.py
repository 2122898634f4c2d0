"""Options that commands share, and the configuration they make."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from opendata_buffer.formats import MIB

__all__ = [
    "NATURAL",
    "OBSERVER_DEADLINE_MS",
    "POSITIVE",
    "json_option",
    "max_batch_bytes_option",
    "queue_fields_of",
    "queue_options",
    "store_options",
    "store_options_of",
    "version_option",
]

F = TypeVar("F", bound=Callable[..., Any])

OBSERVER_DEADLINE_MS = 5_000
"""A person waits for the answer: a store that is down is reported soon."""
POSITIVE = click.IntRange(min=1)
NATURAL = click.IntRange(min=0)


def _options(*options: Callable[[Any], Any]) -> Callable[[F], F]:
    def decorate(command: F) -> F:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


store_options = _options(
    click.option("--endpoint-url", metavar="URL", help="Another S3 endpoint than AWS's."),
    click.option("--region", metavar="NAME", help="AWS region. Default: the AWS chain's."),
    click.option("--profile", metavar="NAME", help="AWS profile. Default: the AWS chain's."),
)

queue_options = _options(
    click.argument("store"),
    click.option(
        "--data-path-prefix", metavar="PREFIX", help="Where the batches are. Default: ingest."
    ),
    click.option(
        "--manifest-path", metavar="KEY", help="The manifest. Default: <data-path-prefix>/manifest."
    ),
    store_options,
)

max_batch_bytes_option = click.option(
    "--max-batch-bytes",
    type=POSITIVE,
    default=256 * MIB,
    show_default=True,
    help="Largest batch, decoded. Larger ones are refused before they are expanded.",
)

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")


def _print_version(context: click.Context, _: click.Parameter, wanted: bool) -> None:
    if not wanted or context.resilient_parsing:
        return
    from importlib.metadata import PackageNotFoundError, version

    try:
        click.echo(f"opendata-buffer {version('opendata-buffer')}")
    except PackageNotFoundError:
        click.echo("opendata-buffer, from a source tree that is not installed")
    context.exit()


version_option = click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_version,
    help="Show the version and exit.",
)


def store_options_of(store: dict[str, Any]) -> Any:
    """StoreOptions from the values of :data:`store_options`."""
    from opendata_buffer.config import StoreOptions

    return StoreOptions(**store)


def queue_fields_of(options: dict[str, Any]) -> dict[str, Any]:
    """Fields of a QueueConfig from the values of :data:`queue_options`."""
    from opendata_buffer.config import DEFAULT_DATA_PATH_PREFIX

    prefix = options.pop("data_path_prefix")
    return {
        "store": options.pop("store"),
        # An empty one is refused by the configuration, not taken for "not given".
        "data_path_prefix": DEFAULT_DATA_PATH_PREFIX if prefix is None else prefix,
        "manifest_path": options.pop("manifest_path") or "",
        "store_options": store_options_of(options),
    }
