"""A group of batches on its way into the manifest."""

from __future__ import annotations

import pytest

from opendata_buffer.errors import QueueFull
from opendata_buffer.formats.manifest import Manifest, NewEntry
from opendata_buffer.queue.cas import OutcomeUnknown
from opendata_buffer.queue.queue import Append


def entry(n: int) -> NewEntry:
    return NewEntry(f"ingest/{n:03d}.batch")


def anything(before: Manifest, after: Manifest) -> None:
    assert after.next_sequence > before.next_sequence


def group(*numbers: int) -> Append[str]:
    return Append([entry(n) for n in numbers], anything, None)


BEFORE = Manifest.empty().append([entry(0)])


def test_the_group_stands_behind_what_is_queued_and_knows_where() -> None:
    append = group(1, 2)
    assert append.decide(BEFORE).locations() == [entry(n).location for n in range(3)]
    assert (append.sequence, append.mark(), append.stopped) == (1, 1, None)


def test_f1_f2_the_group_is_found_wherever_it_landed() -> None:
    append = group(1, 2)
    append.decide(BEFORE)
    late = BEFORE.append([entry(7)]).append([entry(1), entry(2)]).append([entry(8)])
    assert append.find(late, [1])
    assert append.sequence == 2
    # A consumer drops it from its front: the last of it is looked for.
    assert append.find(late.drop_through(2), [1])
    assert append.sequence == 2


def test_f2_a_group_that_is_not_there_was_not_appended_unless_it_may_have_been_dequeued() -> None:
    append = group(1, 2)
    append.decide(BEFORE)
    assert not append.find(None, [])
    assert not append.find(BEFORE, [1])
    others = BEFORE.append([entry(7), entry(8), entry(9)])
    with pytest.raises(OutcomeUnknown, match="dequeued since"):
        append.find(others.drop_through(1), [1])
    assert not append.find(others.drop_through(1), [])


def test_a_guard_that_stops_it_changes_nothing_until_it_lets_it_go() -> None:
    answers = iter(["wait", None])
    append = Append([entry(1)], anything, lambda before: next(answers))
    assert append.decide(BEFORE) is BEFORE
    assert (append.stopped, append.sequence) == ("wait", -1)
    assert append.decide(BEFORE).entry_count == 2
    assert (append.stopped, append.sequence) == (None, 1)


def test_what_the_check_refuses_goes_nowhere() -> None:
    def full(before: Manifest, after: Manifest) -> None:
        raise QueueFull("ingest/manifest", after.size, 10, before.entry_count, None)

    append: Append[str] = Append([entry(1)], full, None)
    with pytest.raises(QueueFull):
        append.decide(BEFORE)
    assert append.sequence == -1
