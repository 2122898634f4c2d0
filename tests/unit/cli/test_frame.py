"""What a frame of ``top`` shows."""

from __future__ import annotations

import io

from rich.console import Console

from opendata_buffer.admin.broker import BrokerStatus, ClaimsStatus
from opendata_buffer.admin.overview import Overview, QueueLook
from opendata_buffer.admin.watch import Flow, View
from opendata_buffer.cli.frame import frame, sparkline
from opendata_buffer.queue.consumer_info import ConsumerInfo


def view_of(*queues: QueueLook, topic: str = "", failure: str | None = None, **more: Flow) -> View:
    overview = Overview(store="s3://bucket/root", topic=topic, monotonic=0.0, queues=queues)
    return View(
        overview=overview,
        age_seconds=12.0,
        flows={each.name: Flow() for each in queues} | more,
        history=(0, 50, 100),
        writers={"app orders": 0.0, "process AAAAAA": 4.0},
        failure=failure,
        failing_seconds=11.0,
    )


def shown(view: View, height: int | None = None, color: bool = False, width: int = 170) -> str:
    text = io.StringIO()
    system = "standard" if color else None
    console = Console(file=text, width=width, force_terminal=color, color_system=system)  # type: ignore[arg-type]
    console.print(frame(view, height, width))
    return text.getvalue()


def look(name: str = "ingest", backlog: int = 0, **more: object) -> QueueLook:
    return QueueLook(name=name, backlog=backlog, **{"writers": {}, **more})  # type: ignore[arg-type]


def test_a_queue_shows_backlog_age_rates_consumer_and_writers() -> None:
    queue = look(
        backlog=12_345,
        oldest_age_seconds=93.0,
        next_sequence=20_000,
        epoch=4,
        undecided=2,
        holder=ConsumerInfo(4, "worker-7", 4711, "Spark", "", 0),
        writers={"app orders": 12_345},
    )
    flow = Flow(arriving=1_234.5, leaving=0.0, arrived_ago=0.0, left_ago=63.0)
    said = shown(view_of(queue, ingest=flow))
    assert "s3://bucket/root  queue\n" in said
    assert "12,345 batches wait, the oldest 1 min 33 s old   in 1,234.5/s   out 0.0/s   ▁▅█" in said
    assert "epoch 4, Spark on worker-7 (4711), acknowledged 1 min 3 s ago" in said
    assert "producers 2: app orders (12,345 wait), process AAAAAA (4.0 s ago)" in said


def test_a_narrow_terminal_shows_names_and_numbers_whole() -> None:
    holder = ConsumerInfo(4, "a-host-with-a-long-name", 4711, "opendata-buffer consume", "", 0)
    queues = [
        look(f"p-{n:05}-04pn", 12_345, next_sequence=1_000, undecided=7, epoch=4, holder=holder)
        for n in range(3)
    ]
    lines = shown(view_of(*queues, topic="id"), width=80).splitlines()
    rows = lines[4:7]
    for n, row in enumerate(rows):
        assert row.split()[:2] == [f"p-{n:05}-04pn", "12,345"]
        assert row.split()[-1] == "7"
        assert "epoch 4" in row
        assert len(row) <= 80


def test_a_consumer_that_takes_nothing_for_long_is_coloured_and_an_idle_one_is_not() -> None:
    yellow = "\x1b[33m"
    stuck = look(backlog=3, oldest_age_seconds=93.0, epoch=1)
    assert f"{yellow}epoch 1" in shown(view_of(stuck), color=True)
    assert yellow not in shown(view_of(look(epoch=1)), color=True)
    fresh = look(backlog=3, oldest_age_seconds=3.0, epoch=1)
    assert yellow not in shown(view_of(fresh), color=True)
    none = look(backlog=3, oldest_age_seconds=3.0)
    assert f"{yellow}none so far" in shown(view_of(none), color=True)


def test_of_more_partitions_than_fit_the_fullest_are_shown_in_their_order() -> None:
    queues = [look(f"p-{n:05d}", backlog=n % 10) for n in range(40)]
    said = shown(view_of(*queues, topic="01J"), height=14 + 4)
    names = [line.split()[0] for line in said.splitlines() if line.startswith("p-")]
    assert names == ["p-00009", "p-00019", "p-00029", "p-00039"]
    assert "and 36 more" in said
    assert "topic, 40 partitions" in said
    everything = shown(view_of(*queues, topic="01J"))
    assert "p-00000" in everything
    assert "more" not in everything


def test_a_partition_that_drains_says_so() -> None:
    said = shown(view_of(look("p-00000"), look("p-00001", state="draining"), topic="01J"))
    assert "p-00001 (drains)" in said


def test_a_store_that_fails_is_told_first_with_the_age_of_what_follows() -> None:
    said = shown(view_of(look(backlog=3), failure="cannot read 'ingest/manifest': 503"))
    assert said.startswith(
        "the store fails since 11 s: cannot read 'ingest/manifest': 503 What follows is 12 s old."
    )
    assert "3 batches wait" in said


def test_brokers_workers_and_notes_have_lines_of_their_own() -> None:
    alive = BrokerStatus(
        term=2,
        id="b",
        address="ws://h:1",
        seen_ms=0,
        alive=True,
        clients=3,
        waiting=7,
        commits=10,
        appended=55,
        conflicts=1,
    )
    claims = ClaimsStatus(
        frontier=4, held=2, done=1, oldest_held=4, oldest_worker="w", oldest_deliveries=1
    )
    said = shown(view_of(look(broker=alive, claims=claims, notes=("look at this",))))
    assert "broker ws://h:1, term 2, 3 clients, 7 entries wait, 5.5 entries a write" in said
    assert "workers 2 batches held, 1 done out of order" in said
    assert "note: look at this" in said
    dead = BrokerStatus(
        term=2, id="b", address="ws://h:1", seen_ms=0, alive=False, reason="refused"
    )
    assert "DEAD or not reached: refused" in shown(view_of(look(broker=dead)))
    unasked = BrokerStatus(term=2, id="b", address="ws://h:1", seen_ms=0)
    assert "not asked" in shown(view_of(look(broker=unasked)))
    left = BrokerStatus(term=2, id="b", address="", seen_ms=0)
    assert "broker" not in shown(view_of(look(broker=left)))


def test_before_the_first_look_there_is_only_the_failure() -> None:
    view = View(
        overview=None,
        age_seconds=0.0,
        flows={},
        history=(),
        writers={},
        failure="no answer",
        failing_seconds=2.0,
    )
    assert shown(view) == "the store fails since 2.0 s: no answer\n"


def test_a_sparkline_goes_from_nothing_to_the_largest() -> None:
    assert sparkline([]) == ""
    assert sparkline([0, 0]) == "▁▁"
    assert sparkline([0, 1, 7]) == "▁▂█"
