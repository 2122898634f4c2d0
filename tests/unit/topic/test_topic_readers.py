"""Readers are registered on the topic, even if expansions and first starts race or are killed."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import pytest

from opendata_buffer.admin.readers import view_of
from opendata_buffer.admin.target import Target
from opendata_buffer.config import ConsumerConfig
from opendata_buffer.errors import (
    DataLoss,
    InvalidInput,
    PermanentStorageError,
    TransientStorageError,
)
from opendata_buffer.gc import GarbageCollector
from opendata_buffer.queue.log import Log
from opendata_buffer.queue.log_index import LogIndex
from opendata_buffer.queue.neighbours import TOPIC_KEY
from opendata_buffer.queue.reader_admin import reset_reader, unregister
from opendata_buffer.topic.description import DRAIN_S, TopicDescription
from opendata_buffer.topic.topic import Topic, partition_config
from tests.support.logs import DAY_MS
from tests.unit.topic.in_memory import NAMES, URL
from tests.unit.topic.test_consumer_readers import LogTopic, drained, small_segments

__all__ = ["small_segments"]

SEEDS = min(int(os.environ.get("OPENDATA_BUFFER_SEEDS", "10")), 200)


class Killed(BaseException):
    """The process was killed."""


class TwoLogs(LogTopic):
    """A topic of two logs without a retention."""

    retention_ms = None

    def opened(self) -> Topic:
        """Open the topic as another process."""
        return Topic.open(URL, store=self.store, runtime=self.runtime)

    def collect(self, *partitions: int) -> None:
        for number in partitions:
            config = partition_config(NAMES[number], ConsumerConfig(store=URL))
            GarbageCollector(self.store, config, runtime=self.runtime).run_once()

    def index(self, partition: int) -> LogIndex:
        return Log(self.store, self.config(partition), self.runtime).need()

    def readers_in(self, *partitions: int) -> list[tuple[str, ...]]:
        return [self.index(number).readers for number in partitions]

    def registered(self) -> dict[str, int] | None:
        found = TopicDescription.from_json(bytes(self.store.get(TOPIC_KEY).data)).readers
        return None if found is None else dict(found)

    def as_of_an_earlier_release(self) -> None:
        """Remove what earlier releases do not write."""
        found = self.store.get(TOPIC_KEY)
        old = TopicDescription.from_json(bytes(found.data))
        self.store.put(TOPIC_KEY, TopicDescription(old.topic_id, old.partitions, 2).to_json())
        assert self.registered() is None

    def read_and_stop(self, reader: str, **options: Any) -> list[int]:
        """Return all values that a reader gets, and close it."""
        with self.consumer(reader, **options) as consumer:
            return sorted(drained(consumer) + drained(consumer))

    def kill_at_write(self, number: int, work: Callable[[], object]) -> bool:
        """Do some work in a process that dies before write ``number``, counted from 0.

        Returns:
            Whether the process died before its work was done.
        """
        left = number

        def die(operation: str, key: str) -> None:
            nonlocal left
            if operation.startswith("put"):
                left -= 1
                if left < 0:
                    raise Killed

        self.store.before = die
        try:
            work()
        except Killed:
            return True
        finally:
            self.store.heal()
        return False

    def meet_at_write(
        self, number: int, work: Callable[[], object], other: Callable[[], object]
    ) -> bool:
        """Do some work, and call ``other`` just before write ``number``, counted from 0.

        Returns:
            Whether the work had such a write.
        """
        left, met = number, False

        def meet(operation: str, key: str) -> None:
            nonlocal left, met
            if operation.startswith("put"):
                left -= 1
                if left < 0 and not met:
                    met = True
                    self.store.heal()
                    other()

        self.store.before = meet
        work()
        self.store.heal()
        return met


class RetainingWorld(TwoLogs):
    """A topic of two logs that keep batches although all readers have acknowledged them."""

    retention_ms = 10 * DAY_MS


@pytest.fixture
def logs(small_segments: None) -> TwoLogs:
    return TwoLogs()


def test_f47_a_reader_that_was_down_during_an_expansion_misses_nothing(logs: TwoLogs) -> None:
    logs.append(0, *range(20))
    for reader in ("billing", "search"):
        assert logs.read_and_stop(reader) == list(range(20))
    search = logs.consumer("search")
    logs.topic.expand(4)
    assert logs.readers_in(2, 3) == [("billing", "search")] * 2
    logs.append(2, *range(20, 60))
    logs.append(3, *range(60, 100))
    logs.runtime.advance(10)
    assert sorted(drained(search) + drained(search)) == list(range(20, 100))
    logs.collect(0, 1, 2, 3)
    assert (logs.index(2).floor, logs.index(3).floor) == (0, 0), (
        "billing has not read these batches"
    )
    assert logs.read_and_stop("billing") == list(range(20, 100))
    logs.collect(2, 3)
    assert (logs.index(2).floor, logs.index(3).floor) == (40, 40)


def test_f47_readers_of_an_earlier_release_are_found_in_the_partitions(logs: TwoLogs) -> None:
    logs.read_and_stop("billing")
    logs.as_of_an_earlier_release()
    logs.topic = logs.opened()
    logs.topic.expand(3)
    assert logs.readers_in(2) == [("billing",)]
    assert logs.registered() == {"billing": logs.runtime.now_ms()}


def test_f47_a_reader_of_one_partition_reads_the_added_ones_from_their_first_batch(
    logs: TwoLogs,
) -> None:
    logs.read_and_stop("billing", partitions=["0"])
    assert logs.readers_in(0, 1) == [("billing",)] * 2, "it is now a reader of the whole topic"
    logs.append(1, 7)
    logs.read_and_stop("search")
    logs.collect(1)
    assert logs.read_and_stop("billing", partitions=["1"]) == [7]


def test_a_registered_reader_sends_no_request_for_its_registration(logs: TwoLogs) -> None:
    logs.read_and_stop("billing")
    before = logs.registered()
    logs.runtime.advance(60)
    written: list[str] = []
    logs.store.after = lambda operation, key: written.append(key) if "put" in operation else None
    logs.read_and_stop("billing")
    assert written
    assert TOPIC_KEY not in written
    assert logs.registered() == before


def test_a_reader_that_has_expired_everywhere_is_not_registered_again(logs: TwoLogs) -> None:
    logs.read_and_stop("gone")
    logs.runtime.advance(2 * DAY_MS / 1000)
    logs.append(0, 1)
    logs.append(1, 2)
    logs.read_and_stop("billing")
    logs.collect(0, 1)
    assert logs.readers_in(0, 1) == [("billing",)] * 2
    logs.topic.expand(3)
    assert logs.readers_in(2) == [("billing",)]
    assert list(logs.registered() or ()) == ["billing"]


def test_f47_a_reader_that_starts_while_a_topic_is_expanded_is_in_every_partition(
    small_segments: None,
) -> None:
    """The reader starts before each write of the expansion."""
    stopped = 0
    for number in range(100):
        logs = TwoLogs()
        logs.read_and_stop("search")
        expand, start = partial(logs.topic.expand, 4), partial(logs.read_and_stop, "billing")
        if not logs.meet_at_write(number, expand, start):
            break
        stopped += 1
        assert logs.readers_in(0, 1, 2, 3) == [("billing", "search")] * 4
        assert list(logs.registered() or ()) == ["billing", "search"]
    assert stopped > 10


def test_f47_an_expansion_while_a_reader_starts_has_this_reader(logs: TwoLogs) -> None:
    """The topic is expanded before each write of the reader."""
    stopped = 0
    for number in range(100):
        logs = TwoLogs()
        start = partial(logs.consumer, "billing")

        def expand(logs: TwoLogs = logs) -> None:
            logs.opened().expand(3)

        if not logs.meet_at_write(number, start, expand):
            break
        stopped += 1
        assert logs.readers_in(0, 1, 2) == [("billing",)] * 3
        assert list(logs.registered() or ()) == ["billing"]
    assert stopped > 3


def test_f47_two_expansions_at_the_same_time_leave_every_reader_everywhere(logs: TwoLogs) -> None:
    stopped = 0
    for number in range(100):
        logs = TwoLogs()
        logs.read_and_stop("billing")

        def expand_and_read(logs: TwoLogs = logs) -> None:
            logs.opened().expand(3)
            logs.append(2, 5)
            assert logs.read_and_stop("billing") == [5]

        if not logs.meet_at_write(number, partial(logs.topic.expand, 4), expand_and_read):
            break
        stopped += 1
        assert logs.readers_in(0, 1, 2, 3) == [("billing",)] * 4
        assert len(logs.topic.read().active) == 4
        assert logs.read_and_stop("billing") == [], "no position moved backwards"
    assert stopped > 5


@pytest.mark.parametrize("repeats", [True, False])
def test_f47_an_expansion_that_is_killed_before_any_of_its_writes_loses_no_reader(
    logs: TwoLogs, repeats: bool
) -> None:
    killed = 0
    for number in range(100):
        logs = TwoLogs()
        logs.read_and_stop("billing")
        if not logs.kill_at_write(number, lambda logs=logs: logs.topic.expand(4)):
            break
        killed += 1
        if repeats:
            logs.opened().expand(4)
        count = len(logs.opened().description.active)
        assert count == (4 if repeats else 2)
        for partition in range(count):
            logs.append(partition, partition)
        assert logs.read_and_stop("search") == list(range(count))
        logs.collect(*range(count))
        assert logs.read_and_stop("billing") == list(range(count))
    assert killed > 10


def test_f47_a_reader_that_is_killed_at_its_first_start_misses_nothing_later(
    logs: TwoLogs,
) -> None:
    killed = 0
    for number in range(100):
        logs = TwoLogs()
        logs.append(0, 0)
        if not logs.kill_at_write(number, lambda logs=logs: logs.consumer("billing")):
            break
        killed += 1
        logs.consumer("billing").close()
        logs.opened().expand(3)
        logs.append(1, 1)
        logs.append(2, 2)
        assert logs.read_and_stop("search") == [0, 1, 2]
        logs.collect(0, 1, 2)
        assert logs.read_and_stop("billing") == [0, 1, 2]
    assert killed > 3


def test_a_reader_that_expired_returns_while_a_topic_is_expanded(logs: TwoLogs) -> None:
    """The description already names the reader, and no partition does."""
    logs.read_and_stop("billing")
    logs.runtime.advance(2 * DAY_MS / 1000)
    logs.read_and_stop("search")
    logs.collect(0, 1)
    assert logs.readers_in(0, 1) == [("search",)] * 2
    assert list(logs.registered() or ()) == ["billing", "search"]

    def start_reader(operation: str, key: str) -> None:
        if operation == "put_if" and key == TOPIC_KEY:
            logs.store.heal()
            logs.read_and_stop("billing")

    logs.store.before = start_reader
    logs.topic.expand(3)
    assert logs.readers_in(0, 1, 2) == [("billing", "search")] * 3


def test_missing_readers_are_registered_in_partitions_that_still_have_all_their_batches(
    logs: TwoLogs,
) -> None:
    logs.append(1, *range(5))
    logs.read_and_stop("billing")
    unregister(logs.store, Log(logs.store, logs.config(1), logs.runtime), "billing")
    assert logs.readers_in(0, 1) == [("billing",), ()]
    assert logs.opened().register_missing() == {NAMES[1]: {"billing": 0}}
    assert logs.readers_in(0, 1) == [("billing",)] * 2
    assert logs.opened().register_missing() == {}


def test_a_reader_that_lost_batches_in_one_partition_is_not_registered_silently(
    logs: TwoLogs,
) -> None:
    logs.append(0, 0)
    logs.append(1, 1)
    logs.read_and_stop("billing")
    logs.append(1, 2)
    logs.runtime.advance(2 * DAY_MS / 1000)
    with logs.consumer("billing", partitions=["0"]):
        logs.read_and_stop("search")
        logs.collect(0, 1)
    assert logs.readers_in(0, 1) == [("billing", "search"), ("search",)]
    assert logs.opened().register_missing() == {}
    assert logs.readers_in(1) == [("search",)]


def test_a_reader_without_write_access_to_the_description_is_found_in_the_partitions(
    logs: TwoLogs, caplog: pytest.LogCaptureFixture
) -> None:
    logs.append(0, 1)
    logs.store.fail("put_if", TOPIC_KEY, PermanentStorageError("403 Forbidden"))
    assert logs.read_and_stop("billing") == [1]
    assert "reader 'billing' is not named in the description of the topic" in caplog.text
    logs.store.heal()
    assert logs.registered() is None
    logs.topic.expand(3)
    assert logs.readers_in(2) == [("billing",)]


def test_a_reader_gets_a_warning_about_batches_that_a_partition_did_not_retain_for_it(
    logs: TwoLogs, caplog: pytest.LogCaptureFixture
) -> None:
    """A partition that an earlier release added does not know the reader."""
    logs.read_and_stop("billing")
    unregister(logs.store, Log(logs.store, logs.config(1), logs.runtime), "billing")
    logs.append(1, 1, 2, 3)
    logs.read_and_stop("search")
    logs.collect(1)
    assert caplog.text.count("was not registered") == 0
    logs.append(1, 4)
    assert logs.read_and_stop("billing") == [4]
    (line,) = [each.message for each in caplog.records if "was not registered" in each.message]
    assert "'billing'" in line
    assert NAMES[1] in line
    assert "3 batches" in line


def test_f47_random_histories_of_readers_and_expansions_lose_nothing(
    small_segments: None,
) -> None:
    """Readers start and stop, the topic grows, and collectors run. Any of them may be killed."""
    kills = expansions = 0
    for seed in range(SEEDS):
        history = History(seed)
        history.run(30)
        history.check()
        kills += history.kills
        expansions += history.expansions
    assert kills >= SEEDS // 2
    assert expansions >= SEEDS // 2


class History:
    """Random steps on a topic of logs, and the values that each reader must get."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        self.logs = TwoLogs()
        self.produced = 0
        self.first: dict[str, int] = {}  # the first value after a start of the reader
        self.got: dict[str, set[int]] = {}
        self.kills = self.expansions = 0

    def run(self, steps: int) -> None:
        for _ in range(steps):
            partitions = len(self.logs.opened().description.active)
            step = self.rng.choice((self.append, self.append, self.read, self.read, self.change))
            if step == self.append:
                self.append(partitions)
            elif self.rng.random() < 0.3:
                number = self.rng.randrange(8)
                self.kills += self.logs.kill_at_write(number, partial(step, partitions))
            else:
                step(partitions)
            self.logs.runtime.advance(600)

    def append(self, partitions: int) -> None:
        self.logs.append(self.rng.randrange(partitions), self.produced)
        self.produced += 1

    def read(self, partitions: int) -> None:
        name, only = self.rng.choice("abc"), self.rng.choice([None, None, ["0"], ["1"]])
        # Until its first start has ended, the reader may start with a later batch.
        is_new = name not in self.first
        with self.logs.consumer(name, partitions=only, allow_data_loss=is_new) as consumer:
            self.first.setdefault(name, self.produced)
            while (batch := consumer.next_batch()) is not None:
                self.got.setdefault(name, set()).update(int(bytes(v)) for v in batch.entries)
                batch.ack()

    def change(self, partitions: int) -> None:
        kind = self.rng.randrange(4)
        if kind == 0 and partitions < 5:
            self.logs.opened().expand(partitions + 1)
            self.expansions += 1
        elif kind == 1:
            self.logs.opened().register_missing()
        else:
            self.logs.collect(*range(partitions))

    def check(self) -> None:
        """Check that every reader gets all values that were produced after its start."""
        for name, first in self.first.items():
            self.got.setdefault(name, set()).update(self.logs.read_and_stop(name))
            missing = {*range(first, self.produced)} - self.got[name]
            assert not missing, f"reader {name} misses {missing} with seed {self.seed}"


