"""What commits a transaction over several partitions: to be saved before it is applied. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from opendata_buffer.errors import InvalidInput
from opendata_buffer.formats.keys import Transaction
from opendata_buffer.messages.uuids import CLOCK_MAX, PRODUCER_BYTES

__all__ = ["AckIntents"]

_VERSION = 1


@dataclass(frozen=True, slots=True)
class AckIntents:
    """The acknowledgements of a transaction, one for each partition that it wrote to.

    Applied, they commit the transaction. All of them or none have to be, so save them first, in
    the transaction of whatever the published messages were made from, and apply them again in
    full after a fault. ``AckIntents.from_json(intents.to_json()) == intents``.

    Attributes:
        topic_id: Of the topic.
        producer: 6 bytes: the transaction's own producer id.
        clocks: Of each partition, the clock of the acknowledgement. Empty when nothing was
            published: there is nothing to apply then.
        txn: Of a publisher with a name: the name and the number of the transaction.
    """

    topic_id: str
    producer: bytes
    clocks: Mapping[str, int] = field(default_factory=dict)
    txn: Transaction | None = None

    def to_json(self) -> str:
        """One line of JSON."""
        fields: dict[str, Any] = {
            "version": _VERSION,
            "topic": self.topic_id,
            "producer": self.producer.hex(),
            "clocks": dict(sorted(self.clocks.items())),
        }
        if self.txn is not None:
            fields["app"], fields["batch"] = self.txn.app, self.txn.batch
        return json.dumps(fields, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | bytes) -> AckIntents:
        """What :meth:`to_json` wrote.

        Raises:
            InvalidInput: Another program or a later version wrote it.
        """
        try:
            fields = json.loads(text)
            match fields:
                case {
                    "version": 1,
                    "topic": str(topic_id),
                    "producer": str(producer),
                    "clocks": dict(clocks),
                }:
                    made = cls(topic_id, bytes.fromhex(producer), clocks, _txn(fields))
                    if len(made.producer) == PRODUCER_BYTES and all(
                        map(_is_clock, clocks.values())
                    ):
                        return made
        except (ValueError, TypeError, KeyError, RecursionError):
            pass
        raise InvalidInput(
            f"intents are {text!r:.200}, and not what AckIntents.to_json() of this version wrote: "
            "apply them with the version that saved them"
        )


def _txn(fields: Mapping[str, Any]) -> Transaction | None:
    return Transaction(fields["app"], fields["batch"]) if "app" in fields else None


def _is_clock(value: object) -> bool:
    return type(value) is int and 0 < value <= CLOCK_MAX
