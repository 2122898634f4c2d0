"""Classify the objects that a history leaves in the store, and find orphans.

A store must not fill with objects that no program needs. After each history all programs stop, the
grace period passes, and the collector runs. Every object that is left must then belong to one of
:data:`KINDS`, which states why it stays. Any other object is an orphan: nothing would ever delete
it, so the history fails.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from opendata_buffer.config import QueueConfig
from opendata_buffer.errors import StorageError
from opendata_buffer.formats.batch import name_time_ms, parse_location
from opendata_buffer.formats.manifest import Manifest
from opendata_buffer.queue import log_index
from opendata_buffer.queue.log import Log
from opendata_buffer.queue.log_index import LogIndex, index_key
from opendata_buffer.queue.log_parts import end_of_part
from opendata_buffer.stores.base import Blob
from tests.simulation.deployment import Deployment


@dataclass(frozen=True)
class Left:
    """The part of the final store that decides which objects may stay."""

    queued: frozenset[str]
    """Locations that a manifest names."""
    indexes: dict[str, LogIndex]
    """The index of each log, by data prefix."""
    oldest_ms: dict[str, int]
    """Time in the name of the oldest batch that a manifest or a segment of a log keeps, in
    milliseconds, by data prefix."""


@dataclass(frozen=True)
class Kind:
    """A kind of object that may stay, and the reason."""

    name: str
    reason: str
    holds: Callable[[str, Left], bool]


_STATE = re.compile(
    r".*/manifest|.*/_(owner|gc|consumer|acknowledged|broker|log|commit)\.json|_topic\.json"
    r"|.*/_claims(/[^/]+|-[^/]+)?\.json"
)


def _prefix_of(key: str) -> str:
    return key.partition("/_")[0]


def _is_position(key: str, left: Left) -> bool:
    index = left.indexes.get(_prefix_of(key))
    return "/_readers/" in key and index is not None


def _is_registered(key: str, left: Left) -> bool:
    name = key.rpartition("/")[2].removesuffix(".json")
    return _is_position(key, left) and name in left.indexes[_prefix_of(key)].readers


def _is_remembered(key: str, left: Left) -> bool:
    index = left.indexes.get(_prefix_of(key))
    if "/_log/" not in key or index is None:
        return False
    return end_of_part(key) > index.floor - log_index.REMEMBERED


def _is_held_back(key: str, left: Left) -> bool:
    named_ms = name_time_ms(key)
    return any(
        named_ms is not None and parse_location(key, prefix) is not None and named_ms >= oldest_ms
        for prefix, oldest_ms in left.oldest_ms.items()
    )


KINDS = (
    Kind("state", "one small object for each queue, topic, writer's name, or reader",
         lambda key, left: _STATE.fullmatch(key) is not None or _is_registered(key, left)),
    Kind("position of an expired reader", "an error that lists the losses needs it if the "
         "reader returns",
         lambda key, left: _is_position(key, left)),
    Kind("quarantine", "copies stay until a person deletes them",
         lambda key, left: "/_quarantine/" in key),
    Kind("copy by a repair", "a person may want to look at the replaced object",
         lambda key, left: ".broken-" in key or ".wrong-" in key),
    Kind("proof of a broker's client", "the next broker deletes what killed clients have left",
         lambda key, left: "/manifest._clients/" in key),
    Kind("segment that is remembered", "a reader that starts compares with it what a writer queues "
         "a second time (decision 0034)", _is_remembered),
    Kind("queued", "a repeat or a marker at the end of a queue, or the last micro-batch of an idle "
         "query, waits for the next batch",
         lambda key, left: key in left.queued),
    Kind("newer than the oldest kept batch", "the collector deletes it when that one is read "
         "(OpenData RFC 0001)", _is_held_back),
)  # fmt: skip


def look(deployment: Deployment) -> tuple[Counter[str], list[str]]:
    """Count the objects of each kind, and list the orphans.

    Returns:
        Objects by kind, and the keys that belong to no kind.
    """
    queued: set[str] = set()
    indexes: dict[str, LogIndex] = {}
    oldest_ms: dict[str, int] = {}
    names = {*deployment.names()}
    if deployment.is_topic:  # also those that have left it
        names |= {info.key.partition("/")[0] for info in deployment.memory.list("p-").objects}
    for name in names:
        config = deployment.config(QueueConfig, name)
        for key in (config.manifest_path, index_key(config)):
            try:
                blob = deployment.memory.get(key)
            except StorageError:
                continue
            assert isinstance(blob, Blob)
            if key == config.manifest_path:
                locations = Manifest.parse(blob.data).locations()
                queued.update(locations)
                if locations:
                    times = [name_time_ms(location) or 0 for location in locations]
                    oldest_ms[config.data_path_prefix] = min(times)
            else:
                index = LogIndex.from_json(blob.data)
                indexes[config.data_path_prefix] = index
                log = Log(deployment.memory, config, deployment.director)
                kept_ms = log.segments.oldest_name_ms(index)
                if kept_ms is not None:
                    prefix = config.data_path_prefix
                    oldest_ms[prefix] = min(kept_ms, oldest_ms.get(prefix, kept_ms))
    left = Left(frozenset(queued), indexes, oldest_ms)
    counts, orphans = Counter[str](), []
    for info in deployment.memory.list("").objects:
        kind = next((kind for kind in KINDS if kind.holds(info.key, left)), None)
        if kind is None:
            orphans.append(info.key)
        else:
            counts[kind.name] += 1
    return counts, orphans
