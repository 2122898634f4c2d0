"""The referees accept a few histories and refuse wrong ones, and seeded faults match the code."""

from __future__ import annotations

import json
import sys

import pytest

from opendata_buffer.queue.log import Log
from tests.referees import actors, faults, judges
from tests.referees.history import merged
from tests.referees.play import play


@pytest.fixture(scope="module", autouse=True)
def built():
    if (why := judges.missing()) is not None:
        pytest.skip(why)


@pytest.fixture(autouse=True)
def own_segments(monkeypatch):
    """Give the later tests the usual segments back: threads that play a log make them small."""
    for name in ("most_entries", "left_entries"):
        monkeypatch.setattr(Log, name, getattr(Log, name))


@pytest.mark.parametrize(
    ("kind", "where"),
    [
        ("queue", "processes"),
        ("log", "threads"),
        ("sink", "threads"),
        ("work", "s3"),
        ("serial", "threads"),
    ],
)
def test_the_referees_accept_a_history_of_the_library(kind, where):
    name, _, calls, wrong = judges.judged(kind, 1, where, 150)
    assert not wrong, f"{name} {wrong}"
    assert calls >= 50


@pytest.mark.parametrize("processes", [False, True])
def test_a_history_with_a_role_that_fails_is_not_accepted(processes, tmp_path, monkeypatch):
    """A role ended with an error of its own, such as a removed option, so the history fails."""

    def end(scene):
        raise TypeError("unknown option")

    monkeypatch.setitem(actors.ROLES, "sink", end)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(AssertionError, match="ended"):
        play("sink", 1, tmp_path / "history", calls=10, processes=processes, most_s=5)


OPEN = {"f": "open", "epoch": 1, "first": 0}
APPENDS = [{"f": "append", "record": f"r{n}", "sequence": n} for n in range(3)]


def read(*entries, **fields):
    found = [(sequence, f"r{record}", True) for sequence, record in entries]
    return {"f": "read", "epoch": 1, "max": 9, "entries": found, **fields}


def ack(through, **fields):
    return {"f": "ack", "epoch": 1, "through": through, **fields}


TAKEN = {"f": "open", "epoch": 2, "first": 2}
AT_0 = {"f": "open", "epoch": 2, "first": 0}
ALL = read((0, 0), (1, 1), (2, 2))


@pytest.mark.parametrize(
    ("calls", "accepted"),
    [
        ([ALL, ack(1), TAKEN], True),
        ([ALL, ack(1, how="unknown"), TAKEN], True),
        ([ALL, TAKEN], False),  # it begins after entries that were not acknowledged
        ([ALL, ack(2), TAKEN], False),
        ([ALL, ack(1), TAKEN, ack(2)], False),  # by a fenced consumer
        ([ALL, ack(1), TAKEN, ack(2, how="fail", fenced=2)], True),
        # Its answer was lost, and the next attempt found that another consumer took the queue over.
        ([ALL, ack(1, how="fail", fenced=2, until=99), TAKEN], True),
        ([ALL, AT_0, ack(1, how="fail", fenced=2), {**TAKEN, "epoch": 3}], False),
        ([read((0, 0), (2, 2))], False),
        ([read((0, 0), (1, 1), (2, 1))], False),
        ([read((0, 0), (1, 1))], False),  # not to the end
        ([read((0, 0), (1, 1), max=2), read((2, 2))], True),
        ([read((0, 0), max=1), ack(1)], False),
    ],
)
def test_porcupine_refuses_histories_that_a_queue_cannot_have(calls, accepted, tmp_path):
    since = iter(range(1, 100))
    history = [
        {"since": next(since), "until": next(since), "how": "ok", **call}
        for call in [OPEN, *APPENDS, *calls]
    ]
    assert (judges.by_porcupine(history, tmp_path, "queue") == []) is accepted


@pytest.mark.parametrize(
    ("first", "last", "seen", "named"),
    [
        ("ok", "ok", [["a", "b"], ["a", "b"], ["c"]], ""),
        ("fail", "ok", [["a", "b"], ["a", "b"], []], "G1a"),
        ("ok", "ok", [["a"], ["a", "b"], ["c"]], "G1b"),
        ("ok", "ok", [["a", "b"], ["a", "b", "b"], ["c"]], "duplicate-elements"),
        ("ok", "ok", [["a", "b"], ["a", "b"], []], "G-single"),
        ("unknown", "ok", [["a", "b"], ["a", "b"], []], "G-single"),
        ("unknown", "ok", [[], [], []], ""),
    ],
)
def test_adya_refuses_transactions_that_are_visible_in_part(first, last, seen, named, tmp_path):
    written = [["append", "0", "a"], ["append", "0", "b"], ["append", "1", "c"]]
    reads = [[["r", "0", seen[0]]], [["r", "0", seen[1]], ["r", "1", seen[2]], ["r", "2", []]]]
    history = [
        {"since": 1, "until": 2 if first != "unknown" else 99, "how": first, "value": written},
        {"since": 3, "until": 4, "how": "ok", "value": [["append", "2", "z"]]},
        {"since": 1, "until": 2, "how": "ok", "value": [["append", "1", "y"]]},
        {"since": 5, "until": 6, "how": "ok", "value": reads[0], "final": False},
        {"since": 7, "until": 8, "how": last, "value": reads[1], "final": True},
    ]
    history[4]["value"][1][2].insert(0, "y")
    history[4]["value"][2][2].append("z")
    wrong = judges.by_adya(history, tmp_path, "topic")
    assert (named in str(wrong)) if named else not wrong, wrong


def test_calls_of_a_process_that_was_killed_have_no_answer(tmp_path):
    lines = [
        {"t": 2, "p": "a", "i": 1, "type": "invoke", "f": "ack"},
        {"t": 9, "p": "a", "i": 1, "type": "ok"},
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "a.jsonl").write_text(text[:-5])
    (call,) = judges.paired(merged(tmp_path))
    assert (call["how"], call["until"]) == ("unknown", 3)


@pytest.mark.parametrize("name", faults.FAULTS)
def test_a_seeded_fault_fits_the_code(name):
    assert faults.faulty(name) != ""
