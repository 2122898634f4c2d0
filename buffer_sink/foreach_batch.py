"""Writing into a buffer from inside ``foreachBatch``, with the same exactly-once identity.

With ``host_broker=True`` the process that calls the function is also the queue's broker. Spark
commits in Python processes that end early; the one that runs the function of ``foreachBatch`` (the
driver, or with Spark Connect the server's process for the query) lives as long as its query.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from buffer_sink.options import SinkOptions
from buffer_sink.writer import find_topic
from opendata_buffer.config import ProducerConfig, QueueConfig
from opendata_buffer.errors import InvalidInput, OpenDataBufferError
from opendata_buffer.option_reader import queue_fields
from opendata_buffer.producer.group_commit import Committer, open_committer
from opendata_buffer.runtime import SystemRuntime
from opendata_buffer.stores.open import open_store
from opendata_buffer.topic.topic import CachedTopic, Topic

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

log = logging.getLogger(__name__)

REFRESH_S = 60.0
"""Seconds after which the list of a topic's partitions is read again."""

_RUNTIME = SystemRuntime()


def serve_broker(options: SinkOptions) -> None:
    """Let this process be the broker of a queue, or of each partition of a topic.

    Where another broker serves, it stands by. A repeated call only adds the partitions that the
    topic has got since. The broker ends with the process. Only InvalidInput is raised.
    """
    key = (os.getpid(), options.queue, options.one_queue)
    try:
        with _lock:
            if key not in _brokers:
                _brokers[key] = EmbeddedBroker(options)
            _brokers[key].serve()
    except InvalidInput:
        raise
    except OpenDataBufferError as error:
        # If the store is gone, the write that follows raises; the next call tries again.
        log.warning("no broker is served in this process: %s", error)


class EmbeddedBroker:
    """The brokers that this process runs for one queue, or for the partitions of one topic."""

    def __init__(self, options: SinkOptions) -> None:
        queue = options.queue
        self._store = open_store(queue.store, queue.store_options)
        # The broker's collector must have the grace period of the options (failure F5).
        self._config = ProducerConfig(
            **queue_fields(queue), gc_grace_period_ms=options.gc_grace_period_ms, broker="host"
        )
        self._topic: CachedTopic | None = None
        if not options.one_queue and find_topic(self._store) is not None:
            topic = Topic.open(self._config, store=self._store, runtime=_RUNTIME)
            self._topic = CachedTopic(topic, _RUNTIME, REFRESH_S)
        self._open: dict[str, Committer] = {}

    def serve(self) -> None:
        """Run a broker for each partition that has none here yet."""
        configs = {"": self._config}
        if self._topic is not None:
            names = self._topic.get().active
            configs = {name: Topic.config_of(name, self._config) for name in names}
        for name, config in configs.items():
            if name not in self._open:
                # Nothing is appended through this committer: it is made for the broker it starts.
                self._open[name] = open_committer(self._store, config, _RUNTIME, None)

    def close(self) -> None:
        """End all of them."""
        while self._open:
            self._open.popitem()[1].close()


_lock = threading.Lock()  # two queries in one process that write to one queue share its broker
_brokers: dict[tuple[int, QueueConfig, bool], EmbeddedBroker] = {}


@atexit.register
def _close_brokers() -> None:
    """Announce the end, so that the next broker need not wait for a timeout."""
    for (process, *_), broker in list(_brokers.items()):
        if process == os.getpid():
            broker.close()
    _brokers.clear()


@dataclass(frozen=True)
class ForeachBatchWriter:
    """A function for ``foreachBatch``; also to be called from within one. Picklable.

    Attributes:
        store: The store's URL.
        options: Options of the batch sink; ``txnAppId`` among them.
        hosts: Whether the process that calls it is to be the queue's broker, too.
    """

    store: str
    options: Mapping[str, str] = field(hash=False, repr=False)  # it may hold keys
    hosts: bool = False

    def __call__(self, df: DataFrame, batch_id: int) -> None:
        """Append ``df`` to the buffer; a batch id that was written before is skipped."""
        if self.hosts:
            serve_broker(self._checked(batch_id))
        (
            df.write.format("opendata-buffer")
            .options(**self.options)
            .option("txnVersion", str(batch_id))
            .mode("append")
            .save(self.store)
        )

    def _checked(self, batch_id: int) -> SinkOptions:
        texts = {**self.options, "path": self.store, "txnVersion": str(batch_id)}
        return SinkOptions.for_batch(texts)


def foreach_batch_writer(
    store: str, *, txn_app_id: str, host_broker: bool = False, **options: Any
) -> ForeachBatchWriter:
    """A function that writes each micro-batch into a buffer, exactly once.

    Use it as the function of ``foreachBatch``, or call it in one of your own beside other
    writes::

        to_buffer = foreach_batch_writer("s3://bucket/root", txn_app_id="orders-v1")

        def both(df, batch_id):
            df.write.format("delta")...
            to_buffer(df.selectExpr("to_json(struct(*)) AS value"), batch_id)

        query = stream.writeStream.foreachBatch(both).start()

    The executors upload; the driver makes the whole micro-batch visible in one write. Spark
    runs the function again for a batch it is not sure of, and the identity ``(txn_app_id, batch
    id)`` makes the second run do nothing.

    Args:
        store: The store's URL, as in ``save()``.
        txn_app_id: Names the stream of batches: letters, digits, ``.``, ``_``, ``-``. Give each
            call in one function, and each query, an id of its own: a second write of the same
            id and batch is taken for a repeat and skipped. Another query under the id is refused,
            also one whose checkpoint was deleted: it counts its batches from 0 again, and needs
            a new id.
        host_broker: Let the process that runs the function be the broker of the queue, or of each
            partition of the topic, while there is no other.
        **options: Options of the batch sink in snake case or as Spark writes them:
            ``data_path_prefix``, ``compression``, ...

    Raises:
        InvalidInput: An option is unknown or cannot be used.
    """
    texts = {_camel(name): _text(value) for name, value in options.items() if value is not None}
    texts["txnAppId"] = txn_app_id
    writer = ForeachBatchWriter(store, texts, host_broker)
    writer._checked(0)  # now, where the mistake is, and not in the first micro-batch
    return writer


def _camel(name: str) -> str:
    head, *rest = name.split("_")
    return head + "".join(each.capitalize() for each in rest)


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
