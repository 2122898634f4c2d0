"""``exporter``: its gauges, its requests, and its behavior when a store does not answer."""

from __future__ import annotations

import logging
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from opendata_buffer import metrics
from opendata_buffer.admin.levels import LevelReader
from opendata_buffer.admin.target import Target
from opendata_buffer.broker.worker import Worker
from opendata_buffer.cli import exporter
from opendata_buffer.cli.exporter import CONTENT_TYPE, KEPT, Sample, Watch, render
from opendata_buffer.config import QueueConfig, WorkerConfig
from opendata_buffer.errors import PermanentStorageError
from opendata_buffer.runtime import SystemRuntime
from opendata_buffer.stores.memory import MemoryStore
from opendata_buffer.testing.runtime import ManualRuntime
from opendata_buffer.topic.topic import Topic
from tests.unit.cli.shell import copy_into, fails, fill, json_of, misused, ok, topic_of
from tests.unit.cli.test_topic import pending

RUNTIME = SystemRuntime()
INTERVAL_S = 10.0
TIMEOUT_S = 5.0


def reader_of(store: MemoryStore, runtime: Any = RUNTIME) -> LevelReader:
    config = QueueConfig(store=store.url)
    topic = Topic.find(config, store=store, runtime=runtime)
    return LevelReader(Target(store, config, runtime, topic))


def watch_of(store: MemoryStore, runtime: Any = RUNTIME) -> Watch:
    return Watch(store.url, lambda: reader_of(store, runtime), runtime, TIMEOUT_S, INTERVAL_S)


def values(watch: Watch, **labels: str) -> dict[str, float]:
    """Return the values of the samples that have some labels, by gauge."""
    return {
        sample.name: sample.value
        for sample in watch.samples()
        if labels.items() <= sample.labels.items()
    }


def read(store: MemoryStore, **labels: str) -> dict[str, float]:
    watch = watch_of(store)
    watch.read()
    return values(watch, **labels)


# ---- Gauges


def test_a_v1_consumer_shows_what_it_lacks_and_whether_feeding_has_stopped(
    url: str, store: MemoryStore
) -> None:
    fill(url, [b"a"], [b"b"])
    ok("readers", "enable", url, "--yes")
    ok("readers", "add", url, "other", "--v1", "other")
    found = read(store, reader="other")
    assert (found["reader_lag"], found["reader_unfed"], found["reader_feeding_stopped"]) == (
        2,
        2,
        0,
    )
    assert "reader_runs" not in found
    ok("readers", "feed", url)
    assert read(store, reader="other")["reader_unfed"] == 0
    store.delete_many(["other/manifest"])
    assert read(store, reader="other")["reader_feeding_stopped"] == 1


def test_a_queue_that_no_consumer_reads_shows_what_status_shows(
    url: str, store: MemoryStore
) -> None:
    fill(url, [b"a"], [b"b"], [b"c"])
    ok("skip", url, "0", "--force")
    with Worker(WorkerConfig(store=url), store=store) as worker:
        assert len(worker.claim(1)) == 1
        found, known = read(store), json_of("status", url)
    of_queue = read(store, queue=f"{store.url}/ingest/manifest")
    assert of_queue.keys() == {name for name in found if not name.startswith("exporter_")}
    assert found["exporter_up"] == 1
    assert found["queue_length"] == known["queue_length"] == 3
    assert found["consumer_lag_seconds"] <= known["oldest_age_seconds"]
    assert found["next_sequence"] == known["next_sequence"] == 3
    assert found["epoch"] == known["epoch"] == 2
    assert found["manifest_bytes"] == known["manifest_bytes"]
    assert found["manifest_share"] == known["manifest_bytes"] / 2**26
    assert found["quarantined"] == known["quarantined"] == 1
    assert found["claims_held"] == known["claims"]["held"] == 1
    assert found["queue_refused"] == 0
    assert "partition_draining" not in found


def test_a_topic_shows_each_partition_and_its_open_transactions(
    url: str, store: MemoryStore
) -> None:
    first, second = topic_of(url, 2)
    fill(url, [b"a"], [b"b"], data_path_prefix=first)
    pending(store, url, second)
    ok("topic", "drain", url, "0")
    watch = watch_of(store)
    watch.read()
    one, other = values(watch, partition=first), values(watch, partition=second)
    assert (one["queue_length"], one["partition_draining"]) == (2, 1)
    assert (other["transactions_open"], other["partition_draining"]) == (1, 0)
    assert other["oldest_transaction_seconds"] > 0
    assert one["transactions_open"] == 0


def test_a_partition_without_batches_is_empty_and_not_an_error(
    url: str, store: MemoryStore
) -> None:
    topic_of(url, 1)
    found = read(store)
    assert (found["exporter_up"], found["queue_length"]) == (1, 0)


