"""How a queue is named, for errors that tell which one it is and what to type."""

from __future__ import annotations

import shlex

from opendata_buffer.config import DEFAULT_DATA_PATH_PREFIX, QueueConfig
from opendata_buffer.errors import CorruptManifest
from opendata_buffer.formats.manifest import Manifest, told

__all__ = ["named_manifest", "shell_words", "words_of"]


def words_of(url: str, data_path_prefix: str, manifest_path: str | None) -> list[str]:
    """Store and options; those that are the default are left out.

    Args:
        url: The store's.
        data_path_prefix: The queue's.
        manifest_path: The queue's; None if it is where it is by default.
    """
    found = [url]
    if data_path_prefix != DEFAULT_DATA_PATH_PREFIX:
        found += ["--data-path-prefix", data_path_prefix]
    if manifest_path not in (None, f"{data_path_prefix}/manifest"):
        found += ["--manifest-path", str(manifest_path)]
    return found


def shell_words(url: str, config: QueueConfig) -> str:
    """The same as text, quoted where a shell needs it."""
    return shlex.join(words_of(url, config.data_path_prefix, config.manifest_path))


def named_manifest(data: bytes, url: str, config: QueueConfig) -> Manifest:
    """A queue's manifest, which names itself where its entries turn out to be damaged.

    Raises:
        CorruptManifest: Names the command; whoever has read the bytes adds whose they are.
    """
    words = shell_words(url, config)
    try:
        return Manifest.parse(data).named(f"{config.manifest_path!r} in {url}", words)
    except CorruptManifest as error:
        raise CorruptManifest(told(str(error), words)) from error
