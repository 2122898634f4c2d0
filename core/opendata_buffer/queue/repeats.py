"""Which entries name a batch that was queued before: a location is delivered once (failure F41).

A v1 writer that gets no answer to an append does not look for it in the manifest, and appends the
same location again. The first entry with a location counts, and later ones are repeats. While the
first one is queued the manifest shows that. Before a consumer takes acknowledged entries out, it
notes the last :data:`MOST`, the sequence of each by a hash of its location, in
``<prefix>/_acknowledged.json``::

    {"version": 1, "queue": "01J5...", "batches": {"m3Xk...": 41, "Zc0u...": 42}}

An entry repeats only one with a lower sequence, so a note whose acknowledgement was never written
hides nothing (decision 0034). Batches of transactions and messages are left out:
:mod:`opendata_buffer.consumer.isolation` knows their repeats by name.
"""

from __future__ import annotations

import logging
from base64 import b64encode
from collections import deque
from collections.abc import Iterable
from hashlib import blake2b
from itertools import islice, takewhile
from operator import itemgetter

from opendata_buffer import outcomes
from opendata_buffer.config import QueueConfig
from opendata_buffer.errors import CorruptData, PermanentStorageError, TransientStorageError
from opendata_buffer.formats.batch import parse_location
from opendata_buffer.formats.manifest import BatchDescriptor, QueueEntry
from opendata_buffer.queue.cas import LARGEST, CasObject, CasStore, Sidecar, is_number
from opendata_buffer.runtime import Runtime

log = logging.getLogger(__name__)

MOST = 2_048
"""Acknowledged batches that are remembered."""

_NAME = "_acknowledged.json"
_NOTE = Sidecar(
    "the note of acknowledged batches",
    "Delete it: a batch that another client queued twice may then be delivered twice.",
    max_bytes=256 * 1024,
)

_Noted = tuple[str, dict[str, int]]
"""The queue's id; and of each batch its sequence, by the hash of its location."""


def _encode(noted: _Noted) -> bytes:
    return _NOTE.encode({"queue": noted[0], "batches": noted[1]})


def _decode(data: bytes) -> _Noted:
    fields = _NOTE.decode(data)
    batches = fields.mapping("batches")
    if all(map(is_number, batches.values())):
        return fields.text("queue"), batches
    raise fields.wrong("batches", "a sequence for each hash")


def _nothing_known(error: CorruptData, version: str) -> _Noted:
    log.warning("repeats of acknowledged batches are not recognised: %s", error)
    return "", {}


def _hash(location: str) -> str:
    # 96 bits: among MOST others a new location is taken for one of them once in 2^85 times. As the
    # note has it: made of bytes anew, 2,048 of them would be most of what an acknowledgement takes.
    digest = blake2b(location.encode(errors="surrogatepass"), digest_size=12).digest()
    return b64encode(digest).decode()


class Repeats:
    """Recognises repeats among the entries of one queue, by its id; an empty one takes the note of
    whatever queue is there. Not thread-safe."""

    def __init__(
        self, store: CasStore, config: QueueConfig, runtime: Runtime, queue_id: str
    ) -> None:
        self._prefix = config.data_path_prefix
        self._queue_id = queue_id
        self._object: CasObject[_Noted] = CasObject(
            store,
            f"{self._prefix}/{_NAME}",
            decode=_decode,
            encode=_encode,
            runtime=runtime,
            settings=config,
            sidecar=_NOTE,
            if_unreadable=_nothing_known,
        )
        self._first: dict[str, int] = {}
        self._unnoted: deque[str] = deque()

    def load(self) -> None:
        """Read what the consumers before this one have noted; raises what reading raises."""
        found = self._object.read()
        if isinstance(found, tuple) and self._queue_id in ("", found[0]):
            self._first = found[1] | self._first

    def first_of(self, entry: QueueEntry) -> int | None:
        """The sequence that the next entry repeats, or None. Any may be again."""
        if "=" in entry.location:  # most have none, and parsing takes longer than hashing
            named = parse_location(entry.location, self._prefix)
            if named is not None and (named.txn is not None or named.message is not None):
                return None
        name, sequence = _hash(entry.location), entry.sequence
        first = self._first.get(name, LARGEST)
        if first < sequence:
            log.info("entry %d repeats %d: %s", sequence, first, entry.location)
            return first
        if first > sequence:
            self._first[name] = sequence
            self._unnoted.append(name)
        return None

    def described(self, entries: Iterable[QueueEntry]) -> list[BatchDescriptor]:
        """The next entries, in order, with :attr:`.BatchDescriptor.repeats`."""
        return [BatchDescriptor.of(each, repeats=self.first_of(each)) for each in entries]

    def forget(self, location: str) -> None:
        """The batch is given up: should it be queued again, it is delivered."""
        name = _hash(location)
        if self._first.pop(name, None) is not None and name in self._unnoted:
            self._unnoted.remove(name)

    def note(self, before: int) -> None:
        """Note all described entries before a sequence; called before they leave the manifest.

        Where writing it is not allowed, a warning says what follows. TransientStorageError where it
        is not known to be stored: nothing may leave then.
        """
        due = list(takewhile(lambda name: self._first.get(name, 0) < before, self._unnoted))
        new = {name: self._first[name] for name in due if name in self._first}

        def noted(found: _Noted | None) -> _Noted:
            known = found[1] if found is not None and found[0] == self._queue_id else {}
            if found is not None and new.items() <= known.items():
                return found
            latest = sorted((known | new).items(), key=itemgetter(1))[-MOST:]
            return self._queue_id, dict(latest)

        try:
            outcome = self._object.update(noted, from_memory=True) if new else None
        except PermanentStorageError as error:
            log.warning("batches queued a second time may be delivered twice: %s", error)
            return
        if not isinstance(outcome, outcomes.Applied | None):
            raise TransientStorageError(
                f"{self._object.key!r} could not be written, and nothing was acknowledged: "
                f"{outcome}. Try again."
            )
        self.forget_before(before)

    def forget_before(self, sequence: int) -> None:
        """Remember only the last :data:`MOST` of the described entries before a sequence."""
        while self._unnoted and self._first.get(self._unnoted[0], 0) < sequence:
            self._unnoted.popleft()
        known = len(self._first) - MOST - len(self._unnoted)
        for name in [*islice(self._first, max(0, known))]:
            del self._first[name]
