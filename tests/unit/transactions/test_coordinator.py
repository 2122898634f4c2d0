"""Writes to three partitions commit all or nothing, killed and raced at every request."""

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
    """Runs each thread to its end when it is spawned, so that requests can be counted."""

    def spawn(self, target: Callable[[], None], name: str) -> Any:
        target()
        return None


class Wire:
    """One driver's connection to the store; calls ``what`` before or after request ``at``."""

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
    """Uses a coordinator like the sink's driver, with one message per partition and batch."""

    def __init__(self, deployment: Deployment, wire: Wire | None = None) -> None:
        self.deployment = deployment
        self.wire: Any = wire or Wire(deployment.store)
        self.queues: dict[str, Queue] = {}
        self.prepares = deployment.prepares
        self.coordinator = TransactionCoordinator(
            self.wire, CONFIG, self._queue, deployment.runtime, ahead_ms=600_000
        )

    def _queue(self, name: str) -> Queue:
        if name not in self.queues:
            config = QueueConfig(store="memory://x", data_path_prefix=name)
            self.queues[name] = Queue(
                self.wire, config, runtime=self.deployment.runtime, role="test"
            )
        return self.queues[name]

    def attempt(self, batch: int, partitions: Any = PARTITIONS) -> Attempt:
        producer = self.deployment.producer()
        return Attempt(Transaction("q", batch), producer, dict.fromkeys(partitions, 3))

    def begun(self, batch: int) -> Attempt:
        """Begin an attempt, and return it."""
        attempt = self.attempt(batch)
        assert self.coordinator.begin(attempt.txn, "q", PARTITIONS)
        return attempt

    def append(self, attempt: Attempt) -> dict[str, int]:
        since = {}
        for name in attempt.intents:
            if self.prepares:
                self.coordinator.prepare(attempt, name)
            message = build_uuid(attempt.producer, 2, CONTINUE_TXN)
            location = batch_key(name, self.deployment.runtime.ulid(), attempt.txn, message)
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


class Deployment:
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
        """Read new messages by the rule of read-committed."""
        for name, rule in self.rules.items():
            locations = self.manifest(name).locations()
            for sequence in range(self.positions[name], len(locations)):
                for each in rule.offer(sequence, locations[sequence], lambda *_: ()):
                    named: Any = parse_location(locations[each], name)
                    producer = parse_uuid(named.message).producer
                    self.read[named.txn.batch].append((name, producer))
            self.positions[name] = len(locations)
        for batch, got in self.read.items():
            assert len({producer for _, producer in got}) == 1, f"two attempts of batch {batch}"
            assert len({name for name, _ in got}) == len(got), f"batch {batch} was delivered twice"

    def assert_committed(self, batches: int) -> None:
        self.consume()
        assert {batch: len(got) for batch, got in self.read.items()} == dict.fromkeys(
            range(batches), len(PARTITIONS)
        )
        assert self.undecided() == {}


def requests_of(write: Callable[[Driver], object]) -> int:
    """Return the number of requests of a driver that starts after one committed batch."""
    deployment = Deployment()
    Driver(deployment).write(0)
    driver = Driver(deployment)
    write(driver)
    count: int = driver.wire.requests
    return count


def test_a_batch_becomes_visible_in_all_partitions() -> None:
    deployment = Deployment()
    driver = Driver(deployment)
    for batch in range(3):
        before = driver.wire.requests
        assert driver.write(batch)
    # Each partition needs one append, one empty object, and one marker; the record is one more.
    assert driver.wire.requests - before == 3 * len(PARTITIONS) + 1
    deployment.assert_committed(3)
    assert [deployment.manifest(name).next_sequence for name in PARTITIONS] == [6, 6, 6]


def test_after_skipped_batch_numbers_the_record_is_read_and_claimed_again() -> None:
    deployment = Deployment()
    driver, other = Driver(deployment), Driver(deployment)
    driver.write(0)
    before = driver.wire.requests
    driver.write(2)
    assert driver.wire.requests - before == 3 * len(PARTITIONS) + 2
    other.write(3)
    assert driver.write(4)
    deployment.consume()
    assert sorted(deployment.read) == [0, 2, 3, 4]


def test_a_roll_back_never_appends_the_acknowledgement_that_was_prepared() -> None:
    deployment = Deployment()
    driver = Driver(deployment)
    attempt = driver.begun(0)
    driver.append(attempt)
    driver.coordinator.abandon(attempt)
    deployment.consume()
    assert deployment.read == {}
    assert deployment.undecided() == {}
    assert driver.write(0)
    deployment.assert_committed(1)


