"""A job that starts when files arrive, by the rule of Databricks' trigger.

The rule (https://docs.databricks.com/aws/en/jobs/file-arrival-triggers): only new files below the
folder start a run, in all of its subfolders. Overwriting a file of the same name does not.
"""

from __future__ import annotations

from buffer_source.partitions import SourceOffset
from opendata_buffer import Producer
from opendata_buffer.config import ProducerConfig, QueueConfig
from opendata_buffer.formats.batch import batch_key
from opendata_buffer.formats.manifest import NewEntry
from opendata_buffer.internal_parts import internals
from opendata_buffer.queue.log import Log
from opendata_buffer.queue.queue import Queue
from tests.support.bucket import URL, SimulatedBucket, SimulatedQuery

CHECK_S = 60.0
"""Seconds between two checks of the trigger."""

DAY_S = 86_400.0


class Trigger:
    """The trigger of one job: the names that it has seen below its folder."""

    def __init__(self, bucket: SimulatedBucket, folder: str) -> None:
        self._bucket, self._folder = bucket, folder
        self._seen = self._names()

    def arrived(self) -> set[str]:
        """Return the files that are new since the last check. Any of them starts a run."""
        before, self._seen = self._seen, self._names()
        return self._seen - before

    def _names(self) -> set[str]:
        return {found.key for found in self._bucket.objects.list(self._folder).objects}


class Job:
    """Runs a query with ``availableNow`` whenever files have arrived."""

    def __init__(self, bucket: SimulatedBucket, **options: str) -> None:
        self._bucket, self._options = bucket, options
        self._runtime = bucket.simulation.process("scheduler")
        self._offset: SourceOffset | None = None
        self.trigger = Trigger(bucket, "ingest/")
        self.read = 0

    def wait(self, seconds: float) -> list[set[str]]:
        """Let time pass; return the files that started each run."""
        runs, until = [], self._bucket.simulation.now + seconds
        while self._bucket.simulation.now < until:
            self._runtime.sleep(CHECK_S)
            if arrived := self.trigger.arrived():
                runs.append(arrived)
                self.run()
        return runs

    def run(self) -> None:
        """Run once."""
        query = SimulatedQuery(self._bucket, self._offset, **self._options)
        query.stream.prepare_available_now()
        query.drain()
        report = query.stream.report()
        self.read += 0 if report is None else report["batches"]
        # A run lasts some seconds on Spark, in which its collector works.
        self._runtime.sleep(20)
        query.stream.stop()
        self._offset = query.offset


def produce(bucket: SimulatedBucket, count: int) -> None:
    """Produce batches from a process of its own."""
    store, runtime = bucket.process("producer")
    config = ProducerConfig(store=URL, broker="off", flush_interval_ms=10)
    with Producer(config, **internals(store=store, runtime=runtime)) as producer:
        for number in range(count):
            producer.produce([b"%d" % number]).result(60)


def test_each_batch_starts_a_run_and_nothing_else_does() -> None:
    bucket = SimulatedBucket()

    def main() -> None:
        job = Job(bucket)
        job.run()
        job.wait(600)  # The first run creates the consumer's notes, which may start one more.
        for number in range(3):
            produce(bucket, 1)
            (arrived,) = job.wait(1_800)
            assert len(arrived) == 1
            assert arrived.pop().endswith(".batch")
            assert job.read == 2 + number
        assert job.wait(DAY_S) == [], "the collector deletes, and overwrites its cursor"

    bucket.run(main)


def test_the_objects_of_the_first_run_start_one_more_run_at_most() -> None:
    bucket = SimulatedBucket()

    def main() -> None:
        job = Job(bucket)
        job.run()
        runs = job.wait(3_600)
        assert len(runs) <= 1
        assert not any(name.endswith(".batch") for names in runs for name in names)
        assert job.read == 1

    bucket.run(main)


def test_batches_that_arrive_during_a_run_start_the_next_one() -> None:
    bucket = SimulatedBucket()

    def main() -> None:
        job = Job(bucket)
        job.run()
        job.wait(600)
        produce(bucket, 1)
        assert job.trigger.arrived()
        produce(bucket, 2)  # After the check that starts the run.
        job.run()
        assert len(job.wait(3_600)) == 1
        assert job.read == 4

    bucket.run(main)


def test_the_segments_and_positions_of_a_log_start_few_runs_without_data() -> None:
    bucket = SimulatedBucket(is_log=True)

    def main() -> None:
        job = Job(bucket)
        job.run()
        job.wait(600)
        store, runtime = bucket.process("producer")
        queue = Queue(store, QueueConfig(store=URL), runtime=runtime, role="producer")
        queue.append(
            [NewEntry(batch_key("ingest", runtime.ulid())) for _ in range(3 * Log.most_entries)]
        )
        bucket.append("ingest")  # Its object is the one that arrives.
        runs = job.wait(3_600)
        empty = [names for names in runs if not any(name.endswith(".batch") for name in names)]
        assert any(".segment" in name for names in runs for name in names), "segments were written"
        assert len(empty) <= 1, "each run without data ends the chain"
        assert job.wait(DAY_S) == []

    bucket.run(main)
