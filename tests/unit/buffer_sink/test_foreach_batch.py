from __future__ import annotations

import pickle
from typing import Any

import pytest

import buffer_sink
from buffer_sink.foreach_batch import foreach_batch_writer
from buffer_sink.options import SinkOptions
from opendata_buffer.errors import InvalidInput


class Writer:
    """Records what is asked of ``df.write``."""

    def __init__(self) -> None:
        self.asked: dict[str, Any] = {}

    def format(self, name: str) -> Writer:
        self.asked["format"] = name
        return self

    def options(self, **options: str) -> Writer:
        self.asked |= options
        return self

    def option(self, name: str, value: str) -> Writer:
        self.asked[name] = value
        return self

    def mode(self, mode: str) -> Writer:
        self.asked["mode"] = mode
        return self

    def save(self, path: str) -> None:
        self.asked["path"] = path


class Frame:
    def __init__(self) -> None:
        self.write = Writer()


def test_it_is_a_batch_write_with_the_batch_id_as_version() -> None:
    frame: Any = Frame()
    foreach_batch_writer("s3://b/r", txn_app_id="job", compression="zstd")(frame, 12)
    assert frame.write.asked == {
        "format": "opendata-buffer",
        "compression": "zstd",
        "txnAppId": "job",
        "txnVersion": "12",
        "mode": "append",
        "path": "s3://b/r",
    }


def test_options_in_snake_or_camel_case() -> None:
    one = foreach_batch_writer("/s", txn_app_id="a", data_path_prefix="p", upload_concurrency=2)
    two = foreach_batch_writer("/s", txn_app_id="a", dataPathPrefix="p", uploadConcurrency="2")
    assert one == two
    assert one.options == {"dataPathPrefix": "p", "uploadConcurrency": "2", "txnAppId": "a"}
    assert foreach_batch_writer("/s", txn_app_id="a", region=None).options == {"txnAppId": "a"}


def test_options_are_checked_at_once() -> None:
    with pytest.raises(InvalidInput, match="Did you mean 'dataPathPrefix'"):
        foreach_batch_writer("/s", txn_app_id="a", data_prefix="p")
    with pytest.raises(InvalidInput, match="A-Z a-z 0-9"):
        foreach_batch_writer("/s", txn_app_id="a/b")
    with pytest.raises(TypeError, match="txn_app_id"):
        foreach_batch_writer("/s")  # type: ignore[call-arg]


def test_with_host_the_calling_process_serves_and_the_write_finds_a_broker_as_any_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    served: list[SinkOptions] = []
    monkeypatch.setattr("buffer_sink.foreach_batch.serve_broker", served.append)
    made = foreach_batch_writer("/s", txn_app_id="job", broker="host", data_path_prefix="p")
    assert served == []
    for batch in range(2):
        frame: Any = Frame()
        pickle.loads(pickle.dumps(made))(frame, batch)
        assert "broker" not in frame.write.asked
    assert [each.queue.data_path_prefix for each in served] == ["p", "p"]
    frame = Frame()
    foreach_batch_writer("/s", txn_app_id="job", broker="off")(frame, 0)
    assert frame.write.asked["broker"] == "off"
    assert len(served) == 2


def test_it_survives_pickling_as_spark_connect_needs() -> None:
    made = foreach_batch_writer("/s", txn_app_id="a")
    assert pickle.loads(pickle.dumps(made)) == made


def test_the_package_exports_it() -> None:
    assert buffer_sink.foreach_batch_writer is foreach_batch_writer
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = buffer_sink.nothing
