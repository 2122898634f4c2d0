"""Fixtures for every test. Nothing here reaches beyond this machine."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import hypothesis
import pytest

from opendata_buffer.testing.runtime import ManualRuntime
from tests.support.s3_server import S3Server

# Set before boto3 is imported, and inherited by every process that a test starts: no credentials,
# profile, or endpoint of the developer, and no metadata service.
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

# Arrow loads numpy, whose linear algebra starts one thread per core. These threads spin while they
# wait, which takes a quarter of the processor time that a Python process needs to start.
os.environ["OPENBLAS_NUM_THREADS"] = "1"

# A command that a shell starts in the background ignores Ctrl-C, and so do all processes that it
# starts. Without this line, processes that tests interrupt would continue.
signal.signal(signal.SIGINT, signal.default_int_handler)

# On a busy machine, generating examples is slow too.
_slow = [hypothesis.HealthCheck.too_slow]
hypothesis.settings.register_profile(
    "default", deadline=None, max_examples=100, suppress_health_check=_slow
)
hypothesis.settings.register_profile(
    "ci", deadline=None, max_examples=500, print_blob=True, suppress_health_check=_slow
)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


FULL = (
    "databricks",  # processes with the Python of Databricks
    "demo",  # a browser
    "examples",  # processes, some of which are killed
    "monitoring",  # Prometheus
    "process/test_broker.py",  # processes that are killed
    "process/test_broker_kills.py",
    "process/test_kill9.py",
    "referees",  # histories of processes
    "site",  # a browser
    "spark/chaos",  # drivers and workers that are killed
    "spark/test_benchmarks.py",
    "spark/test_cluster.py",  # more than one JVM
    "spark/test_connect.py",
    "spark/test_delta.py",
    "spark/test_demo.py",
    "spark/test_examples.py",
    "spark/test_notebook.py",
    "spark/test_pipelines.py",
    "spark/test_stores.py",
)
"""Files and folders whose tests all have the marker ``full``. See CONTRIBUTING.md.

A test elsewhere gets it by ``@pytest.mark.full`` if it takes seconds, and a file by ``pytestmark``.
"""

HERE = Path(__file__).parent


def is_always_full(path: str) -> bool:
    """Return whether all tests of a file have the marker ``full``.

    Args:
        path: The path of the file below this folder.
    """
    return any(path == place or path.startswith(f"{place}/") for place in FULL)


@pytest.hookimpl(tryfirst=True)  # before pytest chooses tests by their markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if is_always_full(str(item.path.relative_to(HERE))):
            item.add_marker(pytest.mark.full)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Switch Python's garbage collector off while tests are collected.

    Eight thousand tests are 300,000 objects that live until the end. The collector would traverse
    all of them again and again, which took half of the time to collect tests and a tenth of the
    time to run them.
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
    """Return a runtime whose clock moves only when a test or a sleep advances it."""
    return ManualRuntime()


@pytest.fixture(scope="session")
def moto_endpoint() -> Iterator[str]:
    """Yield the URL of moto's S3 over real HTTP, in a thread of this process."""
    from tests.support.moto_server import MotoServer

    with MotoServer() as endpoint:
        yield endpoint


@pytest.fixture
def moto_bucket(moto_endpoint: str, request: pytest.FixtureRequest) -> str:
    """Create a bucket on moto's S3, and return its name."""
    import boto3

    name = f"bucket-{os.urandom(8).hex()}"
    boto3.client("s3", endpoint_url=moto_endpoint).create_bucket(Bucket=name)
    return name


@pytest.fixture(scope="session")
def real_server() -> Iterator[Callable[[str], str]]:
    """Yield a function that starts a server of tools/servers.py by name, once, and returns its URL.

    Each server has an empty bucket ``bucket`` or container ``container``. A test is skipped if its
    server is not installed.
    """
    from tools.servers import SERVERS

    with ExitStack() as running:
        urls: dict[str, str] = {}

        def start(name: str) -> str:
            (server,) = [server for server in SERVERS if server.name == name]
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
    """Yield our own S3 server, which can lose answers."""
    with S3Server() as server:
        yield server
