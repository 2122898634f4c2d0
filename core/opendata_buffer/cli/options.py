"""Options that commands share, and the configuration they make.

The library's errors name settings and calls, such as ``max_batch_bytes`` and ``skip(3)``. Who
reads them in a shell is told the option and the command instead: see :func:`spelled`.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import click
from click.shell_completion import CompletionItem

from opendata_buffer.formats import MIB

__all__ = [
    "NATURAL",
    "LONG_MS",
    "POSITIVE",
    "REACHES_STORE",
    "SOON_MS",
    "allow_foreign_option",
    "create_if_missing_option",
    "flags_of",
    "json_option",
    "framing_option",
    "max_batch_bytes_option",
    "queue_fields_of",
    "queue_words",
    "patient_queue_options",
    "poll_interval_option",
    "queue_options",
    "recreate_option",
    "refuse_together",
    "spelled",
    "store_argument",
    "store_options",
    "store_options_of",
    "version_option",
]

F = TypeVar("F", bound=Callable[..., Any])

SOON_MS = 5_000
"""A person waits for the answer: a store that is down is reported soon."""
LONG_MS = 120_000
"""Records wait for a store that is down for a while."""
POSITIVE = click.IntRange(min=1)
NATURAL = click.IntRange(min=0)


def _options(*options: Callable[[Any], Any]) -> Callable[[F], F]:
    def decorate(command: F) -> F:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def _timeout(default_ms: int) -> Callable[[Any], Any]:
    return click.option(
        "--timeout-ms",
        type=POSITIVE,
        default=default_ms,
        show_default=True,
        help="How long the store may fail to do one thing, retries included.",
    )


_reach_store = _options(
    click.option("--endpoint-url", metavar="URL", help="Another endpoint than the cloud's own."),
    click.option("--region", metavar="NAME", help="AWS region. Default: the AWS chain's."),
    click.option(
        "--profile",
        metavar="NAME",
        help="AWS profile: region, keys or role of ~/.aws/config and ~/.aws/credentials. Default: "
        "the AWS chain's.",
    ),
    click.option(
        "--role-arn",
        metavar="ARN",
        envvar="OPENDATA_BUFFER_ROLE_ARN",
        show_envvar=True,
        help="AWS role to assume; what it gives is renewed.",
    ),
    click.option(
        "--external-id",
        metavar="TEXT",
        envvar="OPENDATA_BUFFER_EXTERNAL_ID",
        show_envvar=True,
        help="Of that role, where its owner asks for one.",
    ),
    click.option(
        "--session-name",
        metavar="TEXT",
        envvar="OPENDATA_BUFFER_SESSION_NAME",
        show_envvar=True,
        help="How that role's log names these requests. Default: opendata-buffer.",
    ),
    click.option(
        "--anonymous",
        is_flag=True,
        envvar="OPENDATA_BUFFER_ANONYMOUS",
        show_envvar=True,
        help="Send no credentials: for a public bucket.",
    ),
)

store_options = _options(_reach_store, _timeout(SOON_MS))


def _directories(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Let the shell complete a directory; a URL is typed."""
    return [CompletionItem(incomplete, type="dir")]


store_argument = click.argument("store", shell_complete=_directories)

_queue = _options(
    store_argument,
    click.option(
        "--data-path-prefix", metavar="PREFIX", help="Where the batches are. Default: ingest."
    ),
    click.option(
        "--manifest-path", metavar="KEY", help="The manifest. Default: <data-path-prefix>/manifest."
    ),
    click.option(
        "--partition",
        metavar="NAME",
        help="The queue is this partition of a topic: its name or its number.",
    ),
    _reach_store,
)
queue_options = _options(_queue, _timeout(SOON_MS))
patient_queue_options = _options(_queue, _timeout(LONG_MS))
"""Those of commands that move records."""

allow_foreign_option = click.option(
    "--allow-foreign-locations",
    is_flag=True,
    help="Read batches that lie outside the data prefix, too.",
)

create_if_missing_option = click.option(
    "--create-if-missing",
    is_flag=True,
    help="Make the queue if there is none: for a start before its producers.",
)

recreate_option = click.option(
    "--recreate",
    is_flag=True,
    help="Start the queue over if its manifest is gone or was restored. What waits is not read.",
)

framing_option = click.option(
    "--framing",
    type=click.Choice(["lines", "ndjson", "csv", "protobuf-fixed", "length"]),
    default="lines",
    show_default=True,
    help="How records are told apart in the stream; length and protobuf-fixed take any bytes.",
)

max_batch_bytes_option = click.option(
    "--max-batch-bytes",
    type=POSITIVE,
    default=256 * MIB,
    show_default=True,
    help="Largest batch, decoded. Larger ones are refused before they are expanded, or written.",
)

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")

poll_interval_option = click.option(
    "--poll-interval-ms",
    type=POSITIVE,
    default=500,
    show_default=True,
    help="For --follow: between two looks while nothing comes.",
)


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


def refuse_together(**given: Any) -> None:
    """Raises UsageError when two of these options are given; they exclude each other."""
    names = [name for name, value in given.items() if value]
    if len(names) > 1:
        raise click.UsageError(f"{' and '.join(names)} cannot be used together")


