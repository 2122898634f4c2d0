"""Places in a queue, and the sequences that they name."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest

from opendata_buffer.config import ConsumerConfig
from opendata_buffer.consumer.place import Place
from opendata_buffer.consumer.position import Position
from opendata_buffer.errors import InvalidInput, QueueReset
from opendata_buffer.formats.manifest import Manifest, Metadata, NewEntry

CONFIG = ConsumerConfig(store="memory://place")

MINUTE = 60_000
NOON = 1_767_268_800_000  # 2026-01-01T12:00:00Z


def dated_manifest(*times: tuple[int, ...] | None, dropped: int = 0) -> Manifest:
    """Return a manifest with one batch per tuple of ingestion times, in minutes after noon.

    None is a batch without metadata.
    """
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
        # The second batch has a record of this minute, although its first record is older.
        ("2026-01-01T12:05:00Z", 2),
        ("2026-01-01T12:05:00", 2),
        ("2026-01-01T13:05:00+01:00", 2),
        ("2026-01-01T12:05:00.001Z", 3),
        ("2026-01-02", 4),
    ],
)
def test_a_start_position_is_resolved_to_a_sequence(text: str, sequence: int) -> None:
    manifest = dated_manifest((0,), (1,), (2, 5), (6,), dropped=1)
    assert Place.parse(text).sequence_in(manifest, CONFIG, CONFIG.store) == sequence


def test_a_start_at_a_time_includes_a_batch_without_any_time_before_a_batch_of_that_time() -> None:
    manifest = dated_manifest((0,), None, (1,))
    for text, sequence in (("2026-01-01T12:00:30Z", 1), ("2026-01-02", 3)):
        assert Place.parse(text).sequence_in(manifest, CONFIG, CONFIG.store) == sequence


@pytest.mark.parametrize("text", ["", "Earliest", "-1", "1.5", "²", "9" * 21, "tomorrow"])
def test_the_error_about_an_invalid_start_position_has_examples(text: str) -> None:
    with pytest.raises(InvalidInput, match="use earliest, latest, a sequence such as 42, or a"):
        Place.parse(text)


def test_the_error_about_a_sequence_outside_the_queue_names_the_valid_ones() -> None:
    manifest = dated_manifest((0,), (1,), dropped=1)
    with pytest.raises(
        InvalidInput, match=r"0 has left the queue with manifest 'ingest/manifest': it holds 1"
    ):
        Place.parse("0").sequence_in(manifest, CONFIG, CONFIG.store)
    with pytest.raises(InvalidInput, match=r"beyond the end .* and the next batch gets 2"):
        Place.parse("3").sequence_in(manifest, CONFIG, CONFIG.store)
    with pytest.raises(InvalidInput, match="it is empty, and the next batch gets 0"):
        Place.parse("1").sequence_in(Manifest.empty(), CONFIG, CONFIG.store)


TWO_HOURS_EAST = timezone(timedelta(hours=2))


@pytest.mark.parametrize(
    ("given", "sequence"),
    [
        ("earliest", 1),
        ("latest", 4),
        (3, 3),
        (datetime(2026, 1, 1, 12, 5, tzinfo=UTC), 2),
        (datetime(2026, 1, 1, 14, 5, tzinfo=TWO_HOURS_EAST), 2),
        ("2026-01-01T12:05:00Z", 2),
        ("2026-01-01T12:05", 2),
        (Position("01JD5T4R3KXBMZ7QV9N2WG8Y00", 2), 3),
        ("01JD5T4R3KXBMZ7QV9N2WG8Y00:2", 3),
        (Place.parse("2"), 2),
    ],
)
def test_python_values_name_the_same_places_as_the_texts_of_commands(
    given: Any, sequence: int
) -> None:
    manifest = dated_manifest((0,), (1,), (2, 5), (6,), dropped=1)
    assert Place.of(given).sequence_in(manifest, CONFIG, CONFIG.store) == sequence


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("beginning", r"start is 'beginning': use 'earliest', 'latest', a sequence such as 42"),
        ("", "start is ''"),
        (-1, "start is -1: use 'earliest'"),
        (True, "start is True"),
        (1.5, "start is 1.5 .*: use 'earliest'"),
        (None, "start is None: use 'earliest'"),
        ("42", "start is '42', a text. Give the number 42 for the place before that batch"),
        (datetime(2026, 1, 31), r"no time zone. Add one, such as start=datetime\(..., tzinfo=UTC"),
    ],
)
def test_a_value_that_names_no_place_or_two_is_refused(given: Any, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        Place.of(given)


def test_a_position_of_a_queue_that_was_created_again_is_not_taken_for_a_place_in_the_new_one() -> (
    None
):
    manifest = dated_manifest((0,), (1,))
    place = Place.of(Position("old", 0))
    with pytest.raises(QueueReset, match=r"position old:0 is not in the queue .* which is new"):
        place.sequence_in(manifest, CONFIG, CONFIG.store, "new")
    assert place.sequence_in(manifest, CONFIG, CONFIG.store, "old") == 1
