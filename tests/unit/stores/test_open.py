"""Opening stores by URL."""

from __future__ import annotations

from pathlib import Path

import pytest

from opendata_buffer.config import StoreOptions
from opendata_buffer.errors import InvalidInput
from opendata_buffer.stores.open import open_store


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("/data/queue", "file:///data/queue"),
        ("file:///data/queue", "file:///data/queue"),
        ("file:/data/queue", "file:///data/queue"),
        ("file://localhost/data/queue", "file:///data/queue"),
        ("FILE:///data/queue/", "file:///data/queue"),
        ("file:///data/with%20space%23", "file:///data/with%20space%23"),
        ("/data/with space#", "file:///data/with%20space%23"),
        ("s3://bucket", "s3://bucket"),
        ("s3://bucket/", "s3://bucket"),
        ("s3a://bucket/some/root/", "s3://bucket/some/root"),
        ("S3://bucket/root", "s3://bucket/root"),
        ("gs://bucket", "gs://bucket"),
        ("GS://bucket/some/root/", "gs://bucket/some/root"),
        ("az://container/some/root/", "az://container/some/root"),
        (
            "abfss://c@account.dfs.core.windows.net/root",
            "abfss://c@account.dfs.core.windows.net/root",
        ),
        ("ABFSS://c@acc.blob.core.chinacloudapi.cn", "abfss://c@acc.dfs.core.chinacloudapi.cn"),
        ("memory://name", "memory://name"),
    ],
)
def test_a_url_opens_the_store_it_names(url: str, expected: str) -> None:
    assert open_store(url).url == expected


def test_a_relative_path_is_resolved_in_the_current_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    first = open_store("queue")
    (tmp_path / "sub").mkdir()
    monkeypatch.chdir(tmp_path / "sub")
    assert first.url == (tmp_path / "queue").as_uri()
    assert open_store("queue").url == (tmp_path / "sub" / "queue").as_uri()


def test_a_name_with_a_colon_is_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert open_store("data:set").url == (tmp_path / "data:set").as_uri()


def test_the_home_directory_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert open_store("~/queue").url == (tmp_path / "queue").as_uri()


def test_a_process_has_one_store_per_url_and_options() -> None:
    assert open_store("s3://cached") is open_store("s3://cached")
    other = StoreOptions(region="eu-west-1")
    assert open_store("s3://cached", other) is not open_store("s3://cached")
    assert open_store("s3://cached", StoreOptions(region="eu-west-1")) is open_store(
        "s3://cached", other
    )


def test_credentials_set_after_a_failure_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    before = open_store("s3://cached")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "set later")
    later = open_store("s3://cached")
    assert later is not before
    assert open_store("s3://cached") is later
    monkeypatch.undo()
    assert open_store("s3://cached") is not later


def test_a_relative_path_needs_a_current_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert open_store(f"{tmp_path}/q").url == f"{tmp_path.as_uri()}/q"
    with pytest.raises(InvalidInput, match=r"'q' is relative.*use an absolute path"):
        open_store("q")


def test_a_url_that_is_not_a_text_is_refused() -> None:
    with pytest.raises(InvalidInput, match="url is of type PosixPath: use str"):
        open_store(Path("/data"))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("", "store is ''"),
        ("~no-such-user/queue", "starts with '~'.*[.]/~no-such-user/queue"),
        ("s4://bucket", "unknown scheme 's4': did you mean 's3'"),
        ("mem://x", "unknown scheme 'mem'"),
        ("gcs://bucket", "unknown scheme 'gcs': did you mean 'gs'"),
        ("gs:bucket", "lacks '//'"),
        ("az://", "names no container"),
        ("az://me@container", "carries credentials"),
        ("abfs://c/root", "unknown scheme 'abfs': did you mean 'abfss'"),
        ("abfss://container/root", "lacks an account: use abfss://container@account"),
        ("abfss://c@account/root", "'account' is not a host of an Azure storage account"),
        ("gs://bucket/a//b", "root of the store"),
        ("https://bucket.s3.amazonaws.com/root", "unknown scheme 'https'"),
        ("s3:bucket", "lacks '//'"),
        ("s3:/bucket", "lacks '//'"),
        ("s3://", "names no bucket"),
        ("s3:///root", "names no bucket"),
        ("memory://", "names no store"),
        ("memory://name/path", "has a path: use memory://name"),
        ("file://host/dir", "names the host 'host'.*file:///dir"),
        ("file:dir", "is not absolute"),
        ("file:///dir?x=1", "%3F"),
        ("file:///dir#x", "%23"),
        ("s3://bucket/a//b", "root of the store"),
        ("s3://bucket/../b", "root of the store"),
        ("/", "root of the file system"),
        ("/tmp/a\nb", "control character"),
        ("/dbfs/Volumes/main/default/v", "Databricks mount.*s3:// URL of the volume"),
        ("/Volumes/main/default/v/queue", "Databricks mount.*s3:// URL of the volume"),
        ("file:/Volumes/main/default/v/queue", "Databricks mount"),
        ("dbfs:/Volumes/main/default/v/queue", "Databricks mount.*s3:// URL of the volume"),
    ],
)
def test_the_error_about_a_url_that_cannot_be_opened_has_a_fix(url: str, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        open_store(url)


@pytest.mark.parametrize(
    "url", ["s3://AKIAEXAMPLE:SECRETEXAMPLE@bucket/root", "s4://AKIAEXAMPLE:SECRETEXAMPLE@bucket"]
)
def test_f37_credentials_in_a_url_are_refused_and_not_shown(url: str) -> None:
    with pytest.raises(InvalidInput) as raised:
        open_store(url)
    assert "SECRETEXAMPLE" not in str(raised.value)
    assert "AKIAEXAMPLE" not in str(raised.value)
