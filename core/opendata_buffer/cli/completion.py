"""Shell completion: ``completion``."""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass
from pathlib import Path

import click
from click.shell_completion import get_completion_class

from opendata_buffer.cli.errors import Failure

__all__ = ["completion"]

PROGRAM = "opendata-buffer"
VARIABLE = "_OPENDATA_BUFFER_COMPLETE"
SHELLS = ("bash", "zsh", "fish")

_ZSH_FIRST = "(( $+functions[compdef] )) || { autoload -Uz compinit && compinit }\n"
"""Without it the script fails in a shell that has not set completion up yet."""


@dataclass(frozen=True)
class _Place:
    """Where a shell looks.

    Attributes:
        script: The file with the completion.
        start: The file that loads it when a shell starts; None where the shell does by itself.
    """

    script: Path
    start: Path | None


@click.command()
@click.argument("shell", type=click.Choice(SHELLS), required=False)
@click.option("--install", is_flag=True, help="Write it to where the shell finds it.")
@click.pass_context
def completion(context: click.Context, /, shell: str | None, install: bool) -> None:
    """Complete commands, options and directories with the tab key.

    Prints the script for SHELL: bash (4.4 or later), zsh or fish. Default: the shell that $SHELL
    names. With --install it is written to a file below the home directory, which bash and zsh
    load by a line at the end of .bashrc or .zshrc, and prints which; the next shell completes.
    """
    shell = shell or _own_shell()
    script = _script(context.find_root().command, shell)
    if not install:
        click.echo(script, nl=False)
        return
    place = _place(shell)
    try:
        place.script.parent.mkdir(parents=True, exist_ok=True)
        place.script.write_text(script)
        click.echo(f"wrote {place.script}")
        if place.start is not None:
            line = f"source {shlex.quote(str(place.script))}  # {PROGRAM} completion\n"
            _add_line(place.start, line)
            click.echo(f"{place.start} loads it; open a new shell")
    except OSError as error:
        raise Failure(
            f"{error.filename}: {error.strerror}. Print the script with '{PROGRAM} completion "
            f"{shell}' and load it in another way"
        ) from error


def _script(root: click.Command, shell: str) -> str:
    found = get_completion_class(shell)
    assert found is not None
    made = found(root, {}, PROGRAM, VARIABLE)
    # Not source(), which starts a shell to see how old it is.
    text = made.source_template % made.source_vars()
    return _ZSH_FIRST + text if shell == "zsh" else text


def _own_shell() -> str:
    name = os.path.basename(os.environ.get("SHELL", ""))
    if name in SHELLS:
        return name
    raise Failure(
        f"the shell is {name or 'not known'}: name one, for example '{PROGRAM} completion bash'"
    )


def _place(shell: str) -> _Place:
    home = Path.home()
    data = Path(os.environ.get("XDG_DATA_HOME") or home / ".local" / "share")
    if shell == "fish":
        config = Path(os.environ.get("XDG_CONFIG_HOME") or home / ".config")
        return _Place(config / "fish" / "completions" / f"{PROGRAM}.fish", None)
    script = data / PROGRAM / f"completion.{shell}"
    if shell == "zsh":
        return _Place(script, Path(os.environ.get("ZDOTDIR") or home) / ".zshrc")
    return _Place(script, home / ".bashrc")


def _add_line(path: Path, line: str) -> None:
    """To the end of a file, unless it is there."""
    text = path.read_text() if path.exists() else ""
    if line in text:
        return
    with path.open("a") as file:
        file.write(line if not text or text.endswith("\n") else f"\n{line}")