def test_a_change_that_loses_every_race_ends_with_an_error(logs: TwoLogs) -> None:
    logs.read_and_stop("billing")
    times = iter(range(10**6))

    def change(operation: str, key: str) -> None:
        if operation == "put_if" and key == TOPIC_KEY:
            found = TopicDescription.from_json(bytes(logs.store.get(TOPIC_KEY).data))
            other = found.with_reader(f"other{next(times)}", 1)
            logs.store.before = lambda operation, key: None
            logs.store.put(TOPIC_KEY, other.to_json())
            logs.store.before = change

    logs.store.before = change
    with pytest.raises(TransientStorageError, match="other processes changed it 20 times"):
        logs.topic.expand(3)


def leave_behind(logs: TwoLogs, *, values: int = 3) -> None:
    """Let ``billing`` expire with unread batches in partition 0, which then leaves the topic."""
    logs.append(0, 0)
    assert logs.read_and_stop("billing") == [0]
    logs.append(0, *range(1, values + 1))
    logs.runtime.advance(2 * DAY_MS / 1000)
    assert logs.read_and_stop("search") == [*range(values + 1)]
    logs.collect(0, 1)
    assert logs.readers_in(0, 1) == [("search",)] * 2, "billing has expired"
    logs.topic.drain("0")
    logs.runtime.advance(2 * DRAIN_S)


