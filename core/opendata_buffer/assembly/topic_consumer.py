"""The public consumer of a topic."""

from __future__ import annotations

from opendata_buffer.assembly import open_pause
from opendata_buffer.queue.queue import OpenPause
from opendata_buffer.topic import consumer


class TopicConsumer(consumer.TopicConsumer):
    """The class below, which here asks the broker for pauses."""

    __doc__ = consumer.TopicConsumer.__doc__

    def _default_pause(self) -> OpenPause | None:
        return open_pause
