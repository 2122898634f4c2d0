"""How a command names a queue, for errors that tell what to type."""

from __future__ import annotations

import shlex

from opendata_buffer.config import DEFAULT_DATA_PATH_PREFIX, QueueConfig

__all__ = ["shell_words", "words_of"]


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
