"""The manifest of a queue as an object in a store."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from opendata_buffer.config import (
    QueueConfig,
)
from opendata_buffer.errors import (
    CorruptManifest,
)
from opendata_buffer.formats.manifest import FOOTER_SIZE, Manifest, NewEntry
from opendata_buffer.queue.hints import queue_name
from opendata_buffer.queue.stored_manifest import parse_manifest

SOUND = Manifest.empty().append([NewEntry(f"p-1/{n}.batch") for n in range(3)])
PARTITION = QueueConfig(store="s3://bucket", data_path_prefix="p-1")
COMMAND = "'opendata-buffer fsck s3://bucket --data-path-prefix p-1 --repair'"


@pytest.mark.parametrize(
    "read",
    [
        Manifest.entries,
        Manifest.locations,
        lambda manifest: manifest.drop_through(0),
        lambda manifest: manifest.append([NewEntry("p-1/x.batch")]).with_epoch(1).entries(),
        lambda manifest: manifest.replace(0, NewEntry("p-1/x.batch")),
        lambda manifest: manifest.find("p-1/2.batch"),
    ],
)
def test_the_error_about_damage_after_the_first_entry_names_the_manifest_and_the_command(
    read: Callable[[Manifest], object],
) -> None:
    size = (SOUND.size - FOOTER_SIZE) // 3
    damaged = bytearray(SOUND.raw)
    damaged[size + 4] ^= 0xFF  # the second entry's sequence
    manifest = parse_manifest(bytes(damaged), queue_name("s3://bucket", PARTITION))
    with pytest.raises(CorruptManifest) as caught:
        read(manifest)
    text = str(caught.value)
    assert text.startswith("'p-1/manifest' in s3://bucket: manifest entry at byte")
    assert COMMAND in text
    assert text.count("s3://bucket") == 3
