"""The public classes that write and read a topic."""

from __future__ import annotations

from opendata_buffer.assembly import open_committer, open_pause
from opendata_buffer.producer.committer import OpenCommitter
from opendata_buffer.queue.queue import OpenPause
from opendata_buffer.topic import consumer, producer, publisher


class TopicProducer(producer.TopicProducer):
    """The class below, which here appends through the broker."""

    __doc__ = producer.TopicProducer.__doc__

    def _default_committer(self) -> OpenCommitter:
        return open_committer


class TopicConsumer(consumer.TopicConsumer):
    """The class below, which here asks the broker for pauses."""

    __doc__ = consumer.TopicConsumer.__doc__

    def _default_pause(self) -> OpenPause | None:
        return open_pause


class Publisher(publisher.Publisher):
    """The class below, which here appends through the broker."""

    __doc__ = publisher.Publisher.__doc__

    def _default_committer(self) -> OpenCommitter:
        return open_committer
