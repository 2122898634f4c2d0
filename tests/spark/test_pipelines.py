"""The declarative pipeline in ``examples``, run as the header of its specification says.

It runs twice. Its table and its sink contain each order, and the second run continues where the
first one ended, with the tables of its catalog.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq

from tests.spark.jvm import SMALL_JVM, java_options, starting
from tests.spark.queues import drain, orders, produce, records

EXAMPLES = Path(__file__).parents[2] / "examples"
EXAMPLE = EXAMPLES / "pipelines"
SPEC = "pipelines/spark-pipeline.yml"


def run(home: Path) -> None:
    import pyspark

    spark_home = Path(pyspark.__file__).parent
    (home / "conf").mkdir(exist_ok=True)
    settings = (EXAMPLE / "spark-defaults.conf").read_text()
    assert "spark.sql.catalogImplementation hive" in settings
    (home / "conf" / "spark-defaults.conf").write_text(
        settings
        + f"""
spark.sql.warehouse.dir {home}/warehouse
spark.hadoop.javax.jdo.option.ConnectionURL jdbc:derby:;databaseName={home}/metastore;create=true
spark.ui.enabled false
spark.sql.shuffle.partitions 2
spark.driver.extraJavaOptions {java_options()}
"""
    )
    with starting():
        done = subprocess.run(
            [str(spark_home / "bin" / "spark-pipelines"), "run", "--spec", SPEC],
            capture_output=True,
            text=True,
            timeout=600,
            cwd=home,
            env={
                **os.environ,
                "SPARK_HOME": str(spark_home),
                "SPARK_CONF_DIR": str(home / "conf"),
                "PYSPARK_PYTHON": sys.executable,
                # For each of its JVMs, because a process that it starts ignores Spark's settings.
                "JDK_JAVA_OPTIONS": SMALL_JVM,
            },
        )
    assert done.returncode == 0, done.stderr[-4000:] + done.stdout[-2000:]


def test_a_streaming_table_of_a_queue_and_a_sink_into_one_have_each_order_once(
    tmp_path: Path,
) -> None:
    spec = (EXAMPLE / "spark-pipeline.yml").read_text()
    for written, here in (
        ("file:///tmp/opendata-buffer-pipeline", f"file://{tmp_path}/storage"),
        ("orders.queue: /tmp/orders", f"orders.queue: {tmp_path}/orders"),
        ("orders.large: /tmp/large-orders", f"orders.large: {tmp_path}/large"),
    ):
        assert written in spec
        spec = spec.replace(written, here)
    shutil.copytree(EXAMPLES / "databricks" / "src", tmp_path / "databricks" / "src")
    (tmp_path / "pipelines").mkdir()
    (tmp_path / SPEC).write_text(spec)

    produce(str(tmp_path / "orders"), [orders(range(7)), orders(range(7, 12))])
    run(tmp_path)
    produce(str(tmp_path / "orders"), [orders(range(12, 20))])
    run(tmp_path)

    files = [path for path in tmp_path.rglob("*.parquet") if re.search(r"/orders/", str(path))]
    ids = [number for path in files for number in pq.read_table(path)["id"].to_pylist()]
    assert sorted(ids) == list(range(20))
    large = [json.loads(record)["id"] for record in records(drain(str(tmp_path / "large")))]
    assert sorted(large) == list(range(10, 20))
