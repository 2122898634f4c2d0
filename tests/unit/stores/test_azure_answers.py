"""What Azure's SDK hands on."""

from __future__ import annotations

from datetime import UTC, datetime
from types import SimpleNamespace

import pytest

from opendata_buffer.stores.azure import date_ms, modified_ms, objects_of
from opendata_buffer.stores.base import ObjectInfo

WHEN = datetime(2026, 1, 1, tzinfo=UTC)


def test_a_missing_date_is_long_ago_for_a_blob_and_none_for_the_service() -> None:
    assert modified_ms(SimpleNamespace(last_modified=None)) == 0
    assert modified_ms(SimpleNamespace(last_modified=WHEN)) == 1_767_225_600_000
    assert date_ms("Thu, 01 Jan 2026 00:00:10 GMT") == 1_767_225_610_000
    assert date_ms(None) is None
    with pytest.raises(ValueError, match="soon"):
        date_ms("soon")


def test_a_page_has_objects_and_directories_are_none() -> None:
    blobs = [
        SimpleNamespace(
            name="root/d", size=0, last_modified=WHEN, metadata={"hdi_isfolder": "true"}
        ),
        SimpleNamespace(name="root/d/a", size=3, last_modified=WHEN, metadata=None),
    ]
    assert objects_of(blobs, "root/") == [ObjectInfo("d/a", 3, 1_767_225_600_000)]
