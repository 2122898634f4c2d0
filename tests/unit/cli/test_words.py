"""Numbers with their nouns."""

from __future__ import annotations

import pytest

from opendata_buffer.cli.words import plural, waiting


@pytest.mark.parametrize(
    ("count", "noun", "said"),
    [
        (1, "batch", "1 batch"),
        (0, "batch", "0 batches"),
        (2_000, "batch", "2,000 batches"),
        (2, "copy", "2 copies"),
        (2, "day", "2 days"),
        (3, "record", "3 records"),
    ],
)
def test_a_noun_has_the_form_of_its_number(count: int, noun: str, said: str) -> None:
    assert plural(count, noun) == said


def test_one_waits_and_many_wait() -> None:
    assert [waiting(n) for n in (0, 1, 2)] == ["0 batches wait", "1 batch waits", "2 batches wait"]
