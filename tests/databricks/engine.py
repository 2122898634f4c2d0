"""Imitate the JVM of a Databricks runtime for the Python files of that runtime.

The wheels of ``databricks-connect`` contain the ``pyspark`` of each runtime, with the programs that
its JVM starts: they plan a read, run a streaming source, and commit a sink. This module starts them
as processes and drives them over a socket, with the fields that the JVM writes. It needs only the
Python part of a runtime, without a JVM or a workspace.

A runtime may run a copy of pyspark under another name, next to the pyspark of the job, so that a
job's client can be older than the engine. :class:`Engine` makes such a copy of a wheel.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import pyarrow as pa

import pyspark_opendata_buffer

ROOT = Path(__file__).resolve().parents[2]
RENAMED = "_engine_pyspark"
ANSWER_S = 60.0

INITIAL, LATEST, PARTITIONS, COMMIT = 884, 885, 886, 887
FEATURES, PREPARE, LATEST_LIMITED, DEFAULT_LIMIT, REPORT = 888, 889, 890, 891, 892
END_OF_STREAM = -4
FAILED = -2
"""The number that a program writes before the traceback of its error."""


def schema(**columns: str) -> str:
    """Return a schema with these columns and types, as JSON."""
    fields = [
        {"name": name, "type": kind, "nullable": True, "metadata": {}}
        for name, kind in columns.items()
    ]
    return json.dumps({"type": "struct", "fields": fields})


BINARY = schema(a="binary")
"""The schema of the rows that tasks receive and return."""


class ProgramFailed(Exception):
    """A program ended with an error. The text is its traceback."""


@dataclass(frozen=True)
class Engine:
    """A runtime's Python.

    Attributes:
        client: Folder with the job's ``pyspark``, an unpacked wheel.
        renamed: Folder with the engine's own copy, from :func:`rename`. None if the job and the
            engine use the same pyspark.
        source: Folder of the wheel with the engine's files.
    """

    client: Path
    source: Path
    renamed: Path | None = None

    @property
    def package(self) -> str:
        return "pyspark" if self.renamed is None else RENAMED

    def asks_for(self, program: str, words: str) -> bool:
        """Return whether a program's source has these words, so that it reads a field."""
        return words in (self.source / "pyspark" / f"{program.replace('.', '/')}.py").read_text()

    @contextmanager
    def run(self, program: str, environment: Mapping[str, str] | None = None) -> Iterator[Program]:
        """Start a program, and end it after the block."""
        renamed = [] if self.renamed is None else [str(self.renamed)]
        paths = [str(self.client), *renamed, str(ROOT / "core"), str(ROOT)]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **(environment or {})}
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = str(server.getsockname()[1])
            command = [sys.executable, "-m", "tests.databricks.worker", port, self.package, program]
            # The end of the block closes its pipe and waits for its end.
            with subprocess.Popen(command, env=env, stderr=subprocess.PIPE, cwd=ROOT) as process:
                try:
                    connection = _accept(server, process)
                    with connection, connection.makefile("rwb", 65536) as stream:
                        connection.settimeout(ANSWER_S)
                        yield Program(stream, process)
                finally:
                    process.kill()


def _accept(server: socket.socket, process: subprocess.Popen[bytes]) -> socket.socket:
    server.settimeout(1.0)
    while True:
        try:
            return server.accept()[0]
        except TimeoutError:
            if process.poll() is not None:
                raise _failed(process) from None


def _failed(process: subprocess.Popen[bytes]) -> ProgramFailed:
    process.wait(ANSWER_S)
    assert process.stderr is not None
    return ProgramFailed(process.stderr.read().decode())


class Program:
    """The JVM's end of a program's socket."""

    def __init__(self, stream: IO[bytes], process: subprocess.Popen[bytes]) -> None:
        self.stream = stream
        self.process = process

    def write(self, *fields: int | bool | str | bytes) -> None:
        """Write numbers as four bytes, booleans as one, and texts and bytes after their length."""
        for field in fields:
            if isinstance(field, bool):
                self.stream.write(struct.pack("!?", field))
            elif isinstance(field, int):
                self.stream.write(struct.pack("!i", field))
            else:
                data = field.encode() if isinstance(field, str) else field
                self.stream.write(struct.pack("!i", len(data)) + data)
        self.stream.flush()

    def long(self, number: int) -> None:
        self.stream.write(struct.pack("!q", number))
        self.stream.flush()

    def number(self) -> int:
        (value,) = struct.unpack("!i", self._exactly(4))
        if value == FAILED:
            raise ProgramFailed(self._exactly(struct.unpack("!i", self._exactly(4))[0]).decode())
        return int(value)

    def bytes(self) -> bytes:
        """Read bytes that follow their length, which may be 0."""
        return self._exactly(self.number())

    def _exactly(self, size: int) -> bytes:
        data = self.stream.read(size)
        if len(data) != size:
            raise _failed(self.process)
        return data


