"""Libraries that are not installed."""

from __future__ import annotations

import json

import pytest

from opendata_buffer.errors import InvalidInput
from opendata_buffer.stores.clients import load


def test_a_module_that_is_there_is_loaded() -> None:
    assert load("json", scheme="x", extra="y") is json


def test_a_missing_one_names_the_command() -> None:
    with pytest.raises(
        InvalidInput,
        match=r"stores of gs:// need no_such_cloud, .*pip install 'opendata-buffer\[gcs\]'",
    ):
        load("no_such_cloud.auth", scheme="gs", extra="gcs")
