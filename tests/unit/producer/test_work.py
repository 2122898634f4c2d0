"""The line of what is to be uploaded."""

from __future__ import annotations

from opendata_buffer.producer.accumulator import UploadLine
from opendata_buffer.producer.batching import Batch
from opendata_buffer.producer.handle import Completion
from opendata_buffer.producer.ordered_uploads import Stage, Upload
from opendata_buffer.testing.runtime import ManualRuntime


def batch() -> Batch:
    return Batch(Completion(ManualRuntime()), 0.0)


def test_f5_what_grew_old_goes_first_and_has_its_bytes() -> None:
    line, batches = UploadLine(), [batch() for _ in range(2)]
    fresh = [each.upload(1.0) for each in batches]
    old = [batch().upload(1.0) for _ in range(2)]
    for upload, made in zip(fresh, batches, strict=True):
        line.enter(upload, made)
    line.enter_again(old)
    line.enter_again([])
    taken = [line.take() for _ in range(len(line))]
    assert [work.upload for work in taken] == [*old, *fresh]
    assert [work.batch for work in taken] == [None, None, *batches]


def test_what_was_given_up_leaves_the_line() -> None:
    line, uploads = UploadLine(), list[Upload]()
    for _ in range(3):
        made = batch()
        uploads.append(made.upload(1.0))
        line.enter(uploads[-1], made)
    uploads[1].stage = Stage.SETTLED
    line.drop_settled()
    assert [line.take().upload for _ in range(len(line))] == [uploads[0], uploads[2]]
