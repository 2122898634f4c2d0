"""``status`` and ``dump``: show a queue or a topic, and the consumer that reads it."""

from __future__ import annotations

import json
from base64 import b64encode
from dataclasses import asdict
from typing import Any

import click

from opendata_buffer.admin.queue_status import read_backlog, read_status
from opendata_buffer.admin.target import Target
from opendata_buffer.admin.topic_status import read_topic
from opendata_buffer.broker.client import Connection, DiscoveryRecord
from opendata_buffer.cli import options
from opendata_buffer.cli.errors import Exceeded, Failure
from opendata_buffer.cli.options import command
from opendata_buffer.cli.target import one_queue, target_of
from opendata_buffer.cli.text import waiting
from opendata_buffer.config import ConsumerConfig
from opendata_buffer.errors import CorruptData, ObjectNotFound
from opendata_buffer.formats import batch as batch_format
from opendata_buffer.formats import manifest as manifest_format
from opendata_buffer.formats.batch import check_key, largest_object, open_batch, split_records
from opendata_buffer.formats.manifest import MAX_MANIFEST_BYTES, Manifest
from opendata_buffer.hints import Surface
from opendata_buffer.quarantine import metadata_json
from opendata_buffer.queue.not_found import no_such_queue
from opendata_buffer.queue.queue import fullness
from opendata_buffer.runtime import Runtime
from opendata_buffer.stores.base import read_bytes

WATCH_S = 2.0  # Seconds between two reads with ``--watch``.


@command()
@options.queue
@options.as_json
@options.flag("--watch", "Show it again every two seconds until interrupted.")
@click.option(
    "--max-lag",
    type=click.FloatRange(min=0),
    metavar="SECONDS",
    help="Only check that the oldest batch does not wait longer; exit code 3 if it does.",
)
@click.option(
    "--max-backlog",
    type=options.NATURAL,
    metavar="N",
    help="Only check that no more than N batches wait; exit code 3 if more do.",
)
@click.pass_obj
def status(
    runtime: Any,
    /,
    as_json: bool,
    watch: bool,
    max_lag: float | None,
    max_backlog: int | None,
    **queue: Any,
) -> None:
    """Show the state of a queue or a topic, and the consumer that reads it.

    This includes open transactions, the broker and its workers, and batches that were skipped or
    trimmed. Nothing is changed. The consumer that claimed the queue may have ended since then.
    Sizes are those of stored objects. With --json and --watch, prints one JSON object per line.

    With --max-lag or --max-backlog the command is a probe: it only reads manifests, prints one
    line, and exits with 0 within the limits, 3 beyond them, and 1 if it cannot find out. Both exit
    with 1 if producers and consumers are refused, because the manifest was restored from an old
    copy or is damaged.
    """
    target = target_of(runtime, queue)
    if max_lag is not None or max_backlog is not None:
        if watch:
            raise click.UsageError("--watch shows, and a probe answers once: leave one out")
        _probe(target, max_lag, max_backlog, as_json)
        return
    # A probe runs every few seconds, and loading rich would take a third of its time.
    from rich.live import Live

    from opendata_buffer.cli import terminal

    console = terminal.open_console()
    reader = target.reader()
    refused = ""

    def current() -> Any:
        nonlocal refused
        if target.topic is not None:
            topic = read_topic(target, target.topic)
            refused = max(each.refused for each in topic.partitions)
            _warn(max(each.manifest_bytes for each in topic.partitions), target)
            return json.dumps(asdict(topic)) if as_json else terminal.topic_table(topic)
        found = read_status(reader, lambda announced: _connect(announced, runtime))
        refused = found.refused
        return json.dumps(asdict(found)) if as_json else terminal.status_table(found)

    if watch and not as_json and console.is_terminal:
        with Live(current(), console=console, auto_refresh=False) as live:
            while True:
                runtime.sleep(WATCH_S)
                live.update(current(), refresh=True)
    while True:
        click.echo(current()) if as_json else terminal.show(current(), console)
        if not watch:
            break
        runtime.sleep(WATCH_S)
    if refused:
        raise Failure(refused)


