"""Reading a queue, a topic or a log as Arrow, without consuming it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from opendata_buffer import (
    Consumer,
    Producer,
    Topic,
    TopicProducer,
    ValueOptions,
    open_store,
    read,
)
from opendata_buffer.config import QueueConfig
from opendata_buffer.consumer.place import EARLIEST
from opendata_buffer.consumer.position import Position
from opendata_buffer.errors import (
    BatchMissing,
    BatchUnreadable,
    DataLoss,
    InvalidInput,
    MalformedRecord,
    QueueReset,
)
from opendata_buffer.messages import ACK_TXN, CONTINUE_TXN
from opendata_buffer.queue.log import Log
from opendata_buffer.reading import FETCHED_BATCHES, Request, read_from
from opendata_buffer.runtime import SystemRuntime
from opendata_buffer.testing.runtime import ManualRuntime
from tests.support.logs import become_log
from tests.unit.buffer_source.source_log import SourceLog
from tests.unit.buffer_source.source_queue import SourceQueue

SCHEMA = pa.schema([("id", pa.int64()), ("_sequence", pa.int64())])


@pytest.fixture
def url(tmp_path: Path) -> str:
    """Return a queue with the batches 0 to 3, of two records each."""
    with Producer(str(tmp_path)) as producer:
        for number in range(4):
            records = [b'{"id":%d}' % (10 * number + at) for at in range(2)]
            producer.produce(records, metadata=b"m%d" % number).result()
    return str(tmp_path)


def acknowledge(url: str, count: int) -> None:
    with Consumer(url, gc=False) as consumer:
        for _ in range(count):
            batch = consumer.next_batch()
            assert batch is not None
            batch.ack()


def objects(url: str) -> dict[str, tuple[int, bytes]]:
    files = [path for path in Path(url).rglob("*") if path.is_file()]
    return {str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


def sequences(url: str, **given: Any) -> list[int]:
    return [*dict.fromkeys(read(url, columns=["sequence"], **given).read_all()[0].to_pylist())]


def test_a_queue_is_read_with_the_columns_of_the_spark_source(url: str) -> None:
    table = read(url).read_all()
    names = ["value", "metadata", "sequence", "index", "ingestion_time"]
    assert table.schema.names == names
    last = table.to_pylist()[-1]
    assert datetime.now(UTC) - last.pop("ingestion_time") < timedelta(minutes=5)
    assert last == {"value": b'{"id":31}', "metadata": b"m3", "sequence": 3, "index": 1}
    assert table["sequence"].to_pylist() == [0, 0, 1, 1, 2, 2, 3, 3]


def test_reading_changes_no_object_and_does_not_fence_the_consumer(url: str) -> None:
    with Consumer(url, gc=False) as consumer:
        first = consumer.next_batch()
        before = objects(url)
        assert read(url).read_all().num_rows == 8
        assert read(url, SCHEMA).read_all().num_rows == 8
        assert objects(url) == before
        assert first is not None
        first.ack()
        consumer.check_fence()
        assert consumer.next_batch() is not None


def test_the_read_ends_at_the_end_that_the_queue_had_at_the_call(url: str) -> None:
    reader = read(url)
    with Producer(url) as producer:
        producer.produce([b"later"]).result()
    acknowledge(url, 2)
    assert reader.read_all().num_rows == 8
    assert sequences(url) == [2, 3, 4]


def test_columns_are_chosen_and_ordered_by_name(url: str) -> None:
    table = read(url, columns=["index", "location", "partition", "otel_signal"]).read_all()
    assert table.schema.names == ["index", "location", "partition", "otel_signal"]
    assert table["location"][0].as_py().startswith("ingest/")
    typed = read(url, SCHEMA, columns=["_sequence"])
    assert typed.schema.names == ["_sequence"]


def test_the_schema_and_not_the_chosen_columns_says_which_records_are_malformed(url: str) -> None:
    with Producer(url) as producer:
        producer.produce([b'{"id":"x"}']).result()
    options = ValueOptions(mode="DROPMALFORMED")
    table = read(url, SCHEMA, columns=["_sequence"], options=options).read_all()
    assert table["_sequence"].to_pylist() == [0, 0, 1, 1, 2, 2, 3, 3]


def test_a_range_includes_its_start_and_excludes_its_end(url: str) -> None:
    assert sequences(url) == sequences(url, start="earliest", end="latest") == [0, 1, 2, 3]
    assert sequences(url, start="latest") == sequences(url, end=0) == []
    assert sequences(url, start=0, end=0) == []
    assert sequences(url, start=1, end=3) == [1, 2]
    with Consumer(url, gc=False) as consumer:
        position = consumer.position_of(1)
    assert sequences(url, start=position) == [2, 3]
    assert sequences(url, end=position) == [0, 1]
    times = read(url).read_all()["ingestion_time"].to_pylist()
    assert sequences(url, start=times[0] - timedelta(seconds=1)) == [0, 1, 2, 3]
    assert sequences(url, start=times[-1] + timedelta(seconds=1)) == []
    assert sequences(url, end=times[0]) == []


def test_records_are_read_into_columns_by_the_rules_of_to_table(url: str) -> None:
    with Producer(url) as producer:
        producer.produce([b'{"id":"x"}', b'{"id":41,"more":[]}']).result()
    rows = read(url, SCHEMA).read_all().to_pylist()
    assert [row["id"] for row in rows] == [0, 1, 10, 11, 20, 21, 30, 31, None, 41]
    assert [row["_sequence"] for row in rows] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    dropping = read(url, SCHEMA, options=ValueOptions(mode="DROPMALFORMED")).read_all()
    assert dropping["id"].to_pylist()[-2:] == [31, 41]
    corrupt = pa.schema([("id", pa.int64()), ("_corrupt_record", pa.string())])
    assert read(url, corrupt).read_all()["_corrupt_record"].to_pylist()[-2:] == ['{"id":"x"}', None]
    failing = read(url, SCHEMA, options=ValueOptions(mode="FAILFAST"))
    with pytest.raises(MalformedRecord) as caught:
        failing.read_all()
    assert (caught.value.sequence, caught.value.index, caught.value.head) == (4, 0, b'{"id":"x"}')


def test_the_columns_of_a_batch_stand_next_to_the_fields_of_records(url: str) -> None:
    wanted = {
        "_index": pa.int64(),
        "id": pa.int64(),
        "_metadata": pa.string(),
        "_ingestion_time": pa.timestamp("ms", "UTC"),
        "_location": pa.string(),
        "_partition": pa.string(),
    }
    row = read(url, pa.schema(wanted)).read_all().to_pylist()[-1]
    assert (row["_index"], row["id"], row["_metadata"], row["_partition"]) == (1, 31, "m3", "")
    assert datetime.now(UTC) - row["_ingestion_time"] < timedelta(minutes=5)


def test_small_batches_share_a_record_batch_and_large_ones_are_cut(tmp_path: Path) -> None:
    with Producer(str(tmp_path)) as producer:
        for number in range(300):
            producer.produce([b'{"id":%d}' % number])
        producer.flush()
        producer.produce([b'{"id":1,"x":"%s"}' % (b"x" * 1000)] * 20_000).result()
    for schema, most in ((None, 8 << 20), (SCHEMA, 20 << 20)):
        batches = list(read(tmp_path, schema))
        assert sum(batch.num_rows for batch in batches) == 20_300
        assert 2 <= len(batches) <= 7
        assert batches[0].num_rows > 300
        assert max(batch.nbytes for batch in batches) < most


# ---- what is not delivered


def test_a_start_that_has_left_the_queue_is_a_loss(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    with Consumer(url, gc=False) as consumer:
        position = consumer.position_of(0)
    acknowledge(url, 3)
    for start in (0, 2, position):
        with pytest.raises(DataLoss, match=r"set allow_data_loss to True") as caught:
            read(url, start=start)
        assert caught.value.oldest == 3
        assert sequences(url, start=start, allow_data_loss=True) == [3]
        assert "data loss allowed" in caplog.text
    assert sequences(url, end=1) == []
    assert sequences(url) == [3]
    caplog.clear()
    assert sequences(url, start="earliest") == [3]
    assert "3 batches were read and removed before this read" in caplog.text


def test_a_position_of_another_queue_or_past_the_end_is_refused(url: str) -> None:
    with pytest.raises(QueueReset, match="is not in the queue"):
        read(url, start=Position("01JD5T4R3KXBMZ7QV9N2WG8Y00", 1))
    with pytest.raises(InvalidInput, match="sequence 5 is beyond the end"):
        read(url, start=5)


def test_a_batch_that_cannot_be_read_is_an_error_after_the_rows_before_it(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    locations = read(url, columns=["location"]).read_all()["location"].to_pylist()
    Path(url, locations[2]).unlink()
    reader = read(url, columns=["sequence"])
    assert reader.read_next_batch()["sequence"].to_pylist() == [0, 0]
    with pytest.raises(BatchMissing, match="batch 1 "):
        reader.read_next_batch()
    assert sequences(url, allow_data_loss=True) == [0, 2, 3]
    assert "data loss allowed" in caplog.text
    Path(url, locations[2]).write_bytes(b"x")
    with pytest.raises(BatchUnreadable, match="batch 1 "):
        sequences(url, allow_data_loss=True)


def test_only_committed_transactions_are_read(
    runtime: ManualRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = SourceLog(runtime, monkeypatch)
    queue.each(1)
    queue.message(1, CONTINUE_TXN)
    queue.each(30)
    config = QueueConfig(store="/queue")

    def found(**given: Any) -> list[int]:
        reader = read_from(queue.store, config, runtime, Request(**given), columns=["sequence"])
        return reader.read_all()["sequence"].to_pylist()

    assert queue.moved()
    assert found() == [0, *range(2, 32)]
    queue.message(2, ACK_TXN)
    assert found() == [0, *range(2, 32), 1]
    assert found(end=20) == [0, *range(2, 20), 1]
    assert found(start=2) == [*range(2, 32)]


# ---- topics and logs


def test_a_topic_is_read_with_each_partition_in_order(tmp_path: Path) -> None:
    Topic.create(tmp_path, partitions=3)
    with TopicProducer(tmp_path) as producer:
        for number in range(12):
            producer.produce([b"%d" % number], partition=number % 2).result()
    rows = read(tmp_path).read_all()
    assert rows.schema.names[2] == "partition"
    values = [int(row["value"]) for row in rows.to_pylist()]
    assert [each for each in values if each % 2] == [*range(1, 12, 2)]
    assert [each for each in values if not each % 2] == [*range(0, 12, 2)]
    names = Topic.open(tmp_path).description.names
    start = {0: 4, names[1]: "latest"}
    assert read(tmp_path, start=start).read_all()["value"].to_pylist() == [b"8", b"10"]
    assert read(tmp_path, end={1: 0}).read_all().num_rows == 6
    one = read(tmp_path, data_path_prefix=names[0])
    assert one.read_all()["value"].to_pylist() == [b"%d" % each for each in range(0, 12, 2)]
    with pytest.raises(InvalidInput, match="each partition counts its own sequences"):
        read(tmp_path, start=3)


def test_a_log_is_read_with_its_segments_or_from_the_position_of_a_reader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Log, "most_entries", 8)
    monkeypatch.setattr(Log, "left_entries", 4)
    url = str(tmp_path)
    with Producer(url) as producer:
        producer.produce([b"0"]).result()
        become_log(open_store(url), QueueConfig(store=url), SystemRuntime())
        for number in range(1, 14):
            producer.produce([b"%d" % number]).result()
    with Consumer(url, reader="billing", gc=False, ack_interval=1) as consumer:
        for _ in range(3):
            batch = consumer.next_batch()
            assert batch is not None
            batch.ack()
    assert [*Path(url, "ingest/_log").iterdir()], "no segment was cut"
    before = objects(url)
    assert sequences(url) == [*range(14)]
    assert sequences(url, reader="billing") == [*range(3, 14)]
    assert sequences(url, reader="billing", end=5) == [3, 4]
    assert objects(url) == before
    with pytest.raises(InvalidInput, match="billing"):
        read(url, reader="biling")


# ---- threads and memory


@pytest.fixture
def far(runtime: ManualRuntime) -> Iterator[SourceQueue]:
    """Return a queue of four groups of batches, in a store whose batches are fetched in threads."""
    queue = SourceQueue(runtime)
    queue.produce(4 * FETCHED_BATCHES, records=[b"x" * 40_000])
    yield queue
    assert not _reading_threads()


def _reading_threads() -> list[threading.Thread]:
    names = ("opendata-buffer-read", "opendata-buffer-fetch")
    found = [thread for thread in threading.enumerate() if thread.name.startswith(names)]
    for thread in found:
        thread.join(10)
    return [thread for thread in found if thread.is_alive()]


def _open(queue: SourceQueue) -> pa.RecordBatchReader:
    config = QueueConfig(store="/queue")
    return read_from(queue.store, config, SystemRuntime(), Request(), columns=["value", "sequence"])


def test_a_reader_that_is_closed_early_leaves_no_thread_and_reads_little_ahead(
    far: SourceQueue,
) -> None:
    with _open(far) as reader:
        reader.read_next_batch()
    assert not _reading_threads()
    batches = [key for key, _ in far.store.gets if key.endswith(".batch")]
    assert 100 < len(batches) <= 2 * FETCHED_BATCHES


def test_a_reader_of_a_far_store_gets_all_batches_in_order(far: SourceQueue) -> None:
    found = _open(far).read_all()["sequence"].to_pylist()
    assert found == [*range(4 * FETCHED_BATCHES)]


def test_an_error_of_a_far_store_is_raised_at_its_place(far: SourceQueue) -> None:
    lost = far.manifest().entries(300, 1)[0].location
    far.store.delete_many([lost])
    rows: list[int] = []
    batches = map(rows.extend, (batch["sequence"].to_pylist() for batch in _open(far)))
    with pytest.raises(BatchMissing, match="batch 300 "):
        deque(batches, maxlen=0)
    assert rows == [*range(300)]


# ---- arguments


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"start": "yesterday"}, "start is 'yesterday'"),
        ({"start": -1}, "start is -1"),
        ({"start": 1.5}, "start is 1.5 (float)"),
        ({"end": datetime(2026, 1, 1)}, "which has no time zone"),
        ({"start": {0: 1}}, "start is a dict of partitions, and this is a queue"),
        ({"end": "7"}, "Give the number 7"),
        ({"start": 1, "reader": "x"}, "both say where to begin"),
        ({"reader": ""}, "reader is ''"),
        ({"reader": "x"}, "is not a log"),
        ({"columns": ["offset"]}, "columns has 'offset'. Columns: value, metadata"),
        ({"columns": ["sequences"]}, "Did you mean 'sequence'?"),
        ({"columns": ["value", "value"]}, "columns has 'value' twice"),
        ({"columns": []}, "columns is empty"),
        ({"columns": "value"}, "columns is 'value' (str)"),
        ({"schema": SCHEMA, "columns": ["value"]}, "which the schema does not have"),
        ({"schema": {"id": "int"}}, "schema is of type dict"),
        ({"schema": pa.schema([("_sequence", pa.int8())])}, "make it int64"),
        ({"schema": pa.schema([("a", pa.uint8())])}, "'a' is of type uint8"),
        ({"options": ValueOptions()}, "give a schema, too"),
        ({"group_id": "x"}, "read() has no argument 'group_id': use start, end, reader"),
        ({"store_options": {"region": "x"}}, "store_options is of type dict"),
    ],
)
def test_a_wrong_argument_is_refused_in_words_of_python(
    url: str, given: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidInput) as caught:
        read(url, **given)
    assert message in str(caught.value)


def test_a_place_without_a_queue_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="no queue"):
        read(tmp_path)
    with pytest.raises(InvalidInput, match="url is 3"):
        read(3)  # type: ignore[arg-type]


def test_the_default_places_are_the_whole_queue(url: str) -> None:
    table = read(QueueConfig(store=url), start=EARLIEST).read_all()
    assert table.num_rows == 8


# ---- other tools


def test_the_rows_go_to_polars_and_duckdb_without_a_copy_in_python(url: str) -> None:
    polars: Any = pytest.importorskip("polars")
    assert polars.DataFrame(read(url, SCHEMA))["id"].sum() == 124
    duckdb: Any = pytest.importorskip("duckdb")
    recent = read(url, SCHEMA)
    assert duckdb.sql("SELECT sum(id) FROM recent").fetchall() == [(124,)]
    assert recent is not None
