from __future__ import annotations

import pickle
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql.datasource import DataSourceReader, EqualTo, GreaterThan

from buffer_source.batch_reader import BufferBatchReader, select
from buffer_source.options import SourceOptions
from buffer_source.rows import default_schema
from opendata_buffer.config import ProducerConfig
from opendata_buffer.errors import DataLoss, InvalidInput
from opendata_buffer.formats.keys import Transaction, batch_key
from opendata_buffer.formats.manifest import Manifest, NewEntry
from opendata_buffer.producer.producer import Producer
from opendata_buffer.testing.runtime import ManualRuntime


def options(**given: str) -> SourceOptions:
    return SourceOptions.from_spark({"path": "/unused", **given})


@pytest.fixture
def manifest(runtime: ManualRuntime) -> Manifest:
    """Sequences 2 to 5: 0 and 1 were read."""
    entries = [NewEntry(batch_key("ingest", runtime.ulid())) for _ in range(6)]
    return Manifest.empty().append(entries).drop_through(1)


def sequences(manifest: Manifest, **given: str) -> list[int]:
    return [entry.sequence for entry in select(manifest, options(**given))]


def test_everything_that_is_queued(manifest: Manifest) -> None:
    assert sequences(manifest) == [2, 3, 4, 5]


def test_both_ends_are_included(manifest: Manifest) -> None:
    assert sequences(manifest, startingOffsets="3", endingOffsets="4") == [3, 4]
    assert sequences(manifest, startingOffsets="6") == []


def test_positions_that_are_not_queued_are_an_error(manifest: Manifest) -> None:
    with pytest.raises(DataLoss, match=r"sequence 1 is needed but .* starts at 2"):
        sequences(manifest, startingOffsets="1")
    with pytest.raises(InvalidInput, match="ends at 5"):
        sequences(manifest, endingOffsets="6")
    with pytest.raises(InvalidInput, match="ends at 5"):
        sequences(manifest, startingOffsets="7")
    allowed = sequences(manifest, startingOffsets="0", endingOffsets="9", failOnDataLoss="false")
    assert allowed == [2, 3, 4, 5]


def test_repeats_of_a_transaction_are_left_out_whatever_the_range(runtime: ManualRuntime) -> None:
    txn = Transaction("a", 1)
    manifest = Manifest.empty()
    for group in ([txn, txn], [None], [txn, txn]):
        names = [NewEntry(batch_key("ingest", runtime.ulid(), each)) for each in group]
        manifest = manifest.append(names)
    assert sequences(manifest) == [0, 1, 2]
    assert sequences(manifest, startingOffsets="1") == [1, 2]
    assert sequences(manifest, startingOffsets="3") == []


def test_filters_travel_no_further_than_the_plan(tmp_path: Path) -> None:
    with Producer(ProducerConfig(store=str(tmp_path))) as producer:
        for number in range(4):
            producer.produce([b"%d" % number])
            producer.flush()
    reader = BufferBatchReader(SourceOptions.from_spark({"path": str(tmp_path)}), default_schema())
    value = EqualTo(("value",), b"3")
    assert list(reader.pushFilters([GreaterThan(("sequence",), 1), value])) == [value]
    partitions = reader.partitions()
    executor = pickle.loads(pickle.dumps(reader))
    pieces = [piece for partition in partitions for piece in executor.read(partition)]
    assert pa.Table.from_batches(pieces)["sequence"].to_pylist() == [2, 3]


def test_spark_takes_it_for_a_reader_that_can_do_without_filters() -> None:
    # As Spark tests it, to refuse the read where pushing filters is off.
    reader = BufferBatchReader(options(), default_schema())
    assert getattr(reader.pushFilters, "__func__", None) is DataSourceReader.pushFilters


def test_a_queue_that_is_not_there_is_named(tmp_path: Path) -> None:
    reader = BufferBatchReader(SourceOptions.from_spark({"path": str(tmp_path)}), default_schema())
    with pytest.raises(InvalidInput, match=r"no queue with manifest 'ingest/manifest' in file://"):
        reader.partitions()
