"""Options that commands share, and the classes of commands: help, store options, former names.

An option with the name of a setting is passed to the configuration unchanged.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import fields
from difflib import get_close_matches
from typing import Any, TypeVar
from urllib.parse import urlsplit

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem

from opendata_buffer.cli.errors import Failure, log, log_to_stderr, one_line
from opendata_buffer.config import StoreOptions
from opendata_buffer.errors import InvalidInput, OpenDataBufferError
from opendata_buffer.hints import QueueName, Surface

F = TypeVar("F", bound=Callable[..., Any])

SOON_MS = 5_000  # Default timeout of commands that a person waits for.
LONG_MS = 120_000
"""Default timeout of commands that move records. They wait for a store that is briefly down."""

EXAMPLES = {
    "cli": "seq 1000 | opendata-buffer produce /tmp/queue; opendata-buffer consume /tmp/queue",
    "produce": "seq 1000 | opendata-buffer produce s3://bucket/orders --compression zstd",
    "consume": "opendata-buffer consume s3://bucket/orders --max-batches 1",
    "broker": "opendata-buffer broker s3://bucket/orders --listen 0.0.0.0:7420",
    "work": "opendata-buffer work s3://bucket/orders --parallel 4 -- ./load.sh",
    "status": "opendata-buffer status s3://bucket/orders --watch",
    "readers": "opendata-buffer readers list s3://bucket/orders",
    "enable": "opendata-buffer readers enable s3://bucket/orders --retention 7d",
    "list": "opendata-buffer readers list s3://bucket/orders",
    "describe": "opendata-buffer readers describe s3://bucket/orders billing",
    "reset": "opendata-buffer readers reset s3://bucket/orders billing --by-duration 6h --dry-run",
    "delete": "opendata-buffer readers delete s3://bucket/orders billing",
    "add": "opendata-buffer readers add s3://bucket/orders clickhouse --v1 clickhouse",
    "feed": "opendata-buffer readers feed s3://bucket/orders --follow",
    "trim": "opendata-buffer trim s3://bucket/orders --to 2026-01-31T03:00:00Z --dry-run",
    "fsck": "opendata-buffer fsck s3://bucket/orders --repair --dry-run",
    "gc": "opendata-buffer gc s3://bucket/orders --dry-run",
    "skip": "opendata-buffer skip s3://bucket/orders 41",
    "restore": "opendata-buffer restore s3://bucket/orders 41-0f343b0931126",
    "topic": "opendata-buffer topic create s3://bucket/orders --partitions 4",
    "create": "opendata-buffer topic create s3://bucket/orders --partitions 4",
    "expand": "opendata-buffer topic expand s3://bucket/orders --partitions 8",
    "drain": "opendata-buffer topic drain s3://bucket/orders 3",
    "exporter": "opendata-buffer exporter s3://bucket/orders --listen 0.0.0.0:9465",
    "abort": "opendata-buffer abort s3://bucket/orders 01a2b3c4d5e6",
    "dump": "opendata-buffer dump s3://bucket/orders ingest/01K9T4R3KXBMZ7QV9N2WG8YDHP.batch",
}
"""The first line of each help screen."""

MOVED = {
    "seek": "use 'trim', with the same --to",
    "quarantine": "'status' lists what was skipped, 'restore' brings it back",
    "manifest": "'dump' prints it, 'fsck --repair' rebuilds it",
    "batch": "use 'dump', with the key of the batch",
    "transactions": "'status' lists the open ones, 'abort' ends one",
    "consume --no-ack": "consume takes nothing unless it is given --ack",
    "consume --recreate": "'produce --recreate' starts a queue over",
    **{
        f"{command} --max-batch-bytes": "a batch has at most 256 MiB"
        for command in ("consume", "dump", "fsck", "produce", "restore", "skip", "work")
    },
    **{
        f"{command} --allow-foreign-locations": "no batch outside of the data prefix is read"
        for command in ("consume", "fsck", "skip", "trim")
    },
}
"""Former commands and options, and their replacements."""


def refuse_moved(context: click.Context, name: str) -> None:
    """Refuse a command or an option that has a new name.

    Args:
        context: The context of the command.
        name: The command or the option.

    Raises:
        click.UsageError: It has a new name.
    """
    if (now := MOVED.get(name)) is not None:
        raise click.UsageError(f"{name!r} is no longer there: {now}", context)


# ---- Options of every command


def _option(name: str, metavar: str | None, help_text: str, *, env: bool = False) -> click.Option:
    variable = f"OPENDATA_BUFFER_{name[2:].replace('-', '_').upper()}" if env else None
    return click.Option(
        [name],
        metavar=metavar,
        is_flag=metavar is None,
        envvar=variable,
        show_envvar=env,
        help=help_text,
    )


_STORAGE = [
    _option("--endpoint-url", "URL", "An endpoint other than the cloud's own."),
    _option("--region", "NAME", "AWS region. Default: the AWS chain's."),
    _option("--profile", "NAME", "AWS profile: region, keys or role of the files in ~/.aws."),
    _option("--role-arn", "ARN", "AWS role to assume. Its credentials are renewed.", env=True),
    _option("--external-id", "TEXT", "External id, if the role requires one.", env=True),
    _option("--session-name", "TEXT", "Session name of the role in AWS's logs.", env=True),
    _option("--anonymous", None, "Send no credentials, to read a public bucket.", env=True),
]

REACH_STORE = {each.name for each in fields(StoreOptions)}
"""Names of the options that say how to reach a store."""


def _timeout(default_ms: int) -> click.Option:
    help_text = "Timeout of one storage operation, retries included."
    kind = click.IntRange(min=1)
    return click.Option(["--timeout-ms"], type=kind, default=default_ms, help=help_text)


def verbose() -> click.Option:
    """Return the option ``-v``, which is accepted before and after the command."""

    def log_more(context: click.Context, option: click.Parameter, count: int) -> None:
        if count:
            log_to_stderr(count)

    return click.Option(
        ["-v", "--verbose"],
        count=True,
        expose_value=False,
        show_default=False,
        callback=log_more,
        help="Log more; twice for everything.",
    )


def write_storage(context: click.Context, formatter: click.HelpFormatter) -> None:
    """Write the table of storage options, for the help of the whole program."""
    title = "Storage options of every command, before or after its name"
    _write_options(context, formatter, title, [*_STORAGE, _timeout(SOON_MS)])


def _write_options(
    context: click.Context, formatter: click.HelpFormatter, title: str, options: list[click.Option]
) -> None:
    records = [each.get_help_record(context) for each in options]
    with formatter.section(title):
        formatter.write_dl([each for each in records if each is not None])


# ---- Commands


class Exampled(click.Command):
    """A command or a group whose help screen starts with an example."""

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the help screen."""
        formatter.write(f"Example: {EXAMPLES[self.name or '']}\n\n")
        super().format_help(ctx, formatter)