def test_f53_an_expired_reader_gets_an_error_about_its_losses_in_a_removed_partition(
    logs: TwoLogs,
) -> None:
    leave_behind(logs)
    assert logs.read_and_stop("search") == []
    assert logs.opened().description.names == [NAMES[1]], "the partition has left"
    with pytest.raises(DataLoss, match=r"needs sequence 1, .* continues at 4: 3 batches") as caught:
        logs.consumer("billing")
    assert f"--partition {NAMES[0]} billing --to-earliest" in str(caught.value)
    assert logs.read_and_stop("search") == [], "it has lost nothing"


@pytest.mark.parametrize("repeats", [True, False])
def test_f53_a_removal_that_is_killed_before_any_of_its_writes_hides_no_loss(
    logs: TwoLogs, repeats: bool
) -> None:
    killed = 0
    for number in range(100):
        logs = TwoLogs()
        leave_behind(logs)
        remove = partial(logs.opened().remove_drained)
        if not logs.kill_at_write(number, remove):
            break
        killed += 1
        if repeats:
            assert logs.opened().remove_drained() == [NAMES[0]]
        with pytest.raises(DataLoss, match="3 batches"):
            logs.consumer("billing")
    assert killed >= 2, "the seal and the description"


def test_f53_a_reader_that_returns_while_a_partition_leaves_gets_everything_or_an_error(
    small_segments: None,
) -> None:
    """The reader starts before each write of the removal. Its batches are still kept."""
    outcomes = []
    for number in range(100):
        logs = RetainingWorld()
        leave_behind(logs)
        got: list[object] = []

        def start(logs: TwoLogs = logs, got: list[object] = got) -> None:
            try:
                got += logs.read_and_stop("billing")
            except DataLoss as error:
                got.append(str(error).partition(":")[0])

        if not logs.meet_at_write(number, logs.opened().remove_drained, start):
            break
        outcomes.append(got)
        with suppress(DataLoss):
            assert logs.read_and_stop("billing") == []
    lost = ["reader 'billing' needs sequence 1, and the log continues at 4"]
    assert len(outcomes) >= 2
    assert all(got in ([1, 2, 3], lost) for got in outcomes), outcomes
    assert [1, 2, 3] in outcomes


