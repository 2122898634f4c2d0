from __future__ import annotations

from buffer_source.micro_batch_stream import FIRST_BATCH_LOGGED_S, CommitLog, Tracking
from buffer_source.offsets import Position

A, B, C, D = (Position(each, 0) for each in (1, 2, 3, 4))


def run(log: CommitLog, *starts: Position) -> None:
    """Batches of a normal query."""
    for start in starts:
        log.handed(start, 0.0)
        log.committed(start)
        log.planned(start)


def test_a_normal_query_is_known_by_the_commits_before_its_batches() -> None:
    log = CommitLog()
    assert not log.handed(None, 0.0)
    log.planned(None)
    assert not log.handed(A, 0.1)
    run(log, A, B)
    assert log.tracking is Tracking.SYNCHRONOUS
    assert log.handed(C, 0.2)


def test_a_log_that_lags_and_was_quick_once_is_not_taken_for_one_that_does_not() -> None:
    # Spark's writer thread was done with batch 1 before its main thread looked for commits.
    log = CommitLog()
    log.handed(None, 0.0)
    log.planned(None)
    run(log, A)
    assert not log.handed(B, 1.0)
    assert not log.handed(B, 1000.0)
    log.planned(B)
    assert log.tracking is Tracking.ASYNCHRONOUS


def test_a_query_that_scans_the_source_twice_proves_no_more_by_it() -> None:
    # df.union(df): Spark asks for the partitions of each micro-batch once for each scan.
    log = CommitLog()
    log.handed(None, 0.0)
    log.planned(None)
    log.planned(None)
    log.handed(A, 0.1)
    log.committed(A)  # The race, won once.
    log.planned(A)
    log.planned(A)
    assert log.tracking is Tracking.UNKNOWN
    assert not log.handed(B, 1000.0)
    assert not log.handed(B, 2000.0)
    log.planned(B)
    log.planned(B)
    assert log.tracking is Tracking.ASYNCHRONOUS


def test_two_scans_do_not_hide_that_the_first_batch_is_on_record_after_a_while() -> None:
    log = CommitLog()
    log.planned(None)
    log.planned(None)
    assert not log.handed(A, 5.0)
    assert log.handed(A, 5.0 + FIRST_BATCH_LOGGED_S)


def test_a_restart_hands_over_what_the_log_holds() -> None:
    log = CommitLog()
    assert log.handed(B, 0.0)


def test_time_proves_the_first_batch_of_a_run_and_no_later_one() -> None:
    log = CommitLog()
    log.planned(A)
    log.planned(B)
    assert log.tracking is Tracking.UNKNOWN
    assert not log.handed(C, 0.0)
    assert not log.handed(C, FIRST_BATCH_LOGGED_S)


def test_a_second_batch_without_a_commit_means_that_the_log_lags() -> None:
    log = CommitLog()
    log.handed(None, 0.0)
    log.planned(None)
    log.handed(A, 0.1)
    log.planned(A)
    assert log.tracking is Tracking.ASYNCHRONOUS
    assert not log.handed(B, 1000.0)
    assert not log.handed(B, 2000.0)


def test_a_commit_of_an_older_offset_means_that_the_log_lags() -> None:
    log = CommitLog()
    log.handed(None, 0.0)
    log.planned(None)
    run(log, A)
    log.handed(B, 0.2)
    log.committed(A)
    assert log.tracking is Tracking.ASYNCHRONOUS
    log.planned(B)
    run(log, C, D)
    assert log.tracking is Tracking.ASYNCHRONOUS
    assert not log.handed(D, 99.0)


def test_a_replay_after_a_crash_has_no_commit_and_tells_nothing() -> None:
    log = CommitLog()
    log.planned(A)
    assert log.tracking is Tracking.UNKNOWN
    run(log, B)
    assert log.tracking is Tracking.UNKNOWN
    run(log, C)
    assert log.tracking is Tracking.SYNCHRONOUS


def test_available_now_is_never_asynchronous() -> None:
    log = CommitLog()
    log.tracking = Tracking.SYNCHRONOUS
    log.handed(None, 0.0)
    log.planned(None)
    assert log.handed(A, 0.0)
