"""Run one of the programs that Databricks' JVM starts, in its own process.

``python -m tests.databricks.worker PORT PACKAGE PROGRAM`` connects to the port, where the test
imitates the JVM, and runs ``main()`` of the program. The program is a module in the package, which
is ``pyspark``, or ``_engine_pyspark`` if the engine has a separate copy.

The test does not send the data that a runtime prepares for each program (versions, files,
broadcasts, settings), so the functions that would read it are replaced. The program ``call`` is not
a module: it does what a task does with a function that another program has made.
"""

from __future__ import annotations

import importlib
import socket
import struct
import sys
import types
from typing import IO, Any

import pyarrow as pa


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _prepare(package: str) -> None:
    # Missing in the wheel; it finds files of a workspace.
    for name in ("wsfs", "wsfs.wsfs_path_finder"):
        made = types.ModuleType(f"{package}.databricks.{name}")
        made.register_wsfs_path_finder = _nothing  # type: ignore[attr-defined]
        sys.modules.setdefault(made.__name__, made)
    util = importlib.import_module(f"{package}.worker_util")
    for name in ("check_python_version", "check_python_version_with_flag", "setup_spark_files"):
        setattr(util, name, _nothing)
    util.setup_broadcasts = _nothing
    if hasattr(util, "Conf"):
        util.Conf.load = _nothing


def _call(package: str, stream: IO[bytes]) -> None:
    """Call pickled functions with record batches, which follow the properties of the tasks."""
    serializer = importlib.import_module(f"{package}.worker_util").pickleSer
    properties = serializer._read_with_length(stream)
    for name in {package, "pyspark"}:
        context = importlib.import_module(f"{name}.taskcontext").TaskContext
        if properties is not None:
            made = context._getOrCreate()
            made._localProperties, made._partitionId, made._attemptNumber = properties, 0, 0
    (count,) = struct.unpack("!i", stream.read(4))
    for _ in range(count):
        function, _ = serializer._read_with_length(stream)
        (size,) = struct.unpack("!i", stream.read(4))
        made = list(function(iter(list(pa.ipc.open_stream(stream.read(size))))))
        sink = pa.BufferOutputStream()
        if made:
            with pa.ipc.new_stream(sink, made[0].schema) as writer:
                for batch in made:
                    writer.write_batch(batch)
        answer = sink.getvalue().to_pybytes()
        stream.write(struct.pack("!i", len(answer)) + answer)
        stream.flush()


def main(port: str, package: str, program: str) -> None:
    """Run the program; see the module."""
    _prepare(package)
    with socket.create_connection(("127.0.0.1", int(port))) as connection:
        stream = connection.makefile("rwb", 65536)
        try:
            if program == "call":
                _call(package, stream)
            else:
                importlib.import_module(f"{package}.{program}").main(stream, stream)
        finally:
            stream.flush()  # A program writes its error last, before it exits.


if __name__ == "__main__":
    main(*sys.argv[1:])
