"""One object as JSON, for people and scripts: what the ``dump`` commands print."""

from __future__ import annotations

import json
import os
from base64 import b64encode
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from opendata_buffer.config import StoreOptions
from opendata_buffer.errors import CorruptData, InvalidInput, PermanentStorageError
from opendata_buffer.formats import batch as batch_format
from opendata_buffer.formats import manifest as manifest_footer
from opendata_buffer.formats.batch import open_batch, split_records
from opendata_buffer.formats.manifest import Manifest, QueueEntry
from opendata_buffer.stores.base import NotModified
from opendata_buffer.stores.open import open_store

__all__ = ["Document", "batch_document", "manifest_document", "read_object"]

_CHUNK = 1 << 20


@dataclass(frozen=True)
class Document:
    """A JSON object of a few values and one list, printed item by item.

    Attributes:
        head: The values before the list.
        name: The list's name.
        items: The list; may be long, each is written on a line of its own.
    """

    head: Mapping[str, Any]
    name: str
    items: Iterable[Any]

    def lines(self) -> Iterator[str]:
        """The text, in pieces that end where a line may."""
        yield json.dumps(dict(self.head))[:-1] + f', "{self.name}": ['
        separator = "\n  "
        for item in self.items:
            yield separator + json.dumps(item)
            separator = ",\n  "
        yield "]}\n" if separator == "\n  " else "\n]}\n"


def manifest_document(raw: bytes) -> Document:
    """A manifest, every entry checked before the first is printed.

    Raises:
        CorruptManifest: It breaks the v1 format anywhere.
    """
    parsed = Manifest.parse(raw)
    parsed.entries()
    head = {
        "version": manifest_footer.VERSION,
        "epoch": parsed.epoch,
        "next_sequence": parsed.next_sequence,
    }
    return Document(head, "entries", map(_entry, parsed.entries()))


def batch_document(raw: bytes, *, limit: int | None, max_bytes: int) -> Document:
    """A batch, decoded whole; ``limit`` shortens only the list that is shown.

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
    return Document(head, "records_base64", map(_base64, records[:limit]))


def read_object(target: str, options: StoreOptions, *, max_bytes: int) -> bytes:
    """Read the one object that a local path or URL names.

    Args:
        target: A file, ``file:///dir/name``, or ``s3://bucket/key``.
        options: How to reach a cloud.
        max_bytes: A larger object is not read.

    Raises:
        InvalidInput: It names no object: a directory, a bucket, a file that is not there.
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
    # Keys stay raw: '%', '#' and '?' are characters of a key like any other (failure F24).
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
            # A pipe or a device does not tell its size.
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
