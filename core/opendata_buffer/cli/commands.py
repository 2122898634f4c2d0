"""The command line: ``opendata-buffer``, also ``python -m opendata_buffer``.

Every command is thin: it turns options into a configuration and prints what a module below it
returns. Errors are one line on stderr and exit code 1; usage errors exit 2. Only stdout is
output; progress, summaries and warnings go to stderr.
"""

from __future__ import annotations

import click

from opendata_buffer.cli.broker import broker
from opendata_buffer.cli.completion import completion
from opendata_buffer.cli.consume import consume
from opendata_buffer.cli.copy import copy
from opendata_buffer.cli.errors import Application, main_of
from opendata_buffer.cli.find import list_
from opendata_buffer.cli.fsck import fsck
from opendata_buffer.cli.objects import batch, manifest
from opendata_buffer.cli.options import version_option
from opendata_buffer.cli.owner import owner
from opendata_buffer.cli.produce import produce
from opendata_buffer.cli.queues import gc, status
from opendata_buffer.cli.repairs import quarantine, rebuild, skip
from opendata_buffer.cli.seek import seek
from opendata_buffer.cli.top import top
from opendata_buffer.cli.topic import topic
from opendata_buffer.cli.transactions import transactions
from opendata_buffer.cli.work import work

__all__ = ["cli", "main"]


@click.group(cls=Application, context_settings={"help_option_names": ["-h", "--help"]})
@version_option
@click.option("-v", "--verbose", count=True, help="Log more; twice for everything.")
@click.pass_context
def cli(context: click.Context, verbose: int) -> None:
    """Look into, mend, and move records through a queue that lives in object storage.

    STORE is a directory, file:///dir, s3://bucket[/root], gs://bucket[/root],
    az://container[/root] or abfss://container@account.dfs.core.windows.net[/root].

    Credentials come from the cloud's standard chain: environment, files, the machine. Keys are no
    options, for others can see a command line: put them into the environment (AWS_ACCESS_KEY_ID
    and AWS_SECRET_ACCESS_KEY, GOOGLE_APPLICATION_CREDENTIALS, AZURE_STORAGE_CONNECTION_STRING) or
    into a file (a --profile of AWS).
    """
    from opendata_buffer.runtime import SystemRuntime

    # Tests put a manual clock here.
    context.obj = context.obj or SystemRuntime()


for command in (
    list_, produce, consume, copy, broker, work, status, top, owner, seek, fsck, gc, skip,
    quarantine, topic, transactions, manifest, batch, completion,
):  # fmt: skip
    cli.add_command(command)

manifest.add_command(rebuild)

main = main_of(cli)
