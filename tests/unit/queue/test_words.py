"""How a command names a queue."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from opendata_buffer.config import QueueConfig
from opendata_buffer.errors import CorruptManifest
from opendata_buffer.formats.manifest import FOOTER_SIZE, Manifest, NewEntry
from opendata_buffer.queue.rollback_checks import named_manifest, shell_words


def test_what_is_the_default_is_left_out() -> None:
    url = "s3://bucket"
    assert shell_words(url, QueueConfig(store=url)) == url
    config = QueueConfig(store=url, data_path_prefix="p-00003-04vf")
    assert shell_words(url, config) == f"{url} --data-path-prefix p-00003-04vf"
    config = QueueConfig(store=url, data_path_prefix="a b", manifest_path="m")
    assert shell_words(url, config) == f"{url} --data-path-prefix 'a b' --manifest-path m"


SOUND = Manifest.empty().append([NewEntry(f"p-1/{n}.batch") for n in range(3)])
CONFIG = QueueConfig(store="s3://bucket", data_path_prefix="p-1")
COMMAND = "'opendata-buffer manifest rebuild s3://bucket --data-path-prefix p-1'"


@pytest.mark.parametrize(
    "look",
    [
        Manifest.entries,
        Manifest.locations,
        Manifest.check,
        lambda manifest: manifest.drop_through(0),
        lambda manifest: manifest.append([NewEntry("p-1/x.batch")]).with_epoch(1).check(),
        lambda manifest: manifest.replace(0, NewEntry("p-1/x.batch")),
        lambda manifest: manifest.find("p-1/2.batch"),
    ],
)
def test_damage_behind_the_first_entry_names_the_manifest_and_the_command(
    look: Callable[[Manifest], object],
) -> None:
    size = (SOUND.size - FOOTER_SIZE) // 3
    damaged = bytearray(SOUND.raw)
    damaged[size + 4] ^= 0xFF  # the second entry's sequence
    manifest = named_manifest(bytes(damaged), "s3://bucket", CONFIG)
    with pytest.raises(CorruptManifest) as caught:
        look(manifest)
    text = str(caught.value)
    assert text.startswith("'p-1/manifest' in s3://bucket: manifest entry at byte")
    assert COMMAND in text
    assert text.count("s3://bucket") == 2


def test_what_is_no_manifest_at_all_names_the_command() -> None:
    with pytest.raises(CorruptManifest) as caught:
        named_manifest(b"<html>", "s3://bucket", CONFIG)
    assert COMMAND in str(caught.value)
