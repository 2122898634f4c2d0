"""Read a queue without consuming it. Nothing is claimed, acknowledged, collected or written.

Entries that were handed out here stay readable until the collector deletes their objects. An entry
that the queue's consumer dequeues first is lost to this reader, which raises ``DataLoss`` for it
(failure F28).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from opendata_buffer import metrics
from opendata_buffer.config import QueueConfig
from opendata_buffer.consumer.isolation import MOST_NOTED, ReadCommitted, Repeats
from opendata_buffer.consumer.opening import check_data_loss, count_between
from opendata_buffer.consumer.position import Cursors
from opendata_buffer.errors import DataLoss, QueueReset
from opendata_buffer.formats.manifest import BatchDescriptor, Manifest
from opendata_buffer.queue.log import Log
from opendata_buffer.queue.log_view import LogView
from opendata_buffer.queue.marker import skipped_ranges
from opendata_buffer.queue.not_found import no_such_queue
from opendata_buffer.queue.ownership import check_owner
from opendata_buffer.queue.queue import Queue
from opendata_buffer.queue.stored_manifest import ends_before
from opendata_buffer.runtime import Runtime
from opendata_buffer.stores.base import Store

CHUNK_ENTRIES = 1_024
"""Entries of a view that :func:`committed_entries` reads at once."""


def committed_entries(
    view: Manifest | LogView,
    begin: int,
    until: int,
    *,
    rule: ReadCommitted,
    repeats: Repeats,
    lost: Callable[[int, int], None],
) -> Iterator[BatchDescriptor]:
    """Yield the entries of a range that are to be delivered, from one view of a queue.

    Entries outside of the range are read, too. Those before it help to recognise repeats, and may
    belong to a transaction that is committed in the range. Those after it are read as long as
    transactions are undecided. The entries of a log are read in chunks.

    Args:
        view: The manifest, or everything that a log keeps.
        begin: The first sequence of the range.
        until: The sequence after the range, at most the end of the view.
        rule: Decides which entries are committed. It has seen no entry yet.
        repeats: Recognises entries whose batch was queued before.
        lost: Called with the first sequence that is gone and the one at which the queue goes on. It
            raises an error if that is not allowed.

    Yields:
        The entries in the order of delivery. A transaction is delivered when it is committed.
    """

    def replay(start: int, stop: int) -> list[tuple[int, str]]:
        return [(entry.sequence, entry.location) for entry in _entries_between(view, start, stop)]

    at = view.first_sequence
    if isinstance(view, LogView):
        at = max(at, begin - MOST_NOTED)
    while at < until or rule.stable_end(at) < at < view.next_sequence:
        left = until - at if at < until else CHUNK_ENTRIES
        entries = view.entries(at, min(left, CHUNK_ENTRIES))
        if not entries:
            oldest = max(at + 1, view.available_from(at))
            lost(at, oldest)
            rule.lost(oldest - 1)
            at = oldest
            continue
        for entry in entries:
            is_repeat = repeats.first_of(entry) is not None
            for sequence in rule.offer(entry.sequence, entry.location, replay):
                if sequence == entry.sequence:
                    if begin <= sequence < until and not is_repeat:
                        yield entry
                elif begin <= sequence < until:
                    # An earlier entry of a transaction, whose name shows that it is not a repeat.
                    yield from view.entries(sequence, 1)
        at = entries[-1].sequence + 1
        repeats.forget_before(at)


def _entries_between(view: Manifest | LogView, start: int, stop: int) -> Iterator[BatchDescriptor]:
    """Yield the entries [start, stop) that still exist."""
    at = max(start, view.first_sequence)
    while at < stop:
        entries = view.entries(at, min(stop - at, CHUNK_ENTRIES))
        yield from entries
        at = entries[-1].sequence + 1 if entries else max(at + 1, view.available_from(at))


class ReadOnlyReader:
    """The manifest of one queue, and a position in it that only this reader knows.

    Making one makes no request. Not thread-safe.

    Args:
        config: The queue.
        store: The opened store of the queue.
        runtime: Clock and threads.
        allow_data_loss: Skip lost entries with a warning, instead of raising ``DataLoss``.
        advice: A sentence for the error about lost entries.
    """

    def __init__(
        self,
        config: QueueConfig,
        *,
        store: Store,
        runtime: Runtime,
        allow_data_loss: bool = False,
        advice: str = "",
    ) -> None:
        self.store = store
        self.config = config
        self.runtime = runtime
        self._queue = Queue(store, config, runtime=runtime, role="reader")
        self._allow_data_loss = allow_data_loss
        self._cause = "The queue's consumer was faster than this reader, which claims nothing."
        if advice:
            self._cause += f" {advice}"
        self._marker_checked = False
        self._repeats: Repeats | None = None
        self._cursors: Cursors | None = None
        self.next_sequence = 0
        """The sequence that the next appended batch gets, by the manifest as it was last read."""
        self._log = Log(store, config, runtime)
        self._view: Manifest | LogView | None = None

    def find(self) -> Manifest | None:
        """Read the manifest.

        Returns:
            The manifest as it is now; None if the queue was never created.

        Raises:
            QueueReset: The manifest vanished or went backwards since the last read or, by the owner
                marker, before that. With ``allow_data_loss`` the marker is not read.
        """
        manifest = self._queue.read()
        if manifest is None and not self._marker_checked and not self._allow_data_loss:
            claim = check_owner(self.store, self.config, runtime=self.runtime)
            if claim is not None:
                claim.check(None)
            # The queue itself notices when a manifest that was read once vanishes.
            self._marker_checked = True
        return manifest

    def view(
        self, needed: int | None = None, manifest: Manifest | None = None
    ) -> Manifest | LogView:
        """Read the queue, and for a log its index, too.

        Args:
            needed: The first sequence to be read; None for the oldest. The index of a log is read
                once, after the manifest, and again if this sequence is not in the manifest.
            manifest: The manifest, if :meth:`find` has just returned it. Default: read it.

        Returns:
            The manifest as it is now; for a log, everything that it keeps.
        """
        manifest = manifest or self.find() or Manifest.empty()
        index = self._log.last_seen
        wanted = manifest.first_sequence if needed is None else needed
        if self._view is None or wanted < manifest.first_sequence:
            index = self._log.read_unclaimed()
        self._view = manifest if index is None else LogView.of(self._log, index, manifest)
        return self._view

    def manifest(self) -> Manifest:
        """Read the manifest of a queue that must exist.

        Returns:
            The manifest as it is now.

        Raises:
            InvalidInput: The queue does not exist.
        """
        manifest = self.find()
        if manifest is None:
            raise no_such_queue(self.store, self.config)
        return manifest

    def seek(self, sequence: int | None) -> None:
        """Continue at a sequence.

        Args:
            sequence: The sequence of the next entry to hand out; None to start with the oldest.

        Raises:
            QueueReset: The queue ends before ``sequence``.
            DataLoss: The queue begins after ``sequence``.
        """
        manifest = self.view(sequence)
        begin = manifest.first_sequence if sequence is None else sequence
        if begin > manifest.next_sequence:
            url, end = self.store.url, manifest.next_sequence
            raise QueueReset(ends_before(begin - 1, end, self._queue.key, url))
        self._cursors = self._check_data_loss(Cursors.at(begin), manifest)
        self.next_sequence = manifest.next_sequence

    def next_descriptors(self, max: int) -> list[BatchDescriptor]:  # noqa: A002
        """Return up to ``max`` next entries, without repeats and without fetching their batches."""
        while entries := self.next_entries(max):
            if found := [each for each in entries if each.repeats is None]:
                return found
        return []

    def next_entries(self, max: int) -> list[BatchDescriptor]:  # noqa: A002
        """Return up to ``max`` next entries, with one read of the manifest."""
        needed = None if self._cursors is None else self._cursors.next_hand_out
        manifest = self.view(needed)
        if self._repeats is None:
            self._repeats = Repeats(self.store, self.config, self.runtime, "")
            self._repeats.load()
        before = self._cursors or Cursors.at(manifest.first_sequence)
        cursors = self._check_data_loss(before, manifest)
        self.next_sequence = manifest.next_sequence
        found = self._repeats.described(manifest.entries(cursors.next_hand_out, max))
        self._cursors = cursors.hand_out(found[-1].sequence) if found else cursors
        if repeats := sum(1 for each in found if each.repeats is not None):
            metrics.repeats_dropped.add(repeats)
        return found

    def entries(self, begin: int, stop: int) -> list[BatchDescriptor]:
        """Return exactly the entries [begin, stop), from the manifest as it was last read.

        Args:
            begin: Sequence of the first entry.
            stop: The sequence after the last entry.

        Returns:
            The entries, by sequence.

        Raises:
            DataLoss: Some of them were dequeued.
        """
        manifest = self._view or Manifest.empty()
        if begin < manifest.first_sequence:
            raise DataLoss(self._queue.key, begin, manifest.first_sequence, self._cause)
        return list(manifest.entries(begin, stop - begin))

    def ack_through(self, sequence: int) -> None:
        """Forget the entries up to and including ``sequence``. Makes no request."""
        assert self._cursors is not None, "nothing was handed out"
        self._cursors = self._cursors.ack_through(sequence)
        if self._repeats is not None:
            self._repeats.forget_before(sequence + 1)

    @property
    def last_acked_sequence(self) -> int | None:
        """The last sequence passed to :meth:`ack_through`; it is not written into the queue."""
        return None if self._cursors is None else self._cursors.last_acked

    @property
    def last_handed_out_sequence(self) -> int | None:
        """The last sequence handed out; None before the queue's first batch."""
        return None if self._cursors is None else self._cursors.last_handed_out

    def count(self, begin: int, end: int) -> int:
        """Return how many entries lie in [begin, end); see :meth:`.EntryConsumer.count`."""
        return count_between(begin, end, self._view)

    def close(self) -> None:
        """Do nothing, because this reader holds nothing."""

    def _check_data_loss(self, cursors: Cursors, manifest: Manifest | LogView) -> Cursors:
        return check_data_loss(
            cursors,
            manifest,
            self._queue.key,
            allowed=self._allow_data_loss,
            cause=self._cause,
            skipped=self._skipped,
        )

    def _skipped(self) -> Sequence[tuple[int, int]]:
        return skipped_ranges(self.store, self.config, self.runtime)
