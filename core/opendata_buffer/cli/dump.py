"""``manifest dump`` and ``batch dump``: one object as JSON."""

from __future__ import annotations

import json
import os
from base64 import b64encode
from typing import Any
from urllib.parse import unquote

import click

from opendata_buffer.cli import options
from opendata_buffer.cli.errors import Failure
from opendata_buffer.cli.repair import rebuild
from opendata_buffer.cli.target import store_options_of
from opendata_buffer.config import StoreOptions
from opendata_buffer.errors import CorruptData, InvalidInput
from opendata_buffer.formats import batch as batch_format
from opendata_buffer.formats import manifest as manifest_format
from opendata_buffer.formats.batch import largest_object, open_batch, split_records
from opendata_buffer.formats.manifest import MAX_MANIFEST_BYTES, Manifest
from opendata_buffer.quarantine import metadata_json
from opendata_buffer.stores.base import read_bytes
from opendata_buffer.stores.open import open_store


@click.group()
def manifest() -> None:
    """Print a manifest, or rebuild it."""


manifest.add_command(rebuild)


@manifest.command("dump")
@click.argument("object_", metavar="PATH_OR_URL")
@options.store
def manifest_dump(object_: str, **store: Any) -> None:
    """Print a manifest as JSON.

    PATH_OR_URL names the object itself: a file, file:///dir/ingest/manifest, or
    s3://bucket/ingest/manifest.
    """
    try:
        raw = read_object(object_, store_options_of(store), max_bytes=MAX_MANIFEST_BYTES)
        parsed = Manifest.parse(raw)
        entries = [
            {
                "sequence": entry.sequence,
                "location": entry.location,
                "metadata": metadata_json(entry.metadata),
            }
            for entry in parsed.entries()
        ]
    except CorruptData as error:
        raise Failure(f"{object_!r} is not a valid manifest: {error}") from error
    fields = {
        "version": manifest_format.VERSION,
        "epoch": parsed.epoch,
        "next_sequence": parsed.next_sequence,
        "entries": entries,
    }
    click.echo(json.dumps(fields, indent=2))


@click.group()
def batch() -> None:
    """Print a batch object."""


@batch.command("dump")
@click.argument("object_", metavar="PATH_OR_URL")
@options.max_batch_bytes
@options.store
def batch_dump(object_: str, max_batch_bytes: int, **store: Any) -> None:
    """Print a batch object as JSON, records in base64.

    PATH_OR_URL names the object itself: a file, or s3://bucket/ingest/<ULID>.batch.
    """
    largest = largest_object(max_batch_bytes)
    try:
        raw = read_object(object_, store_options_of(store), max_bytes=largest)
        footer, block = open_batch(raw, max_batch_bytes)
        records = split_records(block, footer.record_count)
    except CorruptData as error:
        raise Failure(f"{object_!r} is not a valid batch: {error}") from error
    fields = {
        "version": batch_format.VERSION,
        "compression": footer.compression.name.lower(),
        "record_count": footer.record_count,
        "records_base64": [b64encode(each).decode() for each in records],
    }
    click.echo(json.dumps(fields, indent=2))


def read_object(target: str, options: StoreOptions, *, max_bytes: int) -> bytes:
    """Read the object that a path, ``file:///dir/name`` or ``s3://bucket/key`` names."""
    is_file = target.lower().startswith("file:")
    if is_file or "://" not in target:
        url, key = os.path.split(target)
        url, key = url or ".", unquote(key) if is_file else key
    else:
        # Keys are not decoded: '%', '#' and '?' are ordinary characters of a key (failure F24).
        scheme, _, rest = target.partition("://")
        bucket, _, key = rest.partition("/")
        url = f"{scheme}://{bucket}"
    store = open_store(url, options)
    if not key or key.endswith("/"):
        raise InvalidInput(
            f"{target!r} names no object: append its key, for example "
            f"{target.rstrip('/')}/ingest/manifest"
        )
    return read_bytes(store, key, max_bytes)