def pickled_class() -> bytes:
    """Return the format's class, pickled by name as cloudpickle does for importable classes."""
    return pickle.dumps(pyspark_opendata_buffer.DefaultSource)


def _options(options: Mapping[str, str]) -> list[int | str]:
    return [len(options), *(field for option in options.items() for field in option)]


@dataclass(frozen=True)
class Created:
    """A pickled data source that a runtime has created, with its schema as JSON."""

    instance: bytes
    schema: str


def create(engine: Engine, options: Mapping[str, str], schema: str | None = None) -> Created:
    """Do what ``spark.read`` and ``spark.readStream`` do up to ``load()``."""
    with engine.run("sql.worker.create_data_source") as program:
        program.write(pickled_class(), "opendata-buffer", schema is not None)
        if schema is not None:
            program.write(schema)
        program.write(*_options(options), END_OF_STREAM)
        instance = program.bytes()
        assert program.number() == 0, "the schema is no DDL text"
        return Created(instance, program.bytes().decode())


def plan_read(engine: Engine, created: Created, *, streaming: bool) -> tuple[bytes, list[bytes]]:
    """Return the function that tasks call, and their partitions, which a stream does not have."""
    planner = "sql.worker.plan_data_source_read"
    return _planned(
        engine, planner, created.instance, BINARY, created.schema, 10_000, False, streaming
    )


def plan_filtered_read(
    engine: Engine, created: Created, filters: Sequence[Mapping[str, Any]]
) -> tuple[bytes, list[bytes]]:
    """Plan a batch read to whose reader Spark offers filters."""
    planner = "sql.worker.data_source_pushdown_filters"
    return _planned(engine, planner, created.instance, created.schema, json.dumps(filters), 10_000)


def _planned(engine: Engine, planner: str, *fields: int | str | bytes) -> tuple[bytes, list[bytes]]:
    with engine.run(planner) as program:
        program.write(*fields)
        if engine.asks_for(planner, "binary_as_bytes = read_bool"):
            program.write(True)
        program.write(END_OF_STREAM)
        function = program.bytes()
        return function, [program.bytes() for _ in range(program.number())]


def call(
    engine: Engine,
    function: bytes,
    tasks: Sequence[Sequence[pa.RecordBatch]],
    properties: Mapping[str, str] | None = None,
) -> list[pa.RecordBatch]:
    """Call the function of a plan with batches, like tasks in one worker. Return its batches."""
    with engine.run("call") as program:
        program.write(pickle.dumps(None if properties is None else dict(properties)), len(tasks))
        made = []
        for batches in tasks:
            sink = pa.BufferOutputStream()
            with pa.ipc.new_stream(sink, batches[0].schema) as writer:
                for batch in batches:
                    writer.write_batch(batch)
            program.write(function, sink.getvalue().to_pybytes())
            answer = program.bytes()
            made += list(pa.ipc.open_stream(answer)) if answer else []
        return made


def read(engine: Engine, function: bytes, *partitions: bytes) -> list[dict[str, Any]]:
    """Return the rows of partitions."""
    tasks = [[pa.record_batch([pa.array([partition])], names=["a"])] for partition in partitions]
    return [row for batch in call(engine, function, tasks) for row in batch.to_pylist()]


