"""The public producer of a topic."""

from __future__ import annotations

from opendata_buffer.assembly import open_committer
from opendata_buffer.producer.committer import OpenCommitter
from opendata_buffer.topic import producer


class TopicProducer(producer.TopicProducer):
    """The class below, which here appends through the broker."""

    __doc__ = producer.TopicProducer.__doc__

    def _default_committer(self) -> OpenCommitter:
        return open_committer
