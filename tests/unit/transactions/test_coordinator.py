"""Writes to three partitions, killed and raced at every request: all of a batch or nothing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from opendata_buffer import outcomes
from opendata_buffer.config import QueueConfig
from opendata_buffer.consumer.isolation import ReadCommitted
from opendata_buffer.errors import InvalidInput, Superseded, TransientStorageError
from opendata_buffer.formats.batch import Transaction, batch_key, parse_location
from opendata_buffer.formats.manifest import Manifest, NewEntry
from opendata_buffer.messages import CONTINUE_TXN, build_uuid, parse_uuid, undecided
from opendata_buffer.queue.queue import Queue
from opendata_buffer.stores.memory import MemoryStore
from opendata_buffer.testing.runtime import ManualRuntime
from opendata_buffer.transactions import Attempt, CommitRecord, TransactionCoordinator, record_key

PARTITIONS = ("p-00000", "p-00001", "p-00002")
CONFIG = QueueConfig(store="memory://x")
RECORD = record_key("_topic", "q")


class Killed(BaseException):
    """The driver process is gone."""


class Inline(ManualRuntime):
    """Runs threads at once and to their end, so that requests have numbers."""

    def spawn(self, target: Callable[[], None], name: str) -> Any:
        target()
        return None


class Wire:
    """One driver's way to the store: before or after request ``at``, ``what`` is called."""

    def __init__(
        self,
        store: MemoryStore,
        at: int | None = None,
        what: Callable[[], None] = lambda: None,
        after: bool = False,
    ) -> None:
        self._store = store
        self.url = store.url
        self.left = -1 if at is None else at
        self._what = what
        self._after = after
        self.dead = False
        self.requests = 0

    def __getattr__(self, operation: str) -> Callable[..., Any]:
        def request(*arguments: Any, **options: Any) -> Any:
            if self.dead:
                raise Killed
            self.requests += 1
            now, self.left = self.left == 0, self.left - 1
            if now and not self._after:
                self._act()
            answer = getattr(self._store, operation)(*arguments, **options)
            if now and self._after:
                self._act()
            return answer

        return request

    def _act(self) -> None:
        try:
            self._what()
        except Killed:
            self.dead = True
            raise


def kill() -> None:
    raise Killed


class Driver:
    """What the sink's driver does with a coordinator, for batches of one message per partition."""

    def __init__(self, world: World, wire: Wire | None = None) -> None:
        self.world = world
        self.wire: Any = wire or Wire(world.store)
        self.queues: dict[str, Queue] = {}
        self.prepares = world.prepares
        self.coordinator = TransactionCoordinator(
            self.wire, CONFIG, self._queue, world.runtime, ahead_ms=600_000
        )

    def _queue(self, name: str) -> Queue:
        if name not in self.queues:
            config = QueueConfig(store="memory://x", data_path_prefix=name)
            self.queues[name] = Queue(self.wire, config, runtime=self.world.runtime, role="test")
        return self.queues[name]

    def attempt(self, batch: int, partitions: Any = PARTITIONS) -> Attempt:
        producer = self.world.producer()
        return Attempt(Transaction("q", batch), producer, dict.fromkeys(partitions, 3))

    def begun(self, batch: int) -> Attempt:
        """An attempt that may be appended."""
        attempt = self.attempt(batch)
        assert self.coordinator.begin(attempt.txn, "q", PARTITIONS)
        return attempt

    def append(self, attempt: Attempt) -> dict[str, int]:
        since = {}
        for name in attempt.intents:
            if self.prepares:
                self.coordinator.prepare(attempt, name)
            message = build_uuid(attempt.producer, 2, CONTINUE_TXN)
            location = batch_key(name, self.world.runtime.ulid(), attempt.txn, message)
            since[name] = self._queue(name).append([NewEntry(location)])
        return since

    def write(self, batch: int, query: str | None = "q", partitions: Any = PARTITIONS) -> bool:
        attempt = self.attempt(batch, partitions)
        if not self.coordinator.begin(attempt.txn, query, PARTITIONS):
            return False
        since = self.append(attempt)
        if not self.coordinator.decide(attempt):
            return False
        self.coordinator.complete(attempt, since)
        return True


