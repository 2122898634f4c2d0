"""How many requests a process sends before its first record, and how long they take."""

from __future__ import annotations

from tests.support.bucket import SimulatedBucket, SimulatedQuery


def test_a_producer_of_an_existing_queue_is_durable_after_few_requests() -> None:
    bucket = SimulatedBucket()

    def main() -> None:
        bucket.produce()
        store, first = bucket.produce()
        assert store.probes == 0
        assert (
            first.total == 5
        )  # Marker, manifest, a wrong write; then the batch, and the manifest.
        assert store.requests == 6  # Also the marker, when it was closed.
        assert first.seconds < 0.45  # 0.1 s of it is the flush interval.

    bucket.run(main)


def test_a_consumer_of_an_existing_queue_has_its_first_batch_after_few_requests() -> None:
    bucket = SimulatedBucket()

    def main() -> None:
        for _ in range(2):
            store, first = bucket.consume()
            assert store.probes == 0
            # Marker, manifest, a wrong write; the manifest; marker, note of the consumer (two),
            # acknowledged names; the manifest, and the batch.
            assert first.total == 10
            assert first.seconds < 0.55
            bucket.append("ingest")

    bucket.run(main)


def test_a_run_with_available_now_takes_few_requests() -> None:
    bucket = SimulatedBucket()

    def main() -> None:
        query = SimulatedQuery(bucket, gcEnabled="false")
        query.drain()
        query.stream.stop()
        bucket.append("ingest")

        query = SimulatedQuery(bucket, query.offset, gcEnabled="false")
        with bucket.spent(query.store) as first:
            query.stream.prepare_available_now()
            assert query.trigger()
        assert first.total <= 14
        assert first.seconds < 0.8
        assert not query.trigger()
        query.stream.stop()
        assert query.store.requests <= 20

    bucket.run(main)


def test_a_query_of_a_topic_opens_its_partitions_at_the_same_time() -> None:
    bucket = SimulatedBucket(16)

    def main() -> None:
        query = SimulatedQuery(bucket, gcEnabled="false")
        with bucket.spent(query.store) as first:
            assert query.trigger()
        assert query.store.probes == 0
        assert query.store.refusals <= 16  # Threads may send it at the same time.
        assert first.total <= 16 * 12
        assert first.seconds < 1.0
        query.stream.stop()

    bucket.run(main)