def test_f53_a_loss_in_a_partition_that_is_about_to_leave_is_not_hidden(logs: TwoLogs) -> None:
    leave_behind(logs)
    assert logs.opened().description.draining == [NAMES[0]], "it may leave at any time"
    with pytest.raises(DataLoss, match="3 batches"):
        logs.consumer("billing")


def test_f53_a_running_reader_gets_an_error_when_a_partition_is_removed(logs: TwoLogs) -> None:
    logs.append(0, 0)
    logs.append(1, 1)
    frozen = logs.consumer("billing")
    assert sorted(drained(frozen)) == [0, 1]
    logs.append(0, 2, 3)
    logs.append(1, 4)
    logs.runtime.advance(2 * DAY_MS / 1000)
    assert logs.read_and_stop("search", partitions=["0"]) == [0, 2, 3]
    logs.collect(0)
    logs.topic.drain("0")
    logs.runtime.advance(2 * DRAIN_S)
    assert logs.read_and_stop("search") == [1, 4]
    assert logs.opened().description.names == [NAMES[1]], "the partition has left"
    batch = frozen.next_batch()
    assert [bytes(value) for value in batch.entries] == [b"4"], "other partitions first"
    batch.ack()
    with pytest.raises(DataLoss, match=r"needs sequence 1, .* continues at 3: 2 batches"):
        frozen.next_batch()


