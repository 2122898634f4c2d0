"""The Rust crate ``opendata-buffer``, unmodified, reads a log next to Python and Spark.

Producers, a broker, the readers, and the program that feeds are killed, Rust consumers take over
from each other with their collectors on, and a tenth of the answers to conditional writes are lost.
The layout is that of OpenTelemetry's exporter. Cargo gets the crate and builds it for some minutes,
so this runs at night, or with ``OPENDATA_BUFFER_V1_BATCHES=20000``.
"""

from __future__ import annotations

import itertools
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from opendata_buffer import Producer, StoreOptions, admin
from opendata_buffer.config import ProducerConfig
from opendata_buffer.queue.ownership import claim_for_writing
from opendata_buffer.stores.open import open_store
from tests.referees.v1_worker import GRACE_MS, MANIFEST, PLACE, PREFIX
from tests.support.s3_server import Answer, Fault, Request, S3Server
from tools.servers import find

HERE = Path(__file__).parent
BINARY = HERE / "build/cargo/debug/v1_consumer"
BATCHES = int(os.environ.get("OPENDATA_BUFFER_V1_BATCHES", "0"))
NIGHT = int(os.environ.get("OPENDATA_BUFFER_KILLS", "16")) >= 100
PATIENCE_S = 1_800.0
QUEUE = "ingest/otel/logs/clickhouse"
SPARK_EVERY = 8
"""Kills of other programs for each kill of Spark, which takes longer to start than they do."""


pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not (BATCHES or NIGHT), reason="builds a crate: at night only"),
]


