"""Keep a queue as a log: its oldest entries in segments, its newest ones in the manifest.

A manifest is rewritten with each append, so it has to stay small. A plain queue stays small because
its consumer removes entries. A log keeps them, for several readers and for replays, so its oldest
entries move out of the manifest into *segments*. A segment is an object that has the entries of a
range of sequences, in the format of a manifest, and that never changes::

    manifest                          entries 2816 to 3100
    _log/...1792-...2816-<ulid>.segment      entries 1792 to 2815
    _log/...1024-...1792-<ulid>.segment      entries 1024 to 1791
    _log.json                         the index: which segments there are

The index is ``<prefix>/_log.json``::

    {"version": 1, "queue": "01J5...", "end": 2816, "floor": 512, "readers": ["billing"],
     "levels": [[[1792, 2816, 1767225600000, 1767225700000, "0...-01J6....segment"]], ...],
     "lost": [], "missing": {}, "reader_expiry_ms": 604800000, "changes": 7}

* Entries from ``floor`` (the log start offset) up to, but not including, ``end`` are in segments.
  The ranges in ``lost`` are not there: a client that does not know logs removed them from the
  manifest before they were moved.
* ``levels[0]`` names segments. ``levels[n]`` names pages, each of which names 128 parts of the
  level below. So the index stays small however long the log is.
* ``readers`` are the named readers. Their positions are objects of their own
  (:mod:`opendata_buffer.queue.reader_positions`).
* Entries before ``floor`` were acknowledged by every reader, and may be deleted.
* ``end``, ``floor`` and ``changes`` never fall (``tests/specification/Log.tla``).

**Moving.** A writer stores a segment, then adds it to the index, then removes the entries from the
manifest. No entry is ever in neither place (:mod:`opendata_buffer.queue.log_moves`).

**Reading.** A reader reads the manifest first and the index second. An entry that left the manifest
in between is then in the index (decision 0038). :class:`.LogView` is the two of them together.

**Things that can go wrong:**

* A client of v1 consumes the queue and knows nothing of the log. It removes entries from the
  manifest that were not moved yet. The index records them as lost, and readers learn which ones
  (failure F42).
* The index is restored from an old copy. It would hide the segments and the readers that were added
  since. Two things reveal it (failure F46): the owner marker remembers how many changes the index
  has had, and there are stored segments that begin after its end. Before entries count as lost,
  these segments are searched.
* The index is deleted. The owner marker still says that the queue is a log, so no program takes it
  for a plain queue (failure F45).
"""

from __future__ import annotations

from collections.abc import Callable

from opendata_buffer import errors, outcomes
from opendata_buffer.config import QueueConfig
from opendata_buffer.formats.manifest import Manifest
from opendata_buffer.hints import Action, Hint
from opendata_buffer.queue.cas import CasStore, sidecar_object
from opendata_buffer.queue.hints import queue_name
from opendata_buffer.queue.log_index import INDEX, LogIndex, index_key
from opendata_buffer.queue.log_parts import parts_folder
from opendata_buffer.queue.log_segments import Segments
from opendata_buffer.queue.marker import IndexMark, PrefixOwner, owner_key
from opendata_buffer.queue.ownership import QueueClaim, check_owner
from opendata_buffer.runtime import Runtime


class OldIndex(errors.CorruptData):
    """The index of a log was restored from an old copy, and lacks later changes."""


