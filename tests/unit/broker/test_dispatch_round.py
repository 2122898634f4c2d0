"""What one round of a dispatcher changes."""

from __future__ import annotations

from typing import Any

from opendata_buffer.broker.claims import Claims, Heartbeats
from opendata_buffer.broker.dispatch_round import MAX_ANSWER_BYTES, DispatchRound, ReadyBatches
from opendata_buffer.broker.protocol import ClaimRequest, FinishRequest
from opendata_buffer.config import ConsumerConfig
from opendata_buffer.consumer.cursors import BatchDescriptor
from opendata_buffer.formats.entries import Metadata
from opendata_buffer.quarantine import list_quarantine
from opendata_buffer.stores.memory import MemoryStore
from opendata_buffer.testing.runtime import ManualRuntime

CONFIG = ConsumerConfig(store="memory://unused")


class Table:
    """A queue of some batches, of which all are known, and the answers that were given."""

    def __init__(self, count: int, *, metadata: bytes = b"") -> None:
        self.runtime = ManualRuntime()
        self.store = MemoryStore()
        self.ready = ReadyBatches(self.store, CONFIG, self.runtime)
        self.heartbeats = Heartbeats(self.runtime.condition(), lambda: float("-inf"))
        self.claims = Claims(1, 0)
        self.ended: dict[int, str] = {}
        self.metadata = metadata
        self.ready.begin(0)
        self.append(count)

    def append(self, count: int) -> None:
        ranges = (Metadata(0, 0, self.metadata),) if self.metadata else ()
        found = [
            BatchDescriptor(each, f"ingest/{each}.batch", ranges)
            for each in range(self.ready.end, self.ready.end + count)
        ]

        class Found:
            def next_descriptors(self, _: int) -> list[BatchDescriptor]:
                return found

        self.ready.look_for(count, Found(), 0)  # type: ignore[arg-type]

    def turn(self, now: float = 0) -> DispatchRound:
        return DispatchRound(self.claims, self.ready, self.heartbeats, self.ended, now)

    def land(self, turn: DispatchRound) -> list[dict[str, Any]]:
        """As a dispatcher does once the claims are stored."""
        self.claims = turn.claims
        self.heartbeats.landed(turn.lapses)
        self.ready.rests.update(turn.rests)
        self.ended.update(turn.ended)
        return [body for _, body in turn.responses]

    def give(self, most: int = 1, **more: Any) -> list[dict[str, Any]]:
        turn = self.turn()
        assert turn.hand_out([claim(most=most, **more)], None) == []
        (body,) = self.land(turn)
        batches: list[dict[str, Any]] = body["batches"]
        return batches


def claim(
    number: int = 1, *, most: int = 1, until: float = 60, max_deliveries: int = 0
) -> ClaimRequest:
    return ClaimRequest(number, most, until, "worker", 30_000, max_deliveries, lambda _: None)


def finish(batch: dict[str, Any], how: str = "done", *, rest_ms: int = 0) -> FinishRequest:
    sequence, token = batch["sequence"], batch["token"]
    return FinishRequest(2, how, sequence, token, "torn", rest_ms, lambda _: None)


def sequences(batches: list[dict[str, Any]]) -> list[int]:
    return [each["sequence"] for each in batches]


def test_more_batches_are_looked_for_only_where_too_few_are_known() -> None:
    table = Table(1)
    asked: list[int] = []

    def look(count: int) -> None:
        asked.append(count)
        table.append(count)

    turn = table.turn()
    assert turn.hand_out([claim(most=1)], look) == []
    assert asked == []
    assert turn.hand_out([claim(most=3)], look) == []
    assert asked == [3]
    assert sequences(turn.responses[1][1]["batches"]) == [1, 2, 3]


def test_a_rest_that_is_over_is_forgotten_also_when_nobody_waits() -> None:
    """Or the dispatcher would find something to do at every look, and never sleep again."""
    table = Table(1)
    (batch,) = table.give()
    turn = table.turn()
    turn.finish(finish(batch, "release", rest_ms=500))
    table.land(turn)
    assert table.ready.rests == {0: 0.5}
    turn = table.turn(now=1)
    turn.hand_out([], None)
    table.land(turn)
    assert table.ready.rests == {}


def test_a_batch_larger_than_an_answer_goes_there() -> None:
    table = Table(1, metadata=bytes(MAX_ANSWER_BYTES))
    turn = table.turn()
    waits = claim()
    assert turn.hand_out([waits], None) == [waits]
    (report,) = list_quarantine(table.store, "ingest")
    assert "metadata is larger" in report.error
    assert turn.claims.frontier == 1
