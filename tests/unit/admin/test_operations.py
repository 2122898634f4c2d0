"""Administration from Python."""

from __future__ import annotations

import json
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import opendata_buffer
from opendata_buffer import (
    Consumer,
    Fenced,
    InvalidInput,
    Producer,
    QueueConfig,
    TopicConsumer,
    TopicProducer,
    admin,
)
from opendata_buffer.admin.operations import UNCHANGED
from tests.unit.cli.shell import ok


@pytest.fixture
def url(tmp_path: Path) -> str:
    """Return a queue with three batches."""
    with Producer(str(tmp_path), broker="off") as producer:
        for record in (b"a", b"b", b"c"):
            producer.produce([record]).result()
    return str(tmp_path)


@pytest.fixture
def topic(tmp_path: Path) -> str:
    """Return a topic of two logs with a batch each."""
    url = str(tmp_path / "topic")
    admin.create_topic(url, 2)
    admin.enable_log(url, retention="7d")
    with TopicProducer(url, broker="off") as producer:
        for partition in (0, 1):
            producer.produce([b"%d" % partition], partition=partition).result()
    return url


def read(url: str, reader: str) -> list[bytes]:
    found = []
    with Consumer(url, reader=reader, gc=False) as consumer:
        while (batch := consumer.next_batch()) is not None:
            found += [bytes(record.value) for record in batch.records()]
            batch.ack()
    return found


def test_the_functions_are_reached_from_the_root_and_by_import() -> None:
    assert opendata_buffer.admin is admin
    assert {"list_readers", "describe", "reset_reader", "enable_log"} <= {*dir(admin)}
    for name in admin.__all__:
        assert getattr(admin, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'list_topics'"):
        admin.list_topics  # noqa: B018


def test_a_queue_becomes_a_log_whose_readers_are_listed_replayed_and_deleted(url: str) -> None:
    (made,) = admin.enable_log(url, retention=timedelta(days=7), retention_bytes="1GB")
    assert made.made
    assert (made.retention_ms, made.retention_bytes) == (7 * 86_400_000, 10**9)
    assert read(url, "billing") == [b"a", b"b", b"c"]
    (reader,) = admin.list_readers(url)
    assert (reader.name, reader.next_sequence, reader.lag, reader.runs) == ("billing", 3, 0, False)
    plan = admin.reset_reader(url, "billing", to=1, dry_run=True)[0]
    assert (plan.before, plan.after, plan.again) == (3, 1, 2)
    assert read(url, "billing") == []
    admin.reset_reader(url, "billing", to=datetime.now(UTC) - timedelta(hours=3))
    assert read(url, "billing") == [b"a", b"b", b"c"]
    admin.reset_reader(url, "new", to="latest")
    assert read(url, "new") == []
    assert admin.delete_reader(url, "billing") == ["ingest"]
    assert [reader.name for reader in admin.list_readers(url)] == ["new"]


def test_the_settings_of_a_log_change_one_by_one(url: str) -> None:
    with pytest.raises(InvalidInput, match=r"is not a log.* admin.enable_log\(\) makes it one"):
        admin.set_retention(url, retention="1d")
    admin.enable_log(url, retention="7d", retention_bytes=1_000)
    (changed,) = admin.set_retention(url, retention=timedelta(days=1))
    assert (changed.retention_ms, changed.retention_bytes) == (86_400_000, 1_000)
    (changed,) = admin.set_retention(url, retention_bytes=None, reader_expiry="1d")
    assert (changed.retention_ms, changed.retention_bytes) == (86_400_000, None)
    assert changed.reader_expiry_ms == 86_400_000
    assert not changed.made
    assert repr(UNCHANGED) == "UNCHANGED"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "give retention, retention_bytes or reader_expiry"),
        ({"retention": timedelta(0)}, r"keeps nothing. Use a time such as timedelta\(days=7\)"),
        ({"retention": timedelta(-1)}, "retention is of type timedelta: use a timedelta that is"),
        ({"retention": 7}, r"retention is 7 \(int\): use "),
        ({"retention": "7days"}, "invalid duration '7days'"),
        ({"reader_expiry": "1m"}, "10 minutes at least"),
    ],
)
def test_a_limit_that_cannot_be_used_is_refused(url: str, given: Any, message: str) -> None:
    admin.enable_log(url)
    with pytest.raises(InvalidInput, match=message):
        admin.set_retention(url, **given)


