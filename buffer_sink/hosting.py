"""The broker of a queue in the process that calls ``foreachBatch`` functions.

Spark commits in Python processes that come and go. The one that runs the function of
``foreachBatch`` (the driver, or with Spark Connect the server's process for the query) lives as
long as its query, so others can find a broker there.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
from dataclasses import fields

from buffer_sink.options import SinkOptions
from buffer_sink.topic_write import find_topic
from opendata_buffer.broker.committer import open_committer
from opendata_buffer.config import ProducerConfig, QueueConfig
from opendata_buffer.consumer.consumer import Consumer
from opendata_buffer.errors import InvalidInput, OpenDataBufferError
from opendata_buffer.producer.group_commit import Committer
from opendata_buffer.runtime import SystemRuntime
from opendata_buffer.stores.open import open_store
from opendata_buffer.topic.topic import CachedTopic, Topic

__all__ = ["host"]

log = logging.getLogger(__name__)

REFRESH_S = 60.0
"""How old the list of a topic's partitions may be."""

_RUNTIME = SystemRuntime()


def host(options: SinkOptions) -> None:
    """Let this process be the broker of a queue, or of each partition of a topic.

    Where another broker serves, it stands by. Free to repeat: it does nothing then, but for the
    partitions that a topic has got since. It ends with the process.

    Raises:
        InvalidInput: The extra ``broker`` is not installed, or the store cannot be used.
    """
    key = (os.getpid(), options.queue, options.one_queue)
    try:
        with _one_at_a_time:
            if key not in _hosting:
                _hosting[key] = _Hosting(options)
            _hosting[key].serve()
    except InvalidInput:
        raise
    except OpenDataBufferError as error:
        # The write that follows will tell if the store is gone; the next one tries again.
        log.warning("no broker is served in this process: %s", error)


class _Hosting:
    def __init__(self, options: SinkOptions) -> None:
        queue = options.queue
        self._store = open_store(queue.store, queue.store_options)
        # A collector of its workers must not be quicker than what is written (failure F5).
        self._config = ProducerConfig(
            **{each.name: getattr(queue, each.name) for each in fields(QueueConfig)},
            gc_grace_period_ms=options.gc_grace_period_ms,
        )
        self._topic: CachedTopic | None = None
        if not options.one_queue and find_topic(self._store) is not None:
            topic = Topic.open(self._config, store=self._store, runtime=_RUNTIME)
            self._topic = CachedTopic(topic, _RUNTIME, REFRESH_S)
        self._open: dict[str, Committer] = {}

    def serve(self) -> None:
        if self._topic is None:
            self._serve("", self._config)
        else:
            for name in self._topic.get().active:
                self._serve(name, Topic.config_of(name, self._config))

    def _serve(self, name: str, config: ProducerConfig) -> None:
        if name not in self._open:
            # Nothing is appended through it: what it has beside it is the broker.
            self._open[name] = open_committer(
                self._store, config, _RUNTIME, Consumer, broker="host"
            )

    def close(self) -> None:
        while self._open:
            self._open.popitem()[1].close()


# Of two queries in one process that write to one queue, one makes what both use.
_one_at_a_time = threading.Lock()
_hosting: dict[tuple[int, QueueConfig, bool], _Hosting] = {}


@atexit.register
def _leave() -> None:
    """Say so, so that the next broker need not wait."""
    for (process, *_), hosting in list(_hosting.items()):
        if process == os.getpid():
            hosting.close()
    _hosting.clear()