_GIVEN_BEFORE = f"{__name__}.given_before"


def _before_command(option: click.Option) -> click.Option:
    """Return a storage option of a group, which remembers its value for the group's commands."""

    def remember(context: click.Context, option: click.Parameter, value: Any) -> None:
        name = str(option.name)
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            context.meta.setdefault(_GIVEN_BEFORE, {})[name] = value

    found = copy.copy(option)
    found.callback, found.expose_value = remember, False
    found.envvar = None  # The command reads it.
    found.hidden = True  # The help describes the options of the commands.
    return found


class Group(Exampled, click.Group):
    """A group of commands, which also accepts the storage options of its commands."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.params += map(_before_command, [*_STORAGE, _timeout(SOON_MS)])

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the options before the command.

        Args:
            ctx: The context of the group.
            args: The words of the command line.

        Returns:
            The words that are left.

        Raises:
            click.NoSuchOption: The group does not have an option.
        """
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            raise click.NoSuchOption(
                error.option_name,
                f"no such option before the command: {error.option_name}. Put the options of a "
                "command after its name.",
                error.possibilities,
                error.ctx,
            ) from None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command; for an unknown name, suggest the nearest one.

        Args:
            ctx: The context of the group.
            args: The name of the command, and its arguments.

        Returns:
            The name, the command, and its arguments.

        Raises:
            click.UsageError: No command has this name.
        """
        name = args[0]
        if name.startswith("-") or ctx.resilient_parsing or self.get_command(ctx, name) is not None:
            return super().resolve_command(ctx, args)
        known = self.list_commands(ctx)
        nearest = get_close_matches(name, known, 1) or [
            words for words in self._words_below(ctx) if words.endswith(f" {name}")
        ]
        advice = f" Did you mean '{nearest[0]}'?" if nearest else f" Known are {', '.join(known)}."
        raise click.UsageError(f"no such command {name!r}.{advice}", ctx)

    def _words_below(self, ctx: click.Context) -> Iterator[str]:
        """Yield the names of the commands of the groups below, with the name of their group."""
        for name in self.list_commands(ctx):
            group = self.get_command(ctx, name)
            if isinstance(group, click.Group):
                yield from (f"{name} {word}" for word in group.list_commands(ctx))


_OPENED = f"{__name__}.opened"


def remember_opened() -> None:
    """Remember that the running command has opened its store.

    An :class:`.InvalidInput` before that is about the command line alone, and one after that may be
    about the state of the queue.
    """
    click.get_current_context().meta[_OPENED] = True


class Command(Exampled):
    """A command that opens a store."""

    def __init__(self, *arguments: Any, timeout_ms: int = SOON_MS, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.params += [*_STORAGE, _timeout(timeout_ms), verbose()]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the command line; for a removed option, name its replacement."""
        try:
            left = super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            refuse_moved(ctx, f"{self.name} {error.option_name}")
            raise
        for name, value in ctx.meta.get(_GIVEN_BEFORE, {}).items():
            if ctx.get_parameter_source(name) is not ParameterSource.COMMANDLINE:
                ctx.params[name] = value
        return left

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; show the library's errors in terms of the command line.

        Args:
            ctx: The context of the command.

        Returns:
            The result of the command.

        Raises:
            click.UsageError: An argument or an option has a wrong value.
            Failure: The command raised an error of the library.
        """
        try:
            return super().invoke(ctx)
        except OpenDataBufferError as error:
            log.debug("failed", exc_info=True)
            if isinstance(error, InvalidInput) and _OPENED not in ctx.meta:
                raise click.UsageError(one_line(error.text(Surface.SHELL)), ctx) from error
            raise Failure(error.text(Surface.SHELL)) from error

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options, with one line for those of the store."""
        params = [each for each in self.get_params(ctx) if isinstance(each, click.Option)]
        own = [each for each in params if each.name not in REACH_STORE]
        _write_options(ctx, formatter, "Options", own)
        names = [each.opts[0] for each in params if each.name in REACH_STORE]
        formatter.write_paragraph()
        formatter.write_text(f"Storage: {', '.join(names)}. See the help without a command.")


