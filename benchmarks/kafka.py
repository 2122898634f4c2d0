"""A real Kafka to compare with: one node, KRaft, from Maven Central's jars.

Everything is got once, into a cache outside the checkout: the broker's jars and those of Spark's
connector by Maven, the client (librdkafka) by pip.
"""

from __future__ import annotations

import base64
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CACHE = (
    Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "opendata-buffer" / "peers"
)
KAFKA = "org.apache.kafka:kafka_2.13:4.1.0"
CONNECTOR = "org.apache.spark:spark-sql-kafka-0-10_2.13:4.2.0"
"""The newest on Maven Central; it runs in the Spark that we run in."""

CLIENT = "confluent-kafka==2.16.1"
COPY = "org.apache.maven.plugins:maven-dependency-plugin:3.6.1:copy-dependencies"
START_S = 60.0

POM = """<project xmlns="http://maven.apache.org/POM/4.0.0">
  <modelVersion>4.0.0</modelVersion>
  <groupId>benchmarks</groupId><artifactId>peers</artifactId><version>1</version>
  <dependencies><dependency>
    <groupId>{}</groupId><artifactId>{}</artifactId><version>{}</version>
  </dependency></dependencies>
</project>
"""

PROPERTIES = """process.roles=broker,controller
node.id=1
controller.quorum.voters=1@127.0.0.1:{controller}
listeners=PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller}
advertised.listeners=PLAINTEXT://127.0.0.1:{port}
controller.listener.names=CONTROLLER
listener.security.protocol.map=CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT
log.dirs={logs}
offsets.topic.replication.factor=1
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
group.initial.rebalance.delay.ms=0
"""


def why_not() -> str:
    """What is missing to run it; nothing when all is there."""
    missing = [tool for tool in ("java", "mvn") if shutil.which(tool) is None]
    return f"needs {' and '.join(missing)} on the PATH" if missing else ""


def jars(artifact: str) -> list[Path]:
    """The jars of an artifact (group:name:version) with all it depends on; got once."""
    group, name, version = artifact.split(":")
    folder = CACHE / f"{name}-{version}"
    if not (folder / ".complete").exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as home:
            pom = Path(home, "pom.xml")
            pom.write_text(POM.format(group, name, version))
            command = ["mvn", "-q", "-B", "-f", str(pom), COPY, "-DincludeScope=runtime"]
            subprocess.run([*command, f"-DoutputDirectory={folder}"], check=True, timeout=900)
        (folder / ".complete").touch()
    return sorted(folder.glob("*.jar"))


def client() -> Any:
    """Module ``confluent_kafka``."""
    folder = CACHE / CLIENT.replace("==", "-")
    if not (folder / ".complete").exists():
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target"]
        subprocess.run([*command, str(folder), CLIENT], check=True, timeout=600)
        (folder / ".complete").touch()
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
    import confluent_kafka

    return confluent_kafka


@contextmanager
def running() -> Iterator[str]:
    """A broker with an empty log, and its address; it ends with the block."""
    folder = jars(KAFKA)[0].parent
    with tempfile.TemporaryDirectory(prefix="buffer-kafka-") as home:
        port, controller = _free_port(), _free_port()
        properties = Path(home, "server.properties")
        properties.write_text(
            PROPERTIES.format(port=port, controller=controller, logs=f"{home}/logs")
        )
        java = ["java", "-Xmx1g", "-cp", f"{folder}/*"]
        identity = base64.urlsafe_b64encode(os.urandom(16)).decode().rstrip("=")
        formatting = ["kafka.tools.StorageTool", "format", "-t", identity, "-c", str(properties)]
        with Path(home, "kafka.log").open("w") as log:
            subprocess.run([*java, *formatting], check=True, stdout=log, stderr=log, timeout=120)
            process = subprocess.Popen(
                [*java, "kafka.Kafka", str(properties)], stdout=log, stderr=log
            )
            try:
                _await_port(port, process)
                yield f"127.0.0.1:{port}"
            finally:
                process.terminate()
                try:
                    process.wait(20)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()


def fill(
    address: str,
    topic: str,
    partitions: int,
    values: Sequence[bytes],
    copies: int,
    settings: dict[str, str] | None = None,
) -> None:
    """A new topic with these values, so many times, in turn over its partitions."""
    kafka = client()
    from confluent_kafka.admin import AdminClient

    admin = AdminClient({"bootstrap.servers": address})
    made = admin.create_topics([kafka.admin.NewTopic(topic, partitions, 1, config=settings or {})])
    for each in made.values():
        each.result(30)
    producer = kafka.Producer(
        {"bootstrap.servers": address, "linger.ms": 50, "queue.buffering.max.messages": 1_000_000}
    )
    turn = 0
    for _ in range(copies):
        for value in values:
            while True:
                try:
                    producer.produce(topic, value, partition=turn % partitions)
                    break
                except BufferError:
                    producer.poll(0.1)
            turn += 1
        producer.poll(0)
    producer.flush()


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def _await_port(port: int, process: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + START_S
    while time.monotonic() < until:
        if process.poll() is not None:
            break
        with socket.socket() as tried:
            if tried.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    raise RuntimeError(f"Kafka did not start within {START_S:g} s")