def test_the_record_names_the_attempt_and_its_partitions() -> None:
    deployment = Deployment()
    driver = Driver(deployment)
    driver.write(4, partitions=PARTITIONS[:2])
    record = deployment.record
    assert (record.batch, record.query) == (4, "q")
    assert record.producer == "010000000001"
    assert record.intents == {"p-00000": 3, "p-00001": 3}


def test_a_run_knows_the_commits_of_earlier_runs() -> None:
    deployment = Deployment()
    driver = Driver(deployment)
    for batch in (0, 4):
        driver.coordinator.recover("q", "q", PARTITIONS)
        driver.write(batch)
        assert driver.coordinator.committed("q") == batch
    again = Driver(deployment).coordinator
    again.recover("q", "q", PARTITIONS)
    assert again.committed("q") == 4
    again.recover("new", None, PARTITIONS)
    assert again.committed("new") == -1


def test_a_committed_batch_is_not_written_again() -> None:
    deployment = Deployment()
    driver = Driver(deployment)
    driver.write(0)
    assert not driver.write(0), "the same run"
    assert not Driver(deployment).write(0), "another run"
    driver.write(1)
    assert not Driver(deployment).write(0), "an older batch"
    deployment.assert_committed(2)


def test_a_committed_batch_is_reported_after_its_other_attempts_are_rolled_back() -> None:
    deployment = Deployment()
    first, second = Driver(deployment), Driver(deployment)
    first.append(first.begun(0))
    attempt = second.begun(0)
    second.append(attempt)
    assert second.coordinator.decide(attempt)  # then both are killed
    assert not Driver(deployment).write(0)
    deployment.assert_committed(1)


@pytest.mark.parametrize("is_begun", [True, False])
def test_an_attempt_that_cannot_be_ended_now_is_ended_by_the_next_run(
    is_begun: bool, caplog: pytest.LogCaptureFixture
) -> None:
    deployment = Deployment()
    driver = Driver(deployment)
    attempt = driver.begun(0)
    driver.append(attempt)

    def put_if(key: str, data: bytes, condition: Any) -> Any:
        if is_begun and key == RECORD:
            return outcomes.LostRace()
        raise TransientStorageError("the network is down")

    driver.wire.put_if = put_if
    message = "was not committed" if is_begun else "is not known"
    with pytest.raises(TransientStorageError, match=message):
        driver.coordinator.decide(attempt)
    assert ("not rolled back everywhere yet" in caplog.text) == is_begun
    assert Driver(deployment).write(0)
    deployment.assert_committed(1)


KILLS = range(requests_of(lambda driver: driver.write(1)) + 1)


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("at", KILLS)
def test_a_restart_completes_or_repeats_a_batch_that_was_killed_at_any_request(
    at: int, after: bool
) -> None:
    deployment = Deployment()
    Driver(deployment).write(0)
    killed = Driver(deployment, Wire(deployment.store, at, kill, after))
    try:
        assert killed.write(1)
    except Killed:
        assert at < len(KILLS)
    deployment.consume()
    committed = deployment.record.batch == 1
    assert Driver(deployment).write(1) is not committed
    deployment.assert_committed(2)
    assert Driver(deployment).write(2)
    deployment.assert_committed(3)


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("at", KILLS)
def test_another_run_of_the_query_begins_and_ends_at_any_request(at: int, after: bool) -> None:
    """A driver is paused, a second one is started, and the first one continues as a zombie."""
    deployment = Deployment()
    Driver(deployment).write(0)

    def successor() -> None:
        Driver(deployment).write(1)
        Driver(deployment).write(2)
        deployment.consume()

    zombie = Driver(deployment, Wire(deployment.store, at, successor, after))
    with suppress(Superseded):
        zombie.write(1)
    if zombie.wire.left >= 0:
        successor()
    # The next batch cleans up an attempt that the zombie could not end.
    Driver(deployment).write(3)
    deployment.assert_committed(4)


@pytest.mark.parametrize("dies", KILLS[::3])
@pytest.mark.parametrize("at", KILLS[::2])
def test_the_successor_is_killed_while_the_zombie_is_paused(at: int, dies: int) -> None:
    deployment = Deployment()
    Driver(deployment).write(0)

    def successor() -> None:
        try:
            Driver(deployment, Wire(deployment.store, dies, kill)).write(1)
        except Killed:
            deployment.consume()

    with suppress(Superseded):
        Driver(deployment, Wire(deployment.store, at, successor)).write(1)
    deployment.consume()
    Driver(deployment).write(1)
    deployment.assert_committed(2)


