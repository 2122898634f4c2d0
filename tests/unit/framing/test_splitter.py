"""Errors of framings: which record, which byte, what to do."""

from __future__ import annotations

from opendata_buffer.framing import broken, too_large


def test_an_error_names_record_and_byte_and_what_to_do() -> None:
    said = str(broken(3, 17, "no length"))
    assert said.startswith("record 3, at byte 17 of the input: no length. ")
    assert "mend the input" in said


def test_a_large_record_is_named_with_its_size_and_the_limit() -> None:
    assert "20 bytes or more, and a record may have 10" in str(too_large(1, 0, 20, 10))
