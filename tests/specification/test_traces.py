"""The specification allows every trace of the code, and rejects traces of faulty code.

A normal run checks a few short traces of each module. ``OPENDATA_BUFFER_SEEDS`` sets their number,
and ``./run test --nightly`` runs many.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.simulation.conftest import seeds
from tests.specification import trace_broker, trace_collector, trace_log, trace_v1_reader
from tests.specification.traces import Trace, Verdict, tla, validate
from tools import specification

RECORDERS: dict[str, Any] = {
    "Log": trace_log,
    "Collector": trace_collector,
    "Broker": trace_broker,
    "V1Reader": trace_v1_reader,
}
MUTATIONS = [
    (name, mutation) for name, recorder in RECORDERS.items() for mutation in recorder.MUTATIONS
]
SHARE = 0.1
"""Share of the nightly seeds. Each trace starts TLC, which takes two seconds."""


@pytest.fixture(autouse=True)
def tlc() -> Iterator[None]:
    """Skip without Java or TLC. Disable logging, which would format thousands of faults."""
    try:
        specification.java()
        specification.jar(get=False)
    except specification.NotThere as missing:
        pytest.skip(str(missing))
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def explain(name: str, seed: int, trace: Trace, verdict: Verdict) -> str:
    """Show the events around the unexplained one, and the command that repeats the trace."""
    shown = trace.events[max(0, verdict.reached - 10) : verdict.reached + 1]
    events = "\n".join(f"  {event}" for event in shown)
    return f"{verdict}\n{events}\n./run spec --trace {seed} {name}"


@pytest.mark.full
@pytest.mark.parametrize("seed", seeds(SHARE, 1))
@pytest.mark.parametrize("name", RECORDERS)
def test_the_specification_allows_every_trace_of_the_code(name: str, seed: int) -> None:
    trace = RECORDERS[name].record(seed)
    verdict = validate(trace)
    assert verdict.accepted, explain(name, seed, trace, verdict)
    assert verdict.reached == len(trace.events) > 40, "the trace is too short to prove anything"


@pytest.mark.parametrize("name", RECORDERS)
def test_the_traces_contain_every_kind_of_event(name: str) -> None:
    recorder = RECORDERS[name]
    found = {event["is"] for seed in range(12) for event in recorder.record(seed).events}
    assert found >= recorder.KINDS


@pytest.mark.full
@pytest.mark.parametrize(("name", "mutation"), MUTATIONS)
def test_a_trace_of_faulty_code_is_rejected_at_the_fault(name: str, mutation: str) -> None:
    recorder = RECORDERS[name]
    first, change, kinds = recorder.MUTATIONS[mutation]
    # The first seed shows the fault. After a change of the code a later seed may show it.
    for seed in range(first, first + 12):
        trace = recorder.record(seed, change)
        verdict = validate(trace)
        if not verdict.accepted:
            assert verdict.event.get("is") in kinds, explain(name, seed, trace, verdict)
            return
    pytest.fail(f"traces in which {mutation} were accepted")


def corrupt_answer(events: list[dict[str, Any]]) -> int:
    """Change an answer: report the first applied write as refused."""
    at = next(n for n, event in enumerate(events) if event.get("answer") == "applied")
    events[at] = {**events[at], "answer": "conflict"}
    return at


def corrupt_value(events: list[dict[str, Any]]) -> int:
    """Change a value: a read returns a manifest or an index that never existed."""
    looks = ("first", "changes")
    at = next(n for n, e in enumerate(events) if n > 20 and e["is"].startswith(("look", "read")))
    key = next(key for key in looks if key in events[at])
    events[at] = {**events[at], key: events[at][key] + 100}
    return at


@pytest.mark.full
@pytest.mark.parametrize("corrupt", [corrupt_answer, corrupt_value])
def test_a_trace_that_was_changed_is_rejected_at_the_change(
    corrupt: Callable[[list[dict[str, Any]]], int],
) -> None:
    trace = trace_log.record(1)
    events = list(trace.events)
    at = corrupt(events)
    verdict = validate(Trace(trace.module, events, trace.constants))
    assert (verdict.accepted, verdict.reached) == (False, at)
    assert verdict.event == events[at]


def test_values_are_written_as_tla() -> None:
    value = {"is": "trim", "first": 3, "readers": frozenset({"b", "a"}), "log": [1, True]}
    assert tla(value) == '[is |-> "trim", first |-> 3, readers |-> {"a", "b"}, log |-> <<1, TRUE>>]'
