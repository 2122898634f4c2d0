"""A real Kafka to compare with: one node in KRaft mode, from the jars on Maven Central.

The first use downloads everything into a cache outside the checkout: Maven gets the jars of the
broker and of Spark's connector, and pip gets the client (librdkafka). Without Java and Maven the
suites measure our side alone.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.measuring import is_tiny

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

CACHE = (
    Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "opendata-buffer" / "peers"
)
KAFKA = "org.apache.kafka:kafka_2.13:4.1.0"
CONNECTOR = "org.apache.spark:spark-sql-kafka-0-10_2.13:4.2.0"
"""The newest on Maven Central. It runs in the Spark of the development environment."""

CONNECTOR_JARS = ("spark-sql-kafka", "spark-token-provider", "kafka-clients", "commons-pool2")
"""Spark has the other dependencies of the connector itself."""

CLIENT = "confluent-kafka==2.16.1"
COPY = "org.apache.maven.plugins:maven-dependency-plugin:3.6.1:copy-dependencies"
START_S = 60.0
PATIENCE_S = 60.0

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

TUNED_SOURCE = {
    "kafka.max.partition.fetch.bytes": "16000000",
    "kafka.fetch.max.bytes": "64000000",
    "kafka.max.poll.records": "20000",
    "kafka.receive.buffer.bytes": "4000000",
    "kafka.check.crcs": "false",
}
"""Options of a source of Spark's connector that is tuned for throughput."""


def why_not() -> str:
    """Return why Kafka cannot run here, or an empty string if it can.

    A run with ``--tiny`` downloads nothing.
    """
    missing = [tool for tool in ("java", "mvn") if shutil.which(tool) is None]
    if missing:
        return f"needs {' and '.join(missing)} on the PATH"
    if is_tiny() and not all(_is_there(name) for name in (_folder(KAFKA), _folder(CONNECTOR))):
        return "Kafka is not downloaded yet; ./run bench peers downloads it"
    return ""


def jars(artifact: str) -> list[Path]:
    """Find the jars of an artifact and of its dependencies. The first call downloads them.

    Args:
        artifact: Group, name and version, with colons.

    Returns:
        The paths of the jars.
    """
    group, name, version = artifact.split(":")
    folder = CACHE / _folder(artifact)
    if not _is_there(_folder(artifact)):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as home:
            pom = Path(home, "pom.xml")
            pom.write_text(POM.format(group, name, version))
            command = ["mvn", "-q", "-B", "-f", str(pom), COPY, "-DincludeScope=runtime"]
            subprocess.run([*command, f"-DoutputDirectory={folder}"], check=True, timeout=900)
        (folder / ".complete").touch()
    return sorted(folder.glob("*.jar"))


def client() -> Any:
    """Return the module ``confluent_kafka``. The first call downloads it."""
    name = CLIENT.replace("==", "-")
    folder = CACHE / name
    if not _is_there(name):
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target"]
        subprocess.run([*command, str(folder), CLIENT], check=True, timeout=600)
        (folder / ".complete").touch()
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
    import confluent_kafka

    return confluent_kafka


def _folder(artifact: str) -> str:
    _, name, version = artifact.split(":")
    return f"{name}-{version}"


def _is_there(folder: str) -> bool:
    """Return whether a folder of the cache is complete. An interrupted download is not."""
    return (CACHE / folder / ".complete").exists()


# ---- the broker


@contextmanager
def running_if_possible() -> Iterator[str | None]:
    """Run a broker with an empty log.

    Gives its address, or ``None`` if :func:`why_not` has a reason.
    """
    if why_not():
        yield None
        return
    client()
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
    settings: Mapping[str, str] | None = None,
) -> None:
    """Create a topic, and write the same values to it several times.

    Args:
        address: Address of the broker.
        topic: Name of the topic.
        partitions: Number of partitions. The values go to them in turn.
        values: The values.
        copies: How many times to write them.
        settings: Settings of the topic.
    """
    kafka = client()
    from confluent_kafka.admin import AdminClient

    admin = AdminClient({"bootstrap.servers": address})
    new = kafka.admin.NewTopic(topic, partitions, 1, config=dict(settings or {}))
    for created in admin.create_topics([new]).values():
        created.result(30)
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


@contextmanager
def consuming(
    address: str, topic: str, timeout_s: float, *, first_record: bool
) -> Iterator[Callable[[], list[bytes]]]:
    """Open a consumer of a topic.

    Args:
        address: Address of the broker.
        topic: Name of the topic.
        timeout_s: Seconds that the function waits for records.
        first_record: The topic has one record. Read it first, so that the consumer joins its group
            before the measurement begins.

    Yields:
        A function that takes the next records, at most 1,000.

    Raises:
        RuntimeError: The first record did not come.
    """
    consumer = client().Consumer(
        {"bootstrap.servers": address, "group.id": topic, "auto.offset.reset": "earliest"}
    )
    try:
        consumer.subscribe([topic])
        if first_record and len(consumer.consume(1, timeout=PATIENCE_S)) != 1:
            raise RuntimeError("Kafka gave no record")
        yield lambda: [message.value() for message in consumer.consume(1_000, timeout=timeout_s)]
    finally:
        consumer.close()


@contextmanager
def spark_session(address: str | None) -> Iterator[tuple[SparkSession, Path]]:
    """Start a Spark session, with Kafka's connector if there is a broker.

    Args:
        address: Address of the broker, or ``None``.

    Yields:
        The session and an empty directory.
    """
    from benchmarks.queries import session

    home = Path(tempfile.mkdtemp(prefix="buffer-bench-"))
    if address is not None:
        found = [str(jar) for jar in jars(CONNECTOR) if jar.name.startswith(CONNECTOR_JARS)]
        os.environ["PYSPARK_SUBMIT_ARGS"] = f"--jars {','.join(found)} pyspark-shell"
    spark = session(home)
    try:
        yield spark, home
    finally:
        spark.stop()
        os.environ.pop("PYSPARK_SUBMIT_ARGS", None)
        shutil.rmtree(home, ignore_errors=True)


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
