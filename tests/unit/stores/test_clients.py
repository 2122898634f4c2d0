"""Clients that belong to a process."""

from __future__ import annotations

import os
import pickle

import pytest

from opendata_buffer.config import StoreOptions
from opendata_buffer.stores.clients import ProcessClient, environment_of


class Client:
    def __init__(self, name: str) -> None:
        self.name = name


def connect(name: str, options: StoreOptions) -> Client:
    return Client(name)


def client_of(name: str, **options: int) -> ProcessClient[Client]:
    return ProcessClient(connect, name, StoreOptions(**options), ("TEST_CLIENTS_",))  # type: ignore[arg-type]


def test_stores_of_the_same_name_and_options_share_a_client() -> None:
    assert client_of("a").get() is client_of("a").get()
    assert client_of("a").get() is not client_of("b").get()
    assert client_of("a").get() is not client_of("a", max_attempts=2).get()


def test_a_changed_environment_makes_another_and_leaves_those_in_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = client_of("a")
    first = before.get()
    monkeypatch.setenv("TEST_CLIENTS_KEY", "rotated")
    assert environment_of("TEST_CLIENTS_") == (("TEST_CLIENTS_KEY", "rotated"),)
    assert client_of("a").get() is not first
    assert before.get() is first


def test_it_pickles_as_what_it_is_made_from() -> None:
    client = client_of("a")
    client.get()
    raw = pickle.dumps(client)
    assert b"Client(" not in raw
    assert pickle.loads(raw).get() is client.get()


def test_a_forked_child_makes_its_own() -> None:
    client = client_of("a")
    parents = client.get()
    child = os.fork()
    if child == 0:
        # _exit: the child must not run the rest of the test session.
        os._exit(0 if client.get() is not parents else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert client.get() is parents
