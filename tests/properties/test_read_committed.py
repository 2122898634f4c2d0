"""A reader delivers each committed message once, for any producers and any restarts.

A script defines the messages of each producer, in order, and whether they are committed. Hypothesis
interleaves the scripts, writes messages twice, and restarts the reader. The expected messages
follow from the scripts alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from opendata_buffer.consumer.isolation import ReadCommitted, TransactionFilter
from opendata_buffer.formats.batch import Transaction, batch_key
from opendata_buffer.messages import (
    ACK_TXN,
    CONTINUE_TXN,
    FINAL,
    OUTSIDE_TXN,
    build_uuid,
    undecided,
)
from opendata_buffer.testing.runtime import ManualRuntime

_names = ManualRuntime(1_767_225_600_000)
COMMIT, ROLL_BACK, ABANDON, OUTSIDE = "commit", "roll back", "abandon", "outside"


@dataclass(frozen=True)
class Written:
    """One message of a script. The reader must find out whether it ``counts``."""

    producer: int
    clock: int
    flags: int
    counts: bool


@st.composite
def scripts(draw: st.DrawFn, producer: int) -> list[Written]:
    """Draw the messages of one producer in order, including duplicates."""
    script: list[Written] = []
    clock = acked = draw(st.integers(1, 50))
    repeatable: list[Written] = []
    fates = draw(st.lists(st.sampled_from([COMMIT, ROLL_BACK, OUTSIDE]), max_size=4))
    fates += draw(st.sampled_from([[], [ABANDON], ["final"], ["final"]]))
    for fate in fates:
        size = 1 if fate == OUTSIDE else draw(st.integers(0 if fate == COMMIT else 1, 4))
        own: list[Written] = []
        for _ in range(size):
            clock += draw(st.integers(1, 3))
            flags = OUTSIDE_TXN if fate == OUTSIDE else CONTINUE_TXN
            own.append(Written(producer, clock, flags, fate in (COMMIT, OUTSIDE, "final")))
            script.append(own[-1])
            # Duplicates of committed messages and of the current transaction.
            again = st.sampled_from([*repeatable, *own])
            script += draw(st.lists(again, max_size=2))
        if fate in (COMMIT, "final"):
            clock += 1
            acked = clock
            script.append(
                Written(producer, clock, ACK_TXN | (FINAL if fate == "final" else 0), False)
            )
        elif fate == ROLL_BACK:
            script.append(Written(producer, acked, ACK_TXN, False))
        elif fate == OUTSIDE:
            acked = clock
        if fate in (COMMIT, ROLL_BACK):
            script += [script[-1]] * draw(st.integers(0, 1))
        if fate in (COMMIT, OUTSIDE):
            repeatable += own
    return script


@st.composite
def logs(draw: st.DrawFn) -> list[tuple[str, Written | None]]:
    """Draw locations in queue order with their messages; None is a batch without a message."""
    producers = draw(st.integers(1, 3))
    queues = [draw(scripts(producer)) for producer in range(producers)]
    order = draw(
        st.permutations([at for at, queue in enumerate(queues) for _ in queue])
        if any(queues)
        else st.just([])
    )
    waiting = [iter(queue) for queue in queues]
    log: list[tuple[str, Written | None]] = []
    for at in order:
        each = next(waiting[at])
        identity = build_uuid(b"\1PROD" + bytes([each.producer]), each.clock, each.flags)
        txn = Transaction("app", each.clock) if each.producer == 1 else None
        log.append((batch_key("ingest", _names.ulid_at(0), txn, identity), each))
        other = draw(st.sampled_from([None, None, None, "plain", 1, 2]))
        if other == "plain":
            log.append((batch_key("ingest", _names.ulid_at(0)), None))
        elif isinstance(other, int):
            old = Transaction("old", other)
            log.append((batch_key("ingest", _names.ulid_at(0), old), None))
    return log


@settings(deadline=None)
@given(logs(), st.integers(0, 2**40), st.sampled_from([1, 2, 3, 4096]))
def test_any_interleaving_with_any_restarts_gives_each_committed_message_once(
    log: list[tuple[str, Written | None]], restarts: int, buffer: int
) -> None:
    entries = [(at, location) for at, (location, _) in enumerate(log)]
    acknowledged = 0

    def replay(begin: int, end: int) -> Iterable[tuple[int, str]]:
        assert acknowledged <= begin < end, "acknowledged entries have left the manifest"
        return entries[begin:end]

    Small = type("Small", (ReadCommitted,), {"buffer": buffer})  # noqa: N806  # a class
    rule, steady = Small("ingest"), ReadCommitted("ingest")
    filtered = TransactionFilter("ingest")
    delivered: list[int] = []
    for sequence, location in entries:
        now = rule.offer(sequence, location, replay)
        assert now == sorted(now)
        # Planning again gives the same result, whatever the reader has in memory.
        assert now == steady.offer(sequence, location, replay)
        assert rule.to_dict() == steady.to_dict()
        passes = filtered.offer(sequence, location)
        if log[sequence][1] is None:
            assert now == ([sequence] if passes else [])
        delivered += now
        acknowledged = rule.stable_end(sequence + 1)
        open_now = undecided(entries[: sequence + 1], "ingest")
        assert acknowledged == min(
            [sequence + 1, *(transaction.first_sequence for transaction in open_now.values())]
        )
        if restarts >> sequence & 1:
            state = json.loads(json.dumps(rule.to_dict()))
            rule = Small.from_dict(state, "ingest")
        elif restarts >> sequence & 2:
            rule = rule.copy()

    assert len(set(delivered)) == len(delivered)
    for producer in range(3):
        wanted = list(
            dict.fromkeys(
                entry.clock
                for _, entry in log
                if entry and entry.counts and entry.producer == producer
            )
        )
        found = [
            each.clock for at in delivered if (each := log[at][1]) and each.producer == producer
        ]
        assert found == wanted


@settings(deadline=None)
@given(logs())
def test_the_state_keeps_only_producers_that_have_not_sent_their_final_message(
    log: list[tuple[str, Written | None]],
) -> None:
    rule = ReadCommitted("ingest")
    for sequence, (location, _) in enumerate(log):
        rule.offer(sequence, location, lambda begin, end: [])
    ended = {entry.producer for _, entry in log if entry and entry.flags & FINAL}
    seen = {entry.producer for _, entry in log if entry}
    remembered = rule.to_dict().get("producers", {})
    assert {bytes.fromhex(name)[-1] for name in remembered} == seen - ended
