"""The two boto3 clients and how they are shared."""

from __future__ import annotations

import gc
import os
import pickle
import weakref
from pathlib import Path

import pytest
from botocore import UNSIGNED

from opendata_buffer.config import StoreOptions
from opendata_buffer.errors import PermanentStorageError
from opendata_buffer.stores.clients import AWS_ENVIRONMENT, ProcessClient
from opendata_buffer.stores.open import open_store
from opendata_buffer.stores.s3 import S3Store
from opendata_buffer.stores.s3_client import S3Pair, connect

HERE = StoreOptions(endpoint_url="http://127.0.0.1:9")


def clients_of(options: StoreOptions) -> ProcessClient[S3Pair]:
    return ProcessClient(connect, "", options, AWS_ENVIRONMENT)


@pytest.mark.parametrize("endpoint", ["http://127.0.0.1:9", None])
def test_f1_conditional_writes_are_sent_once_and_reads_are_repeated(endpoint: str | None) -> None:
    # None is Amazon's own, which is made on another path.
    options = StoreOptions(endpoint_url=endpoint, region="eu-west-1", max_attempts=7)
    clients = clients_of(options).get()
    retries = [client.meta.config.retries for client in (clients.conditional, clients.data)]
    assert retries == [
        {"mode": "standard", "total_max_attempts": 1},
        {"mode": "standard", "total_max_attempts": 7},
    ]


def test_both_have_the_timeouts_of_the_options() -> None:
    options = StoreOptions(
        endpoint_url="http://127.0.0.1:9",
        connect_timeout_ms=1_234,
        read_timeout_ms=5_678,
        max_connections=9,
    )
    clients = clients_of(options).get()
    for client in (clients.conditional, clients.data):
        config = client.meta.config
        assert (config.connect_timeout, config.read_timeout) == (1.234, 5.678)
        assert config.max_pool_connections == 9
        assert config.tcp_keepalive


def test_stores_of_the_same_options_share_connections() -> None:
    here = clients_of(HERE).get()
    assert here is clients_of(StoreOptions(endpoint_url="http://127.0.0.1:9")).get()
    assert here.data is not here.conditional
    assert here.data is not clients_of(StoreOptions(endpoint_url="http://[::1]:9")).get().data


def test_a_forked_child_does_not_use_its_parents_connections() -> None:
    clients = clients_of(HERE)
    parents = clients.get().data
    child = os.fork()
    if child == 0:
        # _exit: the child must not run the rest of the test session.
        os._exit(0 if clients.get().data is not parents else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert clients.get().data is parents


def test_a_changed_environment_makes_new_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    assert clients_of(StoreOptions()).get().endpoint == "http://127.0.0.1:1"
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:2")
    assert clients_of(StoreOptions()).get().endpoint == "http://127.0.0.1:2"


def test_rotated_credentials_leave_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    options = StoreOptions(endpoint_url="http://127.0.0.1:9", max_connections=3)
    old: list[weakref.ref[object]] = []
    for number in range(4):
        monkeypatch.setenv("AWS_SESSION_TOKEN", f"token {number}")
        store = open_store("s3://rotated", options)
        assert isinstance(store, S3Store)
        old += [weakref.ref(store), weakref.ref(store._clients.get().data)]
        assert store is open_store("s3://rotated", options)
        del store
    gc.collect()
    assert [each() is None for each in old] == [True] * 6 + [False] * 2, "12.7 MiB each"


def test_clients_in_use_outlive_a_rotation(monkeypatch: pytest.MonkeyPatch) -> None:
    store = clients_of(HERE)
    before = store.get().data
    monkeypatch.setenv("AWS_SESSION_TOKEN", "new")
    assert clients_of(HERE).get().data is not before
    assert store.get().data is before


def test_buckets_are_in_the_path_except_at_amazon() -> None:
    assert clients_of(HERE).get().data.meta.config.s3 == {"addressing_style": "path"}
    amazon = clients_of(StoreOptions(region="eu-west-1")).get()
    assert amazon.data.meta.config.s3 == {"addressing_style": "auto"}
    assert amazon.endpoint == "https://s3.eu-west-1.amazonaws.com"


def test_pickling_takes_only_the_options() -> None:
    clients = clients_of(HERE)
    assert clients.get().endpoint == "http://127.0.0.1:9"
    assert len(pickle.dumps(clients)) < 1_000
    assert pickle.loads(pickle.dumps(clients)).get().endpoint == "http://127.0.0.1:9"


@pytest.mark.parametrize(
    ("options", "cause"),
    [
        (StoreOptions(endpoint_url="junk"), "Invalid endpoint: junk"),
        (StoreOptions(profile="nobody"), r"profile \(nobody\) could not be found"),
    ],
)
def test_options_boto3_refuses_are_permanent_errors(options: StoreOptions, cause: str) -> None:
    with pytest.raises(PermanentStorageError, match=f"cannot make an S3 client: .*{cause}"):
        clients_of(options).get()


def test_profile_and_its_region_come_from_the_shared_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config").write_text("[profile team]\nregion = eu-north-1\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.delenv("AWS_DEFAULT_REGION")
    assert clients_of(StoreOptions(profile="team")).get().data.meta.region_name == "eu-north-1"


def test_anonymous_clients_sign_nothing() -> None:
    clients = clients_of(StoreOptions(endpoint_url="http://127.0.0.1:9", anonymous=True)).get()
    for client in (clients.conditional, clients.data):
        assert client.meta.config.signature_version is UNSIGNED
