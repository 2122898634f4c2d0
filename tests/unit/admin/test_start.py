"""Where in a queue to begin."""

from __future__ import annotations

import pytest

from opendata_buffer.admin.start import Start
from opendata_buffer.errors import InvalidInput
from opendata_buffer.formats.entries import Metadata, NewEntry
from opendata_buffer.formats.manifest import Manifest

MINUTE = 60_000
NOON = 1_767_268_800_000  # 2026-01-01T12:00:00Z


def queue(*times: tuple[int, ...] | None, dropped: int = 0) -> Manifest:
    """A batch for each tuple, with these ingestion times in minutes after noon; None for none."""
    entries = [
        NewEntry(
            f"ingest/{n}", tuple(Metadata(i, NOON + t * MINUTE) for i, t in enumerate(each or ()))
        )
        for n, each in enumerate(times)
    ]
    manifest = Manifest.empty().append(entries)
    return manifest.drop_through(dropped - 1) if dropped else manifest


@pytest.mark.parametrize(
    ("text", "sequence"),
    [
        ("earliest", 1),
        ("latest", 4),
        ("1", 1),
        ("3", 3),
        ("4", 4),
        ("2026-01-01T12:00:00Z", 1),
        ("2026-01-01", 1),
        # The second batch has a record of this minute, its first one is older.
        ("2026-01-01T12:05:00Z", 2),
        ("2026-01-01T12:05:00", 2),
        ("2026-01-01T13:05:00+01:00", 2),
        ("2026-01-01T12:05:00.001Z", 3),
        ("2026-01-02", 4),
    ],
)
def test_a_place_is_found(text: str, sequence: int) -> None:
    manifest = queue((0,), (1,), (2, 5), (6,), dropped=1)
    assert Start.parse(text).sequence_in(manifest, "m") == sequence


def test_a_batch_without_any_time_rather_comes_too_often() -> None:
    assert Start.parse("2026-01-02").sequence_in(queue((0,), None, (1,)), "m") == 1


@pytest.mark.parametrize("text", ["", "Earliest", "-1", "1.5", "²", "9" * 21, "tomorrow"])
def test_what_is_no_place_is_refused_with_examples(text: str) -> None:
    with pytest.raises(InvalidInput, match="use earliest, latest, a sequence such as 42, or a"):
        Start.parse(text)


def test_a_sequence_that_is_not_there_says_what_is() -> None:
    manifest = queue((0,), (1,), dropped=1)
    with pytest.raises(InvalidInput, match=r"0 has left the queue with manifest 'm': it holds 1"):
        Start.parse("0").sequence_in(manifest, "m")
    with pytest.raises(InvalidInput, match=r"beyond the end .* and the next batch gets 2"):
        Start.parse("3").sequence_in(manifest, "m")
    with pytest.raises(InvalidInput, match="it is empty, and the next batch gets 0"):
        Start.parse("1").sequence_in(Manifest.empty(), "m")
