"""A local S3 server: moto in a process of its own, with its state in memory."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

BUCKET = "flights"


@contextmanager
def local_s3() -> Iterator[str]:
    """Start the server, point the credential chain of this process at it; yields the store."""
    server = subprocess.Popen(
        [sys.executable, "-m", "notebooks.demo.s3"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        process_group=0,  # Ctrl-C is for the demo, which still needs its storage then
    )
    assert server.stdin is not None
    assert server.stdout is not None
    endpoint = server.stdout.readline().strip()
    os.environ |= {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "demo",
        "AWS_SECRET_ACCESS_KEY": "demo",
        "AWS_DEFAULT_REGION": "us-east-1",
        "NO_PROXY": "127.0.0.1",
    }
    try:
        import boto3

        boto3.client("s3").create_bucket(Bucket=BUCKET)
        yield f"s3://{BUCKET}"
    finally:
        server.stdin.close()
        server.wait()


def serve() -> None:
    """Serve until standard input closes."""
    from opendata_buffer.testing.moto_server import MotoServer

    with MotoServer() as endpoint:
        print(endpoint, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    serve()
