"""Conditional writes to real servers behind a proxy that loses the answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest

from opendata_buffer import outcomes
from opendata_buffer.config import QueueConfig
from opendata_buffer.queue.cas import CasObject
from opendata_buffer.runtime import SystemRuntime
from opendata_buffer.stores.base import Blob, Store, read_bytes
from tests.contract.servers import REAL, store_at
from tests.http_scripts import FaultProxy


@pytest.fixture(params=REAL)
def proxied(
    request: pytest.FixtureRequest, real_server: Callable[[str], str]
) -> Iterator[tuple[Store, FaultProxy]]:
    proxy = FaultProxy(real_server(request.param))
    with proxy.running() as url:
        yield store_at(request.param, url, f"lost/{id(proxy)}"), proxy


class Holds:
    """Recognises a change by the value that it adds."""

    def __init__(self, value: str) -> None:
        self.value = value

    def mark(self) -> int:
        return 0

    def find(self, now: list[str] | None, marks: Sequence[int]) -> bool:
        return now is not None and self.value in now


def writes(proxy: FaultProxy) -> int:
    return sum(request.method in ("PUT", "POST") for request in proxy.asked)


def test_f1_a_write_whose_answer_is_lost_is_sent_once_and_its_outcome_is_unknown(
    proxied: tuple[Store, FaultProxy],
) -> None:
    store, proxy = proxied
    proxy.lose("PUT", "POST")
    assert isinstance(store.put_if("m", b"1", None), outcomes.Unknown)
    assert writes(proxy) == 1
    proxy.lose()
    found = store.get("m")
    assert isinstance(found, Blob)
    assert found.data == b"1", "it was applied"
    proxy.lose("PUT", "POST")
    assert isinstance(store.put_if("m", b"2", found.version), outcomes.Unknown)
    assert writes(proxy) == 2
    proxy.lose()
    changed = store.get("m")
    assert isinstance(changed, Blob)
    assert changed.data == b"2"
    assert isinstance(store.put_if("m", b"3", changed.version), outcomes.Applied)


def test_f1_a_change_whose_answer_is_lost_is_looked_up_and_made_once(
    proxied: tuple[Store, FaultProxy],
) -> None:
    store, proxy = proxied
    counter = CasObject(
        store,
        "counter",
        encode=lambda values: ",".join(values).encode(),
        decode=lambda raw: raw.decode().split(","),
        runtime=SystemRuntime(),
        settings=QueueConfig(store="memory://unused").with_timeout(20_000),
        max_bytes=1_000,
    )
    for number in range(3):
        proxy.lose("PUT", "POST")
        before = writes(proxy)

        def add(values: list[str] | None, number: int = number) -> list[str]:
            return [*(values or []), str(number)]

        assert isinstance(counter.update(add, proof=Holds(str(number))), outcomes.Applied)
        assert writes(proxy) == before + 1, "a read decides, no second write"
    proxy.lose()
    assert read_bytes(store, "counter") == b"0,1,2"
