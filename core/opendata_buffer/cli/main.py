"""The group ``opendata-buffer`` and its commands, each loaded when it is run.

Every command converts options into a configuration, calls a function of the library, and prints its
result. Only results go to stdout; progress, summaries and warnings go to stderr.
"""

from __future__ import annotations

from importlib import import_module

import click

from opendata_buffer.cli.errors import FailureGroup
from opendata_buffer.cli.options import Group, refuse_moved, verbose, write_storage
from opendata_buffer.runtime import SystemRuntime

COMMANDS = {
    "produce": ("produce", "Put the records of stdin into the queue."),
    "consume": ("consume", "Write the records of the queue to stdout."),
    "broker": ("broker", "Commit for all producers of a queue."),
    "work": ("broker", "Run COMMAND for each batch."),
    "status": ("status", "Show what is in the queue or the topic, and which consumer reads it."),
    "exporter": ("exporter", "Serve metrics of queues and topics to Prometheus."),
    "readers": (
        "readers",
        "List, set and delete the named readers of a log, or make a log of a queue.",
    ),
    "trim": ("repair", "Delete the batches before a sequence or a time."),
    "fsck": ("repair", "Check that every queued batch exists and decodes."),
    "gc": ("repair", "Delete the objects of consumed batches, once."),
    "skip": ("repair", "Skip the one batch that stops a queue."),
    "restore": ("repair", "Produce batches again that were skipped, trimmed or are not queued."),
    "topic": ("topic", "Create and change topics."),
    "abort": ("topic", "End the transaction of a producer that will not be started again."),
    "dump": ("status", "Print the manifest or a batch as JSON."),
}
"""Module and summary of each command. ``--help`` prints the summaries without loading a module:
loading all of them, including Arrow, takes half a second."""


class LazyGroup(Group, FailureGroup):
    """A group that loads a command's module when the command is run or completed."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return all commands, in the order of :data:`COMMANDS`."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return the command; None if no command has this name."""
        if cmd_name not in COMMANDS:
            refuse_moved(ctx, cmd_name)
            return None
        module, _ = COMMANDS[cmd_name]
        command = getattr(import_module(f"opendata_buffer.cli.{module}"), cmd_name)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands for ``--help``, and the options that all of them have."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in COMMANDS.items()])
        write_storage(ctx, formatter)


@click.group(
    cls=LazyGroup,
    params=[verbose()],
    context_settings={"help_option_names": ["-h", "--help"], "show_default": True},
)
@click.version_option(package_name="opendata-buffer", message="opendata-buffer %(version)s")
@click.pass_context
def cli(context: click.Context) -> None:
    """Read, write, inspect and repair a queue in object storage.

    STORE is a directory, file:///dir, s3://bucket[/root], gs://bucket[/root],
    az://container[/root] or abfss://container@account.dfs.core.windows.net[/root].

    Credentials come from the cloud's standard chain: environment, files, the machine. Access keys
    cannot be passed as options, because other users can see a command line: put them into the
    environment (AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, GOOGLE_APPLICATION_CREDENTIALS,
    AZURE_STORAGE_CONNECTION_STRING) or into a file (a --profile of AWS).
    """
    # Tests put a manual clock here.
    context.obj = context.obj or SystemRuntime()
