"""How a publisher ends what it wrote: acknowledgements in many partitions at once."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from opendata_buffer.commit.settlement import Ending, PatientPut, settle
from opendata_buffer.config import ProducerConfig
from opendata_buffer.formats.batch import encode_batch
from opendata_buffer.formats.keys import Transaction, batch_key
from opendata_buffer.formats.manifest import NewEntry
from opendata_buffer.messages import ACK_TXN, FINAL, build_uuid
from opendata_buffer.queue.owner import claim_for_use
from opendata_buffer.queue.queue import Queue
from opendata_buffer.runtime import Runtime
from opendata_buffer.stores import Store
from opendata_buffer.together import together
from opendata_buffer.topic.topic import Topic

__all__ = ["Endings"]


class Endings:
    """Writes acknowledgements to the partitions of a topic. Not thread-safe.

    Args:
        store: Of the topic.
        config: Of the publisher.
        runtime: Clock, names and threads.
    """

    def __init__(self, store: Store, config: ProducerConfig, runtime: Runtime) -> None:
        self._store = store
        self._batches = PatientPut(store, config, runtime)
        self._config = config
        self._runtime = runtime
        self._queues: dict[str, Queue] = {}

    def queue(self, name: str) -> Queue:
        """The queue of a partition, claimed when it is first asked for."""
        if name not in self._queues:
            config = Topic.config_of(name, self._config)
            claim = claim_for_use(self._store, config, runtime=self._runtime)
            self._queues[name] = Queue(
                self._store, config, runtime=self._runtime, role="publisher", claim=claim
            )
        return self._queues[name]

    def settle(
        self,
        producer: bytes,
        clocks: Mapping[str, int],
        txn: Transaction | None,
        since: Mapping[str, int],
    ) -> None:
        """End one transaction, where it is undecided; free to repeat.

        Args:
            producer: Of the transaction.
            clocks: Of the acknowledgement in each partition.
            txn: Whose transaction it is.
            since: Of a partition, a sequence before which it wrote nothing.

        Raises:
            OpenDataBufferError: As :func:`.settle`, of whichever partition.
        """

        def end(name: str) -> int:
            return settle(
                self.queue(name),
                name,
                (Ending(producer, clocks[name], txn, since.get(name, 0)),),
                store=self._batches,
                runtime=self._runtime,
                ahead_ms=self._config.gc_grace_period_ms,
            )

        together(self._runtime, end, clocks)

    def say_goodbye(self, producer: bytes, clock: int, names: Collection[str]) -> None:
        """Let readers forget a producer that has nothing undecided and writes nothing more.

        Raises:
            OpenDataBufferError: Some remember it for :data:`.HORIZON_DAYS` days.
        """

        def end(name: str) -> None:
            message = build_uuid(producer, clock, ACK_TXN | FINAL)
            location = batch_key(name, self._runtime.ulid(), None, message)
            self._batches.put(location, encode_batch([]))
            self.queue(name).append([NewEntry(location)])

        together(self._runtime, end, names)