def test_a_log_shows_each_reader_and_what_the_slowest_has_not_read(
    url: str, store: MemoryStore
) -> None:
    fill(url, [b"a"], [b"b"], [b"c"])
    ok("readers", "enable", url, "--yes")
    ok("readers", "reset", url, "slow", "--to-sequence", "1")
    ok("consume", url, "--reader", "fast", "--ack")
    assert read(store)["queue_length"] == 2
    slow, fast = read(store, reader="slow"), read(store, reader="fast")
    assert (slow["reader_lag"], fast["reader_lag"]) == (2, 0)
    assert slow["reader_lag_seconds"] > 0 == fast["reader_lag_seconds"]
    assert 6 * 86_400 < slow["reader_expires_seconds"] <= 7 * 86_400
    assert slow["reader_runs"] == 0


def test_every_gauge_has_the_labels_of_the_table_and_the_units_of_the_library(
    url: str, store: MemoryStore
) -> None:
    first, _ = topic_of(url, 2)
    ok("readers", "enable", url, "--yes")
    fill(url, [b"a"], data_path_prefix=first)
    ok("readers", "reset", url, "slow", "--to-earliest", "--partition", "0")
    log = f"{url}-log"
    fill(log, [b"a"])
    ok("readers", "enable", log, "--yes")
    ok("readers", "add", log, "other", "--v1", "other")
    watches = [watch_of(each) for each in (store, MemoryStore.named(log.removeprefix("memory://")))]
    for watch in watches:
        watch.read()
    seen = {sample.name: tuple(sample.labels) for watch in watches for sample in watch.samples()}
    assert seen == {name: row.labels for name, row in metrics.EXPORTED.items()}
    for row in metrics.TABLE:
        if same := metrics.EXPORTED.get(row.name.removeprefix(metrics.PREFIX)):
            assert (same.kind, same.unit) == (row.kind, row.unit)
            assert set(row.labels) < set(same.labels)


def test_prometheus_parses_the_text_and_finds_unusual_labels_unchanged() -> None:
    parser = pytest.importorskip("prometheus_client.parser")
    url = 'file:///a "b"\\n\nc'
    samples = [
        Sample("queue_length", {"store": url, "queue": "é", "partition": ""}, 2**53),
        Sample("exporter_up", {"store": url}, 1.0),
        Sample("queue_length", {"store": "other", "queue": "q", "partition": "p"}, 0.1),
    ]
    found = list(parser.text_string_to_metric_families(render(samples)))
    assert [(family.name, family.type) for family in found] == [
        ("buffer_exporter_up", "gauge"), ("buffer_queue_length", "gauge"),
    ]  # fmt: skip
    assert [(sample.labels, sample.value) for sample in found[1].samples] == [
        ({"store": url, "queue": "é"}, 2**53),
        ({"store": "other", "queue": "q", "partition": "p"}, 0.1),
    ]


# ---- Requests


class Counting(MemoryStore):
    """Counts requests."""

    requests = 0

    def get(self, *arguments: Any, **options: Any) -> Any:
        self.requests += 1
        return super().get(*arguments, **options)

    def list(self, *arguments: Any, **options: Any) -> Any:
        self.requests += 1
        return super().list(*arguments, **options)


def test_a_read_costs_the_same_for_one_batch_and_for_hundreds_and_a_scrape_costs_nothing(
    url: str, name: str, store: MemoryStore
) -> None:
    costs = []
    for batches in (1, 300):
        fill(url, *([b"%d" % number] for number in range(batches)))
        ok("skip", url, "0", "--force")
        counting = Counting(name)
        copy_into(counting, store)
        watch = watch_of(counting)
        watch.read()
        counting.requests = 0
        watch.read()
        costs.append(counting.requests)
        for _ in range(100):
            assert values(watch)["exporter_up"] == 1
        assert counting.requests == costs[-1]
    assert costs == [4, 4]


# ---- A store that does not answer


class Broken(MemoryStore):
    """Fails every read with an error that quotes a credential, while it is broken."""

    is_broken = True

    def get(self, *arguments: Any, **options: Any) -> Any:
        if self.is_broken:
            raise PermanentStorageError("no answer from http://key:secret@host")
        return super().get(*arguments, **options)


@pytest.fixture
def broken(url: str, name: str, store: MemoryStore) -> Broken:
    fill(url, [b"a"])
    found = Broken(name)
    found.is_broken = False
    copy_into(found, store)
    found.is_broken = True
    return found


def test_a_store_that_fails_is_down_until_it_answers_and_is_logged_once_without_credentials(
    broken: Broken, caplog: pytest.LogCaptureFixture
) -> None:
    watch = watch_of(broken)
    assert values(watch) == {"exporter_up": 0.0}, "nothing is known yet"
    for _ in range(3):
        watch.read()
    assert values(watch).keys() == {"exporter_up", "exporter_read_seconds"}
    assert values(watch)["exporter_up"] == 0
    broken.is_broken = False
    watch.read()
    assert (values(watch)["exporter_up"], values(watch)["queue_length"]) == (1, 1)
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 2
    assert "cannot read memory://" in caplog.messages[0]
    assert caplog.messages[1].endswith("can be read again")
    assert "secret" not in caplog.text


