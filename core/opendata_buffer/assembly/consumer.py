"""The public consumer of one queue."""

from __future__ import annotations

from opendata_buffer.assembly import open_pause
from opendata_buffer.consumer import consumer
from opendata_buffer.queue.queue import OpenPause


class Consumer(consumer.Consumer):
    """The class below, which here asks the broker for pauses."""

    __doc__ = consumer.Consumer.__doc__

    def _default_pause(self) -> OpenPause | None:
        return open_pause
