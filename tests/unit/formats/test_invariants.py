from __future__ import annotations

import pytest

from opendata_buffer.errors import CorruptManifest
from opendata_buffer.formats.manifest import Manifest, NewEntry, check_transition


def queue(first: int, count: int, epoch: int = 0) -> Manifest:
    manifest = Manifest.empty().append([NewEntry(f"p/{n}") for n in range(first + count)])
    return manifest.drop_through(first - 1).with_epoch(epoch)


@pytest.mark.parametrize(
    "after",
    [
        queue(2, 3, 1),
        queue(2, 4, 1),
        queue(3, 2, 1),
        queue(5, 0, 1),
        queue(2, 3, 9),
        queue(7, 1, 1),
    ],
)
def test_steps_forward_are_allowed(after: Manifest) -> None:
    check_transition(queue(2, 3, 1), after)


@pytest.mark.parametrize(
    ("after", "message"),
    [
        (queue(2, 3, 0), "epoch falls from 1 to 0"),
        (queue(2, 2, 1), "next_sequence falls from 5 to 4"),
        (queue(1, 4, 1), "first_sequence falls from 2 to 1"),
        (Manifest.empty(), "epoch falls from 1 to 0"),
    ],
)
def test_f4_f10_f15_steps_back_are_refused(after: Manifest, message: str) -> None:
    with pytest.raises(CorruptManifest, match=message):
        check_transition(queue(2, 3, 1), after)


def test_f16_a_count_that_does_not_match_is_refused() -> None:
    before, after = queue(2, 3, 1), queue(2, 3, 1)
    object.__setattr__(after, "entry_count", 2)
    with pytest.raises(CorruptManifest, match="counts 2 entries from sequence 2"):
        check_transition(before, after)