class World:
    def __init__(self, prepares: bool = True) -> None:
        self.runtime = Inline()
        self.store = MemoryStore()
        self.prepares = prepares
        self.producers = 0
        self.read: defaultdict[int, list[tuple[str, bytes]]] = defaultdict(list)
        """Per batch: partition and producer of each message that the reader delivered."""
        self.rules = {name: ReadCommitted(name) for name in PARTITIONS}
        self.positions = dict.fromkeys(PARTITIONS, 0)

    def producer(self) -> bytes:
        self.producers += 1
        return b"\x01" + self.producers.to_bytes(5, "big")

    def manifest(self, name: str) -> Manifest:
        config = QueueConfig(store="memory://x", data_path_prefix=name)
        queue = Queue(self.store, config, runtime=self.runtime, role="test")
        return queue.read() or Manifest.empty()

    @property
    def record(self) -> CommitRecord:
        return CommitRecord.from_json(self.store.get(RECORD).data)

    def undecided(self) -> dict[str, set[bytes]]:
        found = {
            name: set(undecided(enumerate(self.manifest(name).locations()), name))
            for name in PARTITIONS
        }
        return {name: each for name, each in found.items() if each}

    def consume(self) -> None:
        """Read what is new, by the rule of read-committed."""
        for name, rule in self.rules.items():
            locations = self.manifest(name).locations()
            for sequence in range(self.positions[name], len(locations)):
                for each in rule.offer(sequence, locations[sequence], lambda *_: ()):
                    named: Any = parse_location(locations[each], name)
                    producer = parse_uuid(named.message).producer
                    self.read[named.txn.batch].append((name, producer))
            self.positions[name] = len(locations)
        for batch, got in self.read.items():
            assert len({producer for _, producer in got}) == 1, f"two attempts at {batch}"
            assert len({name for name, _ in got}) == len(got), f"{batch} twice"

    def check(self, batches: int) -> None:
        self.consume()
        assert {batch: len(got) for batch, got in self.read.items()} == dict.fromkeys(
            range(batches), len(PARTITIONS)
        )
        assert self.undecided() == {}


def requests_of(write: Callable[[Driver], object]) -> int:
    """How many requests a driver makes that begins with one committed batch before it."""
    world = World()
    Driver(world).write(0)
    driver = Driver(world)
    write(driver)
    count: int = driver.wire.requests
    return count


def test_a_batch_becomes_visible_in_all_partitions() -> None:
    world = World()
    driver = Driver(world)
    for batch in range(3):
        before = driver.wire.requests
        assert driver.write(batch)
    # Each partition: one append, one empty object, one marker. And one record.
    assert driver.wire.requests - before == 3 * len(PARTITIONS) + 1
    world.check(3)
    assert [world.manifest(name).next_sequence for name in PARTITIONS] == [6, 6, 6]


def test_after_missing_batches_the_record_is_read_and_claimed_again_if_another_run_has_it() -> None:
    world = World()
    driver, other = Driver(world), Driver(world)
    driver.write(0)
    before = driver.wire.requests
    driver.write(2)
    assert driver.wire.requests - before == 3 * len(PARTITIONS) + 2
    other.write(3)
    assert driver.write(4)
    world.consume()
    assert sorted(world.read) == [0, 2, 3, 4]


def test_a_roll_back_never_appends_the_acknowledgement_that_was_prepared() -> None:
    world = World()
    driver = Driver(world)
    attempt = driver.begun(0)
    driver.append(attempt)
    driver.coordinator.abandon(attempt)
    world.consume()
    assert world.read == {}
    assert world.undecided() == {}
    assert driver.write(0)
    world.check(1)


def test_the_record_names_the_attempt_and_its_partitions() -> None:
    world = World()
    driver = Driver(world)
    driver.write(4, partitions=PARTITIONS[:2])
    record = world.record
    assert (record.batch, record.query) == (4, "q")
    assert record.producer == "010000000001"
    assert record.intents == {"p-00000": 3, "p-00001": 3}


def test_a_run_knows_what_the_runs_before_it_committed() -> None:
    world = World()
    driver = Driver(world)
    for batch in (0, 4):
        driver.coordinator.recover("q", "q", PARTITIONS)
        driver.write(batch)
        assert driver.coordinator.committed("q") == batch
    again = Driver(world).coordinator
    again.recover("q", "q", PARTITIONS)
    assert again.committed("q") == 4
    again.recover("new", None, PARTITIONS)
    assert again.committed("new") == -1


