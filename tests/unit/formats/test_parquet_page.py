from __future__ import annotations

import struct

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from opendata_buffer.formats.arrow import HEAD_SIZE, TAIL_SIZE, head, tail


@pytest.mark.parametrize("records", [[b""], [b"one", b"", b"three"], [b"x" * 1000] * 70_000])
def test_a_block_between_head_and_tail_is_a_parquet_file(records: list[bytes]) -> None:
    block = b"".join(struct.pack("<I", len(record)) + record for record in records)
    file = head(len(block), len(records)) + block + tail(len(block), len(records))
    reader = pq.ParquetFile(pa.BufferReader(file))
    column = reader.metadata.row_group(0).column(0)
    assert reader.schema_arrow == pa.schema([pa.field("v", pa.binary(), nullable=False)])
    assert (column.physical_type, column.compression) == ("BYTE_ARRAY", "UNCOMPRESSED")
    assert column.encodings == ("PLAIN",)
    assert reader.metadata.num_rows == len(records)
    assert reader.read().column(0).to_pylist() == records


@pytest.mark.parametrize("count", [0, 1, 127, 128, 2**31 - 1, 2**32 - 1])
@pytest.mark.parametrize("size", [0, 63, 64, 2**31 - 1])
def test_head_and_tail_fit_the_room_left_for_them(size: int, count: int) -> None:
    assert len(head(size, count)) == HEAD_SIZE
    assert len(tail(size, count)) <= TAIL_SIZE


def test_literal_page_header() -> None:
    # PageHeader{1: DATA_PAGE, 2: 9, 3: 9, 5: DataPageHeader{1: 1, 2: PLAIN, 3: RLE, 4: RLE}}
    header = bytes.fromhex("15 00 15 12 15 12 2c 15 02 15 00 15 06 15 06 00 00")
    assert head(9, 1) == b"PAR1" + bytes(HEAD_SIZE - 4 - len(header)) + header
