from __future__ import annotations

import copy
import inspect
import pickle

import pytest

from opendata_buffer import errors
from opendata_buffer.errors import OpenDataBufferError
from opendata_buffer.hints import Action, Hint, QueueName, Surface

EXAMPLES: list[OpenDataBufferError] = [
    errors.InvalidInput("bad"),
    errors.RetryLater("?"),
    errors.OwnershipLost("?"),
    errors.DataError("?"),
    errors.ClaimLost(7),
    errors.PrefixConflict("ingest", "b/manifest", "a/manifest"),
    errors.UnsafeStore("no CAS"),
    errors.StorageError("?"),
    errors.TransientStorageError("slow"),
    errors.PermanentStorageError("denied"),
    errors.ObjectNotFound("ingest/x.batch", "s3://b"),
    errors.Conflict("ingest/manifest", 12, 60.0),
    errors.CommitStateUnknown("ingest/manifest", 5, ("ingest/x.batch",), 9, "answer lost"),
    errors.QueueFull("ingest/manifest", 100, 90, 7, 60_000),
    errors.Fenced("ingest/manifest", 7, 8),
    errors.Drained("p-00001/manifest"),
    errors.Superseded("query-1", 7),
    errors.CorruptData("?"),
    errors.CorruptManifest("?"),
    errors.CorruptBatch("?"),
    errors.PoisonBatch(3, "ingest/x.batch", "why"),
    errors.MalformedRecord(3, 7, "ingest/x.batch", "why", b"{"),
    errors.BatchMissing(3, "ingest/x.batch", "gone"),
    errors.BatchUnreadable(3, "ingest/x.batch", "zstd"),
    errors.ForeignLocation(3, "secret/x", "outside"),
    errors.QueueReset("?"),
    errors.DataLoss("ingest/manifest", 3, 9, "hint"),
    errors.FlushFailed(2, "denied"),
    errors.Closed("?"),
]


def test_every_error_has_an_example_here() -> None:
    classes = {
        cls
        for _, cls in inspect.getmembers(errors, inspect.isclass)
        if issubclass(cls, OpenDataBufferError) and cls is not OpenDataBufferError
    }
    assert classes == {type(example) for example in EXAMPLES}
    assert {cls.__name__ for cls in classes} | {"OpenDataBufferError"} == set(errors.__all__)
    assert issubclass(errors.InvalidInput, ValueError)


