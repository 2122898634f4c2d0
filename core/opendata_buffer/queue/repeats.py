"""Which queued entries name a batch that was queued before: a batch is delivered once.

A v1 writer that gets no answer to an append does not look for it in the manifest, and appends the
same location again (failure F41). The first entry with a location counts, and later ones are
repeats, whatever lies between them. While the first one is queued the manifest shows that. Before a
consumer takes acknowledged entries out of the manifest, it notes them in
``<prefix>/_acknowledged.json``::

    {"version": 1, "queue": "01J5...", "batches": [[41, "m3Xk..."], [42, "Zc0u..."]]}

Each of the last :data:`MOST` is a sequence and a hash of the location. Only what was acknowledged
is noted: the location of a batch that was skipped, or whose manifest was lost before it was read,
may be queued again, and is delivered. An entry is a repeat only of one with a lower sequence, so an
acknowledgement that was noted and then not written hides nothing.

Batches of transactions and messages are left out: their names have identities of their own, and
:mod:`opendata_buffer.consumer.isolation` drops their repeats.
"""

from __future__ import annotations

import logging
from base64 import urlsafe_b64encode
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import takewhile

from opendata_buffer import outcomes
from opendata_buffer.config import QueueConfig
from opendata_buffer.errors import CorruptData, PermanentStorageError, TransientStorageError
from opendata_buffer.formats.keys import parse_location
from opendata_buffer.formats.manifest import BatchDescriptor, QueueEntry
from opendata_buffer.formats.sidecar import LARGEST, Sidecar, is_number
from opendata_buffer.queue.cas import CasObject, CasStore
from opendata_buffer.runtime import Runtime

log = logging.getLogger(__name__)

NAME = "_acknowledged.json"

MOST = 2_048
"""Acknowledged batches that are remembered."""

_NOTE = Sidecar(
    "the note of acknowledged batches",
    "Delete it: the next consumer writes it anew. Until then a batch that a writer queues twice, "
    "once before and once after its acknowledgement, is delivered twice.",
    max_bytes=256 * 1024,
)


@dataclass(frozen=True, slots=True)
class _Acknowledged:
    """The object's value: of each batch its first sequence, by the hash of its location."""

    queue: str
    batches: Mapping[str, int] = field(default_factory=dict)

    def encode(self) -> bytes:
        rows = [[sequence, name] for name, sequence in self.batches.items()]
        return _NOTE.encode({"queue": self.queue, "batches": rows})


def _decode(data: bytes) -> _Acknowledged:
    """The value; that of no batch for an object which cannot be read, so that it is replaced."""
    try:
        fields = _NOTE.decode(data)
        batches = {}
        for row in fields.items("batches"):
            match row:
                case [sequence, str(name)] if is_number(sequence):
                    batches[name] = sequence
                case _:
                    raise fields.wrong("batches", "[sequence, hash] each", row)
        return _Acknowledged(fields.text("queue"), batches)
    except CorruptData as error:
        log.warning("repeats of acknowledged batches are not recognised: %s", error)
        return _Acknowledged("")


def _hash(location: str) -> str:
    # 96 bits: that a new batch is taken for one of the remembered ones is as likely as 1 to 2^85.
    digest = blake2b(location.encode(errors="surrogatepass"), digest_size=12).digest()
    return urlsafe_b64encode(digest).decode()


class Repeats:
    """Recognises repeats among the entries of one queue. Not thread-safe.

    Args:
        queue_id: Of the queue that is read; empty to take the note of whatever queue is there.
    """

    def __init__(self, store: CasStore, config: QueueConfig, runtime: Runtime, queue_id: str):
        self._store = store
        self._config = config
        self._runtime = runtime
        self._queue_id = queue_id
        self._object = self._opened()
        self._first: dict[str, int] = {}
        self._unnoted: deque[tuple[int, str]] = deque()

    def load(self) -> None:
        """Read what the consumers before this one have noted; raises what reading raises."""
        found = self._object.read()
        if isinstance(found, _Acknowledged) and self._queue_id in ("", found.queue):
            self._first = {**found.batches, **self._first}

    def described(self, entries: Iterable[QueueEntry]) -> list[BatchDescriptor]:
        """The descriptors of the next entries, in order, with :attr:`.BatchDescriptor.repeats`.

        The same entries may be given again.
        """
        found = []
        for entry in entries:
            each = BatchDescriptor.of(entry)
            named = parse_location(entry.location, self._config.data_path_prefix)
            if named is None or (named.txn is None and named.message is None):
                each = self._marked(each)
            found.append(each)
        return found

    def _marked(self, entry: BatchDescriptor) -> BatchDescriptor:
        name, sequence = _hash(entry.location), entry.sequence
        first = self._first.get(name, LARGEST)
        if first < sequence:
            log.info("entry %d repeats %d: %s", sequence, first, entry.location)
            return replace(entry, repeats=first)
        if first > sequence:
            self._first[name] = sequence
            self._unnoted.append((sequence, name))
        return entry

    def forget(self, location: str) -> None:
        """The batch is given up: should it be queued again, it is delivered."""
        self._first.pop(_hash(location), None)

    def note(self, before: int) -> None:
        """Note all described entries before a sequence; called before they leave the manifest.

        Where writing the note is not allowed, a warning says what follows. Raises
        TransientStorageError where it is not known to be stored: nothing may leave then.
        """
        due = list(takewhile(lambda each: each[0] < before, self._unnoted))
        new = {name: at for at, name in due if self._first.get(name) == at}
        try:
            if new and not (self._write(new) or self._write(new)):  # once more where it was deleted
                raise TransientStorageError(f"{self._object.key!r} was deleted twice. Try again.")
        except PermanentStorageError as error:
            log.warning("batches queued a second time may be delivered twice: %s", error)
            return
        for _ in due:
            self._unnoted.popleft()
        while len(self._first) > MOST + len(self._unnoted):
            del self._first[next(iter(self._first))]

    def _write(self, new: Mapping[str, int]) -> bool:
        """Add to the note; False where it was deleted and is to be made anew."""

        def noted(found: _Acknowledged | None) -> _Acknowledged:
            known = found.batches if found is not None and found.queue == self._queue_id else {}
            if found is not None and new.items() <= known.items():
                return found
            latest = sorted({**known, **new}.items(), key=lambda each: each[1])[-MOST:]
            return _Acknowledged(self._queue_id, dict(latest))

        outcome = self._object.update(noted, from_memory=True)
        if isinstance(outcome, outcomes.Vanished):
            self._object = self._opened()
            return False
        if not isinstance(outcome, outcomes.Applied):
            raise TransientStorageError(
                f"{self._object.key!r} could not be written, and nothing was acknowledged: "
                f"{outcome}. Try again."
            )
        return True

    def _opened(self) -> CasObject[_Acknowledged]:
        return CasObject(
            self._store,
            f"{self._config.data_path_prefix}/{NAME}",
            decode=_decode,
            encode=_Acknowledged.encode,
            runtime=self._runtime,
            settings=self._config,
            sidecar=_NOTE,
        )
