"""What Spark has logged, inferred from the order of its calls."""

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


def test_a_synchronous_query_is_recognized_by_the_commits_before_its_batches() -> None:
    assert not after("h- p-").holds(OFFSETS["A"], 0.1)
    log = after("h- p- hA cA pA hB cB pB")
    assert log.tracking is SYNCHRONOUS
    assert log.holds(OFFSETS["C"], 0.2)


@pytest.mark.parametrize(
    ("calls", "tracking"),
    [
        # Spark's writer thread finished batch 1 before its main thread looked for commits.
        ("h- p- hA cA pA", UNKNOWN),
        ("h- p- hA cA pA hB pB", ASYNCHRONOUS),
        # df.union(df): Spark asks for the partitions of each micro-batch once per scan.
        ("h- p- p- hA cA pA pA", UNKNOWN),
        ("h- p- p- hA cA pA pA hB pB pB", ASYNCHRONOUS),
        # A second batch without a commit.
        ("h- p- hA pA", ASYNCHRONOUS),
        # The commit is older than the offset that was returned. The result stays known.
        ("h- p- hA cA pA hB cA", ASYNCHRONOUS),
        ("h- p- hA cA pA hB cA pB hC cC pC hD cD pD", ASYNCHRONOUS),
        # A replay after a crash has no commit and proves nothing.
        ("pA", UNKNOWN),
        ("pA hB cB pB", UNKNOWN),
        ("pA hB cB pB hC cC pC", SYNCHRONOUS),
    ],
)
def test_the_calls_show_the_kind_of_progress_tracking(calls: str, tracking: Tracking) -> None:
    log = after(calls)
    assert log.tracking is tracking
    # From the second batch on, waiting proves nothing that the calls do not prove.
    if "h-" in calls and tracking is not SYNCHRONOUS:
        log.holds(OFFSETS["B"], 1.0)
        assert not log.holds(OFFSETS["B"], 1000.0)


def test_a_restart_passes_an_offset_that_is_in_the_log() -> None:
    assert CommitLog().holds(OFFSETS["B"], 0.0)
    assert not CommitLog().holds(None, 0.0)


@pytest.mark.parametrize("calls", ["p-", "p- p-"])
def test_waiting_proves_only_the_first_batch_of_a_run(calls: str) -> None:
    log = after(calls)
    assert not log.holds(OFFSETS["A"], 5.0)
    assert log.holds(OFFSETS["A"], 5.0 + FIRST_BATCH_LOGGED_S)
    log = after(f"{calls} pB")
    assert not log.holds(OFFSETS["C"], 0.0)
    assert not log.holds(OFFSETS["C"], FIRST_BATCH_LOGGED_S)
