"""Collect a queue's batches once, or those of a topic, with its partitions that have left."""

from __future__ import annotations

from opendata_buffer.admin.observe import Observer
from opendata_buffer.config import ConsumerConfig
from opendata_buffer.gc import GarbageCollector, GcReport
from opendata_buffer.runtime import Runtime
from opendata_buffer.stores.base import Store
from opendata_buffer.topic.topic import Topic

__all__ = ["collect"]


def collect(
    store: Store,
    config: ConsumerConfig,
    topic: Topic | None,
    runtime: Runtime,
    *,
    dry_run: bool = False,
) -> GcReport:
    """One cycle of a collector in a queue, or in each partition of a topic.

    A partition that has left its topic has no consumer whose collector would do it. Once nothing
    of it waits any more, the topic remembers it no more.

    Args:
        store: Where they all are.
        config: Of the queue, or of the topic's root.
        topic: Whose partitions are meant; None for one queue.
        runtime: The clock.
        dry_run: Only read and plan; nothing is written.

    Returns:
        What was done, in all of them together.

    Raises:
        InvalidInput: A queue has no manifest.
        OpenDataBufferError: As :meth:`.GarbageCollector.run_once`; what was collected before is.
    """
    if topic is None:
        # Before the collector, which would claim the prefix for a manifest that is a typing error.
        Observer(store, config, runtime).manifest()
        return GarbageCollector(store, config, runtime=runtime).run_once(dry_run=dry_run)
    description = topic.read()
    report, done = GcReport(), list[str]()
    for name in (*description.names, *description.left):
        own = topic.config_of(name, config)
        if Observer(store, own, runtime).find() is None:
            # Nobody has written to it. (One that leaves gets a manifest when it is sealed.)
            continue
        found = GarbageCollector(store, own, runtime=runtime).run_once(dry_run=dry_run)
        report += found
        over = not (found.plan.waiting or found.plan.held or found.failed or found.abandoned)
        if over and name in description.left:
            done.append(name)
    if done and not dry_run:
        topic.forget_left(done)
    return report
