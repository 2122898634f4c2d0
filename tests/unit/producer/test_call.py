"""One call: what it takes, and whether it shares a batch."""

from __future__ import annotations

from uuid import UUID

from opendata_buffer.formats.keys import Transaction
from opendata_buffer.producer.append_buffer import CALL_BYTES, Call


def test_a_call_takes_its_bytes_its_metadata_and_what_its_objects_take() -> None:
    call = Call(memoryview(b"\1\0\0\0a\1\0\0\0b"), 2, b"topic", 1_700)
    assert (call.size, call.held) == (10, 10 + 5 + CALL_BYTES)


def test_a_call_with_an_identity_of_its_own_has_a_batch_to_itself() -> None:
    assert not Call(b"", 0, b"", 0).alone
    assert Call(b"", 0, b"", 0, transaction=Transaction("app", 1)).alone
    assert Call(b"", 0, b"", 0, message=UUID(int=1)).alone
