"""Source and sinks on servers of S3, Google, and Azure."""

from __future__ import annotations

import random
import threading
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from opendata_buffer import Producer
from opendata_buffer.config import ProducerConfig, StoreOptions
from tests.spark.chaos.processes import wait_for
from tests.spark.queues import FORMAT, Pipe, Query, Sink, filtered, manifest, records, written
from tests.support.killed import seeded
from tests.support.s3_server import Answer, Fault, S3Server

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery


def numbers(spark: SparkSession, count: int) -> DataFrame:
    return spark.range(0, count, 1, 2).selectExpr("CAST(id AS STRING) AS value")


def expected(count: int) -> list[bytes]:
    return [b"%d" % number for number in range(count)]


@pytest.mark.parametrize(
    ("server", "path", "url"),
    [
        ("moto", "", "s3://{bucket}/{folder}"),
        ("fake-gcs-server", "", "gs://bucket/{folder}"),
        ("azurite", "/testing", "az://container/{folder}"),
    ],
)
def test_a_write_is_streamed_into_another_queue_and_read(
    spark: SparkSession,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    server: str,
    path: str,
    url: str,
) -> None:
    given, bucket = {}, ""
    if server == "moto":
        given["region"], bucket = "us-east-1", request.getfixturevalue("moto_bucket")
        endpoint = request.getfixturevalue("moto_endpoint")
    else:
        endpoint = request.getfixturevalue("real_server")(server) + path
    given["endpointUrl"] = endpoint
    source, target = (url.format(bucket=bucket, folder=f"{tmp_path.name}/{n}") for n in (1, 2))
    numbers(spark, 100).write.format(FORMAT).mode("append").options(**given).save(source)
    pipe = Pipe(spark, target, tmp_path)
    pipe.options = given
    pipe.run(spark.readStream.format(FORMAT).options(**given).load(source).select("value"))
    options = StoreOptions(endpoint_url=endpoint)
    assert records(written(target, options=options)) == expected(100)
    assert spark.read.format(FORMAT).options(**given).load(target).count() == 100


# ---- exactly-once output on storage that loses answers and refuses requests


BATCHES = 36
CLOSE, RESET = Answer.CLOSE, Answer.RESET
BUSY = Fault(503, applied=False, code="SlowDown")
FAULTS = {
    # The compare-and-swap of producers, consumer, and sink: applied or not, without an answer.
    ("PUT", "manifest"): [
        Fault(CLOSE),
        Fault(CLOSE, applied=False),
        Fault(RESET),
        Fault(500),
        BUSY,
    ],
    ("PUT", ".batch"): [Fault(500), Fault(CLOSE), BUSY],
    ("GET", "manifest"): [Fault(CLOSE), BUSY],
    ("GET", ".batch"): [Fault(500), Fault(Answer.TRUNCATE), Fault(RESET), BUSY],
}
REFUSED_UPLOADS = 7
"""Consecutive refusals of an upload: boto3 makes five attempts, and then the library retries."""


class FaultInjector:
    """Lets one in eight requests of each kind fail in a random way until it is closed."""

    def __init__(self, server: S3Server, rng: random.Random) -> None:
        self.faults = 0
        self._server = server
        self._rng = rng
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> FaultInjector:
        self._server.inject(BUSY, method="PUT", key="out/app=", times=REFUSED_UPLOADS)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        seen = 0
        while not self._over.wait(0.005):
            requests = self._server.requests[seen:]
            seen += len(requests)
            for request in requests:
                for (method, key), faults in FAULTS.items():
                    hit = request.method == method and key in request.key
                    if hit and self._rng.random() < 1 / 8:
                        self._server.inject(self._rng.choice(faults), method=method, key=key)
                        self.faults += 1


def once(sink: Sink) -> list[int]:
    """Return the values of an idempotent sink, and check that repeats are equal."""
    batches: dict[int, list[int]] = {}
    for batch_id, values in sink.batches:
        assert batches.setdefault(batch_id, values) == values
    return [value for values in batches.values() for value in values]


def has_begun(run: StreamingQuery, checkpoint: Path) -> bool:
    """Return whether the first offset is in the log, or the query has ended."""
    return (checkpoint / "offsets" / "0").exists() or not run.isActive


def test_f1_f2_every_record_once_over_a_store_that_loses_answers(
    spark: SparkSession, s3_server: S3Server, tmp_path: Path
) -> None:
    options = StoreOptions(endpoint_url=s3_server.endpoint)

    def produced(prefix: str, begin: int, end: int) -> None:
        config = ProducerConfig(store=s3_server.url, store_options=options, data_path_prefix=prefix)
        with Producer(config) as producer:
            for number in range(begin, end):
                producer.produce([b"%d" % number])
                producer.flush()

    def settings(prefix: str) -> dict[str, str]:
        return {"endpointUrl": s3_server.endpoint, "dataPathPrefix": prefix}

    limited = {**settings("one"), "maxBatchesPerTrigger": "6", "createIfMissing": "true"}
    to_memory = Query(spark, s3_server.url, str(tmp_path / "one"), options=limited)

    def to_buffer() -> StreamingQuery:
        reader = spark.readStream.format(FORMAT).schema("value STRING")
        reader = reader.options(**settings("two"), maxBatchesPerTrigger="6", createIfMissing="true")
        frame = reader.load(s3_server.url)
        writer = frame.writeStream.format(FORMAT).options(**settings("out"))
        return writer.option("checkpointLocation", str(tmp_path / "two")).start(s3_server.url)

    with seeded("CHAOS_SEED") as rng:
        with FaultInjector(s3_server, rng) as injector:
            for begin in range(0, BATCHES, BATCHES // 3):
                runs = [to_memory.start(), to_buffer()]
                try:
                    for prefix in ("one", "two"):
                        produced(prefix, begin, begin + BATCHES // 3)
                    # Except for the last time, stop it at any moment, but not while it writes its
                    # first offset, because Spark would then refuse the checkpoint for ever.
                    if begin + BATCHES // 3 < BATCHES:
                        for run, name in zip(runs, ("one", "two"), strict=True):
                            wait_for(partial(has_begun, run, tmp_path / name), "a first offset")
                        continue
                    for run in runs:
                        run.processAllAvailable()
                finally:
                    for run in runs:
                        run.stop()
        print(f"{injector.faults} faults in {len(s3_server.requests)} requests")
        assert once(to_memory.sink) == list(range(BATCHES))
        copied = filtered(written(s3_server.url, "out", options), "out")
        assert sorted(int(key) for key in copied) == list(range(BATCHES))
    for prefix in ("one", "two"):
        assert manifest(s3_server.url, prefix, options).next_sequence == BATCHES
    assert injector.faults >= BATCHES // 2
