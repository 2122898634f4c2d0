"""Where a reader is in one partition of a topic, as a value to be saved beside what it wrote."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from opendata_buffer.errors import InvalidInput

__all__ = ["PartitionPosition"]

_MAX_SEQUENCE = 2**64 - 1


@dataclass(frozen=True, slots=True)
class PartitionPosition:
    """Everything up to here is processed. ``PartitionPosition.parse(str(position)) == position``.

    Attributes:
        queue_id: Of the partition's queue, so that a position is not taken for one in another.
        sequence: Of the last entry of the manifest whose batches are all processed.
        delivered: How many of the batches that the entry behind it releases are processed, too:
            an acknowledgement releases those of a whole transaction.
        transactions: What the reader knows of writers and open transactions at that point:
            :meth:`.ReadCommitted.to_dict`.
    """

    queue_id: str
    sequence: int
    delivered: int = 0
    transactions: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        fields: dict[str, Any] = {"queue": self.queue_id, "sequence": self.sequence}
        if self.delivered:
            fields["delivered"] = self.delivered
        if self.transactions:
            fields["transactions"] = self.transactions
        return json.dumps(fields, separators=(",", ":"))

    @classmethod
    def parse(cls, text: str) -> PartitionPosition:
        """Read what ``str`` printed.

        Raises:
            InvalidInput: It is no position.
        """
        try:
            fields = json.loads(text)
        except (ValueError, RecursionError, TypeError):
            fields = None
        match fields:
            case {"queue": str(queue_id), "sequence": int(sequence)} if (
                0 <= sequence <= _MAX_SEQUENCE
            ):
                delivered = fields.get("delivered", 0)
                transactions = fields.get("transactions", {})
                if isinstance(delivered, int) and delivered >= 0 and isinstance(transactions, dict):
                    return cls(queue_id, sequence, delivered, transactions)
        raise InvalidInput(
            f"position is {text!r:.200}: use what str() of TopicConsumer.positions gave"
        )

    @classmethod
    def of(cls, given: PartitionPosition | str) -> PartitionPosition:
        """A position from either of its forms.

        Raises:
            InvalidInput: It is none.
        """
        return given if isinstance(given, PartitionPosition) else cls.parse(given)
