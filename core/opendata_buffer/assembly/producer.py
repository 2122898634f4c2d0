"""The public producer of one queue."""

from __future__ import annotations

from opendata_buffer.assembly import open_committer
from opendata_buffer.producer import producer
from opendata_buffer.producer.committer import OpenCommitter


class Producer(producer.Producer):
    """The class below, which here appends through the broker."""

    __doc__ = producer.Producer.__doc__

    def _default_committer(self) -> OpenCommitter:
        return open_committer
