"""Options of the source, including those for data that cannot be delivered."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest

from buffer_source.options import SourceOptions
from opendata_buffer.config import GarbageCollectorConfig, StoreOptions
from opendata_buffer.errors import BatchMissing, BatchUnreadable, ForeignLocation, InvalidInput
from opendata_buffer.values import ValueOptions


def parse(**options: str) -> SourceOptions:
    return SourceOptions.from_spark({"path": "/data/queue", **options})


def test_keys_arrive_lower_cased_from_spark() -> None:
    options = parse(
        datapathprefix="a/b",
        endpointurl="http://127.0.0.1:5000",
        region="eu-west-1",
        startingoffsets="LATEST",
        maxbatchespertrigger="7",
        maxbytespertrigger="1000",
        maxoffsetspertrigger="50",
        minpartitions="3",
        failondataloss="False",
        gcenabled="false",
        gcgraceperiodms="1",
    )
    queue = replace(parse().queue, data_path_prefix="a/b", manifest_path="")
    store = StoreOptions(endpoint_url="http://127.0.0.1:5000", region="eu-west-1")
    assert options == SourceOptions(
        queue=replace(queue, store_options=store),
        starting_offsets="latest",
        start_is_given=True,
        max_batches=7,
        max_bytes=1000,
        max_records=50,
        min_partitions=3,
        fail_on_data_loss=False,
        gc=GarbageCollectorConfig(enabled=False, grace_period_ms=1),
    )
    consumer = options.consumer
    assert (consumer.manifest_path, consumer.gc) == ("a/b/manifest", options.gc)


@pytest.mark.parametrize(
    ("name", "value", "accepted"),
    [
        ("startingOffsets", "first", "'earliest', 'latest' or a sequence"),
        ("startingOffsets", "-1", "'earliest', 'latest' or a sequence"),
        ("startingOffsets", '{"x": 3}', "'earliest', 'latest' or a sequence"),
        ("endingOffsets", "earliest", "'latest' or a sequence"),
        ("failOnDataLoss", "maybe", "true or false"),
        ("maxBytesPerTrigger", "10m", "whole number of at least 1"),
        ("maxBatchesPerTrigger", "0", "whole number of at least 1"),
        ("idlePollMs", "0", "whole number of at least 1"),
        ("maxOffsetsPerTrigger", "1e6", "whole number of at least 1"),
        ("minOffsetsPerTrigger", "0", "whole number of at least 1"),
        ("minPartitions", "-4", "whole number of at least 1"),
        ("gcGracePeriodMs", "", "give it a value or leave it out"),
        ("dataPathPrefix", "/abs", "Use a relative name"),
    ],
)
def test_the_error_about_an_invalid_value_lists_the_accepted_ones(
    name: str, value: str, accepted: str
) -> None:
    with pytest.raises(InvalidInput) as caught:
        parse(**{name.lower(): value})
    message = str(caught.value)
    assert accepted in message
    assert repr(value) in message or "give it a value" in message
    assert name in message or name == "dataPathPrefix"


@pytest.mark.parametrize("path", ["s4://b", "s3://", "s3://key:secret@b", "/Volumes/a/b/c"])
def test_an_invalid_store_is_refused_at_load(path: str) -> None:
    with pytest.raises(InvalidInput, match=r"store '.*' (has|names|carries|is) "):
        SourceOptions.from_spark({"path": path})


def test_a_stream_refuses_an_end_and_a_batch_read_refuses_a_latest_start() -> None:
    for ending in ("5", "latest", '{"0": 5}'):
        with pytest.raises(InvalidInput, match=r"endingOffsets is .*Leave it out.*availableNow"):
            parse(endingOffsets=ending).check_stream()
    with pytest.raises(InvalidInput, match="would be empty"):
        parse(startingOffsets="latest").check_batch()
    with pytest.raises(InvalidInput, match="startingOffsets is 3, greater than endingOffsets 2"):
        parse(startingOffsets="3", endingOffsets="2").check_batch()
    parse(startingOffsets="3", endingOffsets="3").check_batch()
    parse(startingOffsets="3").check_batch()


def test_a_start_time_may_have_two_forms() -> None:
    assert parse().starting_timestamp_ms is None
    assert parse(startingTimestamp="1767225600123").starting_timestamp_ms == 1767225600123
    for text in ("2026-01-01T00:00:00.123Z", "2026-01-01 01:00:00.123+01:00"):
        assert parse(startingTimestamp=text).starting_timestamp_ms == 1767225600123


@pytest.mark.parametrize("value", ["yesterday", "2026-01-01T00:00:00", "2026-01-01", "-5", "1.5"])
def test_a_time_that_is_invalid_or_has_no_zone_is_refused(value: str) -> None:
    with pytest.raises(InvalidInput, match=r"startingTimestamp is .* with its zone such as 2026"):
        parse(startingTimestamp=value)


def test_a_start_time_and_a_start_position_cannot_be_combined() -> None:
    with pytest.raises(InvalidInput, match=r"startingTimestamp .* and startingOffsets are both"):
        parse(startingTimestamp="5", startingOffsets="earliest")


@pytest.mark.parametrize(
    ("text", "delay_ms"),
    [
        ("90s", 90_000),
        ("15m", 900_000),
        ("15min", 900_000),
        ("2 H", 7_200_000),
        ("1d", 86_400_000),
        ("500ms", 500),
        ("2500", 2_500),
        ("0", 0),
    ],
)
def test_the_delay_of_a_trigger_is_written_as_in_spark(text: str, delay_ms: int) -> None:
    assert parse(minOffsetsPerTrigger="5", maxTriggerDelay=text).max_delay_ms == delay_ms
    assert parse().max_delay_ms == 900_000


@pytest.mark.parametrize("text", ["soon", "-1s", "1.5m", "15 minutes", "1w", "m"])
def test_an_invalid_delay_is_refused(text: str) -> None:
    with pytest.raises(
        InvalidInput, match=f"maxTriggerDelay is '{text}': use a number with a unit"
    ):
        parse(minOffsetsPerTrigger="5", maxTriggerDelay=text)


def test_a_delay_without_a_minimum_and_a_minimum_above_the_maximum_are_refused() -> None:
    with pytest.raises(InvalidInput, match="maxTriggerDelay is given and minOffsetsPerTrigger is"):
        parse(maxTriggerDelay="1m")
    wrong = parse(minOffsetsPerTrigger="5", maxOffsetsPerTrigger="4")
    with pytest.raises(InvalidInput, match="minOffsetsPerTrigger is 5, more than maxOffsetsPerTri"):
        wrong.check_stream()
    parse(minOffsetsPerTrigger="5", maxOffsetsPerTrigger="5").check_stream()
    parse(minOffsetsPerTrigger="5").check_stream()


def test_a_query_that_acknowledges_nothing_cannot_create_a_queue() -> None:
    assert parse(acknowledge="false").acknowledge is False
    with pytest.raises(InvalidInput, match="createIfMissing is true and acknowledge is false"):
        parse(acknowledge="false", createIfMissing="true").check_stream()


def test_partitions_of_a_topic_may_have_their_own_starting_positions() -> None:
    options = parse(startingOffsets='{"p-00001": 7, "p-00000": 0}', endingOffsets='{"p-00001": 9}')
    assert hash(options) == hash(pickle.loads(pickle.dumps(options)))
    first, second, third = (options.of_partition(f"p-0000{number}") for number in range(3))
    assert [each.starting_offsets for each in (first, second, third)] == [0, 7, "earliest"]
    assert [each.ending_offsets for each in (first, second, third)] == ["latest", 9, "latest"]
    assert second.queue.manifest_path == "p-00001/manifest"
    assert parse(startingOffsets="latest").of_partition("p-00000").starting_offsets == "latest"


def test_a_partition_may_also_be_named_by_its_number() -> None:
    options = parse(startingOffsets='{"1": 7, "p-2": 8, "p-00003-04vf": 9}')
    names = ("p-00000-04pn", "p-00001-05mv", "p-00002-0bvb", "p-00003-04vf")
    found = [options.of_partition(name).starting_offsets for name in names]
    assert found == ["earliest", 7, 8, 9]


@pytest.mark.parametrize("value", ["{}", '{"p-00000": -1}', '{"p-00000": true}', "[1]", "{"])
def test_invalid_starting_positions_are_refused(value: str) -> None:
    with pytest.raises(InvalidInput, match=r"startingOffsets is .* of a topic sequences by"):
        parse(startingOffsets=value)


@pytest.mark.parametrize(
    ("given", "missing", "corrupt"),
    [
        ({}, False, False),
        ({"failOnDataLoss": "false"}, True, False),
        ({"corruptBatches": "quarantine"}, False, True),
    ],
)
def test_each_fault_has_its_own_option_and_a_foreign_batch_always_fails(
    given: dict[str, str], missing: bool, corrupt: bool
) -> None:
    options = SourceOptions.from_spark({"path": "/q", **given})
    for error, goes_on, advice in (
        (BatchMissing(3, "a", "gone"), missing, "failOnDataLoss set to false"),
        (BatchUnreadable(3, "a", "bad"), corrupt, "corruptBatches set to quarantine"),
        (ForeignLocation(3, "other/a", "outside"), False, "outside"),
    ):
        for _ in range(2):
            assert options.tolerates(error) is goes_on
        assert goes_on or str(error).count(advice) == 1


def read(**options: str) -> ValueOptions | None:
    return SourceOptions.from_spark({"path": "/q", **options}).values


def test_without_a_value_format_records_stay_bytes() -> None:
    assert read() is None
    assert read(valueFormat="BYTES") is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "PERMISSIVE"}, "option mode is given and valueFormat is bytes"),
        ({"valueFormat": "json", "sep": ";"}, "option sep is given and valueFormat is json"),
        ({"valueFormat": "xml"}, "option valueFormat is 'xml': use bytes or json or csv"),
        ({"valueFormat": "json", "mode": "STRICT"}, "use PERMISSIVE or DROPMALFORMED or FAILFAST"),
        ({"valueFormat": "csv", "sep": "||"}, "option sep is '||': use one ASCII character"),
        (
            {"valueFormat": "csv", "quote": "\u00ab"},
            "option quote is '\u00ab': use one ASCII character",
        ),
        ({"valueFormat": "csv", "sep": ""}, "option sep is ''"),
    ],
)
def test_the_error_about_an_unaccepted_option_names_it(
    options: dict[str, str], message: str
) -> None:
    with pytest.raises(InvalidInput) as caught:
        read(**options)
    assert message in str(caught.value)
