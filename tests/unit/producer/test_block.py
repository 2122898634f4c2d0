"""Record blocks from what callers brought."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from opendata_buffer.errors import InvalidInput
from opendata_buffer.formats.batch import encode_block, split_records
from opendata_buffer.producer.append_buffer import (
    PIECE_HELD,
    RECORD_HELD,
    RECORDS_AT_ONCE,
    BlockBuilder,
    Run,
    encode_entries,
    encode_list,
)


def closed(*items: Any) -> Run:
    first, *others = items
    run = Run(first, 0, None, 1_000_000, 1.0)
    for item in others:
        if type(item) is tuple:
            run.left -= len(item[0]) + PIECE_HELD
            run.more += item[1] - 1
            run.pieces += 1
        else:
            run.left -= len(item) + RECORD_HELD
        run.append(item)
    run.close()
    return run


def piece(*records: bytes) -> tuple[bytes, int]:
    return encode_block(records), len(records)


def split(builder: BlockBuilder) -> list[bytes]:
    return split_records(b"".join(builder.pieces()), builder.count)


@pytest.mark.parametrize("kind", [list, tuple])
def test_a_list_of_bytes_becomes_its_block(kind: Any) -> None:
    records = [b"", b"x", b"y" * 1_023, b"z" * 1_024, b"w" * 70_000]
    found = encode_list(kind(records))
    assert found is not None
    block, count = found
    assert count == 5
    assert split_records(block, count) == records


@pytest.mark.parametrize("other", ["text", None, 7, bytearray(b"a"), memoryview(b"a")])
@pytest.mark.parametrize("at", [0, 50, 99])
def test_a_list_with_anything_else_is_left_to_who_names_the_record(other: Any, at: int) -> None:
    records: list[Any] = [b"record"] * 100
    records[at] = other
    assert encode_list(records) is None
    if isinstance(other, bytearray | memoryview):
        records[at] = b"a"
        assert encode_entries([*records[:at], other, *records[at + 1 :]]) == piece(*records)
    else:
        with pytest.raises(InvalidInput, match=f"record {at} is {type(other).__name__}"):
            encode_entries(records)


def test_bytes_of_a_class_of_their_own_are_not_trusted_to_know_their_length() -> None:
    class Odd(bytes):
        def __len__(self) -> int:
            return 3

    assert encode_list([b"a", Odd(b"longer")]) is None
    assert encode_entries([b"a", Odd(b"longer")]) == piece(b"a", b"longer")


def test_an_empty_list_makes_no_piece() -> None:
    assert encode_list([]) is None


def test_records_and_pieces_keep_their_order() -> None:
    builder = BlockBuilder()
    builder.add_run(closed(b"a", b"b"))
    assert builder.count == 2
    builder.add_run(closed(b"c", piece(b"d", b"e"), b"f"))
    assert builder.count == 6
    builder.add(*piece(b"g", b"h"))
    builder.add_run(closed(piece(b"i", b""), piece(b"j")))
    assert builder.count == 11
    assert split(builder) == [b"a", b"b", b"c", b"d", b"e", b"f", b"g", b"h", b"i", b"", b"j"]


def test_neighbouring_runs_are_joined_in_one_go_and_many_records_in_several() -> None:
    builder = BlockBuilder()
    records = [b"%d" % n for n in range(RECORDS_AT_ONCE + 2_000)]
    for start in range(0, len(records), 1_000):
        builder.add_run(closed(*records[start : start + 1_000]))
    assert builder.count == len(records)
    assert len(builder.pieces()) == 2
    assert split(builder) == records


def test_what_comes_after_the_closing_of_its_run_is_not_in_the_block() -> None:
    run = closed(b"a", b"b")
    run.append(b"late")
    builder = BlockBuilder()
    builder.add_run(run)
    assert split(builder) == [b"a", b"b"]


def test_an_arrow_array_and_an_iterator_become_blocks() -> None:
    assert encode_entries(pa.array([b"a", b"b"])) == piece(b"a", b"b")
    assert encode_entries(iter([b"a", b"b"])) == piece(b"a", b"b")


@pytest.mark.parametrize("one", [b"a", bytearray(b"a"), memoryview(b"a"), "a"])
def test_one_record_instead_of_a_list_is_refused(one: Any) -> None:
    with pytest.raises(InvalidInput, match=f"entries is one {type(one).__name__}"):
        encode_entries(one)
