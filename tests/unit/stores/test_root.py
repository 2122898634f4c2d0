"""The part of a bucket that a store is."""

from __future__ import annotations

import pytest

from opendata_buffer.errors import InvalidInput
from opendata_buffer.stores.http import Root


def test_the_root_is_before_every_key() -> None:
    assert Root("a/b", "S3 keys").full("c") == "a/b/c"
    assert Root("", "S3 keys").full("c") == "c"


def test_a_key_that_is_too_long_with_its_root_is_refused_by_name() -> None:
    root = Root("r" * 24, "S3 keys")
    assert len(root.full("k" * 999)) == 1024
    with pytest.raises(InvalidInput, match="has 1025 bytes: S3 keys have at most 1024"):
        root.full("k" * 1_000)


def test_a_root_that_no_key_begins_with_is_refused() -> None:
    with pytest.raises(InvalidInput, match="root of the store"):
        Root("a\x00b", "S3 keys")


def test_of_many_keys_the_illegal_ones_are_told_apart() -> None:
    legal, failures = Root("r", "S3 keys").legal(["a", "", "b", "x" * 2_000])
    assert legal == ["a", "b"]
    assert [failure.key for failure in failures] == ["", "x" * 2_000]
