"""How a command names a queue."""

from __future__ import annotations

from opendata_buffer.config import QueueConfig
from opendata_buffer.queue.words import shell_words


def test_what_is_the_default_is_left_out() -> None:
    url = "s3://bucket"
    assert shell_words(url, QueueConfig(store=url)) == url
    config = QueueConfig(store=url, data_path_prefix="p-00003-04vf")
    assert shell_words(url, config) == f"{url} --data-path-prefix p-00003-04vf"
    config = QueueConfig(store=url, data_path_prefix="a b", manifest_path="m")
    assert shell_words(url, config) == f"{url} --data-path-prefix 'a b' --manifest-path m"