def _connect(announced: DiscoveryRecord, runtime: Runtime) -> Connection:
    # Loading the network code takes longer than everything else, and most queues have no broker.
    from opendata_buffer.broker.network import WebSocketNetwork

    return WebSocketNetwork(runtime).connect(announced)


def _warn(manifest_bytes: int, target: Target) -> None:
    if warning := fullness(manifest_bytes, target.config.max_manifest_bytes):
        click.echo(f"warning: {warning}", err=True)


def _probe(target: Target, max_lag: float | None, max_backlog: int | None, as_json: bool) -> None:
    batches, lag_s, largest, refused = read_backlog(target)
    if refused:
        raise Failure(refused)
    _warn(largest, target)
    excess = []
    if max_lag is not None and lag_s > max_lag:
        excess.append(f"the oldest batch waits {lag_s:.1f} s, more than {max_lag:g}")
    if max_backlog is not None and batches > max_backlog:
        excess.append(f"{waiting(batches)}, more than {max_backlog:,}")
    if as_json:
        known = {"ok": not excess, "batches": batches, "lag_seconds": lag_s}
        click.echo(json.dumps({**known, "manifest_bytes": largest}))
    if excess:
        raise Exceeded(
            f"too much waits in {target.store.url}: {'; '.join(excess)}. "
            f"'opendata-buffer status {options.queue_words()}' shows which consumer should read it"
        )
    if not as_json:
        click.echo(f"ok: {waiting(batches)}, the oldest for {lag_s:.1f} s")


@command()
@options.queue
@click.argument("key", required=False)
@click.pass_obj
def dump(runtime: Any, /, key: str | None, **queue: Any) -> None:
    """Print the manifest or a batch as JSON.

    KEY is the whole key of a batch object, as the manifest, errors and 'consume --json' show it.
    Without KEY the command prints the manifest. If KEY begins with the manifest's key, such as that
    of a copy that a repair leaves, or is a segment of a log, it is printed as a manifest. Bytes
    that may not be text are in base64.
    """
    if key is not None:
        check_key("key", key)
    target = one_queue(runtime, queue, ConsumerConfig)
    key = target.config.manifest_path if key is None else key
    is_manifest = key.startswith(target.config.manifest_path) or key.endswith(".segment")
    largest = largest_object(target.config.max_batch_bytes)
    try:
        raw = read_bytes(target.store, key, MAX_MANIFEST_BYTES if is_manifest else largest)
        fields = _manifest(raw) if is_manifest else _batch(raw, target.config.max_batch_bytes)
    except ObjectNotFound:
        if key == target.config.manifest_path:
            raise no_such_queue(target.store, target.config) from None
        raise
    except CorruptData as error:
        kind = "manifest" if is_manifest else "batch"
        reason = error.at(target.name).text(Surface.SHELL)
        raise Failure(f"{key!r} is not a valid {kind}: {reason}") from error
    click.echo(json.dumps(fields, indent=2))


def _manifest(raw: bytes) -> dict[str, Any]:
    parsed = Manifest.parse(raw)
    return {
        "version": manifest_format.VERSION,
        "epoch": parsed.epoch,
        "next_sequence": parsed.next_sequence,
        "entries": [
            {
                "sequence": entry.sequence,
                "location": entry.location,
                "metadata": metadata_json(entry.metadata),
            }
            for entry in parsed.entries()
        ],
    }


def _batch(raw: bytes, max_batch_bytes: int) -> dict[str, Any]:
    footer, block = open_batch(raw, max_batch_bytes)
    records = split_records(block, footer.record_count)
    return {
        "version": batch_format.VERSION,
        "compression": footer.compression.name.lower(),
        "record_count": footer.record_count,
        "records_base64": [b64encode(each).decode() for each in records],
    }
