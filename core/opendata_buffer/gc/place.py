"""How far the collector has come: a small object beside the manifest, so that runs can be short.

A job that runs for a minute an hour cannot look at a large prefix in one go. It goes on where
the run before it stopped, and after the last object begins again at the first. The place is a
hint: a lost or a wrong one makes some objects wait for a round longer, and nothing else.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass

from opendata_buffer.config import QueueConfig
from opendata_buffer.errors import CorruptData, StorageError
from opendata_buffer.formats.keys import MAX_KEY_BYTES
from opendata_buffer.formats.sidecar import Sidecar
from opendata_buffer.queue.cas import CasStore, Done, Gone, Register
from opendata_buffer.runtime import Runtime

__all__ = ["PLACE_NAME", "Place", "SavedPlace"]

log = logging.getLogger(__name__)

PLACE_NAME = "_gc.json"
_PLACE = Sidecar(
    "the garbage collector's place",
    "Nothing depends on it: the collector writes another.",
)


@dataclass(frozen=True, slots=True)
class Place:
    """Where to go on.

    Attributes:
        after: Key of the last object dealt with; empty for the beginning.
    """

    after: str = ""

    def to_json(self) -> bytes:
        """The object's bytes."""
        return json.dumps({"version": _PLACE.version, "after": self.after}).encode()

    @classmethod
    def from_json(cls, raw: bytes) -> Place:
        """Read the object's bytes.

        Raises:
            CorruptData: They are no place of this version.
        """
        return cls(_PLACE.decode(raw).text("after"))


class SavedPlace:
    """The place of the collectors of one queue, at ``<prefix>/_gc.json``.

    Args:
        store: Where the queue lives.
        config: The queue's data prefix; backoff and deadline of a write.
        runtime: Clock and jitter.
    """

    def __init__(self, store: CasStore, config: QueueConfig, runtime: Runtime) -> None:
        self._store = store
        self._config = config
        self._runtime = runtime
        self._prefix = config.data_path_prefix
        self._register = self._opened()
        self._known = Place()

    def load(self) -> str:
        """Key after which to go on; empty for the beginning."""
        try:
            found = self._register.read()
        except CorruptData as error:
            log.warning("the collector begins at the first object: %s", error)
            found = Done(None)
        if isinstance(found, Gone):
            self._register = self._opened()
        self._known = (found.value if isinstance(found, Done) else None) or Place()
        # Another prefix's key would skip everything, and what is no key fails each listing.
        after = self._known.after
        return after if after.startswith(f"{self._prefix}/") and _is_key(after) else ""

    def save(self, after: str) -> None:
        """Remember a key; whoever saves last wins, and a failure is only logged."""
        place = Place(after)
        if place == self._known:
            return
        try:
            outcome = self._register.update(lambda _: place, from_memory=True)
        except (CorruptData, StorageError) as error:
            log.warning("the collector's place was not saved: %s", error)
            return
        if isinstance(outcome, Done):
            self._known = place
        elif isinstance(outcome, Gone):
            # Somebody deleted it. This register never writes it again; the next page's does.
            self._register = self._opened()

    def _opened(self) -> Register[Place]:
        return Register(
            self._store,
            f"{self._prefix}/{PLACE_NAME}",
            decode=self._read,
            encode=Place.to_json,
            runtime=self._runtime,
            settings=self._config,
            max_bytes=_PLACE.max_bytes,
            unreadable=_PLACE.unreadable,
        )

    def _read(self, raw: bytes) -> Place:
        """The place; the beginning where there is none, so that the next one can be saved."""
        try:
            return Place.from_json(raw)
        except CorruptData as error:
            key = self._register.key
            log.warning("the collector begins at the first object: %r: %s", key, error)
            return Place()


def _is_key(text: str) -> bool:
    try:
        return len(text.encode()) <= MAX_KEY_BYTES
    except UnicodeEncodeError:
        return False
