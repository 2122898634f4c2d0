"""When an object may be written again."""

from __future__ import annotations

import pickle

from opendata_buffer.stores.gcs import MOST_KEYS, REMEMBERED_S, WriteRate


def test_a_store_that_refuses_nothing_is_never_waited_for() -> None:
    pace = WriteRate(1.0)
    assert pace.due("m", 5.0) == 0
    pace.taken("m", 5.0)
    assert pace.due("m", 5.0) == 0


def test_after_a_refusal_the_next_write_waits_for_its_time() -> None:
    pace = WriteRate(1.0)
    pace.taken("m", 5.0)
    pace.refused("m", 5.25)
    assert pace.due("m", 5.25) == 0.75
    assert pace.due("m", 6.5) == 0, "it is late already"
    pace.taken("m", 6.5)
    assert pace.due("m", 6.75) == 0.75
    assert pace.due("other", 6.75) == 0, "each object counts for itself"


def test_what_nobody_wrote_here_is_tried_at_once() -> None:
    pace = WriteRate(1.0)
    pace.refused("m", 5.0)
    assert pace.due("m", 5.0) == 0


def test_a_refusal_is_forgotten_in_time() -> None:
    pace = WriteRate(1.0)
    pace.taken("m", 0.0)
    pace.refused("m", 0.0)
    pace.taken("m", REMEMBERED_S)
    assert pace.due("m", REMEMBERED_S) == 1.0
    assert pace.due("m", REMEMBERED_S + 0.5) == 0


def test_it_holds_no_more_objects_than_it_says() -> None:
    pace = WriteRate(1.0)
    for number in range(3 * MOST_KEYS):
        pace.taken(f"{number}", 0.0)
        pace.refused(f"{number}", 0.0)
    assert len(pace._taken) <= MOST_KEYS
    assert len(pace._refused) <= MOST_KEYS
    assert pace.due(f"{3 * MOST_KEYS - 1}", 0.0) == 1.0


def test_another_process_begins_anew_for_its_clock_is_another() -> None:
    pace = WriteRate(1.0)
    pace.taken("m", 5.0)
    pace.refused("m", 5.0)
    assert pickle.loads(pickle.dumps(pace)).due("m", 5.0) == 0
