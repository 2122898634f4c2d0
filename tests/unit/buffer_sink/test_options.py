from __future__ import annotations

import pickle
from types import SimpleNamespace
from unittest.mock import MagicMock, call

import pytest

import buffer_sink
from buffer_sink.foreach_batch import foreach_batch_writer
from buffer_sink.options import SinkOptions
from opendata_buffer.errors import InvalidInput
from opendata_buffer.formats.batch import Compression, Transaction

STORE = {"path": "/data/queue"}


def test_every_option_arrives_in_lower_case() -> None:
    options = SinkOptions.for_batch(
        {
            "path": "s3://b/r",
            "datapathprefix": "p",
            "endpointurl": "http://localhost:1",
            "region": "eu",
            "txnappid": "app",
            "txnversion": "7",
            "compression": "ZSTD",
            "gcgraceperiodms": "3600000",
        }
    )
    assert options.queue.store == "s3://b/r"
    assert (options.queue.data_path_prefix, options.queue.manifest_path) == ("p", "p/manifest")
    assert options.queue.store_options.endpoint_url == "http://localhost:1"
    assert options.transaction == Transaction("app", 7)
    assert options.compression == Compression.ZSTD
    assert options.grace_ms == 3_600_000
    assert pickle.loads(pickle.dumps(options)) == options
    assert hash(options) == hash(pickle.loads(pickle.dumps(options)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "no store given"),
        ({**STORE, "txnappId": "a b"}, "A-Z a-z 0-9"),
        ({**STORE, "compresion": "zstd"}, "Did you mean 'compression'"),
        ({**STORE, "compression": "snappy"}, "use none or zstd"),
        ({**STORE, "gcGracePeriodMs": "0"}, "gcGracePeriodMs"),
        ({**STORE, "broker": "host"}, "the command broker runs one"),
        ({**STORE, "partitioner": "hash"}, "use random or modulo or rendezvous"),
        ({"path": "memory://x"}, "memory of one process"),
        ({"path": "s4://x"}, "did you mean 's3'"),
        ({"path": "dbfs:/x"}, "is a Databricks mount"),
    ],
)
def test_bad_options_name_the_fix(options: dict[str, str], message: str) -> None:
    for parse in (SinkOptions.for_stream, SinkOptions.for_batch):
        with pytest.raises(InvalidInput, match=message):
            parse(options)


def test_a_stream_takes_its_version_from_its_batch_id() -> None:
    spark_s_own = {"checkpointlocation": "/c", "queryname": "q"}
    assert SinkOptions.for_stream({**STORE, **spark_s_own, "txnAppId": "a"}).app == "a"
    with pytest.raises(InvalidInput, match="txnVersion is 3: a stream uses its batch id"):
        SinkOptions.for_stream({**STORE, "txnAppId": "a", "txnVersion": "3"})


@pytest.mark.parametrize("half", [{"txnAppId": "a"}, {"txnVersion": "0"}])
def test_an_incomplete_identity_is_refused(half: dict[str, str]) -> None:
    with pytest.raises(InvalidInput, match="recognised by both"):
        SinkOptions.for_batch({**STORE, **half})


@pytest.mark.parametrize("given", ["modulo", "RENDEZVOUS", "random"])
def test_partitioner_options_choose_the_partitioner(given: str) -> None:
    options = SinkOptions.for_stream({**STORE, "partitioner": given})
    assert (options.partitioner, options.one_queue) == (given.lower(), False)


def test_a_partitioner_for_a_single_queue_is_refused() -> None:
    named = {**STORE, "dataPathPrefix": "x"}
    assert SinkOptions.for_stream(named).one_queue
    with pytest.raises(InvalidInput, match="names one queue"):
        SinkOptions.for_stream({**named, "partitioner": "modulo"})


# ---- writes from inside foreachBatch


def test_foreach_batch_makes_a_batch_write_with_the_batch_id_as_version() -> None:
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


def test_options_may_be_in_snake_or_camel_case() -> None:
    one = foreach_batch_writer("/s", txn_app_id="a", data_path_prefix="p", gc_grace_period_ms=9**9)
    two = foreach_batch_writer("/s", txn_app_id="a", dataPathPrefix="p", gcGracePeriodMs=str(9**9))
    assert one == two
    assert one.options == {"dataPathPrefix": "p", "gcGracePeriodMs": "387420489", "txnAppId": "a"}
    assert foreach_batch_writer("/s", txn_app_id="a", region=None).options == {"txnAppId": "a"}


def test_options_are_checked_before_the_first_batch() -> None:
    with pytest.raises(InvalidInput, match="Did you mean 'dataPathPrefix'"):
        foreach_batch_writer("/s", txn_app_id="a", data_prefix="p")
    with pytest.raises(InvalidInput, match="A-Z a-z 0-9"):
        foreach_batch_writer("/s", txn_app_id="a/b")
    with pytest.raises(TypeError, match="txn_app_id"):
        foreach_batch_writer("/s")  # type: ignore[call-arg]


def test_the_package_exports_the_foreach_batch_writer() -> None:
    assert buffer_sink.foreach_batch_writer is foreach_batch_writer
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = buffer_sink.nothing
