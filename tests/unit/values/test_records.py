from __future__ import annotations

import pyarrow as pa
import pytest

from opendata_buffer.values.records import Records


def test_quotes_are_found_record_by_record() -> None:
    records = Records(pa.array([b'{"a":1}', b"", b"[]", b'"x" "y"'], pa.binary()))
    assert records.quote_count.tolist() == [2, 0, 0, 4]
    first = records.first_quote.tolist()
    assert records.quotes[first[0] : first[0] + 2].tolist() == [1, 3]
    assert records.quotes[first[3] : first[3] + 4].tolist() == [9, 11, 13, 15]
    assert records.plain.tolist() == [True, False, False, True]


@pytest.mark.parametrize("odd", [b'{"a":"\\n"}', b'{"a":"\n"}', b'{"a":\t1}', b'{"a":"\x00"}'])
def test_a_record_with_an_escape_or_a_control_character_is_not_plain(odd: bytes) -> None:
    plain = b'{"a":"~ \xc3\xa9"}'
    records = Records(pa.array([plain, odd, plain], pa.binary()))
    assert records.plain.tolist() == [True, False, True]


def test_spaces_at_the_end_are_trimmed_up_to_a_limit() -> None:
    texts = [b'"x"' + b" " * spaces for spaces in (0, 1, 7, 8, 9, 30, 3000)]
    records = Records(pa.array([b"x", *texts], pa.binary()).slice(1))
    trimmed = (records.trimmed - records.begin).tolist()
    assert trimmed[:-1] == [3] * 6
    assert trimmed[-1] > 3


def test_the_last_bytes_of_a_buffer_are_read_as_all_others_are() -> None:
    exact = pa.py_buffer(b'{"a":1}')
    offsets = pa.array([0, 7], pa.int32()).buffers()[1]
    records = Records(pa.Array.from_buffers(pa.binary(), 1, [None, offsets, exact]))
    assert records.source.word(records.begin).tobytes() == b'{"a":1}\0'
