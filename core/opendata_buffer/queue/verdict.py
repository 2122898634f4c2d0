"""What the probe found of a store, kept beside the owner marker for the next process.

The probe makes some forty requests, which takes a second on S3 and five on a store that takes
one write a second to one object. Its verdict is about the store and not about a process, so it is
kept in ``<prefix>/_probe.json``::

    {"version": 1, "store": "https://s3.eu-west-1.amazonaws.com/bucket", "probed_ms": 1767225600000}

It counts for that endpoint and bucket alone, because a queue may be copied to another store with
all its objects, and for a week, because what answers there may be replaced. No verdict, one that
cannot be read, and one that could not be written cost a probe and nothing else.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Protocol

from opendata_buffer.config import QueueConfig
from opendata_buffer.errors import CorruptData, OpenDataBufferError
from opendata_buffer.formats.sidecar import Sidecar
from opendata_buffer.queue.cas import CasStore, Done, Register
from opendata_buffer.runtime import Runtime
from opendata_buffer.stores import Probed

__all__ = ["VERDICT_NAME", "StoreVerdict"]

log = logging.getLogger(__name__)

VERDICT_NAME = "_probe.json"
KEPT_MS = 7 * 24 * 3_600_000
"""How old a verdict may be."""

_VERDICT = Sidecar("the verdict of the probe", "It is written anew.", max_bytes=16 * 1024)
_DEADLINE_MS = 5_000


class VerdictStore(CasStore, Protocol):
    """What keeping a verdict needs of a store."""


@dataclass(frozen=True, slots=True)
class _Verdict:
    subject: str
    probed_ms: int


class StoreVerdict:
    """Whether a store is safe: remembered by this process, kept beside the queue, or probed.

    Args:
        store: The store.
        config: The queue whose prefix keeps the verdict.
        runtime: Clock.
    """

    def __init__(self, store: VerdictStore, config: QueueConfig, runtime: Runtime) -> None:
        self._store = store
        self._config = config
        self._runtime = runtime
        self._probed = False
        # Keeping it is worth a short wait and no more.
        quick = replace(config, cas_deadline_ms=min(_DEADLINE_MS, config.cas_deadline_ms))
        self._register = Register(
            store,
            f"{config.data_path_prefix}/{VERDICT_NAME}",
            decode=_decode,
            encode=_encode,
            runtime=runtime,
            settings=quick,
            max_bytes=_VERDICT.max_bytes,
            unreadable=_VERDICT.unreadable,
        )

    def check(self) -> None:
        """Make sure that the store honours conditional writes (failure F12).

        Raises:
            As :meth:`opendata_buffer.stores.ConditionalPut.check_conditional_writes`.
        """
        store = self._store
        if isinstance(store, Probed) and not store.is_probed:
            if self._is_kept(store.probe_subject):
                store.take_as_probed()
                return
            self._probed = True
        store.check_conditional_writes(self._config.manifest_path)

    def keep(self) -> None:
        """Keep what :meth:`check` has found, if it had to ask the store; raises nothing.

        Called when the prefix is claimed: nothing is written into another queue's.
        """
        store = self._store
        if not self._probed or not isinstance(store, Probed):
            return
        self._probed = False
        now = _Verdict(store.probe_subject, self._runtime.now_ms())
        try:
            # Whose answer is lost may be written twice.
            self._register.update(lambda _: now)
        except OpenDataBufferError as error:
            log.info("what the probe found was not kept at %s: %s", self._register.key, error)

    def _is_kept(self, subject: str) -> bool:
        try:
            found = self._register.read()
        except OpenDataBufferError as error:
            # The probe will say what is wrong with the store.
            log.debug("%s was not read: %s", self._register.key, error)
            return False
        kept = found.value if isinstance(found, Done) else None
        if kept is None or kept.subject != subject:
            return False
        return 0 <= self._runtime.now_ms() - kept.probed_ms < KEPT_MS


def _encode(verdict: _Verdict) -> bytes:
    return _VERDICT.encode({"store": verdict.subject, "probed_ms": verdict.probed_ms})


def _decode(data: bytes) -> _Verdict:
    try:
        fields = _VERDICT.decode(data)
        return _Verdict(fields.text("store"), fields.number("probed_ms"))
    except CorruptData as error:
        log.debug("%s", error)
        return _Verdict("", 0)  # a hint that says nothing
