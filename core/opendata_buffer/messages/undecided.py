"""Transactions that a manifest's entries leave undecided. Pure.

A transaction's batches lie in the queue as CONTINUE_TXN messages until an acknowledgement of
their producer decides them: it commits those up to its clock and drops the others. Until then no
reader delivers them, and none acknowledges what lies behind the first of them. So the entries of
an undecided transaction never leave the manifest, and the manifest alone shows what there is to
decide.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from opendata_buffer.formats.keys import Transaction, parse_location
from opendata_buffer.messages.uuids import ACK_TXN, CONTINUE_TXN, FINAL, parse_uuid

__all__ = ["Undecided", "undecided"]


@dataclass(frozen=True, slots=True)
class Undecided:
    """What one producer wrote in one queue and has neither committed nor rolled back.

    Attributes:
        first_sequence: Of the first batch; nothing from here on can be acknowledged.
        first_clock: The producer's clock at the first batch. An acknowledgement with a clock
            below it rolls the transaction back.
        last_clock: The producer's clock at the last batch. One with a clock beyond it commits.
        batches: How many, duplicates left out.
        txn: Whose it is, from the first batch's name, if that says so.
    """

    first_sequence: int
    first_clock: int
    last_clock: int
    batches: int
    txn: Transaction | None = None


def undecided(entries: Iterable[tuple[int, str]], data_path_prefix: str) -> dict[bytes, Undecided]:
    """The undecided transactions of a queue, by producer id, in the order of their beginnings.

    Args:
        entries: Sequence and location of each entry of a manifest, in order.
        data_path_prefix: The queue's data prefix; locations elsewhere are no messages.
    """
    found: dict[bytes, Undecided] = {}
    acked: dict[bytes, int] = {}
    for sequence, location in entries:
        parsed = parse_location(location, data_path_prefix)
        if parsed is None or parsed.message is None:
            continue
        message = parse_uuid(parsed.message)
        producer, clock, flags = message.producer, message.clock, message.flags & ~FINAL
        final = message.flags != flags
        span = found.get(producer)
        if clock == 0:
            continue  # It opts out of sequencing, as a message without identity.
        if flags == ACK_TXN:
            found.pop(producer, None)
            # Readers forget a producer at its last word: what follows all the same is new to them,
            # and held back.
            acked[producer] = 0 if final else clock
        elif flags != CONTINUE_TXN:
            # A producer that mixes both kinds gives up its open transaction.
            if span is not None and clock >= span.first_clock:
                del found[producer]
                acked[producer] = clock
        elif span is not None:
            if clock > span.last_clock:
                found[producer] = replace(span, last_clock=clock, batches=span.batches + 1)
        elif clock > acked.get(producer, 0):
            found[producer] = Undecided(sequence, clock, clock, 1, parsed.txn)
    return found
