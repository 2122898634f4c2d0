"""One ``produce()`` call on its way into a batch, as a value."""

from __future__ import annotations

from dataclasses import dataclass
from uuid import UUID

from opendata_buffer.formats.keys import Transaction

__all__ = ["CALL_BYTES", "Call"]

CALL_BYTES = 256
"""What a waiting call takes of the producer's budget beside its bytes: about what its objects
take of the process's memory."""


@dataclass(slots=True, eq=False)
class Call:
    """One ``produce()`` call, encoded.

    Attributes:
        block: Its entries as a piece of a record block.
        count: How many entries.
        metadata: The caller's metadata payload.
        ingestion_time_ms: When the call was made, milliseconds since the Unix epoch.
        transaction: Whose the call is; it then has a batch of its own.
        message: Identity of the call as a message; it then has a batch of its own, too.
    """

    block: bytes | memoryview
    count: int
    metadata: bytes
    ingestion_time_ms: int
    transaction: Transaction | None = None
    message: UUID | None = None

    @property
    def alone(self) -> bool:
        """Whether it has a batch to itself."""
        return self.transaction is not None or self.message is not None

    @property
    def held(self) -> int:
        """Bytes of the producer's budget that it takes (failure F33)."""
        return len(self.block) + len(self.metadata) + CALL_BYTES

    @property
    def size(self) -> int:
        """Bytes of its records in a block."""
        return len(self.block)