def test_the_four_groups_of_errors_are_distinguished() -> None:
    groups = (errors.InvalidInput, errors.RetryLater, errors.OwnershipLost, errors.DataError)
    for error in EXAMPLES:
        assert sum(isinstance(error, group) for group in groups) <= 1
        assert error.retryable is isinstance(error, errors.RetryLater)
    other = {type(error).__name__ for error in EXAMPLES if not isinstance(error, groups)}
    assert other == {
        "StorageError", "PermanentStorageError", "ObjectNotFound", "CommitStateUnknown",
        "Drained", "FlushFailed", "Closed",
    }  # fmt: skip


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
def test_every_error_survives_pickling_with_its_values(error: OpenDataBufferError) -> None:
    for other in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(other) is type(error)
        assert str(other) == str(error)
        assert vars(other) == vars(error)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (errors.Fenced("ingest/manifest", 7, 8), ["7", "8", "ingest/manifest", "Stop this one"]),
        (
            errors.Fenced("ingest/_readers/billing.json", 7, 8),
            ["reader 'billing'", "epoch 7", "epoch 8", "reset with --force", "name of its own"],
        ),
        (errors.Fenced("queue/of.json", 7, 8), ["owns the queue", "Stop this one"]),
        (
            errors.PrefixConflict("ingest", "b/manifest", "a/manifest"),
            ["a/manifest", "b/manifest", "data_path_prefix"],
        ),
        (
            errors.CommitStateUnknown("m", 5, ("x.batch",), 9, "answer lost"),
            ["sequence 5", "next sequence 9", "x.batch", "Do not delete", "answer lost"],
        ),
        (errors.QueueFull("m", 100, 90, 7, 60_000), ["100 bytes", "90", "7 batches", "60 s"]),
        (errors.QueueFull("m", 100, 90, 7, None), ["7 batches wait for the consumer. Start"]),
        (errors.BatchMissing(3, "x.batch", "gone"), ["batch 3", "x.batch", "gone", "skip(3)"]),
        (errors.DataLoss("m", 3, 9), ["sequence 3", "starts at 9", "6 batches"]),
        (
            errors.DataLoss("m", 3, 109, skipped=[(0, 1), (9, 109), (200, 300)]),
            ["starts at 109: the manifest was rebuilt", "9 to 108 never held", "6 batches before"],
        ),
        (
            errors.DataLoss("p/_readers/x.json", 50, 109, skipped=[(9, 109)]),
            ["continues at 109: the manifest was rebuilt. Sequences 50 to 108 never held batches."],
        ),
        (errors.Conflict("m", 12, 60.0), ["12 attempts", "60.0 s", "Nothing was written"]),
        (errors.FlushFailed(2, "denied"), ["2 produce() calls", "denied. P", "new producer"]),
        (errors.FlushFailed(2, "denied."), ["denied. Produce"]),
        (
            errors.FlushFailed(5, "answer lost", 2),
            ["5 produce() calls", "2 of them may be", "CommitStateUnknown", "of all others again"],
        ),
    ],
)
def test_messages_name_the_values_and_the_fix(error: Exception, words: list[str]) -> None:
    for word in words:
        assert word in str(error)


def test_an_error_has_a_problem_and_hints_and_shows_both() -> None:
    error = errors.Conflict("ingest/manifest", 12, 60.0)
    assert error.hints == (Hint(Action.LET_FEWER_WRITE),)
    assert "timeout" not in error.problem
    assert error.problem.endswith("Nothing was written")
    assert str(error) == f"{error.problem}. {error.hints[0]}"
    assert error.text(Surface.SHELL) == str(error).replace("timeout_ms", "--timeout-ms")


def test_the_problem_has_the_sentence_after_a_hint() -> None:
    problem = errors.QueueFull("m", 100, 90, 7, None).problem
    assert problem.endswith("7 batches wait for the consumer. Nothing was appended.")


def test_an_error_is_shown_in_the_words_of_its_surface_also_after_pickling() -> None:
    error = errors.ClaimLost(7)
    error.surface = Surface.SHELL
    for other in (pickle.loads(pickle.dumps(error)), copy.copy(error), errors.copied(error)):
        assert "--claim-timeout-ms" in str(other)
    assert "--" not in str(errors.ClaimLost(7))


def test_the_caller_that_knows_the_queue_completes_the_command() -> None:
    error = errors.BatchMissing(3, "ingest/x.batch", "gone")
    assert "skip STORE 3'" in error.text(Surface.SHELL)
    queue = QueueName("s3://bucket", "p/manifest", (("data_path_prefix", "p"),))
    named = error.at(queue)
    assert named is error
    assert "'opendata-buffer skip s3://bucket --data-path-prefix p 3'" in named.text(Surface.SHELL)
    assert "skip(3)" in str(named)


def test_an_action_is_added_to_an_error_once() -> None:
    error = errors.QueueReset("went backwards").add(Hint(Action.ACCEPT_LOSS))
    assert error.add(Hint(Action.ACCEPT_LOSS)).hints == (Hint(Action.ACCEPT_LOSS),)


def test_a_failed_flush_repeats_the_hints_of_its_cause() -> None:
    cause = errors.Conflict("m", 12, 60.0)
    error = errors.FlushFailed(2, cause.problem, hints=cause.hints)
    assert [hint.action for hint in error.hints] == [Action.LET_FEWER_WRITE, Action.PRODUCE_AGAIN]
    assert "--timeout-ms" in error.text(Surface.SHELL)
