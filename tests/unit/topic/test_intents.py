"""Intents are saved and read again by whoever applies them."""

from __future__ import annotations

import pytest

from opendata_buffer.errors import InvalidInput
from opendata_buffer.formats.keys import Transaction
from opendata_buffer.topic.transaction import AckIntents

A = b"\1AAAAA"
WHOLE = '{"version":1,"topic":"T","producer":"014141414141","clocks":{"p":5}'


@pytest.mark.parametrize("txn", [None, Transaction("publisher.x", 7)])
@pytest.mark.parametrize("clocks", [{}, {"p-00001": 2**64 - 1, "p-00000": 3}])
def test_intents_round_trip(clocks: dict[str, int], txn: Transaction | None) -> None:
    made = AckIntents("01J5T4R3KXBMZ7QV9N2WG8YDHP", A, clocks, txn)
    text = made.to_json()
    assert "\n" not in text
    assert AckIntents.from_json(text) == made
    assert AckIntents.from_json(text.encode()) == made


def test_later_versions_may_add_to_them() -> None:
    assert AckIntents.from_json(WHOLE + ',"more":[]}') == AckIntents("T", A, {"p": 5})


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "[" * 100_000,
        WHOLE,
        WHOLE.replace(":1,", ":2,") + "}",
        WHOLE.replace("0141", "01") + "}",
        WHOLE.replace("0141", "01zz") + "}",
        WHOLE.replace("5", "0") + "}",
        WHOLE.replace("5", "true") + "}",
        WHOLE.replace("5", "18446744073709551616") + "}",
        WHOLE + ',"app":"a/b","batch":1}',
        WHOLE + ',"app":3,"batch":1}',
        WHOLE + ',"app":"a"}',
    ],
)
def test_what_is_no_intents_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput):
        AckIntents.from_json(text)
