"""Readers are registered on the topic: expansions, first starts, and what is killed among them."""

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
from opendata_buffer.topic.topic import Topic
from tests.support.logs import DAY_MS
from tests.unit.topic.in_memory import NAMES, URL
from tests.unit.topic.test_consumer_readers import LogTopic, drained, small_segments

__all__ = ["small_segments"]

SEEDS = min(int(os.environ.get("OPENDATA_BUFFER_SEEDS", "10")), 200)


class Killed(BaseException):
    """The process is gone."""


class World(LogTopic):
    """A topic of two logs without a retention."""

    retention_ms = None

    def opened(self) -> Topic:
        """The topic as another process has it."""
        return Topic.open(URL, store=self.store, runtime=self.runtime)

    def collect(self, *partitions: int) -> None:
        for number in partitions:
            config = Topic.config_of(NAMES[number], ConsumerConfig(store=URL))
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
        """What a reader gets until nothing waits; its process ends then."""
        with self.consumer(reader, **options) as consumer:
            return sorted(drained(consumer) + drained(consumer))

    def kill_at_write(self, number: int, work: Callable[[], object]) -> bool:
        """Do some work in a process that dies before a write of this number, counted from 0.
        Returns whether it died, and not whether it ended."""
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
        """Do some work, and another thing just before its write of this number, counted from 0.
        Returns whether the work had such a write."""
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


class RetainingWorld(World):
    """A topic of two logs that keep batches although all readers have acknowledged them."""

    retention_ms = 10 * DAY_MS


@pytest.fixture
def world(small_segments: None) -> World:
    return World()


def test_f47_a_reader_that_was_down_during_an_expansion_misses_nothing(world: World) -> None:
    world.append(0, *range(20))
    for reader in ("billing", "search"):
        assert world.read_and_stop(reader) == list(range(20))
    search = world.consumer("search")
    world.topic.expand(4)
    assert world.readers_in(2, 3) == [("billing", "search")] * 2
    world.append(2, *range(20, 60))
    world.append(3, *range(60, 100))
    world.runtime.advance(10)
    assert sorted(drained(search) + drained(search)) == list(range(20, 100))
    world.collect(0, 1, 2, 3)
    assert (world.index(2).floor, world.index(3).floor) == (0, 0), "billing has not read these"
    assert world.read_and_stop("billing") == list(range(20, 100))
    world.collect(2, 3)
    assert (world.index(2).floor, world.index(3).floor) == (40, 40)


def test_f47_readers_of_an_earlier_release_are_found_in_the_partitions(world: World) -> None:
    world.read_and_stop("billing")
    world.as_of_an_earlier_release()
    world.topic = world.opened()
    world.topic.expand(3)
    assert world.readers_in(2) == [("billing",)]
    assert world.registered() == {"billing": world.runtime.now_ms()}


def test_f47_a_reader_of_one_partition_reads_the_added_ones_from_their_first_batch(
    world: World,
) -> None:
    world.read_and_stop("billing", partitions=["0"])
    assert world.readers_in(0, 1) == [("billing",)] * 2, "it is a reader of the whole topic"
    world.append(1, 7)
    world.read_and_stop("search")
    world.collect(1)
    assert world.read_and_stop("billing", partitions=["1"]) == [7]


def test_a_reader_that_is_known_makes_no_request_for_its_registration(world: World) -> None:
    world.read_and_stop("billing")
    before = world.registered()
    world.runtime.advance(60)
    written: list[str] = []
    world.store.after = lambda operation, key: written.append(key) if "put" in operation else None
    world.read_and_stop("billing")
    assert written
    assert TOPIC_KEY not in written
    assert world.registered() == before


def test_a_reader_that_has_expired_everywhere_is_not_registered_again(world: World) -> None:
    world.read_and_stop("gone")
    world.runtime.advance(2 * DAY_MS / 1000)
    world.append(0, 1)
    world.append(1, 2)
    world.read_and_stop("billing")
    world.collect(0, 1)
    assert world.readers_in(0, 1) == [("billing",)] * 2
    world.topic.expand(3)
    assert world.readers_in(2) == [("billing",)]
    assert list(world.registered() or ()) == ["billing"]


