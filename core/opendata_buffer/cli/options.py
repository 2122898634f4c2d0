"""Options that commands share, and the library's errors in terms of options.

An option with the name of a setting is handed to the configuration as it is. The library's errors
name settings and calls, such as ``max_batch_bytes`` and ``skip(3)``; :func:`with_flags` shows the
option and the command instead.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from operator import mul
from typing import Any, TypeVar

import click
from click.shell_completion import CompletionItem

from opendata_buffer.config import StoreOptions
from opendata_buffer.errors import InvalidInput
from opendata_buffer.formats import MIB

F = TypeVar("F", bound=Callable[..., Any])

POSITIVE = click.IntRange(min=1)
NATURAL = click.IntRange(min=0)


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

queue = _options(
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
)

allow_foreign = click.option(
    "--allow-foreign-locations",
    is_flag=True,
    help="Also read batches that lie outside the data prefix.",
)

create_if_missing = click.option(
    "--create-if-missing",
    is_flag=True,
    help="Create the queue if there is none: to start before its producers.",
)

framing = click.option(
    "--framing",
    type=click.Choice(["lines", "ndjson", "protobuf-fixed", "length"]),
    default="lines",
    help="How records are separated in the stream; length and protobuf-fixed take any bytes.",
)

max_batch_bytes = click.option(
    "--max-batch-bytes",
    type=POSITIVE,
    default=256 * MIB,
    help="Largest batch, decoded. Larger ones are neither decoded nor written.",
)

as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")

yes = click.option("-y", "--yes", is_flag=True, help="Do it without asking.")


def refuse_together(**given: Any) -> None:
    """Raises UsageError when two of these options are given; they exclude each other."""
    names = [name for name, value in given.items() if value]
    if len(names) > 1:
        raise click.UsageError(f"{' and '.join(names)} cannot be used together")


_DURATION = re.compile(r"P?(?:(\d{1,6})D)?T?(?:(\d{1,6})H)?(?:(\d{1,6})M)?(?:(\d{1,9})S)?", re.I)


def duration_ms(text: str) -> int:
    """Milliseconds of a duration such as ``7d``, ``1d12h``, ``90m``, ``30s`` or ``P7DT12H``."""
    found = _DURATION.fullmatch(text)
    if found is None or not any(found.groups()):
        raise InvalidInput(f"{text!r} is no duration: use one such as 7d, 12h, 90m or 1d12h")
    counts = [int(each or 0) for each in found.groups()]
    return sum(map(mul, counts, (86_400_000, 3_600_000, 60_000, 1_000)))


_SIZE = re.compile(r"(\d{1,18})(?:([kMGTP])(i?)B|B)?")


def size_bytes(text: str) -> int:
    """Bytes of a size such as ``500GB``, ``64MiB`` or ``1000``."""
    found = _SIZE.fullmatch(text)
    if found is None:
        raise InvalidInput(f"{text!r} is no size: use one such as 500GB, 64MiB or 1000")
    count, unit, binary = found.groups()
    power = " kMGTP".index(unit) if unit else 0
    return int(count) * int((1024 if binary else 1000) ** power)


_FLAGS, _QUEUE = f"{__name__}.flags", f"{__name__}.queue"


def remember_flags() -> None:
    """Keep the running command's options, for an error that is shown after its context ended."""
    context = click.get_current_context()
    flags = {
        parameter.name: parameter.opts[0]
        for parameter in context.command.params
        if isinstance(parameter, click.Option) and parameter.name
    }
    for setting in ("cas_deadline_ms", "delivery_timeout_ms"):
        flags[setting] = "--timeout-ms"
    context.meta[_FLAGS] = flags


def remember_queue(options: dict[str, Any], reach_store: StoreOptions) -> None:
    """Keep the running command's queue, for an error or a hint."""
    words = [str(options["store"])]
    for name in NAMES_ONE_QUEUE:
        if options[name] is not None:
            words += ["--" + name.replace("_", "-"), str(options[name])]
    context = click.get_current_context()
    context.meta[_QUEUE] = shlex.join([*words, *reach_store.command_words()])


def queue_words() -> str:
    """The running command's queue, as the words that name it in another command."""
    words = click.get_current_context().meta[_QUEUE]
    assert isinstance(words, str)
    return words


def with_flags(context: click.Context, message: str) -> str:
    """An error of the library in terms of the command line.

    ``max_batch_bytes`` becomes ``--max-batch-bytes`` where the command has that option, and
    ``skip(3)`` becomes the command ``opendata-buffer skip``.
    """
    flags, queue = context.meta.get(_FLAGS), context.meta.get(_QUEUE)
    if flags is None:
        return message
    if queue is not None:
        message = re.sub(
            r"skip\((?:'([^']*)', )?(\d+)\); its records are then lost",
            lambda found: (
                f"'opendata-buffer skip {queue} {found[2]}"
                f"{'' if found[1] is None else f' --partition {found[1]}'}', which copies it to "
                "the quarantine first"
            ),
            message,
        )
    message = re.sub(
        r"(?<!in Python )\b(\w+)=True\b", lambda name: flags.get(name[1], name[0]), message
    )
    # A setting of one word may be an ordinary word of the message.
    return re.sub(r"\b[a-z]+(?:_[a-z]+)+\b", lambda name: flags.get(name[0], name[0]), message)
