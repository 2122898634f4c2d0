from __future__ import annotations

import pytest

from buffer_source.options import Action, BadBatchPolicy
from opendata_buffer.errors import BatchMissing, BatchUnreadable, ForeignLocation, PoisonBatch

MISSING = BatchMissing(3, "ingest/a.batch", "its object does not exist")
CORRUPT = BatchUnreadable(3, "ingest/a.batch", "bad magic")
FOREIGN = ForeignLocation(3, "other/a.batch", "outside")


@pytest.mark.parametrize(
    ("policy", "missing", "corrupt"),
    [
        (BadBatchPolicy(), Action.FAIL, Action.FAIL),
        (BadBatchPolicy(missing=Action.PASS_BY), Action.PASS_BY, Action.FAIL),
        (BadBatchPolicy(corrupt=Action.QUARANTINE), Action.FAIL, Action.QUARANTINE),
    ],
)
def test_each_fault_has_an_action_of_its_own_and_a_foreign_batch_always_fails(
    policy: BadBatchPolicy, missing: Action, corrupt: Action
) -> None:
    assert policy.action(MISSING) is missing
    assert policy.action(CORRUPT) is corrupt
    assert policy.action(FOREIGN) is Action.FAIL


@pytest.mark.parametrize(
    ("error", "hint"),
    [
        (BatchMissing(3, "a", "gone"), "failOnDataLoss set to false"),
        (BatchUnreadable(3, "a", "bad"), "corruptBatches set to quarantine"),
    ],
)
def test_an_error_that_ends_the_query_names_the_option_that_would_not(
    error: PoisonBatch, hint: str
) -> None:
    BadBatchPolicy().action(error)
    assert hint in str(error)


def test_the_option_is_named_once_however_often_the_policy_is_asked() -> None:
    error = BatchMissing(3, "a", "gone")
    for _ in range(2):
        BadBatchPolicy().action(error)
    assert str(error).count("failOnDataLoss") == 1


def test_a_batch_is_checked_to_its_end_only_where_it_may_be_passed_by() -> None:
    assert not BadBatchPolicy(missing=Action.PASS_BY).checks_first
    assert BadBatchPolicy(corrupt=Action.QUARANTINE).checks_first
