"""``manifest dump`` and ``batch dump``: one object as JSON."""

from __future__ import annotations

import json
import os
import sys
from base64 import b64encode
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import click

from opendata_buffer.cli.errors import Failure
from opendata_buffer.cli.options import NATURAL, max_batch_bytes_option, store_options
from opendata_buffer.cli.repair import rebuild
from opendata_buffer.cli.target import store_options_of
from opendata_buffer.config import StoreOptions
from opendata_buffer.errors import CorruptData, InvalidInput, PermanentStorageError
from opendata_buffer.formats import batch as batch_format
from opendata_buffer.formats import manifest as manifest_format
from opendata_buffer.formats.batch import largest_object, open_batch, split_records
from opendata_buffer.formats.entries import QueueEntry
from opendata_buffer.formats.manifest import MAX_MANIFEST_BYTES, Manifest
from opendata_buffer.stores.base import NotModified
from opendata_buffer.stores.open import open_store

__all__ = ["batch", "batch_document", "manifest", "manifest_document", "read_object"]

_CHUNK = 1 << 20


@click.group()
def manifest() -> None:
    """Print a manifest, or rebuild it."""


manifest.add_command(rebuild)


@manifest.command("dump")
@click.argument("object_", metavar="PATH_OR_URL")
@store_options
def manifest_dump(object_: str, **store: Any) -> None:
    """Print a manifest as JSON.

    PATH_OR_URL names the object itself: a file, file:///dir/ingest/manifest, or
    s3://bucket/ingest/manifest.
    """
    try:
        raw = read_object(object_, store_options_of(store), max_bytes=MAX_MANIFEST_BYTES)
        document = manifest_document(raw)
    except CorruptData as error:
        raise Failure(f"{object_!r} is no sound manifest: {error}") from error
    sys.stdout.writelines(document)  # click.echo() would flush after each record


@click.group()
def batch() -> None:
    """Print a batch object."""


@batch.command("dump")
@click.argument("object_", metavar="PATH_OR_URL")
@click.option("--limit", type=NATURAL, metavar="N", help="Show only the first N records.")
@max_batch_bytes_option
@store_options
def batch_dump(object_: str, limit: int | None, max_batch_bytes: int, **store: Any) -> None:
    """Print a batch object as JSON, records in base64.

    PATH_OR_URL names the object itself: a file, or s3://bucket/ingest/<ULID>.batch.
    """
    options, largest = store_options_of(store), largest_object(max_batch_bytes)
    try:
        raw = read_object(object_, options, max_bytes=largest)
        document = batch_document(raw, limit=limit, max_bytes=max_batch_bytes)
    except CorruptData as error:
        raise Failure(f"{object_!r} is no sound batch: {error}") from error
    sys.stdout.writelines(document)  # click.echo() would flush after each record


def _document(head: Mapping[str, Any], name: str, items: Iterable[Any]) -> Iterator[str]:
    """A JSON object of a few values and one list that may be long, a line for each item."""
    yield json.dumps(dict(head))[:-1] + f', "{name}": ['
    separator = "\n  "
    for item in items:
        yield separator + json.dumps(item)
        separator = ",\n  "
    yield "]}\n" if separator == "\n  " else "\n]}\n"


def manifest_document(raw: bytes) -> Iterator[str]:
    """A manifest as text, in pieces. Every entry is checked before the first is printed.

    Raises:
        CorruptManifest: It breaks the v1 format.
    """
    parsed = Manifest.parse(raw)
    parsed.entries()
    head = {
        "version": manifest_format.VERSION,
        "epoch": parsed.epoch,
        "next_sequence": parsed.next_sequence,
    }
    return _document(head, "entries", map(_entry, parsed.entries()))


def batch_document(raw: bytes, *, limit: int | None, max_bytes: int) -> Iterator[str]:
    """A batch as text, in pieces. All of it is decoded; ``limit`` shortens the list shown.

    Raises:
        CorruptBatch: It breaks the v1 format, or decodes to more than ``max_bytes``.
    """
    footer, block = open_batch(raw, max_bytes)
    records = split_records(block, footer.record_count)
    head = {
        "version": batch_format.VERSION,
        "compression": footer.compression.name.lower(),
        "record_count": footer.record_count,
    }
    return _document(head, "records_base64", map(_base64, records[:limit]))


def read_object(target: str, options: StoreOptions, *, max_bytes: int) -> bytes:
    """Read the object that a local path or URL names.

    Args:
        target: A file, ``file:///dir/name``, or ``s3://bucket/key``.
        options: How to reach a cloud.
        max_bytes: A larger object is not read.

    Raises:
        InvalidInput: It names no object: a directory, a bucket, a file that does not exist.
        CorruptData: It has more than ``max_bytes``.
        ObjectNotFound: The store has no such object.
        TransientStorageError, PermanentStorageError: It could not be read.
    """
    if "://" not in target:
        return _read_file(Path(os.path.expanduser(target)), max_bytes)
    scheme, _, rest = target.partition("://")
    if scheme.lower() == "file":
        parts = urlsplit(target)
        if parts.netloc not in ("", "localhost") or parts.query or parts.fragment:
            raise InvalidInput(
                f"{target!r} is no file URL: use file:///dir/name with '?' and '#' written as "
                "%3F and %23, or a plain path"
            )
        return _read_file(Path(unquote(parts.path)), max_bytes)
    # Keys are not decoded: '%', '#' and '?' are ordinary characters of a key (failure F24).
    bucket, _, key = rest.partition("/")
    store = open_store(f"{scheme}://{bucket}", options)
    if not key or key.endswith("/"):
        raise InvalidInput(
            f"{target!r} names no object: append its key, for example "
            f"{target.rstrip('/')}/ingest/manifest"
        )
    got = store.get(key, max_bytes=max_bytes)
    assert not isinstance(got, NotModified)  # only an answer to if_changed
    return got.data


def _read_file(path: Path, max_bytes: int) -> bytes:
    data = bytearray()
    try:
        with path.open("rb") as file:
            # The size of a pipe or a device is unknown.
            while chunk := file.read(_CHUNK):
                data += chunk
                if len(data) > max_bytes:
                    raise CorruptData(f"it has more than {max_bytes} bytes")
        return bytes(data)
    except FileNotFoundError:
        raise InvalidInput(f"there is no file {str(path)!r}: check the path") from None
    except IsADirectoryError:
        likely = path / "ingest" / "manifest"
        example = str(likely) if likely.is_file() else f"{path}/ingest/manifest"
        raise InvalidInput(
            f"{str(path)!r} is a directory: name one object in it, for example {example}"
        ) from None
    except OSError as error:
        raise PermanentStorageError(f"cannot read {str(path)!r}: {error.strerror}") from error


def _entry(entry: QueueEntry) -> dict[str, Any]:
    return {
        "sequence": entry.sequence,
        "location": entry.location,
        "metadata": [
            {
                "start_index": each.start_index,
                "ingestion_time_ms": each.ingestion_time_ms,
                "payload_base64": _base64(each.payload),
            }
            for each in entry.metadata
        ],
    }


def _base64(data: bytes) -> str:
    return b64encode(data).decode()
