"""Writes to a queue that another client keeps in its own layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from buffer_sink.foreach_batch import foreach_batch_writer
from buffer_sink.options import SinkOptions
from buffer_sink.writer import WriteRefused
from opendata_buffer.errors import InvalidInput
from opendata_buffer.formats.manifest import Manifest
from opendata_buffer.stores.open import open_store
from opendata_buffer.topic.topic import Topic
from tests.support.exporter import DATA, MANIFEST, export, there
from tests.unit.buffer_sink.test_writer import made_batch, made_stream, plan, rows

QUEUE = {"dataPathPrefix": DATA, "manifestPath": MANIFEST}


def files(root: Path) -> list[str]:
    """Return the objects of the store in this directory."""
    return [found.key for found in open_store(str(root)).list("").objects]


@pytest.mark.parametrize("made", [made_batch, made_stream])
def test_f51_a_write_over_the_batches_of_an_exporter_is_refused_before_its_first_upload(
    tmp_path: Path, made: Any
) -> None:
    batches = export(open_store(str(tmp_path)), b"a", b"b", b"c")
    before = files(tmp_path)
    with pytest.raises(WriteRefused, match=r"^PrefixConflict: ") as caught:
        made(tmp_path, dataPathPrefix=DATA)
    assert f'.option("manifestPath", "{MANIFEST}")' in str(caught.value)
    assert "manifest_path" not in str(caught.value)
    assert "createIfMissing" not in str(caught.value)
    assert files(tmp_path) == before
    assert there(open_store(str(tmp_path))) == batches


def test_a_write_with_the_exporter_s_manifest_appends_to_its_queue(tmp_path: Path) -> None:
    export(open_store(str(tmp_path)), b"a")
    options = SinkOptions.for_batch({"path": str(tmp_path), **QUEUE})
    assert options.one_queue
    made = plan(tmp_path)
    made = type(made)(options, made.columns, made.made).locate()
    made.append([made.upload(iter([rows("b")]), None)])
    manifest = Manifest.parse((tmp_path / MANIFEST).read_bytes())
    assert [entry.sequence for entry in manifest.entries()] == [0, 1]
    assert (tmp_path / DATA / "_owner.json").exists()


def test_a_queue_is_claimed_before_the_first_upload_of_a_write(tmp_path: Path) -> None:
    made_batch(tmp_path)
    assert files(tmp_path) == ["ingest/_owner.json"]


def test_foreach_batch_writer_takes_the_manifest_in_snake_case(tmp_path: Path) -> None:
    writer = foreach_batch_writer(
        str(tmp_path), txn_app_id="a", data_path_prefix=DATA, manifest_path=MANIFEST
    )
    assert writer.options == {**QUEUE, "txnAppId": "a"}


def test_a_manifest_is_refused_for_a_topic(tmp_path: Path) -> None:
    Topic.create(str(tmp_path), 1)
    for prefix in ({}, {"dataPathPrefix": "p-00000"}):
        with pytest.raises(
            WriteRefused, match=r'^InvalidInput: .* Leave out \.option\("manifestPath", "m"\)'
        ):
            made_batch(tmp_path, manifestPath="m", **prefix)


def test_a_partitioner_and_a_manifest_are_refused_together() -> None:
    given = {"path": "/x", "manifestPath": "m", "partitioner": "modulo"}
    with pytest.raises(InvalidInput, match="dataPathPrefix or manifestPath names one queue"):
        SinkOptions.for_batch(given)
