"""Numbers with their nouns."""

from __future__ import annotations

import pytest

from opendata_buffer.cli.words import plural


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
