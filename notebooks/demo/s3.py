"""A local S3 server in a separate process: a real one if it is installed, else a simulator.

versitygw keeps its objects on disk, so the demo can be interrupted and resumed on it. moto keeps
them in memory. ``./run servers`` gets versitygw.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tools.servers import VERSITYGW

BUCKET = "flights"
END = "end\n"

ORPHANED_S = 20.0
"""Seconds that producers get to finish their writes after the demo was killed."""


@dataclass(frozen=True)
class Server:
    """The running server.

    Attributes:
        store: The URL of the buffer on it.
        name: Its name and version.
        keeps: Whether it keeps the objects after it has ended.
    """

    store: str
    name: str
    keeps: bool


def is_real() -> bool:
    """Return whether a real server is installed, which keeps its objects."""
    return VERSITYGW.is_there


@contextmanager
def local_s3(objects: Path, lock: Path) -> Iterator[Server]:
    """Start the server, and point the credential chain of this process to it.

    Args:
        objects: The directory for the objects of a real server.
        lock: The demo's lock. If the demo is killed, the server ends once the lock is free.
    """
    server = subprocess.Popen(
        [sys.executable, "-m", "notebooks.demo.s3", str(objects), str(lock)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        process_group=0,  # Ctrl-C is for the demo, which still needs the server.
    )
    assert server.stdin is not None
    assert server.stdout is not None
    endpoint = server.stdout.readline().strip()
    if not endpoint:
        raise SystemExit("error: the S3 server did not start, see above")
    os.environ |= {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_DEFAULT_REGION": "us-east-1",
        "NO_PROXY": "127.0.0.1",
    }
    try:
        _make_bucket()
        name = f"{VERSITYGW.name} {VERSITYGW.version}" if is_real() else "moto, a simulator"
        yield Server(f"s3://{BUCKET}", name, keeps=is_real())
    finally:
        with suppress(BrokenPipeError):
            server.stdin.write(END)
            server.stdin.close()
        server.wait()


def _make_bucket() -> None:
    import boto3
    from botocore.exceptions import ClientError

    try:
        boto3.client("s3").create_bucket(Bucket=BUCKET)
    except ClientError as error:
        if error.response["Error"]["Code"] != "BucketAlreadyOwnedByYou":
            raise


def serve(objects: Path, lock: Path) -> None:
    """Serve until the demo asks for the end, or until the demo and its producers are gone."""
    if is_real():
        objects.mkdir(parents=True, exist_ok=True)
        with VERSITYGW.start(objects) as endpoint:
            print(endpoint, flush=True)
            if sys.stdin.read() != END:
                _await_producers(lock)
        return
    from tests.support.moto_server import MotoServer

    with MotoServer() as endpoint:
        print(endpoint, flush=True)
        sys.stdin.read()


def _await_producers(lock: Path) -> None:
    """Wait for the producers, which hold the lock until their current chunks are durable."""
    end = time.monotonic() + ORPHANED_S
    with lock.open("a") as file:
        while time.monotonic() < end:
            with suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            time.sleep(0.1)


if __name__ == "__main__":
    serve(Path(sys.argv[1]), Path(sys.argv[2]))