def command(timeout_ms: int = SOON_MS) -> Callable[[Callable[..., Any]], Command]:
    """Make a decorator like ``click.command``.

    Args:
        timeout_ms: The default of ``--timeout-ms``, in milliseconds.

    Returns:
        The decorator.
    """
    return click.command(cls=Command, timeout_ms=timeout_ms)


_QUEUE = f"{__name__}.queue"


def remember_queue(options: dict[str, Any], reach_store: StoreOptions) -> None:
    """Remember the running command's queue, for an error or a hint."""
    given = [(name, options[name]) for name in NAMES_ONE_QUEUE if options[name] is not None]
    manifest = options["manifest_path"] or ""
    queue = QueueName(options["store"], manifest, (*given, *reach_store.for_commands()))
    click.get_current_context().meta[_QUEUE] = queue


def queue_words() -> str:
    """Return the running command's queue, as the words that name it in another command."""
    queue = click.get_current_context().meta[_QUEUE]
    assert isinstance(queue, QueueName)
    return queue.words()


# ---- Options of several commands

POSITIVE = click.IntRange(min=1)
NATURAL = click.IntRange(min=0)


def flag(name: str, help_text: str) -> Callable[[F], F]:
    """Return an option without a value. ``name`` may have the parameter's name after a space."""
    return click.option(*name.split(), is_flag=True, help=help_text)


def text(name: str, metavar: str, help_text: str, **more: Any) -> Callable[[F], F]:
    """Return an option with a text; None if it is not given."""
    return click.option(*name.split(), metavar=metavar, help=help_text, **more)


def number(name: str, default: int, help_text: str, *, least: int = 1) -> Callable[[F], F]:
    """Return an option with a whole number."""
    return click.option(name, type=click.IntRange(min=least), default=default, help=help_text)


def host_and_port(context: click.Context, option: click.Parameter, text: str | None) -> str | None:
    """Check a host and a port; an IPv6 address is in brackets.

    Args:
        context: The context of the command.
        option: The option.
        text: The host and the port, or None if the option was not given.

    Returns:
        The text.

    Raises:
        click.BadParameter: The text has another form.
    """
    if text is None:
        return None
    with suppress(ValueError):
        parts = urlsplit(f"//{text}")
        if parts.hostname and parts.port is not None and parts.netloc == text and "@" not in text:
            return text
    raise click.BadParameter(f"{text!r} is not HOST:PORT, such as 0.0.0.0:7420 or [::]:7420")


def _options(*options: Callable[[Any], Any]) -> Callable[[F], F]:
    def decorate(command: F) -> F:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


NAMES_ONE_QUEUE = ("partition", "data_path_prefix", "manifest_path")
"""Names of the options that choose one queue of a store."""

store_argument = click.argument(
    "store", shell_complete=lambda context, argument, text: [CompletionItem(text, type="dir")]
)

place = _options(
    text("--data-path-prefix", "PREFIX", "Prefix of the batches. Default: ingest."),
    text("--manifest-path", "KEY", "Key of the manifest. Default: <data-path-prefix>/manifest."),
    text("--partition", "NAME", "Use this partition of a topic, by its name or number."),
)
"""The options that choose a queue of a store."""

queue = _options(store_argument, place)

create_if_missing = flag(
    "--create-if-missing", "Create the queue if it does not exist, to start before its producers."
)

framing = click.option(
    "--framing",
    type=click.Choice(["lines", "ndjson", "protobuf-fixed", "length"]),
    default="lines",
    help="How records are separated in the stream; length and protobuf-fixed take any bytes.",
)

as_json = flag("--json as_json", "Print JSON instead of text.")

yes = click.option("-y", "--yes", is_flag=True, help="Do it without asking.")


def refuse_together(**given: Any) -> None:
    """Refuse options that exclude each other.

    Args:
        **given: The values of the options, by name.

    Raises:
        click.UsageError: Two of them are given.
    """
    names = [name for name, value in given.items() if value]
    if len(names) > 1:
        raise click.UsageError(f"{' and '.join(names)} cannot be used together")