def test_a_reader_that_runs_is_only_moved_or_deleted_by_force(url: str) -> None:
    admin.enable_log(url)
    running = Consumer(url, reader="billing", gc=False)
    for change in (
        lambda **force: admin.reset_reader(url, "billing", to="latest", **force),
        lambda **force: admin.delete_reader(url, "billing", **force),
    ):
        with pytest.raises(InvalidInput, match=r"'billing' runs: Python on .* pass force=True"):
            change()
    running.check_fence()
    admin.reset_reader(url, "billing", to="latest", force=True)
    with pytest.raises(Fenced):
        running.check_fence()


def test_describe_has_what_status_shows_as_json(url: str, topic: str) -> None:
    for where in (url, topic):
        shown = json.loads(ok("status", where, "--json").stdout)
        assert {*asdict(admin.describe(where))} == {*shown}
    status = admin.describe(url)
    assert isinstance(status, admin.Status)
    partition = admin.describe(topic, partition=1)
    assert isinstance(partition, admin.Status)
    assert partition.data_path_prefix == admin.list_partitions(topic)[1].name


def test_a_missing_queue_is_named(tmp_path: Path) -> None:
    for call in (admin.describe, admin.list_readers, admin.enable_log):
        with pytest.raises(InvalidInput, match="there is no queue"):
            call(str(tmp_path))


def test_settings_of_a_queue_can_be_given_as_keywords_or_as_a_configuration(
    tmp_path: Path,
) -> None:
    with Producer(str(tmp_path), data_path_prefix="other", broker="off") as producer:
        producer.produce([b"a"]).result()
    config = QueueConfig(store=str(tmp_path), data_path_prefix="other")
    by_keyword = admin.describe(str(tmp_path), data_path_prefix="other")
    for status in (by_keyword, admin.describe(config)):
        assert isinstance(status, admin.Status)
        assert status.queue_length == 1
    with pytest.raises(InvalidInput, match="data_path_prefixx"):
        admin.describe(str(tmp_path), data_path_prefixx="other")


# ---- topics


def test_partitions_are_added_listed_and_drained(tmp_path: Path) -> None:
    url = str(tmp_path)
    admin.create_topic(url, 2)
    assert len(admin.list_partitions(url)) == 2
    assert len(admin.add_partitions(url, total=3)) == 3
    assert not admin.drain_partition(url, 0)
    assert [each.state.value for each in admin.list_partitions(url)] == [
        "draining",
        "active",
        "active",
    ]
    with pytest.raises(InvalidInput, match="there is no topic"):
        admin.list_partitions(f"{url}/elsewhere")


def test_a_reader_of_a_topic_is_reset_everywhere_or_in_some_partitions(topic: str) -> None:
    def read_all() -> list[bytes]:
        found = []
        with TopicConsumer(topic, reader="billing", gc=False) as consumer:
            while (batch := consumer.next_batch()) is not None:
                found += [bytes(record.value) for record in batch.records()]
                batch.ack()
        return sorted(found)

    assert read_all() == [b"0", b"1"]
    admin.reset_reader(topic, "billing", to={1: 0})
    assert read_all() == [b"1"]
    admin.reset_reader(topic, "billing", to="earliest")
    assert read_all() == [b"0", b"1"]
    admin.reset_reader(topic, "billing", to=0, partition=0)
    assert read_all() == [b"0"]
    with pytest.raises(InvalidInput, match="to is 0, and each partition counts its own"):
        admin.reset_reader(topic, "billing", to=0)
    assert len(admin.delete_reader(topic, "billing")) == 2


# ---- trim


def test_a_backlog_is_discarded_with_a_copy_so_that_a_consumer_can_start_at_the_end(
    url: str,
) -> None:
    with pytest.raises(InvalidInput, match=r"3 unread batches .* or admin.trim_queue\(\)"):
        Consumer(url, start="latest")
    (done,) = admin.trim_queue(url, to="latest")
    assert (done.trimmed, done.first_sequence, len(done.copies)) == (3, 3, 3)
    with Consumer(url, start="latest", gc=False) as consumer:
        assert consumer.next_batch() is None
    (again,) = admin.trim_queue(url, to="latest")
    assert again.trimmed == 0
    with pytest.raises(InvalidInput, match="to names partitions, and this is one queue"):
        admin.trim_queue(url, to={0: 1})


def test_a_topic_is_trimmed_in_the_partitions_that_are_named(tmp_path: Path) -> None:
    url = str(tmp_path)
    admin.create_topic(url, 2)
    with TopicProducer(url, broker="off") as producer:
        for partition in (0, 1):
            producer.produce([b"a"], partition=partition).result()
    assert [done.trimmed for done in admin.trim_queue(url, to={1: "latest"})] == [1]
    assert [done.trimmed for done in admin.trim_queue(url, to="latest")] == [1, 0]
