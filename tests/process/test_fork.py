"""A process that forks or ends while a producer is open: gunicorn, Celery, multiprocessing."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from opendata_buffer import Consumer, ConsumerConfig


def consumed(store: Path) -> list[list[bytes]]:
    with Consumer(ConsumerConfig(store=str(store), create_if_missing=True)) as consumer:
        return [batch.entries for batch in iter(consumer.next_batch, None)]


def run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


PARENT = """
import logging, os, sys, warnings
warnings.simplefilter("ignore", DeprecationWarning)
logging.disable(logging.WARNING)  # about a broker that is late on a busy machine
from opendata_buffer import Closed, Producer, ProducerConfig

config = ProducerConfig(store=sys.argv[1], flush_interval_ms=60_000, broker=sys.argv[2])
producer = Producer(config)
if config.broker == "host":
    # Also fork a broker with its port, its threads, and its own connection.
    producer.produce([b"first"])
    producer.flush(30)
producer.produce([b"parent"])
child = os.fork()
if child == 0:
    try:
        producer.produce([b"lost"])
    except Closed as error:
        print(error)
    producer.close()  # only the parent flushes the parent's entries
    with Producer(config) as own:
        own.produce([b"child"])
    sys.exit(0)  # not os._exit: the exit hooks run
assert os.waitpid(child, 0)[1] == 0
producer.close()
"""


@pytest.mark.parametrize("broker", ["auto", "host"])
def test_a_forked_child_has_its_own_producer(tmp_path: Path, broker: str) -> None:
    done = run(PARENT, str(tmp_path), broker)
    assert (done.returncode, done.stderr) == (0, "")
    assert "Make a producer in each process, after the fork" in done.stdout
    first = [[b"first"]] if broker == "host" else []
    assert sorted(consumed(tmp_path)) == [[b"child"], *first, [b"parent"]]


IMPORTING = """
import importlib.abc, os, sys, threading, time, warnings
warnings.simplefilter("ignore", DeprecationWarning)
from opendata_buffer.broker.tls import broker_context

begun = threading.Event()

class SlowImport(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "cryptography.hazmat.primitives.asymmetric.ec":
            begun.set()
            time.sleep(0.5)
        return None

forked = threading.Event()

def serve():
    # The thread of a broker lives on. OpenSSL holds a lock while a thread that has used it ends.
    broker_context()
    forked.wait(60)

sys.meta_path.insert(0, SlowImport())
thread = threading.Thread(target=serve)
thread.start()
assert begun.wait(30)
child = os.fork()
if child == 0:
    print("child", len(broker_context()[1]), flush=True)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
forked.set()
thread.join()
"""


def test_a_child_that_is_forked_while_a_broker_starts_can_start_a_broker() -> None:
    done = run(IMPORTING)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "child 64\n"


KILLED = """
import os, sys, time, warnings
warnings.simplefilter("ignore", DeprecationWarning)
from opendata_buffer import Producer, ProducerConfig
from opendata_buffer.broker.election import Lease
from opendata_buffer.runtime import SystemRuntime
from opendata_buffer.stores.open import open_store

config = ProducerConfig(store=sys.argv[1], broker="host", flush_interval_ms=10)
producer = Producer(config)
while (found := Lease(open_store(config.store), config, SystemRuntime()).read()) is None:
    time.sleep(0.01)
producer.produce([b"first"])
producer.flush(30)
read, write = os.pipe()
child = os.fork()
if child == 0:
    # The hooks of the fork have run, so the sockets are closed.
    os.write(write, b"!")
    sys.stdin.read()
    os._exit(0)
os.read(read, 1)
print(found.address, flush=True)
os.kill(os.getpid(), 9)
"""


def test_a_killed_broker_is_detected_although_a_child_process_of_it_lives(
    tmp_path: Path,
) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        host, _, port = parent.stdout.readline().strip().rpartition(":")
        assert parent.wait(60) == -9
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((host, int(port)), 10)
        assert parent.stdout.read(0) == ""
        parent.stdin.close()  # the child ends


FORGETFUL = """
import sys
from opendata_buffer import Producer, ProducerConfig

def main():
    # With an interval of a minute, nothing is flushed by age before the end.
    producer = Producer(ProducerConfig(store=sys.argv[1], flush_interval_ms=60_000))
    producer.produce([b"a", b"b"])

main()
"""


def test_f30_a_producer_that_was_not_closed_is_flushed_at_exit(tmp_path: Path) -> None:
    done = run(FORGETFUL, str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "was not closed before exit" in done.stderr
    assert consumed(tmp_path) == [[b"a", b"b"]]


def test_f30_single_records_that_arrow_joins_are_flushed_at_exit(tmp_path: Path) -> None:
    """Arrow first imports pandas then, and with it a module that Python refuses at exit."""
    many = FORGETFUL.replace(
        'producer.produce([b"a", b"b"])', "[producer.send(b'a') for _ in range(20_000)]"
    )
    done = run(many, str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "was not closed before exit" in done.stderr
    assert consumed(tmp_path) == [[b"a"] * 20_000]