class StreamRunner:
    """One streaming source of a query, with the calls that the JVM makes."""

    def __init__(self, program: Program, created: Created) -> None:
        self._program = program
        program.write(created.instance, created.schema, 10_000)
        assert program.number() == 0

    def _ask(self, function: int, *fields: dict[str, Any]) -> Program:
        self._program.write(function, *map(json.dumps, fields))
        return self._program

    def initial(self) -> dict[str, Any]:
        return _json(self._ask(INITIAL))

    def latest(self) -> dict[str, Any]:
        """Call ``latestOffset()`` without arguments, like runtimes before 18.1."""
        return _json(self._ask(LATEST))

    def latest_limited(self, start: dict[str, Any], limit: dict[str, Any]) -> dict[str, Any]:
        return _json(self._ask(LATEST_LIMITED, start, limit))

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[bytes]:
        program = self._ask(PARTITIONS, start, end)
        found = [program.bytes() for _ in range(program.number())]
        assert program.number() == 0, "the partitions contain rows"
        return found

    def commit(self, end: dict[str, Any]) -> None:
        assert self._ask(COMMIT, end).number() == 0

    def features(self) -> int:
        """Return a sum of 1 (latestOffset() takes a limit) and 2 (Trigger.AvailableNow)."""
        return self._ask(FEATURES).number()

    def prepare_for_trigger_available_now(self) -> None:
        assert self._ask(PREPARE).number() == 0

    def default_limit(self) -> dict[str, Any]:
        return _json(self._ask(DEFAULT_LIMIT))

    def report(self) -> dict[str, Any]:
        return _json(self._ask(REPORT))


def _json(program: Program) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(program.bytes())
    return found


@contextmanager
def stream(
    engine: Engine, created: Created, environment: Mapping[str, str] | None = None
) -> Iterator[StreamRunner]:
    """Run a streaming source until the block ends, then kill its process."""
    with engine.run("sql.streaming.python_streaming_source_runner", environment) as program:
        yield StreamRunner(program, created)


@dataclass(frozen=True)
class PlannedWrite:
    """The pickled function that tasks call, and the writer that commits a batch write."""

    function: bytes
    writer: bytes


def plan_write(
    engine: Engine,
    options: Mapping[str, str],
    schema: str,
    *,
    streaming: bool,
    overwrite: bool = False,
) -> PlannedWrite:
    """Plan ``df.write`` or one micro-batch of ``df.writeStream``."""
    with engine.run("sql.worker.write_into_data_source") as program:
        program.write(pickled_class(), "opendata-buffer", schema, BINARY, *_options(options))
        program.write(overwrite, streaming)
        if engine.asks_for("sql.worker.write_into_data_source", "binary_as_bytes = read_bool"):
            program.write(True)
        program.write(END_OF_STREAM)
        return PlannedWrite(program.bytes(), program.bytes())


def write(
    engine: Engine,
    planned: PlannedWrite,
    batches: Sequence[pa.RecordBatch],
    properties: Mapping[str, str] | None = None,
) -> bytes:
    """Write like a task, and return its pickled commit message."""
    (answer,) = call(engine, planned.function, [batches], properties or {})
    return answer.column(0)[0].as_py()  # type: ignore[no-any-return]


def commit_batch(
    engine: Engine, planned: PlannedWrite, messages: Sequence[bytes], *, abort: bool = False
) -> None:
    """Commit or abort a batch write, on the driver."""
    with engine.run("sql.worker.commit_data_source_write") as program:
        program.write(planned.writer, len(messages), *messages, abort, END_OF_STREAM)
        assert program.number() == 0


def commit_stream(
    engine: Engine,
    created: Created,
    messages: Sequence[bytes],
    batch_id: int,
    *,
    abort: bool = False,
) -> None:
    """Commit or abort a micro-batch, on the driver."""
    with engine.run("sql.worker.python_streaming_sink_runner") as program:
        program.write(created.instance, created.schema, False, len(messages), *messages)
        program.long(batch_id)
        program.write(abort, END_OF_STREAM)
        assert program.number() == 0


def rename(wheel: Path, folder: Path) -> Path:
    """Copy a wheel's pyspark under the engine's name.

    The copy is a folder with the name of the engine's archive, because its adapters recognize the
    engine by that name. It is not an archive, because Python does not cache compiled modules of
    one.
    """
    made = folder / f"{RENAMED}.zip"
    for path in sorted((wheel / "pyspark").rglob("*.*")):
        target = made / RENAMED / path.relative_to(wheel / "pyspark")
        target.parent.mkdir(parents=True, exist_ok=True)
        # The adapters name both packages, so they are not changed.
        if path.suffix == ".py" and path.name != "_engine_adapters.py":
            target.write_text(re.sub(r"(?<![\w/.-])pyspark\b", RENAMED, path.read_text()))
        elif path.suffix != ".pyc":
            shutil.copyfile(path, target)
    return made
