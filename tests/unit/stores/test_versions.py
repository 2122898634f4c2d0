"""What counts as a version of an object."""

from __future__ import annotations

import pytest

from opendata_buffer.errors import TransientStorageError, UnsafeStore
from opendata_buffer.stores.base import (
    NotModified,
    not_modified,
    strong_etag,
    unversioned,
    weak_or_none,
)


@pytest.mark.parametrize("etag", [None, "", 'W/"abc"'])
def test_a_missing_or_weak_etag_is_none(etag: str | None) -> None:
    assert strong_etag(etag) is None


def test_a_strong_etag_is_kept_with_its_quotes() -> None:
    assert strong_etag('"abc"') == '"abc"'


def test_a_store_without_versions_is_refused_with_what_it_answered_and_what_to_use() -> None:
    for etag, said in ((None, "no ETag"), ('W/"abc"', 'the weak ETag W/"abc"')):
        error = unversioned("'s3://b' at https://h", f"answers with {weak_or_none(etag)}", "Use X.")
        assert isinstance(error, UnsafeStore)
        assert f"store 's3://b' at https://h answers with {said}: nothing tells" in str(error)
        assert str(error).endswith("overwrite each other. Use X.")


def test_not_modified_answers_only_a_question_about_a_version() -> None:
    assert not_modified("k", "s3://b", '"7"') == NotModified()
    with pytest.raises(TransientStorageError, match="'k' in s3://b: it was answered as not modif"):
        not_modified("k", "s3://b", None)
