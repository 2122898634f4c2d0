"""What a producer may hold, and when it is full."""

from __future__ import annotations

from dataclasses import dataclass

from opendata_buffer.producer.accumulator import Budget
from opendata_buffer.producer.handle import Completion
from opendata_buffer.producer.ordered_uploads import Upload
from opendata_buffer.testing.runtime import ManualRuntime


@dataclass
class Waiting:
    held: int = 0
    calls: int = 0


def upload(held: int, calls: int) -> Upload:
    return Upload(completion=Completion(ManualRuntime()), held=held, calls=calls, deadline=1.0)


def test_f33_what_waits_and_what_is_on_its_way_count_until_it_is_told() -> None:
    waiting = Waiting(held=30, calls=3)
    budget = Budget(waiting, 100, 5)
    sent = upload(30, 3)
    waiting.held = waiting.calls = 0
    budget.take(sent)
    waiting.held, waiting.calls = 10, 1
    assert (budget.held, budget.calls) == (40, 4)
    budget.give_back(sent)
    assert (budget.held, budget.calls) == (10, 1)


def test_it_is_full_by_bytes_and_by_calls() -> None:
    waiting = Waiting(held=60, calls=1)
    assert Budget(waiting, 100, None).has_room(40)
    assert not Budget(waiting, 100, None).has_room(41)
    assert Budget(waiting, 100, 2).has_room(40)
    assert not Budget(waiting, 100, 1).has_room(40)


def test_a_call_larger_than_all_of_it_comes_in_alone() -> None:
    waiting = Waiting()
    budget = Budget(waiting, 100, None)
    assert budget.has_room(1_000)
    waiting.held = 1
    assert not budget.has_room(1_000)


def test_a_run_may_take_what_is_free_and_nothing_where_each_call_counts() -> None:
    assert Budget(Waiting(held=60), 100, None).room_for_run == 40
    assert Budget(Waiting(held=60), 100, 1_000).room_for_run == 0
