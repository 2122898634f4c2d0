"""The error that a queue does not exist names the nearest thing that does."""

from __future__ import annotations

from pathlib import Path

import pytest

from opendata_buffer import Producer, Topic
from opendata_buffer.config import QueueConfig
from opendata_buffer.hints import Surface
from opendata_buffer.queue.not_found import no_such_queue
from opendata_buffer.stores.open import open_store


def shown(url: str, surface: Surface) -> str:
    return no_such_queue(open_store(url), QueueConfig(store=url)).text(surface)


@pytest.mark.parametrize(
    ("surface", "prefix", "names"),
    [
        (Surface.SHELL, "ingest", "Name the queue {url}."),
        (Surface.SHELL, "orders", "Name the queue {url} --data-path-prefix orders."),
        (Surface.PYTHON, "orders", "Use store='{url}' with data_path_prefix='orders'."),
        (Surface.SPARK, "orders", 'Use load("{url}") with .option("dataPathPrefix", "orders").'),
    ],
)
def test_a_store_that_is_the_prefix_of_a_queue_names_that_queue(
    tmp_path: Path, surface: Surface, prefix: str, names: str
) -> None:
    with Producer(str(tmp_path), data_path_prefix=prefix) as producer:
        producer.produce([b"record"])
    text = shown(f"{tmp_path}/{prefix}", surface)
    assert f"there is no queue at file://{tmp_path}/{prefix}: " in text
    assert text.endswith(names.format(url=f"file://{tmp_path}"))


def test_a_store_that_is_a_partition_names_the_partition_of_its_topic(tmp_path: Path) -> None:
    name = Topic.create(str(tmp_path), 1).description.names[0]
    with Producer(str(tmp_path), data_path_prefix=name) as producer:
        producer.produce([b"record"])
    text = shown(f"{tmp_path}/{name}", Surface.SHELL)
    assert text.endswith(f"Name the queue file://{tmp_path} --partition {name}.")


def test_a_bucket_without_a_queue_names_no_other(tmp_path: Path) -> None:
    assert "there is no queue: no manifest 'ingest/manifest' in" in shown(
        str(tmp_path), Surface.SHELL
    )
