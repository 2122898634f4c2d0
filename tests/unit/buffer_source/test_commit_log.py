"""What the order of Spark's calls proves about its commit log."""

from __future__ import annotations

import pytest

from buffer_source.commit_log import FIRST_BATCH_LOGGED_S, CommitLog, Tracking
from buffer_source.partitions import ONLY, PartitionOffset, SourceOffset

SYNCHRONOUS, ASYNCHRONOUS, UNKNOWN = Tracking.SYNCHRONOUS, Tracking.ASYNCHRONOUS, Tracking.UNKNOWN

OFFSETS: dict[str, SourceOffset | None] = {"-": None}
OFFSETS |= {name: SourceOffset({ONLY: PartitionOffset(ord(name), 0)}) for name in "ABCD"}


def after(calls: str) -> CommitLog:
    """Return the log after some calls: ``hA`` is latestOffset(A), ``cA`` commit(A).

    ``pA`` is partitions(A). The initial offset is ``-``.
    """
    log = CommitLog()
    for call in calls.split():
        offset = OFFSETS[call[1]]
        if call[0] == "h":
            log.holds(offset, 0.0)
        elif call[0] == "p":
            log.planned(offset)
        else:
            assert offset is not None
            log.committed(offset)
    return log


def test_a_normal_query_is_known_by_the_commits_before_its_batches() -> None:
    assert not after("h- p-").holds(OFFSETS["A"], 0.1)
    log = after("h- p- hA cA pA hB cB pB")
    assert log.tracking is SYNCHRONOUS
    assert log.holds(OFFSETS["C"], 0.2)


@pytest.mark.parametrize(
    ("calls", "tracking"),
    [
        # Spark's writer thread was done with batch 1 before its main thread looked for commits.
        ("h- p- hA cA pA", UNKNOWN),
        ("h- p- hA cA pA hB pB", ASYNCHRONOUS),
        # df.union(df): Spark asks for the partitions of each micro-batch once for each scan.
        ("h- p- p- hA cA pA pA", UNKNOWN),
        ("h- p- p- hA cA pA pA hB pB pB", ASYNCHRONOUS),
        # A second batch without a commit.
        ("h- p- hA pA", ASYNCHRONOUS),
        # A commit of an older offset than the one that was handed over; and it stays known.
        ("h- p- hA cA pA hB cA", ASYNCHRONOUS),
        ("h- p- hA cA pA hB cA pB hC cC pC hD cD pD", ASYNCHRONOUS),
        # A replay after a crash has no commit and shows nothing.
        ("pA", UNKNOWN),
        ("pA hB cB pB", UNKNOWN),
        ("pA hB cB pB hC cC pC", SYNCHRONOUS),
    ],
)
def test_what_calls_show_of_the_tracking(calls: str, tracking: Tracking) -> None:
    log = after(calls)
    assert log.tracking is tracking
    # In the second batch and later no time proves what the calls do not.
    if "h-" in calls and tracking is not SYNCHRONOUS:
        log.holds(OFFSETS["B"], 1.0)
        assert not log.holds(OFFSETS["B"], 1000.0)


def test_a_restart_hands_over_what_the_log_holds() -> None:
    assert CommitLog().holds(OFFSETS["B"], 0.0)
    assert not CommitLog().holds(None, 0.0)


@pytest.mark.parametrize("calls", ["p-", "p- p-"])
def test_time_proves_the_first_batch_of_a_run_and_no_later_one(calls: str) -> None:
    log = after(calls)
    assert not log.holds(OFFSETS["A"], 5.0)
    assert log.holds(OFFSETS["A"], 5.0 + FIRST_BATCH_LOGGED_S)
    log = after(f"{calls} pB")
    assert not log.holds(OFFSETS["C"], 0.0)
    assert not log.holds(OFFSETS["C"], FIRST_BATCH_LOGGED_S)
