from __future__ import annotations

import logging

import pytest

from buffer_source.micro_batch_stream import Progress
from opendata_buffer.consumer.fetch import BatchDescriptor


def test_counts_add_up_over_micro_batches(caplog: pytest.LogCaptureFixture) -> None:
    progress = Progress()
    with caplog.at_level(logging.WARNING):
        progress.planned(2, 30, missing=0, repeats=[])
    assert caplog.text == ""
    progress.planned(1, 5, missing=1, repeats=[BatchDescriptor(7, "a"), BatchDescriptor(9, "b")])
    progress.retried()
    assert progress.to_json() == {
        "batches": 3,
        "bytes": 35,
        "droppedRepeats": 2,
        "missing": 1,
        "quarantined": 0,
        "retries": 1,
    }
    assert "left out 2 of 4 batches, sequences 7 to 9" in caplog.text


def test_bytes_that_were_not_measured_are_not_made_up() -> None:
    progress = Progress()
    progress.planned(1, 5, missing=0, repeats=[])
    progress.planned(1, None, missing=0, repeats=[])
    progress.planned(1, 5, missing=0, repeats=[])
    assert (progress.batches, progress.bytes) == (3, None)
