"""Reading a queue without owning it: no epoch, no marker, nothing dequeued."""

from __future__ import annotations

from opendata_buffer.config import QueueConfig
from opendata_buffer.errors import InvalidInput
from opendata_buffer.formats.manifest import Manifest
from opendata_buffer.queue.ownership import check_owner, missing_topic_hint
from opendata_buffer.queue.queue import Queue
from opendata_buffer.runtime import Runtime
from opendata_buffer.stores.base import Store
from opendata_buffer.topic.description import number_of
from opendata_buffer.topic.topic import is_topic

__all__ = ["Observer", "is_a_topic"]


def is_a_topic(url: str, prefix: str) -> str:
    """What to tell who asked for a queue where there is a topic, and no such partition."""
    lists = f"'opendata-buffer topic describe {url}' lists them"
    if number_of(prefix) is None:
        return (
            f"there is a topic at {url}, and this is about one queue: name a partition with "
            f"--partition; {lists}"
        )
    return f"partition {prefix!r} of the topic at {url} was never written; {lists}"


class Observer:
    """Looks at the manifest of one queue, again and again.

    Args:
        store: Where the queue lives.
        config: Its manifest and prefix; ``cas_deadline_ms`` bounds a look, retries included.
        runtime: The clock of retries.
    """

    def __init__(self, store: Store, config: QueueConfig, runtime: Runtime) -> None:
        self.store = store
        self.config = config
        self.runtime = runtime
        self._queue = Queue(store, config, runtime=runtime, role="observer")
        self._never_was = False

    def manifest(self) -> Manifest:
        """The manifest as it is now. An unchanged one is not transferred again.

        Raises:
            InvalidInput: There is none; nothing is created.
            QueueReset: It vanished or went backwards since the last look, or there was one once.
            CorruptManifest: It is no v1 manifest.
            TransientStorageError, PermanentStorageError: The store did not answer.
        """
        manifest = self.find()
        if manifest is None and is_topic(self.store):
            raise InvalidInput(is_a_topic(self.store.url, self.config.data_path_prefix))
        if manifest is None and (lost := missing_topic_hint(self.store)):
            raise InvalidInput(lost)
        if manifest is None:
            raise InvalidInput(
                f"there is no queue: no manifest {self.config.manifest_path!r} in "
                f"{self.store.url}. Produce into it first, or name the right queue with "
                "data_path_prefix or manifest_path."
            )
        return manifest

    def find(self) -> Manifest | None:
        """As :meth:`manifest`; None where there is none and never was one.

        Raises:
            QueueReset: Also when there was one: the marker beside it knows.
        """
        manifest = self._queue.read()
        if manifest is None and not self._never_was:
            claim = check_owner(self.store, self.config, runtime=self.runtime)
            if claim is not None:
                claim.check(None)
            # Once it was seen, the queue itself notices that it vanishes.
            self._never_was = True
        return manifest