@pytest.mark.parametrize(
    "at", range(requests_of(lambda driver: driver.coordinator.recover("q", None, PARTITIONS)) + 12)
)
def test_a_run_that_rolls_back_does_not_touch_the_batches_of_a_later_run(at: int) -> None:
    """A roll-back right after the claim would be wrong: the later run has already appended."""
    deployment = Deployment()
    Driver(deployment).write(0)
    later = Driver(deployment)
    attempt = later.attempt(1)
    since: dict[str, int] = {}

    def begin() -> None:
        assert later.coordinator.begin(attempt.txn, "q", PARTITIONS)
        since.update(later.append(attempt))

    cleaner = Driver(deployment, Wire(deployment.store, at, begin))
    with suppress(Superseded):
        cleaner.coordinator.recover("q", None, PARTITIONS)
    if not since:
        begin()
    if at < 2:  # the run that cleans up claimed last, so it is the later run
        with pytest.raises(Superseded, match="this is the old run"):
            later.coordinator.decide(attempt)
        assert later.write(1)
    else:
        assert later.coordinator.decide(attempt)
        later.coordinator.complete(attempt, since)
    deployment.assert_committed(2)


def test_a_zombie_that_appends_late_and_dies_is_cleaned_up_by_the_next_batch() -> None:
    deployment = Deployment()
    driver, zombie = Driver(deployment), Driver(deployment)
    attempt = zombie.begun(0)
    driver.write(0)
    driver.write(1)
    zombie.append(attempt)
    assert len(deployment.undecided()) == 3
    driver.write(2)
    deployment.assert_committed(3)


@pytest.mark.parametrize("decided", [False, True])
def test_recover_completes_committed_transactions_and_ends_the_rest(decided: bool) -> None:
    deployment = Deployment()
    driver = Driver(deployment)
    attempt = driver.begun(0)
    driver.append(attempt)
    assert not decided or driver.coordinator.decide(attempt)
    recovered = Driver(deployment).coordinator
    assert recovered.recover("q", None, PARTITIONS) == 3
    assert recovered.recover("q", None, PARTITIONS) == 0
    if not decided:
        with pytest.raises(Superseded):
            driver.coordinator.decide(attempt)
    deployment.assert_committed(int(decided))


class LosesAnswers(Wire):
    """Never answers conditional writes of the record, whether it carries them out or not."""

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
def test_a_decision_whose_answer_is_lost_is_looked_up_or_stays_unknown(
    carried_out: bool, readable: bool
) -> None:
    deployment = Deployment()
    wire = LosesAnswers(deployment.store, carried_out, readable)
    driver = Driver(deployment, wire)
    driver.write(0)
    wire.armed = True
    if carried_out and readable:
        assert driver.write(1), "reading the record again shows the decision"
    else:
        with pytest.raises(TransientStorageError, match="may or may not have been written"):
            driver.write(1)
        assert len(deployment.undecided()) == 3, "the outcome is unknown, so nothing is rolled back"
        assert Driver(deployment).write(1) is not carried_out
    deployment.assert_committed(2)


def test_a_forgotten_app_has_no_record() -> None:
    deployment = Deployment()
    driver = Driver(deployment)
    driver.write(0)
    for _ in range(2):
        driver.coordinator.forget("q")
        assert RECORD not in [each.key for each in deployment.store.list("").objects]


@pytest.mark.parametrize("same_process", [False, True])
def test_an_app_id_of_another_query_is_refused_before_anything_is_appended(
    same_process: bool,
) -> None:
    deployment = Deployment()
    driver = Driver(deployment)
    assert driver.write(0, query="one")
    before = [deployment.manifest(name) for name in PARTITIONS]
    second = driver if same_process else Driver(deployment)
    for batch in (0, 1):  # one looks like a repeat, and one would go in between
        with pytest.raises(InvalidInput, match=r"belongs to query one.*this is query two"):
            second.write(batch, query="two")
    assert [deployment.manifest(name) for name in PARTITIONS] == before
    assert driver.write(1, query="one")
    deployment.assert_committed(2)


def test_a_query_takes_over_an_app_id_from_writes_without_a_query_in_the_same_process() -> None:
    deployment = Deployment()
    driver = Driver(deployment)
    assert driver.write(0, query=None)
    assert driver.write(1, query="one")
    assert deployment.record.query == "one"
    with pytest.raises(InvalidInput, match="belongs to query one"):
        Driver(deployment).write(2, query="two")
    deployment.assert_committed(2)