def store_options_of(store: dict[str, Any]) -> Any:
    """StoreOptions from the values of :data:`store_options`.

    The attempts of one request share the time: a store that accepts connections and never
    answers is given up when it is over, and not after five times 30 seconds.
    """
    from opendata_buffer.config import StoreOptions

    _remember_flags()
    timeout_ms = store.pop("timeout_ms")
    attempts = 2 if timeout_ms < 30_000 else 3
    share_ms = max(1, timeout_ms // attempts)
    return StoreOptions(
        **store,
        connect_timeout_ms=min(share_ms, StoreOptions.connect_timeout_ms),
        read_timeout_ms=min(share_ms, StoreOptions.read_timeout_ms),
        max_attempts=attempts,
    )


def queue_fields_of(options: dict[str, Any]) -> dict[str, Any]:
    """Fields of a QueueConfig from the values of :data:`queue_options`."""
    from opendata_buffer.config import DEFAULT_DATA_PATH_PREFIX

    _remember(options)
    prefix, partition = options.pop("data_path_prefix"), options.pop("partition")
    if partition is not None and (prefix is not None or options["manifest_path"] is not None):
        raise click.UsageError(
            "--partition says where the queue is: leave --data-path-prefix and --manifest-path out"
        )
    fields = {
        "store": options.pop("store"),
        # An empty one is refused by the configuration, not taken for "not given".
        "data_path_prefix": DEFAULT_DATA_PATH_PREFIX if prefix is None else prefix,
        "manifest_path": options.pop("manifest_path") or "",
        "cas_deadline_ms": options["timeout_ms"],
        "store_options": store_options_of(options),
    }
    if partition is not None:
        fields["data_path_prefix"] = _partition(partition, fields)
    return fields


def _partition(given: str, fields: dict[str, Any]) -> str:
    """The whole name of a partition. Only an abbreviation asks for a look at the topic."""
    from opendata_buffer.config import QueueConfig
    from opendata_buffer.topic.description import has_letters
    from opendata_buffer.topic.topic import Topic

    if has_letters(given):
        return given
    topic = Topic.open(QueueConfig(**fields), runtime=click.get_current_context().obj)
    # One that has left keeps what its last reader acknowledged, until that is collected.
    known = topic.description
    return known.left_name(given) if known.has_left(given) else known.resolved(given)


_FLAGS, _QUEUE = f"{__name__}.flags", f"{__name__}.queue"
_ENVIRONMENT = click.core.ParameterSource.ENVIRONMENT

REACHES_STORE = (
    "endpoint_url", "region", "profile", "role_arn", "external_id", "session_name", "anonymous",
)  # fmt: skip
"""Names of the options that say how to reach a store."""

_NAMES_A_QUEUE = ("partition", "data_path_prefix", "manifest_path", *REACHES_STORE)


def _remember_flags() -> None:
    """Note the running command's options, for an error that is told after it has ended."""
    context = click.get_current_context()
    flags = {
        parameter.name: parameter.opts[0]
        for parameter in context.command.params
        if isinstance(parameter, click.Option) and parameter.name
    }
    for setting in ("cas_deadline_ms", "delivery_timeout_ms"):
        flags[setting] = "--timeout-ms"
    context.meta[_FLAGS] = flags


def _remember(options: dict[str, Any]) -> None:
    """Note the queue that the running command is about, for an error or a hint."""
    _remember_flags()
    context = click.get_current_context()
    words = [str(options["store"])]
    for name in _NAMES_A_QUEUE:
        value = options.get(name)
        # What the environment says holds for the next command, too.
        if value in (None, False) or context.get_parameter_source(name) is _ENVIRONMENT:
            continue
        flag = "--" + name.replace("_", "-")
        words += [flag] if value is True else [flag, str(value)]
    context.meta[_QUEUE] = shlex.join(words)


@contextmanager
def flags_of(prefix: str, names: Iterable[str]) -> Iterator[None]:
    """Errors inside the block are about the options that begin so: ``--to-role-arn``."""
    try:
        yield
    except Exception:
        own = {name: f"{prefix}{name.replace('_', '-')}" for name in names}
        click.get_current_context().meta.setdefault(_FLAGS, {}).update(own)
        raise


def queue_words() -> str:
    """The running command's queue, as the words that name it in another command."""
    words = click.get_current_context().meta[_QUEUE]
    assert isinstance(words, str)
    return words


def spelled(context: click.Context, message: str) -> str:
    """An error of the library in the words of the command line.

    ``max_batch_bytes`` becomes ``--max-batch-bytes`` where the command has that option, and
    ``skip(3)`` the command that does it.
    """
    flags, queue = context.meta.get(_FLAGS), context.meta.get(_QUEUE)
    if flags is None:
        return message
    if queue is not None:
        message = _skipping(message, queue)
    message = re.sub(
        r"(?<!in Python )\b(\w+)=True\b", lambda name: flags.get(name[1], name[0]), message
    )
    # Settings of one word are words of the language, too.
    return re.sub(r"\b[a-z]+(?:_[a-z]+)+\b", lambda name: flags.get(name[0], name[0]), message)


def _skipping(message: str, queue: str) -> str:
    return re.sub(
        r"skip\((?:'([^']*)', )?(\d+)\); its records are then lost",
        lambda found: (
            f"'opendata-buffer skip {queue} {found[2]}"
            f"{'' if found[1] is None else f' --partition {found[1]}'}', which copies it to the "
            "quarantine first"
        ),
        message,
    )
