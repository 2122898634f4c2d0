"""The module that Spark finds for ``spark.readStream.format("opendata-buffer")``.

No registration is needed: Spark imports every ``pyspark_*`` package and looks for a
``DefaultSource``. A package that fails or is slow to import hides all of them behind
``DATA_SOURCE_NOT_FOUND``. So this module imports only pyspark, and loads the source and the sink
when they are used.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from pyspark.errors import PySparkException
from pyspark.sql.datasource import DataSource, DataSourceStreamReader

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.datasource import (
        DataSourceReader,
        DataSourceStreamWriter,
        DataSourceWriter,
        InputPartition,
    )
    from pyspark.sql.types import StructType

    from buffer_source.options import SourceOptions

__all__ = ["DefaultSource", "register"]

_NO_TABLE = (
    "an opendata-buffer is not a table of a catalog, as CREATE TABLE ... USING and saveAsTable "
    "make it: Spark passes its options to no query. To read use CREATE TEMPORARY VIEW name "
    "USING `opendata-buffer` OPTIONS (path '...') or "
    "spark.read.format('opendata-buffer').load('...'), to write "
    "df.write.format('opendata-buffer').mode('append').save('...')"
)

_P = ParamSpec("_P")
_T = TypeVar("_T")


_OWN = ("opendata_buffer", "buffer_source", "buffer_sink", "pyspark_opendata_buffer")
_PACKAGES = {"ulid": "python-ulid", "opentelemetry": "opentelemetry-api"}
"""Packages whose name is not that of their module."""


def _package_of(module: str | None) -> str:
    """Return the package to install for a module that is missing."""
    top = (module or "").partition(".")[0]
    if top in _OWN:
        return "opendata-buffer with all that it depends on"
    return f"{_PACKAGES.get(top, top)}, which opendata-buffer depends on,"


def _complete(method: Callable[_P, _T]) -> Callable[_P, _T]:
    """Wrap a method so that its errors speak of the query.

    A ModuleNotFoundError names the Python that lacks the module, and the errors of the library
    speak of Spark's options.
    """

    @wraps(method)
    def checked(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        try:
            return method(*args, **kwargs)
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                f"{sys.executable} finds no module {error.name!r}. Install "
                f"{_package_of(error.name)} in this Python, and in that of each executor. Spark "
                "plans a Python source in the Python that PYSPARK_DRIVER_PYTHON names, or else "
                "PYSPARK_PYTHON; after register(spark) it is always PYSPARK_PYTHON. More: "
                "docs/how-to/on-a-cluster.md, 'Run it on a cluster'",
                name=error.name,
                path=error.path,
            ) from error
        except Exception as error:
            from opendata_buffer.errors import OpenDataBufferError
            from opendata_buffer.hints import Surface

            if isinstance(error, OpenDataBufferError):
                error.surface = Surface.SPARK
                # Spark shows the traceback before the message, which is all that a user needs.
                raise error.with_traceback(None) from None
            raise

    return checked


class _Refused(DataSourceStreamReader):
    """A reader that raises the reason why it could not be made, whatever Spark calls first.

    Spark hides an error of ``streamReader()``: its runner then calls ``stop()`` of a reader that it
    does not have, and shows the ``UnboundLocalError`` of that call instead.
    """

    def __init__(self, error: Exception) -> None:
        self._error = error

    def initialOffset(self) -> dict[str, Any]:
        raise self._error

    def getDefaultReadLimit(self) -> Any:
        raise self._error

    def latestOffset(self, start: object = None, limit: object = None) -> dict[str, Any]:
        raise self._error

    def partitions(self, start: object, end: object) -> Sequence[InputPartition]:
        raise self._error

    def read(self, partition: object) -> Any:
        raise self._error


def _own(schema: StructType) -> StructType:
    """Return the schema in the types of this process's pyspark.

    Databricks may plan with a copy of pyspark under another name, which has different types.
    """
    from pyspark.sql.types import StructType

    if not hasattr(schema, "json") or isinstance(schema, type):
        from opendata_buffer.arguments import wrong_type

        raise wrong_type("schema", schema, "a StructType")
    return StructType.fromJson(json.loads(schema.json()))


def _check_flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        from opendata_buffer.arguments import wrong_type

        raise wrong_type(name, value, "true or false")


class DefaultSource(DataSource):
    """Reads and writes buffers, in batches and in streams.

    You can also register it by hand: ``spark.dataSource.register(DefaultSource)``. The options are
    those of :class:`buffer_source.options.SourceOptions` and
    :class:`buffer_sink.options.SinkOptions`.
    """

    cores: int | None = None
    """Tasks that the cluster runs at once; set by :func:`register`."""

    @classmethod
    def name(cls) -> str:
        """Return the name of the format."""
        return "opendata-buffer"

    @_complete
    def schema(self) -> StructType:
        """Check the options, and find the columns of a read without ``.schema(...)``.

        Makes one small request to see whether the store holds a topic, which has one column more.
        With ``valueFormat`` it reads a sample of the queued records.

        Returns:
            The columns.

        Raises:
            InvalidInput: The options cannot be used, or the sample does not show any columns.
        """
        from buffer_source.options import SourceOptions
        from buffer_source.partitions import SourcePartitions
        from buffer_source.schema import default_schema, infer_schema
        from opendata_buffer.errors import InvalidInput
        from opendata_buffer.runtime import SystemRuntime
        from opendata_buffer.stores.open import open_store

        if "provider" in self.options:  # Spark passes the properties of a new table.
            raise InvalidInput(_NO_TABLE)
        options = SourceOptions.from_spark(self.options, self.cores)
        store = open_store(options.queue.store, options.queue.store_options)
        if options.values is not None:
            return infer_schema(options, options.values, store, SystemRuntime())
        topic = SourcePartitions(options, store, SystemRuntime()).topic
        return default_schema(topic is not None)

    @_complete
    def reader(self, schema: StructType) -> DataSourceReader:
        """Make the reader for ``spark.read``.

        Args:
            schema: The schema of the DataFrame.

        Returns:
            The reader.

        Raises:
            InvalidInput: The options or the schema cannot be used.
        """
        from buffer_source.batch_reader import BufferBatchReader

        return BufferBatchReader(self._source_options(), _own(schema))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        """Return the reader for ``spark.readStream``.

        It does not raise an error. If the options or the schema cannot be used, the reader raises
        the error when Spark first uses it.
        """
        try:
            return self._stream_reader(schema)
        except Exception as error:
            return _Refused(error)

    @_complete
    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """Make the writer for ``df.write``.

        Args:
            schema: The schema of the DataFrame.
            overwrite: Whether the save mode is ``overwrite``, which is refused.

        Returns:
            The writer.

        Raises:
            InvalidInput: The options, the schema or the save mode cannot be used.
        """
        from buffer_sink.writer import batch_writer

        _check_flag("overwrite", overwrite)
        return batch_writer(self._given_options(), _own(schema), overwrite)

    @_complete
    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        """Make the writer for ``df.writeStream``.

        Args:
            schema: The schema of the DataFrame.
            overwrite: Whether the output mode is ``complete``, which is refused.

        Returns:
            The writer.

        Raises:
            InvalidInput: The options, the schema or the output mode cannot be used.
        """
        from buffer_sink.writer import stream_writer

        _check_flag("overwrite", overwrite)
        return stream_writer(self._given_options(), _own(schema), overwrite)

    @_complete
    def _stream_reader(self, schema: StructType) -> DataSourceStreamReader:
        from buffer_source.stream_reader import BufferStreamReader, know_engine

        know_engine(schema)
        return BufferStreamReader(self._source_options(), _own(schema))

    def _source_options(self) -> SourceOptions:
        from buffer_source.options import SourceOptions

        return SourceOptions.from_spark(self._given_options(), self.cores)

    def _given_options(self) -> Mapping[str, str]:
        from opendata_buffer.errors import InvalidInput

        if not self.options:
            raise InvalidInput(_NO_TABLE)
        return self.options


def register(spark: SparkSession, parallelism: int | None = None) -> None:
    """Register the format and tell it how many tasks the cluster runs at the same time.

    Without this call, Spark finds the format if the package is installed on the driver and the
    executors, but then plans as many tasks as the driver has CPUs. With it, Spark plans for the
    whole cluster. The call also makes a package usable that came with ``spark-submit --py-files``;
    see the page "On a cluster". You can repeat it. Spark 4.0 keeps a format that it has already
    found, and which does not know the cores: use the option ``minPartitions`` there.

    Args:
        spark: The session. The cores of a session over Spark Connect are not known.
        parallelism: Tasks that run at the same time. Default: ``defaultParallelism``, or the number
            of cores in the settings if not all executors have started yet.

    Raises:
        InvalidInput: An argument has the wrong type.
    """
    from opendata_buffer.arguments import wrong_type

    if not hasattr(spark, "dataSource") or isinstance(spark, type):
        raise wrong_type("spark", spark, "a SparkSession")
    if parallelism is not None and type(parallelism) is not int:
        raise wrong_type("parallelism", parallelism, "a whole number of tasks, or None")
    cores = parallelism or _cores_of(spark)
    # Under the name of another module, pickle sends the class itself, including its cores.
    attributes = {"cores": cores, "__module__": "__main__", "__doc__": DefaultSource.__doc__}
    try:
        spark.dataSource.register(type("DefaultSource", (DefaultSource,), attributes))
    except PySparkException as error:
        # Spark 4.0 replaces a registered format, but not one that it has found without help.
        if "DATA_SOURCE_ALREADY_EXISTS" not in str(error):
            raise


def _cores_of(spark: SparkSession) -> int | None:
    if ".connect." in type(spark).__module__:
        return None
    context = spark.sparkContext
    conf = context.getConf()
    expected = int(conf.get("spark.executor.instances", "0") or 0) * int(
        conf.get("spark.executor.cores", "1") or 1
    )
    return max(int(context.defaultParallelism), expected)
