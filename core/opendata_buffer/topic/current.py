"""The partitions of a topic as a producer needs them: at once, and not older than some seconds."""

from __future__ import annotations

import logging

from opendata_buffer.errors import OpenDataBufferError
from opendata_buffer.locks import locked
from opendata_buffer.runtime import Runtime, deadline
from opendata_buffer.topic.description import TopicDescription
from opendata_buffer.topic.topic import Topic

__all__ = ["CurrentTopic"]

log = logging.getLogger(__name__)

OUTDATED = 5
"""Ages after which a caller waits for a look: nobody has asked for long."""

LOOK_S = 10.0
"""How long a look may take. Without an answer the caller goes on with what is known: a partition
that has left refuses what is appended."""


class CurrentTopic:
    """A topic's description, read again by age. Thread-safe.

    Args:
        topic: Opened; nobody else uses it.
        runtime: Clock and threads.
        max_age_s: Seconds after which the next question starts a look. The caller does not wait
            for it: the answer to the questions after it is new.
    """

    def __init__(self, topic: Topic, runtime: Runtime, max_age_s: float) -> None:
        self._topic = topic
        self._runtime = runtime
        self._max_age_s = max_age_s
        self._condition = runtime.condition()
        self._known = topic.description
        self._known_at = runtime.monotonic()
        self._looking = False

    def get(self) -> TopicDescription:
        """The description; raises nothing."""
        age_s, looks = self._ask()
        if looks and age_s >= OUTDATED * self._max_age_s:
            self._look()
        elif looks:
            try:
                self._runtime.spawn(self._look, "opendata-buffer-topic")
            except RuntimeError:
                self._look()  # the process has no thread left
        return self._known

    @property
    @locked
    def is_outdated(self) -> bool:
        """Whether the next :meth:`get` waits for a look."""
        age_s = self._runtime.monotonic() - self._known_at
        return not self._looking and age_s >= OUTDATED * self._max_age_s

    @locked
    def _ask(self) -> tuple[float, bool]:
        """How old the answer is, and whether the caller is the one who sees to a new one."""
        age_s = self._runtime.monotonic() - self._known_at
        looks = age_s >= self._max_age_s and not self._looking
        self._looking = self._looking or looks
        return age_s, looks

    def _look(self) -> None:
        found = None
        try:
            with deadline(self._runtime, LOOK_S):
                found = self._topic.read()
        except OpenDataBufferError as error:
            log.warning("the topic at %s could not be looked at: %s", self._topic.url, error)
        finally:
            self._looked(found)

    @locked
    def _looked(self, found: TopicDescription | None) -> None:
        self._looking = False
        self._known_at = self._runtime.monotonic()  # also after a failure: not at every call
        if found is not None:
            self._known = found
