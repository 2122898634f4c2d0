"""The public publisher of transactions."""

from __future__ import annotations

from opendata_buffer.assembly import open_committer
from opendata_buffer.producer.committer import OpenCommitter
from opendata_buffer.topic import publisher


class Publisher(publisher.Publisher):
    """The class below, which here appends through the broker."""

    __doc__ = publisher.Publisher.__doc__

    def _default_committer(self) -> OpenCommitter:
        return open_committer
