"""The queue's batches as a foreman knows them: what it can hand out, and what it must not."""

from __future__ import annotations

import logging
from typing import Any

from opendata_buffer.broker.messages import metadata_body
from opendata_buffer.broker.tenure import QueueConsumer
from opendata_buffer.broker.wire import MAX_MESSAGE_BYTES
from opendata_buffer.config import ConsumerConfig
from opendata_buffer.errors import InvalidInput
from opendata_buffer.quarantine import Entry, quarantine
from opendata_buffer.runtime import Runtime
from opendata_buffer.stores import Store

__all__ = ["MAX_ANSWER_BYTES", "Shelf"]

log = logging.getLogger(__name__)

MAX_ANSWER_BYTES = MAX_MESSAGE_BYTES // 2
"""About the size of one answer; the batches that do not fit are handed out later."""


class Shelf:
    """Batches that wait or are being worked on. One thread uses it.

    Args:
        store: Where the queue lives.
        config: The consumer's settings.
        runtime: Clock.
    """

    def __init__(self, store: Store, config: ConsumerConfig, runtime: Runtime) -> None:
        self._store = store
        self._config = config
        self._runtime = runtime
        self._known: dict[int, Entry] = {}
        self._stuck: set[int] = set()
        self.end = 0
        """Batches before this sequence are known."""
        self.looked_at = float("-inf")
        """When it was last looked for more, monotonic seconds."""
        self.rests: dict[int, float] = {}
        """Until when a released batch rests, monotonic seconds."""

    def begin(self, first: int) -> None:
        """Forget everything: the queue begins at this sequence."""
        self._known, self.rests, self.end = {}, {}, first

    def look_for(self, count: int, consumer: QueueConsumer, now: float) -> bool:
        """Look for more batches; False when there are none."""
        self.looked_at = now
        found = consumer.next_descriptors(count)
        for each in found:
            self._known[each.sequence] = each
            self.end = each.sequence + 1
        return bool(found)

    def resting(self, now: float) -> set[int]:
        """What is not to be handed out just now."""
        self.rests = {key: at for key, at in self.rests.items() if at > now}
        return {*self.rests, *self._stuck}

    def size_of(self, sequence: int) -> int:
        """About how many bytes a batch takes in an answer."""
        known = self._known[sequence]
        ranges = sum(80 + len(each.payload) * 4 // 3 for each in known.metadata)
        return 200 + len(known.location) + ranges

    def body_of(self, sequence: int) -> dict[str, Any]:
        """A batch as an answer names it."""
        known = self._known[sequence]
        return {
            "sequence": sequence,
            "location": known.location,
            "metadata": metadata_body(known.metadata),
        }

    def quarantine(self, sequence: int, reason: str) -> bool:
        """Copy a batch to the quarantine; False when it is too large for that.

        It then stays in the queue and is handed to nobody: finished, it would be deleted, and
        an error would be told to everybody who asks for any batch.
        """
        try:
            quarantine(
                self._store,
                self._config.data_path_prefix,
                self._known[sequence],
                reason,
                query="worker",
                runtime=self._runtime,
            )
        except InvalidInput as error:
            self._stuck.add(sequence)
            log.error(
                "batch %d (%s) stays in the queue and is handed to nobody: %s. To pass it by: "
                "'opendata-buffer skip %s %d'",
                sequence,
                reason,
                error,
                self._store.url,
                sequence,
            )
            return False
        log.warning("batch %d goes to the quarantine: %s", sequence, reason)
        return True

    def drop_before(self, frontier: int) -> None:
        """Batches before it are acknowledged."""
        self._known = {key: each for key, each in self._known.items() if key >= frontier}
        self._stuck = {key for key in self._stuck if key >= frontier}
