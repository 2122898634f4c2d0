"""What all commands share: an example first in the help, storage options, ``-v``, former names; and
counts, ages and questions as a person reads them, without rich."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import fields
from datetime import timedelta
from typing import Any

import click

from opendata_buffer.cli.errors import Failure, log_to_stderr
from opendata_buffer.config import StoreOptions

SOON_MS = 5_000
"""Deadline of commands that a person waits for."""
LONG_MS = 120_000
"""Deadline of commands that move records, which wait for a store that is down for a while."""

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
    "trim": "opendata-buffer trim s3://bucket/orders --to 2026-01-31T03:00:00Z --dry-run",
    "fsck": "opendata-buffer fsck s3://bucket/orders --repair --dry-run",
    "gc": "opendata-buffer gc s3://bucket/orders --dry-run",
    "skip": "opendata-buffer skip s3://bucket/orders 41",
    "restore": "opendata-buffer restore s3://bucket/orders 41-0f343b0931126",
    "topic": "opendata-buffer topic create s3://bucket/orders --partitions 4",
    "create": "opendata-buffer topic create s3://bucket/orders --partitions 4",
    "expand": "opendata-buffer topic expand s3://bucket/orders --partitions 8",
    "drain": "opendata-buffer topic drain s3://bucket/orders 3",
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
}
"""Former commands and options, and what took their place."""


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
    _option("--endpoint-url", "URL", "Another endpoint than the cloud's own."),
    _option("--region", "NAME", "AWS region. Default: the AWS chain's."),
    _option("--profile", "NAME", "AWS profile: region, keys or role of the files in ~/.aws."),
    _option("--role-arn", "ARN", "AWS role to assume. Its credentials are renewed.", env=True),
    _option("--external-id", "TEXT", "External id, where that role requires one.", env=True),
    _option("--session-name", "TEXT", "Session name in that role's log.", env=True),
    _option("--anonymous", None, "Send no credentials: for a public bucket.", env=True),
]

REACH_STORE = {each.name for each in fields(StoreOptions)} | {"timeout_ms"}
"""Names of the options that say how to reach a store."""


def _timeout(default_ms: int) -> click.Option:
    help_text = "Timeout of one storage operation, retries included."
    kind = click.IntRange(min=1)
    return click.Option(["--timeout-ms"], type=kind, default=default_ms, help=help_text)


def verbose() -> click.Option:
    """``-v``, before or after the command."""

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
    """The table of storage options, for the help of the whole."""
    records = [each.get_help_record(context) for each in (*_STORAGE, _timeout(SOON_MS))]
    with formatter.section("Storage options of every command"):
        formatter.write_dl([each for each in records if each is not None])


class Exampled(click.Command):
    """A command or a group whose help screen starts with an example."""

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The help screen."""
        formatter.write(f"Example: {EXAMPLES[self.name or '']}\n\n")
        super().format_help(ctx, formatter)


class Command(Exampled):
    """A command that opens a store."""

    def __init__(self, *arguments: Any, timeout_ms: int = SOON_MS, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.params += [*_STORAGE, _timeout(timeout_ms), verbose()]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the command line; an option that is gone says what took its place."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            refuse_moved(ctx, f"{self.name} {error.option_name}")
            raise

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The options, with one line for those of the store."""
        params = [each for each in self.get_params(ctx) if isinstance(each, click.Option)]
        own = [each.get_help_record(ctx) for each in params if each.name not in REACH_STORE]
        with formatter.section("Options"):
            formatter.write_dl([each for each in own if each is not None])
        names = [each.opts[0] for each in params if each.name in REACH_STORE]
        formatter.write_paragraph()
        formatter.write_text(f"Storage: {', '.join(names)}. See the help without a command.")


def refuse_moved(context: click.Context, name: str) -> None:
    """Raise UsageError for a command or an option that has another name now."""
    if (now := MOVED.get(name)) is not None:
        raise click.UsageError(f"{name!r} is no longer there: {now}", context)


def command(timeout_ms: int = SOON_MS) -> Callable[[Callable[..., Any]], Command]:
    """As ``click.command``; ``timeout_ms`` is the default of ``--timeout-ms``."""
    return click.command(cls=Command, timeout_ms=timeout_ms)


def plural(count: int, noun: str) -> str:
    """``1 batch``, ``2 batches``, ``1,000 copies``."""
    if count == 1:
        return f"1 {noun}"
    if noun.endswith(("ch", "sh", "s", "x")):
        noun += "e"
    elif noun.endswith("y") and noun[-2] not in "aeiou":
        noun = noun[:-1] + "ie"
    return f"{count:,} {noun}s"


def waiting(batches: int) -> str:
    """``1 batch waits``, ``2 batches wait``."""
    return f"{plural(batches, 'batch')} {'waits' if batches == 1 else 'wait'}"


def format_age(seconds: float | None) -> str:
    """``93.2`` as ``0:01:33``; None as a dash."""
    # Negative when another machine's clock runs ahead.
    return "-" if seconds is None else str(timedelta(seconds=max(0, int(seconds))))


def format_span(milliseconds: int | None) -> str:
    """``604800000`` as ``7d``, ``5400000`` as ``1h30m``; None as ``none``."""
    if milliseconds is None:
        return "none"
    rest, found = milliseconds // 1000, ""
    for unit, seconds in (("d", 86_400), ("h", 3_600), ("m", 60), ("s", 1)):
        count, rest = divmod(rest, seconds)
        found += f"{count:,}{unit}" if count else ""
    return found or "0s"


def format_retention(milliseconds: int | None, size: int | None) -> str:
    """How long a log keeps what all readers have acknowledged."""
    kept = [] if milliseconds is None else [format_span(milliseconds)]
    kept += [] if size is None else [f"{size:,} bytes"]
    return f"{' or '.join(kept)} at least" if kept else "until all readers have acknowledged"


def confirm(what: str, yes: bool) -> None:
    """Ask before the command does ``what``, a sentence; fail if standard input is no terminal."""
    if yes:
        return
    if not is_interactive():
        raise Failure(f"{what}. Standard input is no terminal to ask on: give --yes to do it")
    click.confirm(f"{what}. Go on?", abort=True, err=True)


def is_interactive() -> bool:
    """Whether standard input is a terminal."""
    return sys.stdin is not None and sys.stdin.isatty()
