"""``dump``: a manifest or a batch as JSON."""

from __future__ import annotations

import json
from base64 import b64encode
from typing import Any

import click

from opendata_buffer.cli import options
from opendata_buffer.cli.command import command
from opendata_buffer.cli.errors import Failure
from opendata_buffer.cli.target import one_queue
from opendata_buffer.config import ConsumerConfig
from opendata_buffer.errors import CorruptData, ObjectNotFound
from opendata_buffer.formats import batch as batch_format
from opendata_buffer.formats import manifest as manifest_format
from opendata_buffer.formats.batch import largest_object, open_batch, split_records
from opendata_buffer.formats.manifest import MAX_MANIFEST_BYTES, Manifest
from opendata_buffer.quarantine import metadata_json
from opendata_buffer.queue.queue import no_such_queue
from opendata_buffer.stores.base import read_bytes


@command()
@options.queue
@click.argument("key", required=False)
@options.max_batch_bytes
def dump(key: str | None, **queue: Any) -> None:
    """Print the manifest or a batch as JSON.

    KEY is the whole key of a batch object, as the manifest, errors and 'consume --json' show it.
    Without KEY it is the manifest; so is a KEY that begins with the manifest's, such as the copy
    that a repair leaves, and a segment of a log. What need not be text is in base64.
    """
    target = one_queue(queue, ConsumerConfig)
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
        raise Failure(f"{key!r} is not a valid {kind}: {error}") from error
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
