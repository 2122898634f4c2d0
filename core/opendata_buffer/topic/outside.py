"""What a publisher writes outside of its transactions: messages that count as they are durable."""

from __future__ import annotations

from opendata_buffer.commit.durability import WriteHandle
from opendata_buffer.messages import OUTSIDE_TXN, Clock, build_uuid
from opendata_buffer.producer.call import Call
from opendata_buffer.producer.producer import Producer
from opendata_buffer.topic.endings import Endings

__all__ = ["Outside"]


class Outside:
    """One producer of messages, in whichever partitions. Not thread-safe.

    Args:
        producer: Its own id, 6 bytes.

    Attributes:
        producer: As given.
    """

    def __init__(self, producer: bytes) -> None:
        self.producer = producer
        self._clock = Clock()
        self._partitions: set[str] = set()

    def at(self, now_ms: int) -> None:
        """Let the next messages be of this time, milliseconds since the Unix epoch."""
        self._clock.update(now_ms)

    def accept(self, name: str, producer: Producer, call: Call) -> WriteHandle:
        """Have one part of a call accepted as the next message."""
        call.message = build_uuid(self.producer, self._clock.tick(), OUTSIDE_TXN)
        self._partitions.add(name)
        return producer.accept(call)

    def say_goodbye(self, endings: Endings) -> None:
        """Let readers forget this producer, which writes nothing more.

        Raises:
            OpenDataBufferError: See :meth:`.Endings.say_goodbye`.
        """
        endings.say_goodbye(self.producer, self._clock.value + 1, self._partitions)
