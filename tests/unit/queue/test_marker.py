"""The content of an owner marker."""

from __future__ import annotations

import pytest

from opendata_buffer.errors import (
    CorruptData,
)
from opendata_buffer.queue.marker import MOST_SKIPPED, PrefixOwner, Watermark, held_batches


@pytest.mark.parametrize("key", ["ingest", "tenant#1/100%/ä", "a/b/c"])
@pytest.mark.parametrize(
    "watermark",
    [None, Watermark(3, 1), Watermark(3, 1, 0, ""), Watermark(42, 3, 39, "ingest/ä.batch")],
)
def test_f24_raw_keys_round_trip(key: str, watermark: Watermark | None) -> None:
    for manifest in (f"{key}/manifest", "elsewhere/m #1"):
        marker = PrefixOwner(manifest, "01J5", watermark)
        assert PrefixOwner.from_json(marker.to_json(key), key) == marker


def test_an_incomplete_watermark_is_ignored_and_an_invalid_one_is_refused() -> None:
    for half in (b'"next_sequence": 7', b'"epoch": 1', b'"acked": 3, "acked_location": "a"'):
        data = b'{"version": 1, "manifest": "manifest", %s}' % half
        assert PrefixOwner.from_json(data, "ingest") == PrefixOwner("ingest/manifest", "")
    # If it were ignored, a lost manifest would look like a new one.
    data = b'{"version": 1, "manifest": "manifest", "next_sequence": "7", "epoch": 1}'
    with pytest.raises(CorruptData, match="'next_sequence' is '7', and not a whole number"):
        PrefixOwner.from_json(data, "ingest")
    with pytest.raises(CorruptData, match="not the path of a manifest"):
        PrefixOwner.from_json(b'{"version": 1, "manifest": ""}', "ingest")


def test_ranges_that_never_held_batches_round_trip_and_only_the_last_are_kept() -> None:
    ranges = tuple((10 * number, 10 * number + 5) for number in range(MOST_SKIPPED + 1))
    marker = PrefixOwner("ingest/manifest", "01J5", skipped=ranges)
    found = PrefixOwner.from_json(marker.to_json("ingest"), "ingest")
    assert found.skipped == ranges[1:]
    assert b"skipped" not in PrefixOwner("ingest/manifest", "01J5").to_json("ingest")
    assert held_batches(12, ranges) == 5
    with pytest.raises(CorruptData, match="a list of ranges"):
        PrefixOwner.from_json(b'{"version": 1, "manifest": "manifest", "skipped": [3]}', "ingest")
