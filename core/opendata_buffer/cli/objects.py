"""Commands about one object, named by itself: ``manifest dump``, ``batch dump``."""

from __future__ import annotations

import sys
from typing import Any

import click

from opendata_buffer.cli.errors import Failure
from opendata_buffer.cli.options import (
    NATURAL,
    max_batch_bytes_option,
    store_options,
    store_options_of,
)

__all__ = ["batch", "manifest"]

# Commands import what they need: --help and usage errors answer without loading Arrow.


@click.group()
def manifest() -> None:
    """Look at a manifest, or make it again."""


@click.group()
def batch() -> None:
    """Look at a batch object."""


@manifest.command("dump")
@click.argument("object_", metavar="PATH_OR_URL")
@store_options
def manifest_dump(object_: str, **store: Any) -> None:
    """Print a manifest as JSON.

    PATH_OR_URL names the object itself: a file, file:///dir/ingest/manifest, or
    s3://bucket/ingest/manifest.
    """
    from opendata_buffer.cli.dump import manifest_document, read_object
    from opendata_buffer.errors import CorruptData
    from opendata_buffer.formats.manifest import MAX_MANIFEST_BYTES

    try:
        raw = read_object(object_, store_options_of(store), max_bytes=MAX_MANIFEST_BYTES)
        document = manifest_document(raw)
    except CorruptData as error:
        raise Failure(f"{object_!r} is no sound manifest: {error}") from error
    sys.stdout.writelines(document.lines())  # click.echo() would flush at each record


@batch.command("dump")
@click.argument("object_", metavar="PATH_OR_URL")
@click.option("--limit", type=NATURAL, metavar="N", help="Show only the first N records.")
@max_batch_bytes_option
@store_options
def batch_dump(object_: str, limit: int | None, max_batch_bytes: int, **store: Any) -> None:
    """Print a batch object as JSON, records in base64.

    PATH_OR_URL names the object itself: a file, or s3://bucket/ingest/<ULID>.batch.
    """
    from opendata_buffer.cli.dump import batch_document, read_object
    from opendata_buffer.errors import CorruptData
    from opendata_buffer.formats.batch import largest_object

    try:
        raw = read_object(
            object_, store_options_of(store), max_bytes=largest_object(max_batch_bytes)
        )
        document = batch_document(raw, limit=limit, max_bytes=max_batch_bytes)
    except CorruptData as error:
        raise Failure(f"{object_!r} is no sound batch: {error}") from error
    sys.stdout.writelines(document.lines())  # click.echo() would flush at each record