def test_f53_a_reader_that_accepted_its_loss_gets_no_second_error(logs: TwoLogs) -> None:
    leave_behind(logs)
    logs.read_and_stop("search")
    assert logs.opened().description.unread == {NAMES[0]: ("billing",)}
    logs.append(1, 7)
    assert logs.read_and_stop("billing", allow_data_loss=True) == [7]
    assert logs.opened().description.unread == {}
    assert logs.read_and_stop("billing") == []
    assert logs.consumer("billing").partitions == [NAMES[1]]


def test_f53_a_reader_that_was_reset_to_the_end_gets_no_second_error(logs: TwoLogs) -> None:
    leave_behind(logs)
    logs.read_and_stop("search")
    target = Target(logs.store, logs.config(0), logs.runtime)
    reset_reader(view_of(target), "billing", 4)
    logs.append(1, 7)
    assert logs.read_and_stop("billing") == [7]
    assert logs.opened().description.unread == {}


def test_f53_batches_of_a_removed_partition_that_segments_still_have_are_read(
    small_segments: None,
) -> None:
    """The entries that were still in the manifest were dropped when the partition left."""
    logs = RetainingWorld()
    leave_behind(logs, values=30)
    end = logs.moved(0)
    assert end > 1
    logs.read_and_stop("search")
    assert logs.opened().description.names == [NAMES[1]], "the partition has left"
    with logs.consumer("billing") as billing:
        for value in range(1, end):
            batch = billing.next_batch()
            assert [bytes(found) for found in batch.entries] == [b"%d" % value]
            batch.ack()
        with pytest.raises(DataLoss, match=rf"needs sequence {end}, .* at 31: ") as caught:
            billing.next_batch()
    assert "was drained, which does not wait for expired readers" in str(caught.value)
    assert logs.read_and_stop("billing", allow_data_loss=True) == []
    assert logs.opened().description.unread == {}


