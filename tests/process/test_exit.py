"""A process that ends in order, but forgot to close its producer."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from opendata_buffer.config import ConsumerConfig
from opendata_buffer.consumer.consumer import Consumer

FORGETFUL = """
import sys
from opendata_buffer.config import ProducerConfig
from opendata_buffer.producer.producer import Producer

def main():
    # A minute's interval: nothing is flushed by its age before the end.
    producer = Producer(ProducerConfig(store=sys.argv[1], flush_interval_ms=60_000))
    producer.produce([b"a", b"b"])

main()
"""


def test_f30_a_producer_nobody_closed_is_flushed_at_exit(tmp_path: Path) -> None:
    command = [sys.executable, "-c", FORGETFUL, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "was not closed before exit" in done.stderr
    with Consumer(ConsumerConfig(store=str(tmp_path))) as consumer:
        batch = consumer.next_batch()
        assert batch is not None
        assert batch.entries == [b"a", b"b"]
