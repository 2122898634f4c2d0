"""An app's commit record as one run has claimed it, and what that run saw of earlier ones.

A run claims once, and a new claim is a new run: what was appended under the old one cannot be
decided any more.

A run notes what is undecided in a manifest *before* it reads or writes the record. If the record
still names the run then, all that it noted is of earlier runs, and none of it can be committed any
more: it is rolled back. See :mod:`opendata_buffer.commit.record`.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping

from opendata_buffer.commit.record import CommitRecord, began, claimed, decided
from opendata_buffer.commit.settlement import ROLL_BACK, Ending, undecided_of
from opendata_buffer.errors import TransientStorageError
from opendata_buffer.formats.keys import Transaction
from opendata_buffer.formats.manifest import Manifest
from opendata_buffer.queue.cas import Done, Outcome, Register

__all__ = ["ClaimedRecord"]

log = logging.getLogger(__name__)


class ClaimedRecord:
    """One run of an app. Not thread-safe.

    Args:
        app: The app id.
        register: Its commit record.
        run: A name for this run that no other run has.
    """

    def __init__(self, app: str, register: Register[CommitRecord], run: str) -> None:
        self._app = app
        self._register = register
        self._run = run
        self._seen: dict[str, int] = {}
        """Per partition, the sequence up to which undecided transactions were looked for."""
        self._left: defaultdict[str, dict[bytes, Transaction | None]] = defaultdict(dict)
        """Per partition, producers of earlier runs that are to be rolled back."""

    @property
    def key(self) -> str:
        """The record's object."""
        return self._register.key

    @property
    def record(self) -> CommitRecord | None:
        """The record as last read or written."""
        return self._register.last_seen

    def claim(self, batch: int, query: str | None) -> CommitRecord:
        """Write this run into the record, unless the batch is committed. Once, before all else.

        Args:
            batch: Number of the batch that the run is about to write.
            query: Id of the query, if it is known.

        Raises:
            InvalidInput: The app id belongs to another query; nothing was written.
            TransientStorageError: The record could not be written.
        """
        outcome = self._register.update(
            lambda record: began(record, self._app, batch, query, self._run)
        )
        if not isinstance(outcome, Done) or outcome.value is None:
            raise TransientStorageError(
                f"commit record {self.key!r} could not be written: {outcome}. Nothing "
                "was appended; start the query again."
            )
        return outcome.value

    def belongs_to(self, query: str | None) -> bool:
        """Whether the record says already that the app is the query's.

        Raises:
            InvalidInput: The app id belongs to another query.
        """
        return claimed(self.record, self._app, query) is self.record

    def is_held(self) -> bool:
        """Whether no other run has begun since. Reads the record."""
        now = self._register.read()
        return isinstance(now, Done) and now.value is not None and now.value.run == self._run

    def was_overtaken_before(self, batch: int) -> bool:
        """Whether other runs wrote the batches between the last one of this run and this one.

        Spark commits in any of its idle Python workers. Where there are several, because several
        queries commit, each batch of a query may follow one that another process wrote, as a run
        of its own. Without such a gap nobody did, and nothing is read.
        """
        record = self.record
        return record is not None and batch > record.batch + 1 and not self.is_held()

    def decide(
        self, batch: int, producer: str, intents: Mapping[str, int]
    ) -> Outcome[CommitRecord | None]:
        """Write a batch into the record: it is committed with that, and not before.

        Args:
            batch: Its number.
            producer: Who wrote it, as hexadecimal digits.
            intents: Of each partition it went to, the clock of the acknowledgement.

        Returns:
            The record is unchanged where this run may not decide any more.

        Raises:
            TransientStorageError: The record could not be read; it may have been written.
        """
        return self._register.update(
            lambda record: decided(record, self._run, batch, producer, intents), from_memory=True
        )

    def note(self, name: str, manifest: Manifest | None, but: bytes | None) -> None:
        """Note what is undecided of the app in a partition, of any producer but one."""
        if manifest is None:
            return
        found = undecided_of(manifest, name, self._app, self._seen.get(name, 0))
        self._seen[name] = manifest.next_sequence
        self._left[name].update({who: each.txn for who, each in found.items() if who != but})

    @property
    def leaves(self) -> bool:
        """Whether anything that was noted is to be rolled back."""
        return any(self._left.values())

    def roll_backs(self) -> dict[str, list[Ending]]:
        """How to end what was noted, by partition."""
        found: defaultdict[str, list[Ending]] = defaultdict(list)
        for name, producers in self._left.items():
            for producer, txn in producers.items():
                log.warning(
                    "batch %s of app %s was given up in %s before it was committed: rolled back",
                    "?" if txn is None else txn.batch, self._app, name,
                )  # fmt: skip
                found[name].append(Ending(producer, ROLL_BACK, txn))
        return found

    def rolled_back(self) -> None:
        """It is done: nothing that was noted is left."""
        self._left.clear()