def test_a_batch_that_was_committed_is_not_written_again() -> None:
    world = World()
    driver = Driver(world)
    driver.write(0)
    assert not driver.write(0), "the same run"
    assert not Driver(world).write(0), "another run"
    driver.write(1)
    assert not Driver(world).write(0), "an older batch"
    world.check(2)


def test_a_committed_batch_is_told_once_the_attempts_beside_it_are_rolled_back() -> None:
    world = World()
    first, second = Driver(world), Driver(world)
    first.append(first.begun(0))
    attempt = second.begun(0)
    second.append(attempt)
    assert second.coordinator.decide(attempt)  # and both are killed
    assert not Driver(world).write(0)
    world.check(1)


@pytest.mark.parametrize("is_begun", [True, False])
def test_an_attempt_that_cannot_be_decided_or_rolled_back_now_is_by_the_next_run(
    is_begun: bool, caplog: pytest.LogCaptureFixture
) -> None:
    world = World()
    driver = Driver(world)
    attempt = driver.begun(0)
    driver.append(attempt)

    def put_if(key: str, data: bytes, condition: Any) -> Any:
        if is_begun and key == RECORD:
            return outcomes.Conflict()
        raise TransientStorageError("the network is down")

    driver.wire.put_if = put_if
    message = "was not committed" if is_begun else "is not known"
    with pytest.raises(TransientStorageError, match=message):
        driver.coordinator.decide(attempt)
    assert ("not rolled back everywhere yet" in caplog.text) == is_begun
    assert Driver(world).write(0)
    world.check(1)


KILLS = range(requests_of(lambda driver: driver.write(1)) + 1)


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("at", KILLS)
def test_killed_at_any_request_a_restart_completes_or_repeats_the_batch(
    at: int, after: bool
) -> None:
    world = World()
    Driver(world).write(0)
    killed = Driver(world, Wire(world.store, at, kill, after))
    try:
        assert killed.write(1)
    except Killed:
        assert at < len(KILLS)
    world.consume()
    committed = world.record.batch == 1
    assert Driver(world).write(1) is not committed
    world.check(2)
    assert Driver(world).write(2)
    world.check(3)


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("at", KILLS)
def test_another_run_of_the_query_begins_and_ends_at_any_request(at: int, after: bool) -> None:
    """A zombie: its driver was paused, a second one was started, and it goes on."""
    world = World()
    Driver(world).write(0)

    def successor() -> None:
        Driver(world).write(1)
        Driver(world).write(2)
        world.consume()

    zombie = Driver(world, Wire(world.store, at, successor, after))
    with suppress(Superseded):
        zombie.write(1)
    if zombie.wire.left >= 0:
        successor()
    # What a zombie leaves undecided without being able to clean up the next batch cleans up.
    Driver(world).write(3)
    world.check(4)


@pytest.mark.parametrize("dies", KILLS[::3])
@pytest.mark.parametrize("at", KILLS[::2])
def test_the_successor_is_killed_while_the_zombie_is_paused(at: int, dies: int) -> None:
    world = World()
    Driver(world).write(0)

    def successor() -> None:
        try:
            Driver(world, Wire(world.store, dies, kill)).write(1)
        except Killed:
            world.consume()

    with suppress(Superseded):
        Driver(world, Wire(world.store, at, successor)).write(1)
    world.consume()
    Driver(world).write(1)
    world.check(2)


@pytest.mark.parametrize(
    "at", range(requests_of(lambda driver: driver.coordinator.recover("q", None, PARTITIONS)) + 12)
)
def test_a_run_that_rolls_back_leaves_the_batches_of_a_later_run_alone(at: int) -> None:
    """The hole that a roll-back right after the claim would have: the later run has appended."""
    world = World()
    Driver(world).write(0)
    later = Driver(world)
    attempt = later.attempt(1)
    since: dict[str, int] = {}

    def begin() -> None:
        assert later.coordinator.begin(attempt.txn, "q", PARTITIONS)
        since.update(later.append(attempt))

    cleaner = Driver(world, Wire(world.store, at, begin))
    with suppress(Superseded):
        cleaner.coordinator.recover("q", None, PARTITIONS)
    if not since:
        begin()
    if at < 2:  # the cleaner's claim came last: it is the later run
        with pytest.raises(Superseded, match="two drivers share one checkpoint"):
            later.coordinator.decide(attempt)
        assert later.write(1)
    else:
        assert later.coordinator.decide(attempt)
        later.coordinator.complete(attempt, since)
    world.check(2)