def test_f47_a_reader_that_starts_while_a_topic_is_expanded_is_in_every_partition(
    small_segments: None,
) -> None:
    """The expansion is stopped before each of its writes, and the reader starts there."""
    stopped = 0
    for number in range(100):
        world = World()
        world.read_and_stop("search")
        expand, start = partial(world.topic.expand, 4), partial(world.read_and_stop, "billing")
        if not world.meet_at_write(number, expand, start):
            break
        stopped += 1
        assert world.readers_in(0, 1, 2, 3) == [("billing", "search")] * 4
        assert list(world.registered() or ()) == ["billing", "search"]
    assert stopped > 10


def test_f47_an_expansion_while_a_reader_starts_has_this_reader(world: World) -> None:
    """The reader is stopped before each of its writes, and the topic is expanded there."""
    stopped = 0
    for number in range(100):
        world = World()
        start = partial(world.consumer, "billing")

        def expand(world: World = world) -> None:
            world.opened().expand(3)

        if not world.meet_at_write(number, start, expand):
            break
        stopped += 1
        assert world.readers_in(0, 1, 2) == [("billing",)] * 3
        assert list(world.registered() or ()) == ["billing"]
    assert stopped > 3


def test_f47_two_expansions_at_the_same_time_leave_every_reader_everywhere(world: World) -> None:
    stopped = 0
    for number in range(100):
        world = World()
        world.read_and_stop("billing")

        def expand_and_read(world: World = world) -> None:
            world.opened().expand(3)
            world.append(2, 5)
            assert world.read_and_stop("billing") == [5]

        if not world.meet_at_write(number, partial(world.topic.expand, 4), expand_and_read):
            break
        stopped += 1
        assert world.readers_in(0, 1, 2, 3) == [("billing",)] * 4
        assert len(world.topic.read().active) == 4
        assert world.read_and_stop("billing") == [], "no position was set back"
    assert stopped > 5


@pytest.mark.parametrize("repeats", [True, False])
def test_f47_an_expansion_that_is_killed_before_any_of_its_writes_loses_no_reader(
    world: World, repeats: bool
) -> None:
    killed = 0
    for number in range(100):
        world = World()
        world.read_and_stop("billing")
        if not world.kill_at_write(number, lambda world=world: world.topic.expand(4)):
            break
        killed += 1
        if repeats:
            world.opened().expand(4)
        count = len(world.opened().description.active)
        assert count == (4 if repeats else 2)
        for partition in range(count):
            world.append(partition, partition)
        assert world.read_and_stop("search") == list(range(count))
        world.collect(*range(count))
        assert world.read_and_stop("billing") == list(range(count))
    assert killed > 10


def test_f47_a_reader_that_is_killed_at_its_first_start_misses_nothing_later(
    world: World,
) -> None:
    killed = 0
    for number in range(100):
        world = World()
        world.append(0, 0)
        if not world.kill_at_write(number, lambda world=world: world.consumer("billing")):
            break
        killed += 1
        world.consumer("billing").close()
        world.opened().expand(3)
        world.append(1, 1)
        world.append(2, 2)
        assert world.read_and_stop("search") == [0, 1, 2]
        world.collect(0, 1, 2)
        assert world.read_and_stop("billing") == [0, 1, 2]
    assert killed > 3


def test_a_reader_that_expired_returns_while_a_topic_is_expanded(world: World) -> None:
    """The description names it already, and no partition does."""
    world.read_and_stop("billing")
    world.runtime.advance(2 * DAY_MS / 1000)
    world.read_and_stop("search")
    world.collect(0, 1)
    assert world.readers_in(0, 1) == [("search",)] * 2
    assert list(world.registered() or ()) == ["billing", "search"]

    def start_reader(operation: str, key: str) -> None:
        if operation == "put_if" and key == TOPIC_KEY:
            world.store.heal()
            world.read_and_stop("billing")

    world.store.before = start_reader
    world.topic.expand(3)
    assert world.readers_in(0, 1, 2) == [("billing", "search")] * 3


def test_missing_readers_are_registered_where_nothing_of_theirs_was_deleted(world: World) -> None:
    world.append(1, *range(5))
    world.read_and_stop("billing")
    unregister(world.store, Log(world.store, world.config(1), world.runtime), "billing")
    assert world.readers_in(0, 1) == [("billing",), ()]
    assert world.opened().register_missing() == {NAMES[1]: {"billing": 0}}
    assert world.readers_in(0, 1) == [("billing",)] * 2
    assert world.opened().register_missing() == {}


