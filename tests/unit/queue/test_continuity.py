"""Whether a manifest continues what is known of its queue, and what is said if not."""

from __future__ import annotations

import pytest

from opendata_buffer.config import QueueConfig
from opendata_buffer.errors import DataLoss, InvalidInput, QueueReset
from opendata_buffer.formats.manifest import Manifest, NewEntry
from opendata_buffer.queue.rollback_checks import (
    Watermark,
    check_follows,
    check_reached,
    check_resume,
    vanished,
)

URL = "s3://bucket/root"
CONFIG = QueueConfig(store=URL, data_path_prefix="orders", manifest_path="orders/manifest")
REBUILD = "'opendata-buffer manifest rebuild s3://bucket/root --data-path-prefix orders'"


def at(next_sequence: int, epoch: int) -> Manifest:
    return Manifest.starting_at(next_sequence, epoch)


def test_f4_a_manifest_follows_only_forwards() -> None:
    check_follows(at(3, 1), at(3, 1), CONFIG, URL)
    check_follows(at(3, 1), at(5, 2), CONFIG, URL)
    for behind in (at(2, 1), at(5, 0)):
        with pytest.raises(QueueReset, match=r"went backwards: next sequence 3 -> ") as caught:
            check_follows(at(3, 1), behind, CONFIG, URL)
        assert REBUILD in str(caught.value)


def test_f4_what_the_marker_saw_tells_a_lost_manifest_from_one_that_never_was() -> None:
    check_reached(Watermark(3, 1), at(3, 1), CONFIG, URL)
    check_reached(Watermark(3, 1, 2, "orders/x.batch"), at(9, 4), CONFIG, URL)
    with pytest.raises(QueueReset, match="is gone from s3://bucket/root: it had reached next") as e:
        check_reached(Watermark(3, 1), None, CONFIG, URL)
    assert REBUILD in str(e.value)
    assert "recreate=True" in str(e.value)
    with pytest.raises(QueueReset, match="epoch 1 -> 0"):
        check_reached(Watermark(3, 1), at(7, 0), CONFIG, URL)


def test_f4_who_loses_a_manifest_in_use_is_told_how_to_get_it_back() -> None:
    error = vanished(CONFIG, URL)
    assert "'orders/manifest' in s3://bucket/root vanished" in str(error)
    assert REBUILD in str(error)


def resume(now: Manifest | None, last_acked: int, *, allow_data_loss: bool = False) -> None:
    check_resume(now, last_acked, CONFIG, URL, allow_data_loss=allow_data_loss)


def test_reading_goes_on_behind_what_is_queued_or_has_just_left() -> None:
    queued = at(5, 1).append([NewEntry("orders/a"), NewEntry("orders/b")])
    for last_acked in (4, 5, 6):
        resume(queued, last_acked)


def test_f4_f27_reading_does_not_go_on_behind_what_the_queue_never_had() -> None:
    with pytest.raises(QueueReset, match="'orders/manifest' does not exist in s3://bucket/root"):
        resume(None, 3)
    with pytest.raises(QueueReset, match=r"after sequence 5: .* ends at 4\. .* without a position"):
        resume(at(5, 1), 5)
    with pytest.raises(InvalidInput, match="last_acked_sequence is -1"):
        resume(at(5, 1), -1)


def test_what_somebody_else_dequeued_is_missed_unless_that_is_allowed() -> None:
    with pytest.raises(DataLoss, match=r"sequence 1 is needed .* starts at 5: 4 batches"):
        resume(at(5, 1), 0)
    resume(at(5, 1), 0, allow_data_loss=True)
