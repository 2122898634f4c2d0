"""What both decoders of a batch share; whole batches are in test_batch and test_arrow."""

from __future__ import annotations

import pytest

from opendata_buffer.errors import CorruptBatch, InvalidInput
from opendata_buffer.formats.codec import (
    FOOTER_SIZE,
    BatchFooter,
    Compression,
    check_block,
    join_records,
    largest_object,
    parse_footer,
    split_records,
)


def test_a_footer_is_the_last_seven_bytes() -> None:
    data = b"block" + b"\x01" + b"\x03\x00\x00\x00" + b"\x01\x00"
    assert FOOTER_SIZE == 7
    assert parse_footer(data) == BatchFooter(Compression.ZSTD, 3)
    with pytest.raises(CorruptBatch, match="6 bytes, less than its 7-byte footer"):
        parse_footer(data[-6:])


def test_records_come_apart_as_they_were_joined() -> None:
    records = [b"hello", b"", b"\x00" * 300]
    assert split_records(join_records(records), 3) == records
    assert split_records(b"", 0) == []


def test_a_block_must_fit_the_limit_and_its_records() -> None:
    footer = BatchFooter(Compression.NONE, 2)
    check_block(8, footer, 8)
    with pytest.raises(CorruptBatch, match="record block has 9 bytes, more than max_batch_bytes 8"):
        check_block(9, footer, 8)
    with pytest.raises(CorruptBatch, match="counts 2 records but the block has 7 bytes"):
        check_block(7, footer, 8)
    with pytest.raises(CorruptBatch, match="counts no records but the block has 1 bytes"):
        check_block(1, BatchFooter(Compression.NONE, 0), 8)


def test_the_largest_object_is_larger_than_its_block() -> None:
    assert largest_object(0) > FOOTER_SIZE
    assert largest_object(1 << 20) > (1 << 20) + FOOTER_SIZE


class Endless(bytes):
    def __len__(self) -> int:
        return 2**32


def test_a_record_beyond_four_gigabytes_is_named() -> None:
    with pytest.raises(InvalidInput, match="record 1 has 4294967296 bytes"):
        join_records([b"a", Endless()])