class Log:
    """The index and the segments of one log.

    Not thread-safe: the owner of this object must make its calls one after another.

    Args:
        store: Where the log is.
        config: The log's queue.
        runtime: Clock and sleep.
        queue_id: Id of the queue. An index of another queue is refused. Empty accepts any.
        reader: Name of the reader to whom errors give advice; empty without one.
    """

    most_entries = 1_024
    """Number of entries in the manifest above which the oldest ones are moved."""
    left_entries = 256
    """Number of newest entries that stay in the manifest, where writers look for their appends."""

    def __init__(
        self,
        store: CasStore,
        config: QueueConfig,
        runtime: Runtime,
        queue_id: str = "",
        reader: str = "",
    ) -> None:
        self.store = store
        self.config = config
        self.runtime = runtime
        self.queue_id = queue_id
        self.reader = reader
        self.segments = Segments(store, config, runtime, reader)
        self._object = sidecar_object(
            INDEX,
            LogIndex,
            store,
            index_key(config),
            runtime,
            config,
            check_read=self._checks_read(),
        )
        self._mark = IndexMark(store, config, runtime)
        self._true_gap = (0, 0)

    def adopt(self, claim: QueueClaim) -> None:
        """Use the marker that a claim of the queue has just read."""
        if claim.marker is not None:
            self._mark.adopt(claim.marker)

    @property
    def last_seen(self) -> LogIndex | None:
        """Return the index as it was last read or written; None before that."""
        return self._object.last_seen

    def read(self) -> LogIndex | None:
        """Read the index.

        Two conditional GETs: the owner marker and then the index.

        Returns:
            The index as it is now; None if the queue is not a log.

        Raises:
            OldIndex: The index was restored from an old copy.
            CorruptData: It is gone, cannot be read, or is another queue's.
        """
        marker = self._mark.read()
        found = self._object.read()
        if isinstance(found, outcomes.Vanished):
            raise self._gone()
        if found is not None and self.queue_id and found.queue_id != self.queue_id:
            raise errors.CorruptData(
                f"{self._object.key!r} in {self.store.url} is of queue {found.queue_id}, and the "
                f"queue is {self.queue_id}: it was started over. If the old log is given up, "
                f"delete the object and everything below {parts_folder(self.config)!r}. If only "
                f"{owner_key(self.config.data_path_prefix)!r} was lost, write the old id back "
                "into it."
            )
        if found is not None:
            self._check_marked(found, marker)
        return found

    def _checks_read(self) -> Callable[[LogIndex, LogIndex], None]:
        """Return the check that an index which is read now can follow the one known before."""
        # Not a method of this object: the reference cycle would keep the index in memory until the
        # next run of Python's garbage collector.
        store, config = self.store, self.config

        def check(known: LogIndex, now: LogIndex) -> None:
            if known.queue_id == now.queue_id and now.changes < known.changes:
                raise _old_index(
                    store, config, f"had {known.changes} changes, and now {now.changes}"
                )

        return check

    def _check_marked(self, index: LogIndex, marker: PrefixOwner | None) -> None:
        if marker is None or marker.queue_id != index.queue_id or marker.index_changes is None:
            return
        if index.changes < marker.index_changes:
            what = f"had {marker.index_changes} changes, and now {index.changes}"
            raise _old_index(self.store, self.config, what)

    def check_gap(self, index: LogIndex, manifest: Manifest) -> None:
        """Check that no segment has the entries missing between index and manifest.

        The marker may lag behind the index that it guards, so this looks at the stored segments:
        one listing for each new gap.

        Args:
            index: The index, read after the manifest.
            manifest: The manifest.

        Raises:
            OldIndex: Segments are stored that have the missing entries.
            TransientStorageError: The index has changed meanwhile.
        """
        gap = index.end, manifest.first_sequence
        if gap[0] >= gap[1] or gap == self._true_gap:
            return
        if found := self.segments.stored_between(*gap):
            now = self._object.read()
            if not isinstance(now, LogIndex) or now.end != index.end:
                # A writer had stored the segment and not yet named it, while a v1 consumer removed
                # the same entries.
                raise errors.TransientStorageError(
                    f"{self._object.key!r} in {self.store.url} was changed while it was read: try "
                    "again"
                )
            first, end = found[0][0], found[-1][1]
            what = f"ends at {index.end}, and segments of {first} to {end - 1} are stored"
            raise _old_index(self.store, self.config, what)
        self._true_gap = gap

    def read_unclaimed(self) -> LogIndex | None:
        """Read the index for a process that has not claimed the queue.

        It reads the owner marker, too, to learn the id of the queue. The index of a queue that was
        deleted and created again would hide the first batches of the new one.

        Returns:
            The index as it is now; None if the queue is not a log.

        Raises:
            CorruptData: As :meth:`read`.
        """
        if self.read() is not None and not self.queue_id:
            claim = check_owner(self.store, self.config, runtime=self.runtime)
            self.queue_id = "" if claim is None else claim.queue_id
        return self.read()

    def need(self, *, marked: bool = False) -> LogIndex:
        """Read the index of a queue that must be a log.

        Args:
            marked: Whether the owner marker says that the queue is a log.

        Returns:
            The index as it is now.

        Raises:
            InvalidInput: The queue is not a log.
            CorruptData: As :meth:`read`, or the marker says that there should be an index (failure
                F45).
        """
        found = self.read()
        if found is None and marked:
            raise self._gone()
        if found is None:
            raise errors.InvalidInput(
                f"the queue with manifest {self.config.manifest_path!r} in {self.store.url} is "
                "not a log, and has no named readers",
                Hint(Action.ENABLE_READERS, queue_name(self.store.url, self.config)),
            )
        return found

    def _gone(self) -> errors.CorruptData:
        return errors.CorruptData(
            f"{self._object.key!r} in {self.store.url} is gone",
            Hint(Action.REBUILD_INDEX, queue_name(self.store.url, self.config)),
        )

    def change(
        self,
        decide: Callable[[LogIndex | None], LogIndex | None],
        *,
        from_memory: bool = False,
    ) -> LogIndex:
        """Make a change that may be applied twice, and note it in the owner marker.

        Args:
            decide: Returns the index as it should be, given the index as it is. It must be pure.
            from_memory: See :meth:`.CasObject.update`.

        Returns:
            The index that holds now.

        Raises:
            OldIndex: The index was restored from an old copy.
            TransientStorageError: It is not known whether the change was written; try again.
            CorruptData: The index cannot be read.
        """
        marker = self._mark.read()

        def checked(before: LogIndex | None) -> LogIndex | None:
            if before is not None:
                self._check_marked(before, marker)
            return decide(before)

        now = self._object.change(checked, from_memory=from_memory)
        if marker is None or (marker.index_changes or 0) < now.changes:
            self._mark.note(now.queue_id, now.changes)
        return now

    def replace(self, known: LogIndex, new: LogIndex) -> LogIndex:
        """Write an index if the stored one is still the known one.

        Args:
            known: The index as it was read.
            new: The index to write.

        Returns:
            The index that holds now.

        Raises:
            OldIndex: As :meth:`change`, like its other errors.
        """
        return self.change(lambda before: new if before == known else before)

    def put_back(self, known: LogIndex | None, new: LogIndex) -> None:
        """Write an index in place of the known one, which may be an old copy.

        Args:
            known: The index as it was read; None if it could not be read.
            new: The index to write.

        Raises:
            TransientStorageError: The index was changed meanwhile, or the outcome is not known.
        """
        now = self._object.change(lambda before: new if before == known else before)
        if now != new:
            raise errors.TransientStorageError(
                f"{self._object.key!r} in {self.store.url} was changed meanwhile. Stop producers, "
                "consumers and collectors, and try again."
            )
        self._mark.note(new.queue_id, new.changes)


def _old_index(store: CasStore, config: QueueConfig, what: str) -> OldIndex:
    """Return the error about an index that is an old copy."""
    return OldIndex(
        f"{index_key(config)!r} in {store.url} went backwards: it {what}. It was restored from an "
        "old copy, and hides newer segments and readers",
        Hint(Action.REPAIR_OLD_INDEX, queue_name(store.url, config)),
    )
