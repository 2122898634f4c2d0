"""No secret of a URL is shown, wherever the URL came in."""

from __future__ import annotations

import pytest

from opendata_buffer.config import QueueConfig, StoreOptions, check_no_secrets, redacted
from opendata_buffer.errors import InvalidInput
from opendata_buffer.stores.open import open_store


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("at https://me:hunter2@host/x failed", "at https://***@host/x failed"),
        ("s3://AKIA:wJalr/XUtn/hunter2@bucket/root", "s3://***@bucket/root"),
        ("https://me:p@ss@host", "https://***@host"),
        ("https://token@host:9000/a", "https://***@host:9000/a"),
        ("https://host/a?sig=hunter2&x=1 and on", "https://host/a?*** and on"),
        ("'https://me:hunter2@host/a?b' 'c?d'", "'https://***@host/a?***' 'c?d'"),
        ("abfss://key:hunter2@acc.dfs.core.windows.net", "abfss://***@acc.dfs.core.windows.net"),
        ("abfss://hunter2@c@acc.dfs.core.windows.net", "abfss://***@acc.dfs.core.windows.net"),
        ("https://a:hunter2@b https://c:hunter2@d", "https://***@b https://***@d"),
    ],
)
def test_user_information_and_queries_are_hidden(text: str, shown: str) -> None:
    assert redacted(text) == shown


@pytest.mark.parametrize(
    "text",
    [
        "abfss://container@account.dfs.core.windows.net/root",
        "at 'ABFSS://container@account.dfs.core.windows.net' and on",
        "s3://bucket/a@b",
        "/data/a@b?c",
        "http://127.0.0.1:9000",
        "key 'a?b' in x",
        "",
    ],
)
def test_the_rest_stays_as_it_is(text: str) -> None:
    assert redacted(text) == text
    check_no_secrets("store", text)


@pytest.mark.parametrize(
    "url",
    [
        "https://me:hunter2@host",
        "https://hunter2@host",
        "https://host/?sig=hunter2",
        "s3://AKIA:a/hunter2@bucket/r",
        "s3://bucket/r?token=hunter2",
    ],
)
def test_a_url_with_a_secret_is_refused_without_showing_it(url: str) -> None:
    for way in (
        lambda: StoreOptions(endpoint_url=url),
        lambda: QueueConfig(store=url),
        lambda: open_store(url),
    ):
        with pytest.raises(InvalidInput, match=r"'.*://.*\*\*\*") as caught:
            way()
        assert "hunter2" not in str(caught.value)
