"""The programs in ``examples/`` run as their headers say."""

from __future__ import annotations

import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from opendata_buffer import Consumer, ConsumerConfig, Producer, ProducerConfig

ROOT = Path(__file__).parents[2]


def run(name: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / name), *arguments],
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def batches_of(store: str) -> Iterator[list[bytes]]:
    with Consumer(ConsumerConfig(store=store)) as consumer:
        while batch := consumer.next_batch():
            yield batch.entries
            consumer.ack(batch.sequence)


def test_an_asyncio_service_answers_when_orders_are_durable(tmp_path: Path) -> None:
    assert run("asyncio_service.py", str(tmp_path)) == "200 orders accepted\n"
    batches = list(batches_of(str(tmp_path)))
    records = [record for batch in batches for record in batch]
    assert len(set(records)) == len(records) == 200
    # Clients share batches, which is the point of the example.
    assert len(batches) < 200


def test_a_pool_of_workers_fetches_and_one_consumer_acknowledges(tmp_path: Path) -> None:
    store = str(tmp_path)
    with Producer(ProducerConfig(store=store)) as producer:
        for number in range(5):
            producer.produce([b"%d" % number] * (number + 1))
            producer.flush()
    lines = run("worker_pool.py", store).splitlines()
    assert lines == [f"batch {n}: {n + 1} records" for n in range(5)] + ["15 records processed"]
    assert list(batches_of(store)) == []


def test_workers_share_a_queue_and_quarantine_what_cannot_be_processed(tmp_path: Path) -> None:
    store = str(tmp_path)
    with Producer(ProducerConfig(store=store)) as producer:
        for number in range(5):
            producer.produce([b"%d" % number if number != 3 else b""] * (number + 1))
            producer.flush()
    assert run("shared_queue.py", store) == "11 records in 4 batches\n"
    assert list(batches_of(store)) == []
    assert len(list((tmp_path / "ingest" / "_quarantine").glob("*.json"))) == 1


def test_interrupted_transfers_leave_every_sum_correct(tmp_path: Path) -> None:
    store = str(tmp_path)
    assert run("transactions.py", store) == "40 records, sum 0\n"
    cut = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "transactions.py"), store, "crash"],
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert (cut.returncode, cut.stdout) == (1, "")
    # 19 transfers of the interrupted run, and 20 of this run.
    assert run("transactions.py", store) == "78 records, sum 0\n"


@pytest.mark.parametrize("option", ["", "--exactly-once"])
def test_a_service_that_is_killed_writes_the_rest_when_it_is_started_again(
    tmp_path: Path, option: str
) -> None:
    store, database = str(tmp_path / "queue"), tmp_path / "orders.db"
    records = [b"%d" % number for number in range(2_100)]

    def produce(some: list[bytes]) -> None:
        with Producer(store, flush_size_bytes=1) as producer:
            for record in some:
                producer.produce([record], metadata=b"till-7")

    def written() -> list[bytes]:
        if not database.exists():
            return []
        connection = sqlite3.connect(database)
        try:
            return [record for (record,) in connection.execute("SELECT record FROM orders")]
        except sqlite3.OperationalError:  # no table yet
            return []
        finally:
            connection.close()

    def serve_until(count: int, end: signal.Signals) -> int:
        command = [sys.executable, str(ROOT / "examples" / "consume_into_sqlite.py"), store]
        process = subprocess.Popen([*command, str(database), *filter(None, [option])])
        until = time.monotonic() + 120
        while len(set(written())) < count and time.monotonic() < until:
            time.sleep(0.01)
        time.sleep(
            1 if end == signal.SIGTERM else 0
        )  # Written records are acknowledged in that time.
        process.send_signal(end)
        return process.wait(60)

    produce(records[:2_000])
    for count in (20, 100):
        assert serve_until(count, signal.SIGKILL) == -signal.SIGKILL
        assert len(set(written())) < 2_000, "it was killed while it worked"
    produce(records[2_000:])
    assert serve_until(2_100, signal.SIGTERM) == 0
    found = sorted(written(), key=int)
    assert (found if option else sorted(set(found), key=int)) == records
    assert list(batches_of(store)) == []
