"""Writes from inside foreachBatch."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

import buffer_sink
from buffer_sink.foreach_batch import foreach_batch_writer
from opendata_buffer.errors import InvalidInput


class Frame:
    """Records what is asked of ``df.write``."""

    def __init__(self) -> None:
        self.write: Any = self
        self.asked: dict[str, Any] = {}

    def format(self, name: str) -> Frame:
        return self.options(format=name)

    def options(self, **options: str) -> Frame:
        self.asked |= options
        return self

    def option(self, name: str, value: str) -> Frame:
        return self.options(**{name: value})

    def mode(self, mode: str) -> Frame:
        return self.options(mode=mode)

    def save(self, path: str) -> None:
        self.options(path=path)


def test_it_is_a_batch_write_with_the_batch_id_as_version() -> None:
    frame = Frame()
    made = foreach_batch_writer("s3://b/r", txn_app_id="job", compression="zstd")
    pickle.loads(pickle.dumps(made))(frame, 12)
    assert frame.asked == {
        "format": "opendata-buffer",
        "compression": "zstd",
        "txnAppId": "job",
        "txnVersion": "12",
        "mode": "append",
        "path": "s3://b/r",
    }


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