def test_values_outlive_one_failed_read_but_not_many(broken: Broken) -> None:
    runtime = ManualRuntime()
    watch = watch_of(broken, runtime)
    broken.is_broken = False
    watch.read()
    broken.is_broken = True
    watch.read()
    assert (values(watch)["exporter_up"], values(watch)["queue_length"]) == (0, 1)
    last = values(watch)["exporter_last_success_timestamp_seconds"]
    runtime.advance((KEPT + 2) * INTERVAL_S)
    assert "queue_length" not in values(watch)
    assert values(watch)["exporter_last_success_timestamp_seconds"] == last


def test_a_store_that_hangs_is_down_and_does_not_delay_a_scrape(broken: Broken) -> None:
    broken.is_broken = False
    runtime, hangs, hung = ManualRuntime(), threading.Event(), threading.Event()
    watch = watch_of(broken, runtime)
    watch.read()

    def wait(*arguments: Any, **options: Any) -> Any:
        hung.set()
        hangs.wait(60)
        raise PermanentStorageError("late")

    broken.get = wait  # type: ignore[method-assign]
    thread = threading.Thread(target=watch.read)
    thread.start()
    assert hung.wait(60)
    try:
        assert values(watch)["exporter_up"] == 1, "it may still answer in time"
        runtime.advance(INTERVAL_S + 1)
        assert values(watch)["exporter_up"] == 0
        assert values(watch)["queue_length"] == 1
    finally:
        hangs.set()
        thread.join()


def test_a_damaged_partition_does_not_hide_the_others(
    url: str, store: MemoryStore, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = topic_of(url, 2)
    for name in (first, second):
        fill(url, [b"a"], data_path_prefix=name)
    sound = store.get(f"{first}/manifest")
    assert sound is not None
    store.put(f"{first}/manifest", b"<html>")
    watch = watch_of(store)
    for _ in range(2):
        watch.read()
    damaged = values(watch, partition=first)
    assert damaged == {"queue_refused": 1.0}
    assert values(watch, partition=second)["queue_length"] == 1
    assert values(watch)["exporter_up"] == 1
    (line,) = caplog.messages
    assert "producers, consumers or workers are refused: " in line
    store.put(f"{first}/manifest", sound.data)
    watch.read()
    assert values(watch, partition=first)["queue_length"] == 1


def test_damaged_claims_stop_workers_and_hide_no_number_of_the_queue(
    url: str, store: MemoryStore, caplog: pytest.LogCaptureFixture
) -> None:
    fill(url, [b"a"], [b"b"])
    store.put("ingest/_claims.json", b"garbage")
    found = read(store)
    assert (found["queue_length"], found["queue_refused"]) == (2, 1)
    assert "claims_held" not in found
    assert "every batch in the queue is handed out again" in caplog.text


def test_an_error_that_is_a_bug_is_reported_and_does_not_end_the_watch(
    store: MemoryStore, caplog: pytest.LogCaptureFixture
) -> None:
    def bug() -> LevelReader:
        raise KeyError("surprise")

    watch = Watch(store.url, bug, RUNTIME, TIMEOUT_S, INTERVAL_S)
    watch.read()
    assert values(watch)["exporter_up"] == 0
    assert "internal error, KeyError: 'surprise'" in caplog.text


# ---- HTTP


@contextmanager
def served(text: str, host: str = "127.0.0.1") -> Iterator[str]:
    server = exporter._server(f"{host}:0", lambda: text)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"{host}:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_metrics_are_served_and_other_paths_lead_to_them() -> None:
    with served("buffer_up 1\n") as address:
        with urllib.request.urlopen(f"http://{address}/metrics?x=1", timeout=60) as answer:
            assert (answer.read(), answer.headers["Content-Type"]) == (
                b"buffer_up 1\n", CONTENT_TYPE,
            )  # fmt: skip
        with urllib.request.urlopen(f"http://{address}/", timeout=60) as answer:
            assert b"/metrics" in answer.read()
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"http://{address}/nothing", timeout=60)


def test_an_ipv6_address_in_brackets_is_listened_on() -> None:
    if not socket.has_ipv6:
        pytest.skip("this machine has no IPv6")
    with (
        served("up 1\n", "[::1]") as address,
        urllib.request.urlopen(f"http://{address}/metrics", timeout=60) as answer,
    ):
        assert answer.read() == b"up 1\n"


def test_many_silent_clients_do_not_take_more_threads_than_allowed() -> None:
    with served("") as address:
        host, _, port = address.partition(":")
        clients = [socket.create_connection((host, int(port)), 60) for _ in range(40)]
        refused = 0
        for client in clients[exporter.MOST_REQUESTS :]:
            client.settimeout(60)
            refused += client.recv(1) == b""
            client.close()
        assert refused == 40 - exporter.MOST_REQUESTS
        for client in clients[: exporter.MOST_REQUESTS]:
            client.close()


def test_a_port_that_is_taken_is_one_clear_error(url: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        line = fails("exporter", url, "--listen", address)
    assert line.startswith(f"error: cannot listen on {address}: Address already in use")
    assert "--listen" in line


def test_a_wrong_store_ends_the_exporter_before_it_serves(url: str) -> None:
    assert "unknown scheme" in misused("exporter", url, "s4://bucket")
    assert "Missing argument 'STORE...'" in misused("exporter")