def test_a_reader_that_lost_batches_in_one_partition_is_not_registered_silently(
    world: World,
) -> None:
    world.append(0, 0)
    world.append(1, 1)
    world.read_and_stop("billing")
    world.append(1, 2)
    world.runtime.advance(2 * DAY_MS / 1000)
    with world.consumer("billing", partitions=["0"]):
        world.read_and_stop("search")
        world.collect(0, 1)
    assert world.readers_in(0, 1) == [("billing", "search"), ("search",)]
    assert world.opened().register_missing() == {}
    assert world.readers_in(1) == [("search",)]


def test_a_reader_that_may_not_write_the_description_reads_and_is_found_in_the_partitions(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.append(0, 1)
    world.store.fail("put_if", TOPIC_KEY, PermanentStorageError("403 Forbidden"))
    assert world.read_and_stop("billing") == [1]
    assert "reader 'billing' is not named in the description of the topic" in caplog.text
    world.store.heal()
    assert world.registered() is None
    world.topic.expand(3)
    assert world.readers_in(2) == [("billing",)]


def test_a_reader_is_warned_of_batches_that_a_partition_did_not_keep_for_it(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """A partition that an earlier release has added does not know the reader."""
    world.read_and_stop("billing")
    unregister(world.store, Log(world.store, world.config(1), world.runtime), "billing")
    world.append(1, 1, 2, 3)
    world.read_and_stop("search")
    world.collect(1)
    assert caplog.text.count("was not registered") == 0
    world.append(1, 4)
    assert world.read_and_stop("billing") == [4]
    (line,) = [each.message for each in caplog.records if "was not registered" in each.message]
    assert "'billing'" in line
    assert NAMES[1] in line
    assert "3 batches" in line


def test_f47_random_histories_of_readers_and_expansions_lose_nothing(
    small_segments: None,
) -> None:
    """Readers start and stop, the topic grows, collectors run, and each may be killed."""
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
    """Random steps on a topic of logs, and what each reader has to get."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        self.world = World()
        self.produced = 0
        self.first: dict[str, int] = {}  # the first value after a start of the reader
        self.got: dict[str, set[int]] = {}
        self.kills = self.expansions = 0

    def run(self, steps: int) -> None:
        for _ in range(steps):
            partitions = len(self.world.opened().description.active)
            step = self.rng.choice((self.append, self.append, self.read, self.read, self.change))
            if step == self.append:
                self.append(partitions)
            elif self.rng.random() < 0.3:
                number = self.rng.randrange(8)
                self.kills += self.world.kill_at_write(number, partial(step, partitions))
            else:
                step(partitions)
            self.world.runtime.advance(600)

    def append(self, partitions: int) -> None:
        self.world.append(self.rng.randrange(partitions), self.produced)
        self.produced += 1

    def read(self, partitions: int) -> None:
        name, only = self.rng.choice("abc"), self.rng.choice([None, None, ["0"], ["1"]])
        # Until the first start has ended, the reader may begin with a later batch.
        is_new = name not in self.first
        with self.world.consumer(name, partitions=only, allow_data_loss=is_new) as consumer:
            self.first.setdefault(name, self.produced)
            while (batch := consumer.next_batch()) is not None:
                self.got.setdefault(name, set()).update(int(bytes(v)) for v in batch.entries)
                batch.ack()

    def change(self, partitions: int) -> None:
        kind = self.rng.randrange(4)
        if kind == 0 and partitions < 5:
            self.world.opened().expand(partitions + 1)
            self.expansions += 1
        elif kind == 1:
            self.world.opened().register_missing()
        else:
            self.world.collect(*range(partitions))

    def check(self) -> None:
        """Every reader gets all that was produced after it had started."""
        for name, first in self.first.items():
            self.got.setdefault(name, set()).update(self.world.read_and_stop(name))
            missing = {*range(first, self.produced)} - self.got[name]
            assert not missing, f"reader {name} misses {missing} with seed {self.seed}"


def test_a_change_that_always_loses_ends_with_an_error(world: World) -> None:
    world.read_and_stop("billing")
    times = iter(range(10**6))

    def change(operation: str, key: str) -> None:
        if operation == "put_if" and key == TOPIC_KEY:
            found = TopicDescription.from_json(bytes(world.store.get(TOPIC_KEY).data))
            other = found.with_reader(f"other{next(times)}", 1)
            world.store.before = lambda operation, key: None
            world.store.put(TOPIC_KEY, other.to_json())
            world.store.before = change

    world.store.before = change
    with pytest.raises(TransientStorageError, match="other processes changed it 20 times"):
        world.topic.expand(3)


def leave_behind(world: World, *, values: int = 3) -> None:
    """Let ``billing`` expire with unread batches in partition 0, which then leaves the topic."""
    world.append(0, 0)
    assert world.read_and_stop("billing") == [0]
    world.append(0, *range(1, values + 1))
    world.runtime.advance(2 * DAY_MS / 1000)
    assert world.read_and_stop("search") == [*range(values + 1)]
    world.collect(0, 1)
    assert world.readers_in(0, 1) == [("search",)] * 2, "billing has expired"
    world.topic.drain("0")
    world.runtime.advance(2 * DRAIN_S)


def test_f53_an_expired_reader_is_told_of_its_losses_in_a_partition_that_has_left(
    world: World,
) -> None:
    leave_behind(world)
    assert world.read_and_stop("search") == []
    assert world.opened().description.names == [NAMES[1]], "the partition has left"
    with pytest.raises(DataLoss, match=r"needs sequence 1, .* continues at 4: 3 batches") as caught:
        world.consumer("billing")
    assert f"--partition {NAMES[0]} billing --to-earliest" in str(caught.value)
    assert world.read_and_stop("search") == [], "it has lost nothing"


@pytest.mark.parametrize("repeats", [True, False])
def test_f53_a_removal_that_is_killed_before_any_of_its_writes_hides_no_loss(
    world: World, repeats: bool
) -> None:
    killed = 0
    for number in range(100):
        world = World()
        leave_behind(world)
        remove = partial(world.opened().remove_drained)
        if not world.kill_at_write(number, remove):
            break
        killed += 1
        if repeats:
            assert world.opened().remove_drained() == [NAMES[0]]
        with pytest.raises(DataLoss, match="3 batches"):
            world.consumer("billing")
    assert killed >= 2, "the seal and the description"


def test_f53_a_reader_that_returns_while_a_partition_leaves_gets_everything_or_an_error(
    small_segments: None,
) -> None:
    """The reader starts before each write of the removal. Its batches are still kept."""
    outcomes = []
    for number in range(100):
        world = RetainingWorld()
        leave_behind(world)
        got: list[object] = []

        def start(world: World = world, got: list[object] = got) -> None:
            try:
                got += world.read_and_stop("billing")
            except DataLoss as error:
                got.append(str(error).partition(":")[0])

        if not world.meet_at_write(number, world.opened().remove_drained, start):
            break
        outcomes.append(got)
        with suppress(DataLoss):
            assert world.read_and_stop("billing") == []
    lost = ["reader 'billing' needs sequence 1, and the log continues at 4"]
    assert len(outcomes) >= 2
    assert all(got in ([1, 2, 3], lost) for got in outcomes), outcomes
    assert [1, 2, 3] in outcomes


def test_f53_a_loss_in_a_partition_that_is_about_to_leave_is_not_hidden(world: World) -> None:
    leave_behind(world)
    assert world.opened().description.draining == [NAMES[0]], "it may leave at any time"
    with pytest.raises(DataLoss, match="3 batches"):
        world.consumer("billing")


def test_f53_a_reader_that_runs_is_told_when_a_partition_leaves(world: World) -> None:
    world.append(0, 0)
    world.append(1, 1)
    frozen = world.consumer("billing")
    assert sorted(drained(frozen)) == [0, 1]
    world.append(0, 2, 3)
    world.append(1, 4)
    world.runtime.advance(2 * DAY_MS / 1000)
    assert world.read_and_stop("search", partitions=["0"]) == [0, 2, 3]
    world.collect(0)
    world.topic.drain("0")
    world.runtime.advance(2 * DRAIN_S)
    assert world.read_and_stop("search") == [1, 4]
    assert world.opened().description.names == [NAMES[1]], "the partition has left"
    batch = frozen.next_batch()
    assert [bytes(value) for value in batch.entries] == [b"4"], "other partitions first"
    batch.ack()
    with pytest.raises(DataLoss, match=r"needs sequence 1, .* continues at 3: 2 batches"):
        frozen.next_batch()


def test_f53_a_reader_that_accepts_its_loss_is_not_told_again(world: World) -> None:
    leave_behind(world)
    world.read_and_stop("search")
    assert world.opened().description.unread == {NAMES[0]: ("billing",)}
    world.append(1, 7)
    assert world.read_and_stop("billing", allow_data_loss=True) == [7]
    assert world.opened().description.unread == {}
    assert world.read_and_stop("billing") == []
    assert world.consumer("billing").partitions == [NAMES[1]]


def test_f53_a_reader_that_is_reset_to_the_end_is_not_told_again(world: World) -> None:
    leave_behind(world)
    world.read_and_stop("search")
    target = Target(world.store, world.config(0), world.runtime)
    reset_reader(view_of(target), "billing", 4)
    world.append(1, 7)
    assert world.read_and_stop("billing") == [7]
    assert world.opened().description.unread == {}


def test_f53_what_segments_still_keep_of_a_partition_that_left_is_read(
    small_segments: None,
) -> None:
    """The entries that were still in the manifest were dropped when the partition left."""
    world = RetainingWorld()
    leave_behind(world, values=30)
    end = world.moved(0)
    assert end > 1
    world.read_and_stop("search")
    assert world.opened().description.names == [NAMES[1]], "the partition has left"
    with world.consumer("billing") as billing:
        for value in range(1, end):
            batch = billing.next_batch()
            assert [bytes(found) for found in batch.entries] == [b"%d" % value]
            batch.ack()
        with pytest.raises(DataLoss, match=rf"needs sequence {end}, .* at 31: ") as caught:
            billing.next_batch()
    assert "was drained, which does not wait for expired readers" in str(caught.value)
    assert world.read_and_stop("billing", allow_data_loss=True) == []
    assert world.opened().description.unread == {}


def test_f53_a_program_that_saved_a_position_at_the_end_has_lost_nothing(world: World) -> None:
    """It was killed after it had saved its results, and before it acknowledged them."""
    leave_behind(world)
    world.read_and_stop("search")
    saved = {NAMES[0]: f"{world.index(0).queue_id}:3"}
    with world.consumer("billing", saved) as consumer:
        assert drained(consumer) == []
    assert world.opened().description.unread == {}


def test_f53_a_consumer_of_named_partitions_is_told_of_losses_in_these(world: World) -> None:
    leave_behind(world)
    world.read_and_stop("search")
    with pytest.raises(DataLoss, match="3 batches"):
        world.consumer("billing", partitions=["0"])
    assert world.read_and_stop("billing", partitions=["1"]) == []
    assert world.read_and_stop("billing", partitions=["0"], allow_data_loss=True) == []
    with pytest.raises(InvalidInput, match="partition is '0': the topic has p-00001"):
        world.consumer("billing", partitions=["0"])


def test_f53_a_reader_without_the_right_to_write_the_description_starts(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    leave_behind(world)
    world.read_and_stop("search")
    world.read_and_stop("billing", partitions=["1"])
    with pytest.raises(DataLoss):
        world.consumer("billing")
    world.store.fail("put_if", TOPIC_KEY, PermanentStorageError("403 Forbidden"))
    assert world.read_and_stop("billing", allow_data_loss=True) == []
    assert "still names partitions that reader 'billing' has read" in caplog.text
    world.store.heal()
    assert world.opened().description.unread == {NAMES[0]: ("billing",)}


def test_f53_objects_of_a_partition_that_an_operator_deleted_do_not_stop_a_reader(
    world: World,
) -> None:
    leave_behind(world)
    world.read_and_stop("search")
    world.store.delete_many([info.key for info in world.store.list(NAMES[0]).objects])
    assert world.read_and_stop("billing") == []
    assert world.opened().description.unread == {}
    assert not world.store.list(NAMES[0]).objects, "the partition was not created again"


def test_f53_a_reader_that_read_everything_and_expired_is_not_named(world: World) -> None:
    world.append(0, 1, 2)
    assert world.read_and_stop("billing") == [1, 2]
    world.runtime.advance(2 * DAY_MS / 1000)
    world.read_and_stop("search")
    world.collect(0, 1)
    world.topic.drain("0")
    world.runtime.advance(2 * DRAIN_S)
    world.read_and_stop("search")
    assert world.opened().description.names == [NAMES[1]]
    assert world.opened().description.unread == {}
    assert world.read_and_stop("billing") == []


def test_f53_readers_that_the_description_has_no_room_for_are_counted_in_a_warning(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("opendata_buffer.topic.topic.MAX_UNREAD", 1)
    monkeypatch.setattr("opendata_buffer.topic.description.MAX_UNREAD", 1)
    assert world.read_and_stop("audit") == []
    world.runtime.advance(1)
    leave_behind(world)
    world.read_and_stop("search")
    assert world.opened().description.unread == {NAMES[0]: ("billing",)}
    assert "The oldest 1 are dropped" in caplog.text
