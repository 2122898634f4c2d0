"""What every test may ask for. Nothing here reaches beyond this machine."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import hypothesis
import pytest

from opendata_buffer.testing.runtime import ManualRuntime
from tests.support.s3_server import S3Server

# Before boto3 is imported, and inherited by every process a test starts: no real credentials,
# no profile and no endpoint of the developer's, no metadata service.
_CLOUDS = ("AWS_", "AZURE_", "GOOGLE_", "CLOUDSDK_", "STORAGE_EMULATOR_HOST")
for _name in [name for name in os.environ if name.startswith(_CLOUDS)]:
    del os.environ[_name]
os.environ.update(
    AWS_ACCESS_KEY_ID="testing",
    AWS_SECRET_ACCESS_KEY="testing",
    AWS_DEFAULT_REGION="us-east-1",
    AWS_CONFIG_FILE=os.devnull,
    AWS_SHARED_CREDENTIALS_FILE=os.devnull,
    AWS_EC2_METADATA_DISABLED="true",
    AZURE_STORAGE_KEY="dGVzdGluZw==",
)

# Whoever loads Arrow loads numpy, whose linear algebra starts a thread for each core that waits by
# spinning: a quarter of the processor time in which a Python process starts.
os.environ["OPENBLAS_NUM_THREADS"] = "1"

# A shell that starts a command in the background lets it ignore Ctrl-C, and so does every process
# that command starts: those that tests interrupt would go on.
signal.signal(signal.SIGINT, signal.default_int_handler)

# A machine that is busy with something else is slow at making examples, too.
_slow = [hypothesis.HealthCheck.too_slow]
hypothesis.settings.register_profile(
    "default", deadline=None, max_examples=100, suppress_health_check=_slow
)
hypothesis.settings.register_profile(
    "ci", deadline=None, max_examples=500, print_blob=True, suppress_health_check=_slow
)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Eight thousand tests are 300,000 objects that live until the end.

    Python's garbage collector would walk through all of them again and again: that was half of the
    time to collect tests, and a tenth of the time to run them.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()


@pytest.fixture
def runtime() -> ManualRuntime:
    """A clock that only moves when the test, or a sleep, says so."""
    return ManualRuntime()


@pytest.fixture(scope="session")
def moto_endpoint() -> Iterator[str]:
    """The URL of moto's S3 over real HTTP, in a thread of this process."""
    from tests.support.moto_server import MotoServer

    with MotoServer() as endpoint:
        yield endpoint


@pytest.fixture
def moto_bucket(moto_endpoint: str, request: pytest.FixtureRequest) -> str:
    """A new bucket there."""
    import boto3

    name = f"bucket-{os.urandom(8).hex()}"
    boto3.client("s3", endpoint_url=moto_endpoint).create_bucket(Bucket=name)
    return name


@pytest.fixture(scope="session")
def real_server() -> Iterator[Callable[[str], str]]:
    """Starts a server of tools/servers.py by its name, once; gives its URL.

    Each has an empty bucket ``bucket`` or container ``container``. A test that asks for one that
    is not there is skipped.
    """
    from tools.servers import SERVERS

    with ExitStack() as running:
        urls: dict[str, str] = {}

        def start(name: str) -> str:
            (server,) = [each for each in SERVERS if each.name == name]
            if not server.is_there:
                pytest.skip(server.why_not)
            if name not in urls:
                urls[name] = running.enter_context(server.start())
                _make_bucket(name, urls[name])
            return urls[name]

        yield start


def _make_bucket(server: str, url: str) -> None:
    if server == "versitygw":
        import boto3

        boto3.client("s3", endpoint_url=url).create_bucket(Bucket="bucket")
    elif server == "fake-gcs-server":
        import urllib3

        made = urllib3.request("POST", f"{url}/storage/v1/b?project=p", json={"name": "bucket"})
        assert made.status == 200
    else:
        from opendata_buffer.config import StoreOptions
        from opendata_buffer.stores.azure import connect

        options = StoreOptions(endpoint_url=f"{url}/testing")
        connect("", options).create_container("container")


@pytest.fixture
def s3_server() -> Iterator[S3Server]:
    """Our own S3 over HTTP, which can lose answers."""
    with S3Server() as server:
        yield server
