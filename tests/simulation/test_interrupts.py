"""Ctrl-C, or any error that a signal's handler raises, in the middle of a call (failure F30)."""

from __future__ import annotations

from opendata_buffer.config import ProducerConfig
from opendata_buffer.errors import Closed, FlushFailed
from opendata_buffer.producer.producer import Producer
from tests.simulation.actors import FAILURES, produce, run_readers, watch
from tests.simulation.scenario import simulate
from tests.simulation.world import Node, World
from tests.support.model import Record

SHARE = 0.5
"""Of the seeds; see conftest.py."""

CLOSE_S = 20.0
SLACK_S = 1.0


class Interrupted(BaseException):
    """What a handler raises: no library may swallow it."""


class Impatient:
    """A program that produces, is interrupted anywhere, closes its producer and begins again."""

    def __init__(self, world: World, lives: int) -> None:
        self._world = world
        self._left = lives
        self._next = 0
        self.interrupted = 0

    def run(self) -> None:
        while self._left > 0:
            self._left -= 1
            node = self._world.node("program")
            config = self._world.producer_config()
            program = node.runtime.spawn(lambda: self._live(node, config), "main")  # noqa: B023
            self._world.director.sleep(self._world.uniform(0, 3))
            self._world.simulation.interrupt(
                program, Interrupted(), after=self._world.draw(8) if self._left % 2 else 0
            )
            program.join()
            self._world.simulation.kill(node.runtime)  # as the end of the interpreter does

    def _live(self, node: Node, config: ProducerConfig) -> None:
        producer = None
        try:
            producer = self._world.patiently(
                node, lambda: Producer(config, store=node.store, runtime=node.runtime)
            )
            while True:
                self._produce(node, producer)
        except Interrupted:
            self.interrupted += 1
        began = node.runtime.monotonic()
        if producer is not None:
            try:
                producer.close(timeout=CLOSE_S)
            except FlushFailed as error:
                self._world.log(f"{node.name}: {error}")
        took = node.runtime.monotonic() - began
        if took > CLOSE_S + SLACK_S:
            self._world.fail(f"close(timeout={CLOSE_S}) took {took:.1f} s after an interruption")

    def _produce(self, node: Node, producer: Producer) -> None:
        size = 1 + self._world.draw(3)
        records = [Record("program", self._next + n) for n in range(size)]
        self._next += size
        handle = produce(self._world, producer, records)
        watch(self._world, handle, records, expected=(Closed,))
        try:
            if self._world.chance(0.2):
                producer.flush()
            elif self._world.chance(0.3):
                handle.watcher.await_durable()
        except FAILURES as error:
            self._world.log(f"{node.name}: {error}")
        self._world.work(node)


def interrupt(world: World) -> None:
    """One program after the other; what a handle calls durable arrives all the same."""
    world.ambushes = 0
    world.torments = ("outage", "short pause")
    program = Impatient(world, 6)
    run_readers(world)
    program.run()
    world.finish()
    if program.interrupted < 3:
        world.fail(f"only {program.interrupted} calls were interrupted")


def test_after_an_interruption_close_ends_in_time_and_what_is_durable_arrives(seed: int) -> None:
    simulate(seed, interrupt, "test_interrupts.py")
