"""The commit records of a queue's writers: which batch of which query was committed last."""

from __future__ import annotations

import logging
from dataclasses import replace

from opendata_buffer import outcomes
from opendata_buffer.config import QueueConfig
from opendata_buffer.errors import OpenDataBufferError, TransientStorageError
from opendata_buffer.queue.cas import CasObject, CasStore
from opendata_buffer.runtime import Runtime
from opendata_buffer.transactions.commit_record import RECORD, CommitRecord, claimed, record_key

__all__ = ["CommitRecords"]

log = logging.getLogger(__name__)

_DEADLINE_MS = 10_000  # of one change of a record; a micro-batch waits for it


class CommitRecords:
    """Reads and raises the record of each app that writes through this process.

    Args:
        store: Where the queue lives.
        config: The queue's data prefix and backoff.
        runtime: Clock and jitter.
    """

    def __init__(self, store: CasStore, config: QueueConfig, runtime: Runtime) -> None:
        self._store = store
        self._config = replace(config, cas_deadline_ms=min(_DEADLINE_MS, config.cas_deadline_ms))
        self._runtime = runtime
        self._registers: dict[str, CasObject[CommitRecord]] = {}

    def claim(self, app: str, query: str | None) -> CommitRecord | None:
        """The app's record, which from now on belongs to this query. None when there is none.

        Costs one read, and one write when the app id belongs to no query yet. That write must
        have landed before the first append under the id: two queries that begin at once would
        otherwise both find nothing.

        Raises:
            InvalidInput: The app id belongs to another query; nothing was written.
            CorruptData: The record is not readable.
            TransientStorageError, PermanentStorageError: The store did not answer.
        """
        # What another process wrote since counts, so each claim reads. A record that was deleted
        # by its operator is gone for good: a new register does not miss it.
        register = self._registers.get(app) or self._register(app)
        if isinstance(register.read(), outcomes.Vanished):
            register = self._register(app)
        outcome = register.update(lambda record: claimed(record, app, query), from_memory=True)
        if not isinstance(outcome, outcomes.Applied):
            raise TransientStorageError(
                f"commit record {register.key!r} could not be written: {outcome}. Nothing was "
                "appended; start the query again."
            )
        self._registers[app] = register
        return outcome.value

    def raise_to(self, app: str, batch: int, next_sequence: int, query: str | None) -> None:
        """Note a committed batch, best effort: it is in the queue and must not fail any more.

        A record that lags is covered by the manifest and by the reader's filter. It never falls
        when a driver that was thought dead writes late.
        """
        register = self._registers[app]
        empty = CommitRecord(-1, 0, query)
        try:
            outcome = register.update(
                lambda record: (record or empty).raised(batch, next_sequence, query),
                from_memory=True,
            )
        except OpenDataBufferError as error:
            log.warning("commit record %s was not written: %s", register.key, error)
            return
        if not isinstance(outcome, outcomes.Applied):
            log.warning("commit record %s was not written: %s", register.key, outcome)

    def _register(self, app: str) -> CasObject[CommitRecord]:
        return CasObject(
            self._store,
            record_key(self._config.data_path_prefix, app),
            decode=CommitRecord.from_json,
            encode=CommitRecord.to_json,
            runtime=self._runtime,
            settings=self._config,
            max_bytes=RECORD.max_bytes,
            unreadable=RECORD.unreadable,
        )
