from __future__ import annotations

from buffer_source.queue_cursor import newest_ms, oldest_ms
from opendata_buffer.consumer.fetch import BatchDescriptor
from opendata_buffer.formats.keys import batch_key
from opendata_buffer.formats.manifest import Metadata
from opendata_buffer.testing.runtime import ManualRuntime


def test_the_times_of_the_records_count_more_than_the_name(runtime: ManualRuntime) -> None:
    ranges = (Metadata(0, 7_000, b""), Metadata(3, 5_000, b""), Metadata(9, 9_000, b""))
    batch = BatchDescriptor(4, batch_key("ingest", runtime.ulid()), ranges)
    assert (oldest_ms(batch), newest_ms(batch)) == (5_000, 9_000)


def test_a_batch_whose_records_have_no_time_is_as_old_as_its_name(runtime: ManualRuntime) -> None:
    batch = BatchDescriptor(4, batch_key("ingest", runtime.ulid()), ())
    assert oldest_ms(batch) == newest_ms(batch) == runtime.now_ms()


def test_of_a_foreign_name_without_times_nothing_is_known() -> None:
    batch = BatchDescriptor(4, "elsewhere/data", ())
    assert oldest_ms(batch) is None
    assert newest_ms(batch) is None
