"""The contract of all committers, whichever process finally writes the manifest.

To test another committer, add a line to ``COMMITTERS``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from opendata_buffer.broker.committer import open_brokered_committer
from opendata_buffer.broker.election import LeaderElection
from opendata_buffer.broker.network import WebSocketNetwork
from opendata_buffer.config import ProducerConfig
from opendata_buffer.errors import (
    CommitStateUnknown,
    CorruptManifest,
    QueueFull,
    TransientStorageError,
)
from opendata_buffer.formats.manifest import Manifest, Metadata, NewEntry
from opendata_buffer.producer.committer import Committer
from opendata_buffer.producer.group_commit import GroupCommitter
from opendata_buffer.producer.sharing import shared_committer
from opendata_buffer.stores.base import Blob
from opendata_buffer.stores.memory import MemoryStore
from tests.support.tuned import tuned
from tests.unit.broker.local import RUNTIME, Hooked, eventually

WAIT_S = 10.0
Make = Callable[..., Committer]


class Store(Hooked):
    """A store that counts writes of the manifest, can be silent to reads, and may have a broker."""

    def __init__(self) -> None:
        super().__init__()
        self.writes = 0
        self.silent = False
        self.on_write = self._count
        self.broker: LeaderElection | None = None

    def _count(self) -> None:
        self.writes += 1

    def get(self, key: str, **options: Any) -> Any:
        if self.silent:
            raise TransientStorageError("no answer")
        return super().get(key, **options)

    def stored(self) -> bytes:
        blob = MemoryStore.get(self, "ingest/manifest")
        assert isinstance(blob, Blob)
        return blob.data

    def locations(self) -> list[str]:
        return [entry.location for entry in Manifest.parse(self.stored()).entries()]


def group_committer(store: Store, config: ProducerConfig) -> Committer:
    return shared_committer(store, config, RUNTIME)


def brokered_committer(store: Store, config: ProducerConfig) -> Committer:
    """Return a committer that appends through a broker of this process, over real sockets."""
    network = WebSocketNetwork(RUNTIME)
    if store.broker is None:
        store.broker = LeaderElection(store, config, RUNTIME, network)
        eventually(lambda: store.broker is not None and store.broker.serving)
    return open_brokered_committer(store, config, RUNTIME, None, network=network)


COMMITTERS = [group_committer, brokered_committer]


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture(params=COMMITTERS)
def make(request: pytest.FixtureRequest, store: Store) -> Iterator[Make]:
    made: list[Committer] = []

    def committer(**settings: int) -> Committer:
        # A deadline that a busy machine does not reach.
        settings = {"backoff_max_ms": 5, "timeout_ms": 30_000, **settings}
        config = tuned(ProducerConfig, store="memory://unused", **settings)
        made.append(request.param(store, config))
        return made[-1]

    yield committer
    for opened in reversed(made):
        opened.close()
    if store.broker is not None:
        store.broker.stop(WAIT_S)


def entries(*numbers: int) -> list[NewEntry]:
    return [
        NewEntry(f"ingest/01J5T4R3KXBMZ7QV9N2WG8Y{n:03d}.batch", (Metadata(0, n, b"%d" % n),))
        for n in numbers
    ]


def locations(*numbers: int) -> list[str]:
    return [entry.location for entry in entries(*numbers)]


def append(committer: Committer, *numbers: int, within: float = 60.0) -> int:
    return committer.append(entries(*numbers), begin_by=RUNTIME.monotonic() + within)


def test_entries_land_in_order_and_the_first_sequence_is_returned(make: Make, store: Store) -> None:
    committer = make()
    assert append(committer, 1, 2, 3) == 0
    assert append(committer, 4, 5) == 3
    found = Manifest.parse(store.stored()).entries()
    assert [entry.location for entry in found] == locations(1, 2, 3, 4, 5)
    assert [entry.metadata for entry in found] == [
        entry.metadata for entry in entries(1, 2, 3, 4, 5)
    ]


def test_an_append_is_one_write(make: Make, store: Store) -> None:
    committer = make()
    append(committer, *range(100))
    assert store.writes == committer.attempts == 1


def test_many_callers_lose_nothing_and_get_their_own_sequences(make: Make, store: Store) -> None:
    committers = [make() for _ in range(8)]
    got: dict[int, int] = {}

    def call(committer: Committer, caller: int) -> None:
        for turn in range(10):
            n = caller * 100 + turn * 2
            got[n] = append(committer, n, n + 1)

    threads = [
        threading.Thread(target=call, args=(committer, n)) for n, committer in enumerate(committers)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    queued = store.locations()
    assert len(queued) == 160
    assert len(got) == 80
    for n, sequence in got.items():
        assert queued[sequence : sequence + 2] == locations(n, n + 1)
    for caller in range(8):
        sequences = [got[caller * 100 + turn * 2] for turn in range(10)]
        assert sequences == sorted(sequences)


@pytest.mark.parametrize(("answers", "requests"), [(1, 0), (3, 0), (0, 2)])
def test_f2_after_a_lost_answer_or_request_nothing_lands_twice(
    make: Make, store: Store, answers: int, requests: int
) -> None:
    committer = make()
    store.lost_answers, store.lost_requests = answers, requests
    assert append(committer, 1, 2) == 0
    assert append(committer, 3) == 2
    assert store.locations() == locations(1, 2, 3)


def test_an_append_reports_an_unknown_outcome(make: Make, store: Store) -> None:
    committer = make(timeout_ms=1_000)
    append(committer, 1)
    store.lost_requests = 10**6
    with pytest.raises(CommitStateUnknown) as caught:
        # Until then, a client asks a broker again that does not reach the store.
        append(committer, 2, 3, within=3)
    assert set(locations(2, 3)) <= set(caught.value.locations)


def test_a_store_that_does_not_answer_refuses_and_the_append_may_be_tried_again(
    make: Make, store: Store
) -> None:
    committer = make(timeout_ms=1_000)
    store.silent = True
    with pytest.raises(TransientStorageError):
        append(committer, 1)
    assert store.writes == 0
    store.silent = False
    assert append(committer, 1) == 0


def test_f35_a_full_queue_refuses_an_append_completely(make: Make, store: Store) -> None:
    committer = make(max_manifest_bytes=400)
    append(committer, 1, 2, 3)
    before = store.locations()
    with pytest.raises(QueueFull):
        append(committer, *range(10, 20))
    assert store.locations() == before
    assert append(committer, 4) == 3


def test_an_append_that_begins_too_late_is_refused(make: Make, store: Store) -> None:
    committer = make()
    with pytest.raises(TransientStorageError):
        append(committer, 1, within=-0.001)
    assert store.writes == 0


def test_a_corrupt_manifest_is_never_overwritten(make: Make, store: Store) -> None:
    committer = make()
    store.put("ingest/manifest", b"no manifest")
    # A broker knows the manifest before the first append. Its write loses a race, and an unreadable
    # manifest does not prove that another writer won.
    local = isinstance(committer, GroupCommitter)
    expected = CorruptManifest if local else (CorruptManifest, CommitStateUnknown)
    with pytest.raises(expected):
        append(committer, 1)
    assert store.stored() == b"no manifest"


def test_closing_one_of_several_users_does_not_affect_the_others(make: Make, store: Store) -> None:
    first = make()
    second = group_committer(store, ProducerConfig(store="memory://unused"))
    second.close()
    assert append(first, 1) == 0
    assert store.locations() == locations(1)