def test_f53_a_program_that_saved_a_position_at_the_end_has_lost_nothing(logs: TwoLogs) -> None:
    """It was killed after it had saved its results, and before it acknowledged them."""
    leave_behind(logs)
    logs.read_and_stop("search")
    saved = {NAMES[0]: f"{logs.index(0).queue_id}:3"}
    with logs.consumer("billing", saved) as consumer:
        assert drained(consumer) == []
    assert logs.opened().description.unread == {}


def test_f53_a_consumer_of_named_partitions_gets_an_error_about_losses_in_these(
    logs: TwoLogs,
) -> None:
    leave_behind(logs)
    logs.read_and_stop("search")
    with pytest.raises(DataLoss, match="3 batches"):
        logs.consumer("billing", partitions=["0"])
    assert logs.read_and_stop("billing", partitions=["1"]) == []
    assert logs.read_and_stop("billing", partitions=["0"], allow_data_loss=True) == []
    with pytest.raises(InvalidInput, match="partition is '0': the topic has p-00001"):
        logs.consumer("billing", partitions=["0"])


def test_f53_a_reader_without_the_right_to_write_the_description_starts(
    logs: TwoLogs, caplog: pytest.LogCaptureFixture
) -> None:
    leave_behind(logs)
    logs.read_and_stop("search")
    logs.read_and_stop("billing", partitions=["1"])
    with pytest.raises(DataLoss):
        logs.consumer("billing")
    logs.store.fail("put_if", TOPIC_KEY, PermanentStorageError("403 Forbidden"))
    assert logs.read_and_stop("billing", allow_data_loss=True) == []
    assert "still names partitions that reader 'billing' has read" in caplog.text
    logs.store.heal()
    assert logs.opened().description.unread == {NAMES[0]: ("billing",)}


def test_f53_objects_of_a_partition_that_an_operator_deleted_do_not_stop_a_reader(
    logs: TwoLogs,
) -> None:
    leave_behind(logs)
    logs.read_and_stop("search")
    logs.store.delete_many([info.key for info in logs.store.list(NAMES[0]).objects])
    assert logs.read_and_stop("billing") == []
    assert logs.opened().description.unread == {}
    assert not logs.store.list(NAMES[0]).objects, "the partition was not created again"


def test_f53_a_reader_that_read_everything_and_expired_is_not_named(logs: TwoLogs) -> None:
    logs.append(0, 1, 2)
    assert logs.read_and_stop("billing") == [1, 2]
    logs.runtime.advance(2 * DAY_MS / 1000)
    logs.read_and_stop("search")
    logs.collect(0, 1)
    logs.topic.drain("0")
    logs.runtime.advance(2 * DRAIN_S)
    logs.read_and_stop("search")
    assert logs.opened().description.names == [NAMES[1]]
    assert logs.opened().description.unread == {}
    assert logs.read_and_stop("billing") == []


def test_f53_readers_that_the_description_has_no_room_for_are_counted_in_a_warning(
    logs: TwoLogs, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("opendata_buffer.topic.topic.MAX_UNREAD", 1)
    monkeypatch.setattr("opendata_buffer.topic.description.MAX_UNREAD", 1)
    assert logs.read_and_stop("audit") == []
    logs.runtime.advance(1)
    leave_behind(logs)
    logs.read_and_stop("search")
    assert logs.opened().description.unread == {NAMES[0]: ("billing",)}
    assert "The oldest 1 are dropped" in caplog.text
