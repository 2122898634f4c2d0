"""Cache the description of a topic for a producer or a consumer.

A producer asks for the partitions with each call, and a consumer with each poll. Neither may wait
for a store each time, and neither may work with an old list for long. So the description is read
again in the background once it is :data:`REFRESH_S` old. Only after a pause of several times that
long does a caller wait for the read.
"""

from __future__ import annotations

import logging

from opendata_buffer import errors
from opendata_buffer.runtime import Runtime, deadline
from opendata_buffer.topic.description import TopicDescription
from opendata_buffer.topic.topic import Topic

log = logging.getLogger(__name__)

REFRESH_S = 2.0
"""Age in seconds at which producers and consumers read a description again."""

WAIT_AFTER = 5
"""Multiple of the maximum age at which :meth:`CachedTopic.get` waits for the read."""

READ_S = 10.0
"""Seconds that a read may take. After that the cached description is used."""


class CachedTopic:
    """A topic's description that is read again in the background. Thread-safe.

    Args:
        topic: The topic, which only this object may use from now on.
        runtime: Clock and threads.
        max_age_s: Age in seconds at which the description is read again.
    """

    def __init__(self, topic: Topic, runtime: Runtime, max_age_s: float) -> None:
        self._topic = topic
        self._runtime = runtime
        self._max_age_s = max_age_s
        self._condition = runtime.condition()
        self._known = topic.description
        self._known_at = runtime.monotonic()
        self._reading = False

    def get(self, *, waits: bool = False) -> TopicDescription:
        """Return the last known description, after a read if it is outdated. Raises nothing.

        Args:
            waits: Whether to wait for any read that is due. It is then made in this thread.

        Returns:
            The description.
        """
        waits = waits or self.is_outdated
        with self._condition:
            begins = not self._reading and self._age_s() >= self._max_age_s
            self._reading = self._reading or begins
        if begins:
            try:
                if waits:
                    self._read()
                else:
                    self._runtime.spawn(self._read, "opendata-buffer-topic")
            except RuntimeError:
                self._read()  # The process cannot start a thread, so read in this one.
        return self._known

    @property
    def is_outdated(self) -> bool:
        """Whether the next :meth:`get` waits for a read."""
        return not self._reading and self._age_s() >= WAIT_AFTER * self._max_age_s

    def _age_s(self) -> float:
        return self._runtime.monotonic() - self._known_at

    def _read(self) -> None:
        found = None
        try:
            with deadline(self._runtime, READ_S):
                found = self._topic.read()
        except errors.OpenDataBufferError as error:
            log.warning("the topic at %s could not be read: %s", self._topic.url, error)
        finally:
            with self._condition:
                self._reading = False
                # Set this after a failure, too: otherwise each call would try again.
                self._known_at = self._runtime.monotonic()
                self._known = found or self._known
