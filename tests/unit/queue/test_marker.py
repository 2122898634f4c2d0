"""The bytes of a prefix's marker."""

from __future__ import annotations

import pytest

from opendata_buffer.errors import CorruptData
from opendata_buffer.queue.ownership import Marker, marker_key
from opendata_buffer.queue.rollback_checks import Watermark


def test_the_marker_names_the_manifest_relative_to_itself() -> None:
    assert marker_key("ingest") == "ingest/_owner.json"
    assert Marker("ingest/manifest", "01J5").to_json("ingest") == (
        b'{"version": 1, "manifest": "manifest", "id": "01J5"}\n'
    )
    assert Marker("queues/b", "01J5").to_json("other") == (
        b'{"version": 1, "manifest": "../queues/b", "id": "01J5"}\n'
    )


@pytest.mark.parametrize("key", ["ingest", "tenant#1/100%/ä", "a/b/c"])
@pytest.mark.parametrize(
    "watermark",
    [None, Watermark(3, 1), Watermark(3, 1, 0, ""), Watermark(42, 3, 39, "ingest/ä.batch")],
)
def test_f24_raw_keys_round_trip(key: str, watermark: Watermark | None) -> None:
    for manifest in (f"{key}/manifest", "elsewhere/m #1"):
        marker = Marker(manifest, "01J5", watermark)
        assert Marker.from_json(marker.to_json(key), key) == marker


def test_the_owner_is_the_same_from_another_root() -> None:
    # s3://bucket with prefix root/ingest, and s3://bucket/root with prefix ingest.
    data = Marker("root/ingest/manifest", "01J5").to_json("root/ingest")
    assert Marker.from_json(data, "ingest") == Marker("ingest/manifest", "01J5")


def test_a_manifest_beyond_the_stores_root_is_nobodys() -> None:
    found = Marker.from_json(b'{"version": 1, "manifest": "../../m"}', "ingest")
    assert found.manifest_path == "../m"


def test_fields_of_later_versions_are_kept() -> None:
    later = b'{"version": 1, "manifest": "manifest", "id": "01J5", "colour": "red"}'
    found = Marker.from_json(later, "ingest")
    assert found.others == {"colour": "red"}
    assert Marker.from_json(found.to_json("ingest"), "ingest") == found


def test_half_a_watermark_is_none_and_the_owner_counts() -> None:
    for half in (b'"next_sequence": 7', b'"epoch": 1', b'"acked": 3, "acked_location": "a"'):
        data = b'{"version": 1, "manifest": "manifest", %s}' % half
        found = Marker.from_json(data, "ingest")
        assert (found.manifest_path, found.watermark) == ("ingest/manifest", None)


def test_a_watermark_that_makes_no_sense_is_not_passed_over() -> None:
    """Without it a manifest that was lost would be taken for a new one."""
    data = b'{"version": 1, "manifest": "manifest", "next_sequence": "7", "epoch": 1}'
    with pytest.raises(CorruptData, match="'next_sequence' is '7', and not a whole number"):
        Marker.from_json(data, "ingest")


@pytest.mark.parametrize(
    "data",
    [b"", b"\xff", b"[]", b'{"version": 2, "manifest": "m"}', b'{"version": 1, "manifest": ""}'],
)
def test_other_bytes_are_refused_saying_what_they_are(data: bytes) -> None:
    with pytest.raises(
        CorruptData, match=r"the owner marker is not readable: .*delete the object\.$"
    ):
        Marker.from_json(data, "ingest")