class LossyServer(S3Server):
    """Loses a tenth of the answers to conditional writes; half of these writes are applied."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._random = random.Random(seed)
        self.share = 0.0
        self.lost = 0

    def _arrived(self, request: Request) -> Fault | None:
        found = super()._arrived(request)
        conditional = {"if-match", "if-none-match"} & request.headers.keys()
        if request.method != "PUT" or not conditional or self._random.random() >= self.share:
            return found
        self.lost += 1
        return Fault(Answer.CLOSE, applied=self._random.random() < 0.5)


class Program:
    """A program that is killed and started again, and the lines that it prints."""

    def __init__(self, *command: str) -> None:
        self.command = command
        self.lines: list[list[str]] = []
        """The lines of each process."""
        self.kills = 0
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(
            self.command, cwd=HERE.parents[1], stdout=subprocess.PIPE, text=True
        )
        self.lines.append([])
        arguments = self.process, self.lines[-1]
        self.thread = threading.Thread(target=self._read, args=arguments)
        self.thread.start()

    def _read(self, process: subprocess.Popen[str], lines: list[str]) -> None:
        assert process.stdout is not None
        with process.stdout as out:
            lines.extend(line[:-1] for line in out if line.endswith("\n"))

    def kill(self) -> None:
        self.close()
        self.kills += 1
        self.start()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.thread.join()

    def all_lines(self) -> Iterator[str]:
        return itertools.chain.from_iterable(self.lines)


def worker(*arguments: str) -> Program:
    return Program(sys.executable, "-m", "tests.referees.v1_worker", *arguments)


def revive(spark: Program) -> None:
    """Start Spark again if it has ended: it gives its Python processes ten seconds to start."""
    if spark.process.poll() is not None:
        spark.kill()


def acked(program: Program) -> int:
    """Return the highest sequence of which a Rust consumer has printed that it is acknowledged."""
    return max(
        (int(line.split()[1]) for line in program.all_lines() if line.startswith("acked ")),
        default=-1,
    )


def batches(lines: Iterator[str]) -> Iterator[tuple[int, str, str]]:
    for line in lines:
        if line[0].isdigit():
            sequence, location, records = line.split(" ", 2)
            yield int(sequence), location, records


@pytest.fixture(scope="session")
def crate() -> str:
    cargo = find("cargo")
    if cargo is None:
        pytest.skip("cargo is missing")
    target = str(HERE / "build/cargo")
    command = [cargo, "build", "--locked", "-q", "--target-dir", target]
    done = subprocess.run(command, cwd=HERE / "v1_consumer", capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"the crate is not built: {done.stderr[-500:]}")
    return str(BINARY)


def test_the_rust_crate_reads_a_log_next_to_python_and_spark(
    crate: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rng, wanted = random.Random(1), BATCHES or 2_000
    with ExitStack() as stack:
        server = stack.enter_context(LossyServer(1))
        for name, value in {
            "AWS_ENDPOINT_URL": server.endpoint,
            "AWS_ENDPOINT": server.endpoint,
            "AWS_ALLOW_HTTP": "true",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_REGION": "us-east-1",
        }.items():
            monkeypatch.setenv(name, value)
        url = server.url
        config = ProducerConfig(store=url, **PLACE)
        claim_for_writing(open_store(url), config, grace_ms=GRACE_MS)
        with Producer(config) as producer:
            producer.produce([b"first"]).result(60)
        admin.enable_log(url, **PLACE)
        assert admin.add_v1_reader(url, "clickhouse", QUEUE, **PLACE) == 0
        # Spark starts for seconds, and must get what the others acknowledge meanwhile.
        admin.reset_reader(url, "spark", "earliest", **PLACE)
        server.share = 0.1

        def add(program: Program) -> Program:
            return stack.enter_context(closing(program))

        writers = {
            name: add(worker(name, url, name + "0")) for name in ("produce", "go", "host", "join")
        }
        reader = add(worker("read", url))
        spark = add(
            Program(sys.executable, "-m", "tests.referees.v1_spark", url, str(tmp_path / "spark"))
        )
        feed = [sys.executable, "-m", "opendata_buffer", "readers", "feed", url, "--follow"]
        place = ["--data-path-prefix", PREFIX, "--manifest-path", MANIFEST]
        feeder = add(Program(*feed, "--interval-ms", "100", *place))
        rust = [crate, server.bucket, f"{QUEUE}/manifest", QUEUE, "1000"]
        consumers = [add(Program(*rust, "7")), add(Program(*rust, "40"))]
        starts: list[tuple[Program, int, int]] = []
        until = time.monotonic() + PATIENCE_S
        number = 0

        def end() -> int:
            found: Any = admin.describe(url, **PLACE)
            return int(found.next_sequence)

        last = 0
        while (last := end()) < wanted:
            assert time.monotonic() < until, f"{last} of {wanted} batches"
            assert not reader.lines[-1] or reader.process.poll() is None, "the reader has ended"
            revive(spark)
            time.sleep(rng.uniform(0.2, 1.5) if wanted < 1_000 else rng.uniform(1, 6))
            number += 1
            name = rng.choice([*writers])
            writers[name].command = (*writers[name].command[:-1], f"{name}{number}")
            victim = rng.choice([writers[name], reader, feeder])
            victim.kill()
            if number % SPARK_EVERY == 0:
                spark.kill()
            rival = rng.choice(consumers)
            most = max(map(acked, consumers))
            rival.kill()  # It takes the queue over from the other one, which is fenced.
            starts.append((rival, len(rival.lines) - 1, most))
        for writer in writers.values():
            writer.close()
        server.share = 0.0
        last = end()
        consumers[0].kill()
        starts.append((consumers[0], len(consumers[0].lines) - 1, max(map(acked, consumers))))
        while acked(consumers[0]) < last - 1 or not all(
            any(sequence == last - 1 for sequence, _, _ in batches(who.all_lines()))
            for who in (reader, spark)
        ):
            assert time.monotonic() < until, (acked(consumers[0]), last)
            revive(spark)
            time.sleep(0.2)
        for program in (*consumers, reader, spark, feeder):
            program.close()
        (status,) = [each for each in admin.list_readers(url, **PLACE) if each.v1]
        store = open_store(url, StoreOptions(endpoint_url=server.endpoint))
        assert (status.stopped, status.next_sequence, status.unfed) == ("", last, 0)

        durable = {line for writer in writers.values() for line in writer.all_lines()}
        known: dict[int, tuple[str, str]] = {}
        for who in (*consumers, reader, spark):
            for sequence, location, records in batches(who.all_lines()):
                assert known.setdefault(sequence, (location, records)) == (location, records)
        locations = [location for location, _ in known.values()]
        assert len({*locations}) == len(locations), "a location has two sequences"
        for what in (
            itertools.chain(*(each.all_lines() for each in consumers)),
            reader.all_lines(),
            spark.all_lines(),
        ):
            got = {sequence for sequence, _, _ in batches(what)}
            assert got == {*range(last)}
        got_records = [record for _, records in known.values() for record in records.split(",")]
        assert durable <= {*got_records}
        assert len({*got_records}) == len(got_records), "a record is in two batches"
        for consumer in consumers:
            for lines in consumer.lines:
                sequences = [sequence for sequence, _, _ in batches(iter(lines))]
                if sequences:
                    assert sequences == [*range(sequences[0], sequences[-1] + 1)]
                assert not [line for line in lines if line.startswith("error ")], lines[-3:]
        for consumer, process, most in starts:
            first = next(batches(iter(consumer.lines[process])), None)
            assert first is None or first[0] > most, "an acknowledged batch was delivered again"
        fenced = sum(line == "fenced" for each in consumers for line in each.all_lines())
        deletes = [
            request
            for request in server.requests
            if request.method in ("DELETE", "POST")
            and "object_store" in request.headers.get("user-agent", "")
        ]
        assert not deletes, "the collector of the crate deleted objects of the log"
        assert not [each for each in store.list(f"{QUEUE}/").objects if "manifest" not in each.key][
            1:
        ]
        assert fenced
        assert server.lost > wanted / 100
        assert feeder.kills
        assert reader.kills
        assert spark.kills or wanted < 2_000
        assert any(line.startswith("host") for line in writers["host"].all_lines())
        print(
            f"{last} batches, {len(starts)} takeovers, {fenced} fenced, {spark.kills} kills of "
            f"Spark, {server.lost} lost answers"
        )
