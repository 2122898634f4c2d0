"""Writes from inside foreachBatch."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from unittest.mock import MagicMock, call

import pytest

import buffer_sink
from buffer_sink.foreach_batch import foreach_batch_writer
from opendata_buffer.errors import InvalidInput


def test_it_is_a_batch_write_with_the_batch_id_as_version() -> None:
    writer = MagicMock()
    for step in (writer.format, writer.options, writer.option, writer.mode):
        step.return_value = writer
    made = foreach_batch_writer("s3://b/r", txn_app_id="job", compression="zstd")
    pickle.loads(pickle.dumps(made))(SimpleNamespace(write=writer), 12)
    assert writer.mock_calls == [
        call.format("opendata-buffer"),
        call.options(compression="zstd", txnAppId="job"),
        call.option("txnVersion", "12"),
        call.mode("append"),
        call.save("s3://b/r"),
    ]


def test_options_in_snake_or_camel_case() -> None:
    one = foreach_batch_writer("/s", txn_app_id="a", data_path_prefix="p", gc_grace_period_ms=9**9)
    two = foreach_batch_writer("/s", txn_app_id="a", dataPathPrefix="p", gcGracePeriodMs=str(9**9))
    assert one == two
    assert one.options == {"dataPathPrefix": "p", "gcGracePeriodMs": "387420489", "txnAppId": "a"}
    assert foreach_batch_writer("/s", txn_app_id="a", region=None).options == {"txnAppId": "a"}


def test_options_are_checked_at_once() -> None:
    with pytest.raises(InvalidInput, match="Did you mean 'dataPathPrefix'"):
        foreach_batch_writer("/s", txn_app_id="a", data_prefix="p")
    with pytest.raises(InvalidInput, match="A-Z a-z 0-9"):
        foreach_batch_writer("/s", txn_app_id="a/b")
    with pytest.raises(TypeError, match="txn_app_id"):
        foreach_batch_writer("/s")  # type: ignore[call-arg]


def test_the_package_exports_it() -> None:
    assert buffer_sink.foreach_batch_writer is foreach_batch_writer
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = buffer_sink.nothing
