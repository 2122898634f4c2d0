"""moto behind a lock: its conditional writes are atomic."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError

from tests.support.moto_server import CallLock, MotoServer


def test_the_second_request_begins_when_the_first_answer_is_whole() -> None:
    inside = 0
    most = 0
    barrier = threading.Barrier(4)

    def application(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterator[bytes]:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        for _ in range(1_000):
            yield b"x"
        inside -= 1

    single = CallLock(application)

    def request() -> int:
        barrier.wait()
        return len(b"".join(single({}, lambda *_: None)))

    with ThreadPoolExecutor(4) as pool:
        sizes = [each.result() for each in [pool.submit(request) for _ in range(4)]]
    assert sizes == [1_000] * 4
    assert most == 1


def test_of_writers_with_the_same_etag_exactly_one_gets_through() -> None:
    with MotoServer() as endpoint:
        client = boto3.client("s3", endpoint_url=endpoint)
        client.create_bucket(Bucket="bucket")
        etag = client.put_object(Bucket="bucket", Key="k", Body=b"start")["ETag"]

        refusals: list[int] = []

        def write(body: bytes) -> str | None:
            try:
                written: str = client.put_object(Bucket="bucket", Key="k", Body=body, IfMatch=etag)[
                    "ETag"
                ]
            except ClientError as error:
                refusals.append(error.response["ResponseMetadata"]["HTTPStatusCode"])
                return None
            return written

        with ThreadPoolExecutor(4) as pool:
            for round_ in range(10):
                bodies = [b"%d by %d" % (round_, writer) for writer in range(4)]
                winners = [each for each in pool.map(write, bodies) if each is not None]
                assert len(winners) == 1
                etag = winners[0]
        assert refusals == [412] * 30


def test_it_is_gone_after_the_block() -> None:
    with MotoServer() as endpoint:
        assert endpoint.startswith("http://127.0.0.1:")
    once = Config(retries={"total_max_attempts": 1})
    client = boto3.client("s3", endpoint_url=endpoint, config=once)
    with pytest.raises(Exception, match="Could not connect"):
        client.list_buckets()
