"""A queue whose manifest is lost, and that its operator starts over (failures F4, F27)."""

from __future__ import annotations

from collections.abc import Callable

from opendata_buffer.config import ConsumerConfig
from opendata_buffer.consumer.consumer import Consumer
from opendata_buffer.consumer.position import Position
from opendata_buffer.errors import QueueReset
from opendata_buffer.producer.producer import Producer
from opendata_buffer.queue.ownership import claim_for_writing
from tests.simulation.actors import FAILURES
from tests.simulation.scenario import simulated
from tests.simulation.world import MANIFEST, Node, World
from tests.support.model import Record
from tests.support.tuned import tuned

SHARE = 0.5
"""Of the seeds; see conftest.py."""


def until_reset(world: World, node: Node, call: Callable[[], object]) -> None:
    """Call until the lost manifest is noticed; anything but bad luck is a failure."""
    until = world.simulation.now + 3600
    while world.simulation.now < until:
        try:
            call()
        except QueueReset as error:
            world.log(f"{node.name}: {error}")
            return
        except FAILURES as error:
            world.log(f"{node.name}: {error}")
        node.runtime.sleep(world.uniform(0.1, 5))
    world.fail(f"{node.name} never noticed that the manifest is gone")


def write(producer: Producer, record: Record) -> None:
    producer.produce([record.encode()]).result()


def read(world: World, node: Node, reader: Consumer, count: int) -> int:
    """Take so many batches and acknowledge them; returns the last one's sequence."""
    last = -1
    for _ in range(count):
        batch = world.patiently(node, reader.next_batch, FAILURES)
        if batch is None:
            break
        last = batch.sequence
        world.model.sink.position = last
        world.patiently(node, lambda last=last: reader.ack(last), FAILURES)
    return last


@simulated
def test_f4_a_lost_manifest_stops_everybody_and_a_new_queue_is_not_taken_for_the_old(
    world: World,
) -> None:
    """Batches wait, the manifest goes, everybody stops; then the operator starts over."""
    world.grace_s = 60
    world.ambushes = 0  # nobody here is started again
    producing, consuming = world.node("producer"), world.node("consumer")
    config = world.producer_config()
    config = tuned(type(config), **vars(config), max_manifest_bytes=64 * 2**20)

    def producer() -> Producer:
        return world.producer(producing, config)

    def consumer(config: ConsumerConfig, position: Position | None = None) -> Consumer:
        return Consumer(config, position, store=consuming.store, runtime=consuming.runtime)

    first = world.patiently(producing, producer, FAILURES)
    count = 3 + world.draw(10)
    for number in range(count):
        world.patiently(
            producing, lambda number=number: write(first, Record("old", number)), FAILURES
        )
    reader = world.patiently(consuming, lambda: consumer(world.consumer_config()), FAILURES)
    taken = read(world, consuming, reader, 1 + world.draw(count - 1))
    position = reader.position_of(taken)
    # The marker notes how far the manifest is seldom: let it.
    world.patiently(producing, lambda: write(first, Record("old", count)), FAILURES)
    world.patiently(consuming, reader.flush, FAILURES)
    world.director.sleep(world.uniform(30, 300))
    waiting = {entry.location for entry in world.model.manifest.entries()}
    if not waiting:
        world.fail("nothing waits: the scenario tests nothing")

    world.memory.delete_many([MANIFEST])
    world.log("the manifest is lost")
    until_reset(world, producing, lambda: write(first, Record("void", 0)))
    until_reset(world, consuming, reader.next_batch)
    for make in (producer, lambda: consumer(world.consumer_config(), position)):
        until_reset(world, producing, make)
    world.director.sleep(5 * world.grace_s)
    # Whatever still ran had time to do harm: a new manifest, or a collection of what waits.
    kept = {info.key for info in world.memory.list("").objects}
    if not waiting <= kept:
        world.fail(f"collected without being read: {waiting - kept}")
    if MANIFEST in kept:
        world.fail("somebody made a new manifest")

    world.heal()
    world.model.start_over()
    restarted = world.node("restarted")
    claim_for_writing(restarted.store, config, runtime=restarted.runtime, recreate=True)
    again = world.producer(restarted, config)
    for number in range(count + 5):
        write(again, Record("new", number))
    # Its sequences have passed the old position, which only the queue's id can tell.
    if world.model.manifest.next_sequence <= position.sequence:
        world.fail("the new queue is too short to be mistaken for the old one")
    until_reset(world, consuming, lambda: consumer(world.consumer_config(), position))
    fresh = consumer(world.consumer_config())
    got = []
    while (batch := fresh.next_batch()) is not None:
        got += batch.entries
    if got != [Record("new", number).encode() for number in range(count + 5)]:
        world.fail(f"the new queue holds {got}")
