"""The data source class that Spark finds, created as Spark does it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.cloudpickle import dumps
from pyspark.errors import AnalysisException
from pyspark.sql.types import StructType

from opendata_buffer.errors import InvalidInput
from pyspark_opendata_buffer import DefaultSource, register


def test_the_error_about_a_catalog_table_names_the_alternative(tmp_path: Path) -> None:
    # CREATE TABLE ... USING `opendata-buffer` OPTIONS (path ...) passes them like this.
    table = {"owner": "root", "location": f"file:{tmp_path}", "provider": "opendata-buffer"}
    read = DefaultSource({})  # as SELECT and INSERT do
    for call in (
        DefaultSource({"path": str(tmp_path), **table}).schema,
        lambda: read.reader(StructType()),
        lambda: read.writer(StructType(), False),
        lambda: read.streamReader(StructType()).initialOffset(),
    ):
        with pytest.raises(InvalidInput, match=r"not a table of a catalog.*CREATE TEMPORARY VIEW"):
            call()


class Session:
    """The parts of a SparkSession that registering needs."""

    def __init__(self, parallelism: int, **conf: str) -> None:
        self.registered: list[Any] = []
        self.dataSource = SimpleNamespace(register=self.registered.append)
        self.sparkContext = SimpleNamespace(
            defaultParallelism=parallelism, getConf=lambda: SimpleNamespace(get=conf.get)
        )


def cores(session: Any, tmp_path: Path, given: int | None = None, **options: str) -> int:
    register(session, given)
    (source,) = session.registered
    assert source.name() == "opendata-buffer"
    made = source({"path": str(tmp_path), **options})
    found: int = made.streamReader(made.schema())._options.cores or 0
    return found


def test_a_registered_format_plans_for_the_cluster(tmp_path: Path) -> None:
    assert cores(Session(48), tmp_path) == 48
    assert cores(Session(48), tmp_path, 7) == 7


def test_executors_that_have_not_started_yet_are_counted(tmp_path: Path) -> None:
    conf = {"spark.executor.instances": "10", "spark.executor.cores": "4"}
    assert cores(Session(2, **conf), tmp_path) == 40


def test_the_registered_class_is_pickled_with_its_cores(tmp_path: Path) -> None:
    session: Any = Session(48)
    register(session)
    source = tmp_path / "source"
    source.write_bytes(dumps(session.registered[0]))
    program = f"import pickle; print(pickle.load(open({str(source)!r}, 'rb')).cores)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "48\n", done.stderr


def test_registering_is_repeatable_if_spark_does_not_replace_a_format() -> None:
    def refuse(source: object) -> None:
        raise AnalysisException(message)

    session: Any = Session(2)
    session.dataSource.register = refuse
    message = "[DATA_SOURCE_ALREADY_EXISTS] Data source 'opendata-buffer' already exists."
    register(session)
    message = "[SOMETHING_ELSE] failed"
    with pytest.raises(AnalysisException, match="SOMETHING_ELSE"):
        register(session)


def test_the_error_about_a_missing_module_names_the_python_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "buffer_source.options", None)
    with pytest.raises(ModuleNotFoundError) as raised:
        DefaultSource({"path": str(tmp_path)}).schema()
    text = str(raised.value)
    assert text.startswith(
        f"{sys.executable} finds no module 'buffer_source.options'. Install opendata-buffer with"
    )
    assert "the Python that PYSPARK_DRIVER_PYTHON names, or else PYSPARK_PYTHON" in text
    assert "docs/how-to/on-a-cluster.md" in text


@pytest.mark.parametrize(
    ("module", "package"), [("pyarrow.lib", "pyarrow"), ("ulid", "python-ulid")]
)
def test_the_error_about_a_missing_dependency_names_the_package_to_install(
    module: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(self: DefaultSource) -> Any:
        raise ModuleNotFoundError(f"No module named {module!r}", name=module)

    monkeypatch.setattr(DefaultSource, "_given_options", missing)
    with pytest.raises(ModuleNotFoundError) as raised:
        DefaultSource({"path": str(tmp_path)}).reader(StructType())
    assert f"Install {package}, which opendata-buffer depends on, in this" in str(raised.value)