def test_a_zombie_that_appends_late_and_dies_is_cleaned_up_by_the_next_batch() -> None:
    world = World()
    driver, zombie = Driver(world), Driver(world)
    attempt = zombie.begun(0)
    driver.write(0)
    driver.write(1)
    zombie.append(attempt)
    assert len(world.undecided()) == 3
    driver.write(2)
    world.check(3)


@pytest.mark.parametrize("decided", [False, True])
def test_recover_completes_what_was_committed_and_ends_the_rest(decided: bool) -> None:
    world = World()
    driver = Driver(world)
    attempt = driver.begun(0)
    driver.append(attempt)
    assert not decided or driver.coordinator.decide(attempt)
    recovered = Driver(world).coordinator
    assert recovered.recover("q", None, PARTITIONS) == 3
    assert recovered.recover("q", None, PARTITIONS) == 0
    if not decided:
        with pytest.raises(Superseded):
            driver.coordinator.decide(attempt)
    world.check(int(decided))


class LosesAnswers(Wire):
    """Conditional writes of the record are carried out, or not, and never answered."""

    def __init__(self, store: MemoryStore, carried_out: bool, readable: bool) -> None:
        super().__init__(store)
        self._carried_out = carried_out
        self._readable = readable
        self.armed = False

    def put_if(self, key: str, data: Any, condition: Any) -> Any:
        if self.armed and key == RECORD:
            if self._carried_out:
                self._store.put_if(key, data, condition)
            return outcomes.Unknown("the answer was lost")
        return self.__getattr__("put_if")(key, data, condition)

    def get(self, key: str, **options: Any) -> Any:
        if self.armed and key == RECORD and not self._readable:
            raise TransientStorageError("no answer")
        return self.__getattr__("get")(key, **options)


@pytest.mark.parametrize("readable", [False, True])
@pytest.mark.parametrize("carried_out", [False, True])
def test_a_decision_whose_answer_is_lost(carried_out: bool, readable: bool) -> None:
    world = World()
    wire = LosesAnswers(world.store, carried_out, readable)
    driver = Driver(world, wire)
    driver.write(0)
    wire.armed = True
    if carried_out and readable:
        assert driver.write(1), "the record tells, when it is read again"
    else:
        with pytest.raises(TransientStorageError, match="may or may not have been written"):
            driver.write(1)
        assert len(world.undecided()) == 3, "it is unknown, so nothing is rolled back"
        assert Driver(world).write(1) is not carried_out
    world.check(2)


def test_an_app_that_is_forgotten_has_no_record() -> None:
    world = World()
    driver = Driver(world)
    driver.write(0)
    for _ in range(2):
        driver.coordinator.forget("q")
        assert RECORD not in [each.key for each in world.store.list("").objects]


@pytest.mark.parametrize("same_process", [False, True])
def test_an_app_id_of_another_query_is_refused_before_anything_is_appended(
    same_process: bool,
) -> None:
    world = World()
    driver = Driver(world)
    assert driver.write(0, query="one")
    before = [world.manifest(name) for name in PARTITIONS]
    second = driver if same_process else Driver(world)
    for batch in (0, 1):  # one that would pass for a repeat, and one that would go in between
        with pytest.raises(InvalidInput, match=r"belongs to query one.*this is query two"):
            second.write(batch, query="two")
    assert [world.manifest(name) for name in PARTITIONS] == before
    assert driver.write(1, query="one")
    world.check(2)


def test_a_query_takes_an_app_id_over_from_writes_without_one_in_the_same_process() -> None:
    world = World()
    driver = Driver(world)
    assert driver.write(0, query=None)
    assert driver.write(1, query="one")
    assert world.record.query == "one"
    with pytest.raises(InvalidInput, match="belongs to query one"):
        Driver(world).write(2, query="two")
    world.check(2)
