"""Which queues a source reads: the one it names, or all partitions of a topic."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from buffer_source.offsets import ONLY, SourceOffset
from buffer_source.options import SourceOptions
from buffer_source.partition import PartitionStream
from opendata_buffer.errors import InvalidInput, OpenDataBufferError, PermanentStorageError
from opendata_buffer.late import late_imports
from opendata_buffer.queue.ownership import missing_topic_hint
from opendata_buffer.runtime import Runtime, deadline
from opendata_buffer.stores.base import Get, Store
from opendata_buffer.topic.description import is_topic

if TYPE_CHECKING:
    from opendata_buffer.topic.topic import Topic

__all__ = ["Partitions", "reads_topic"]

log = logging.getLogger(__name__)


def reads_topic(options: SourceOptions, store: Get, runtime: Runtime) -> bool:
    """Whether the options lead to a topic, by one small read; none where they name a queue.

    Raises:
        TransientStorageError: The store did not answer.
    """
    if options.one_queue:
        return False
    try:
        with deadline(runtime, options.queue.cas_deadline_ms / 1000):
            return is_topic(store)
    except PermanentStorageError as error:
        # Who may only read below a queue's prefix has a queue.
        log.warning("not looking for a topic, reading a queue: %s", error)
        return False


class Partitions:
    """The queues of a source by their names in its offsets, and a stream for each.

    A source that reads one queue has the one partition :data:`~buffer_source.offsets.ONLY`.
    Makes no request before it is asked which partitions there are.

    Args:
        options: What the query asked for.
        store: The opened store.
        runtime: Clock, sleep and threads.
        patient: Repeats what fails for a time.
    """

    def __init__(
        self,
        options: SourceOptions,
        store: Store,
        runtime: Runtime,
        patient: Callable[..., Any],
    ) -> None:
        self._options = options
        self._store = store
        self._runtime = runtime
        self._patient = patient
        self._known = False  # Whether it is known what the options lead to.
        self._topic: Topic | None = None
        self._streams: dict[str, PartitionStream] = {}

    @property
    def topic(self) -> Topic | None:
        """The topic, if the source reads one; one small read when it is asked first.

        Raises:
            InvalidInput: As :meth:`names`.
            StorageError: The store did not answer.
        """
        if not self._known:
            if self._patient(reads_topic, self._options, self._store, self._runtime):
                with late_imports():  # or each query's start over one queue would wait for it
                    from opendata_buffer.topic.topic import Topic

                self._topic = Topic.open(
                    self._options.queue, store=self._store, runtime=self._runtime
                )
            self._check_options(self._topic)
            self._known = True
        return self._topic

    @property
    def opened(self) -> list[PartitionStream]:
        """The streams that a position was handed to."""
        return [each for each in self._streams.values() if each.opened]

    def names(self) -> list[str]:
        """All partitions there are now; of a topic by one look at it.

        Raises:
            InvalidInput: The options ask for a sequence, and a topic has one for each partition.
            QueueReset: The topic was deleted or replaced.
            StorageError: The store did not answer.
        """
        return [ONLY] if self.topic is None else self.topic.read().names

    def options_of(self, name: str) -> SourceOptions:
        """What the query asked for, with the queue of one partition."""
        return self._options if self.topic is None else self._options.of_partition(name)

    def stream(self, name: str) -> PartitionStream:
        """The stream of one partition."""
        if name not in self._streams:
            self._streams[name] = PartitionStream(
                name, self.options_of(name), self._store, self._runtime, self._patient
            )
        return self._streams[name]

    def check(self, offset: SourceOffset | None) -> None:
        """Refuse an offset that is about something else than this source reads.

        Raises:
            InvalidInput: It is about a topic and this is a queue, or the other way round; or the
                topic's description is gone.
        """
        if offset is None:
            return
        if self.topic is None:
            # A checkpoint given up for a lost description would give up what it holds, too.
            if ONLY not in offset.partitions and (lost := missing_topic_hint(self._store)):
                raise InvalidInput(lost)
            offset.only  # noqa: B018  # raises
        elif ONLY in offset.partitions:
            raise InvalidInput(
                f"the checkpoint is about one queue, and {self._store.url} is a topic with "
                f"{len(self.topic.description.names)} partitions: the checkpoint belongs to "
                "another query. Give this query a checkpointLocation of its own, or name the "
                "queue with the option dataPathPrefix."
            )

    def let_drained_leave(self) -> None:
        """Take drained partitions that are empty out of the topic; a failure is put off.

        Only the consumer of a partition knows that it is done with it.
        """
        if self._topic is None or not self._options.acknowledge:
            return
        done = {each.name for each in self._streams.values() if each.empty}
        if not done.intersection(self._topic.description.draining):
            return
        try:
            self._topic.remove_drained()
        except OpenDataBufferError as error:
            log.warning("drained partitions stay in the topic for now: %s", error)

    def _check_options(self, topic: Topic | None) -> None:
        for option, value in (
            ("startingOffsets", self._options.starting_offsets),
            ("endingOffsets", self._options.ending_offsets),
        ):
            if topic is not None and isinstance(value, int):
                raise InvalidInput(
                    f"option {option} is {value}, and {self._store.url} is a topic, each partition "
                    'of which counts for itself: use sequences by partition such as {"0": '
                    f"{value}}}, or name one partition with the option dataPathPrefix"
                )
            if isinstance(value, tuple):
                names = [name for name, _ in value]
                if topic is None:
                    raise InvalidInput(
                        f"option {option} has sequences by partition ({', '.join(names)}), and "
                        f"{self._store.url} with manifest {self._options.queue.manifest_path!r} is "
                        "one queue: use a sequence such as 42"
                    )
                # A partition may have left since the query began, which looks at this no more.
                for name in names:
                    if not topic.description.has_left(name):
                        topic.description.resolved(name)

    def close(self, names: Iterable[str] | None = None) -> None:
        """Let these queues go, or all; acknowledges nothing."""
        for name in list(self._streams if names is None else names):
            if name in self._streams:
                self._streams.pop(name).close()
