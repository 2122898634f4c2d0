"""The test server itself, through a bare HTTP client."""

from __future__ import annotations

import http.client
from xml.etree import ElementTree

import pytest

from tests.support.s3_server import Answer, Fault, S3Server
from tests.unit.broker.local import eventually


def ask(
    server: S3Server, method: str, path: str, body: bytes = b"", **headers: str
) -> tuple[int, bytes, dict[str, str]]:
    connection = http.client.HTTPConnection("127.0.0.1", int(server.endpoint.split(":")[2]))
    try:
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, body, sent)
        answer = connection.getresponse()
        return answer.status, answer.read(), {n.lower(): v for n, v in answer.getheaders()}
    finally:
        connection.close()


def code(body: bytes) -> str | None:
    return ElementTree.fromstring(body).findtext("Code")


def test_put_get_head_delete(s3_server: S3Server) -> None:
    status, _, headers = ask(s3_server, "PUT", "/bucket/a%20b/c%2523", b"123")
    assert (status, headers["etag"]) == (200, '"202cb962ac59075b964b07152d234b70"')  # MD5 of 123
    assert s3_server.objects() == {"a b/c%23": b"123"}
    status, body, headers = ask(s3_server, "GET", "/bucket/a%20b/c%2523")
    assert (status, body, headers["content-length"]) == (200, b"123", "3")
    status, body, headers = ask(s3_server, "HEAD", "/bucket/a%20b/c%2523")
    assert (status, body, headers["content-length"]) == (200, b"", "3")
    assert ask(s3_server, "DELETE", "/bucket/a%20b/c%2523")[0] == 204
    status, body, _ = ask(s3_server, "GET", "/bucket/a%20b/c%2523")
    assert (status, code(body)) == (404, "NoSuchKey")


def test_conditions(s3_server: S3Server) -> None:
    path = "/bucket/m"
    assert ask(s3_server, "PUT", path, b"1", If_Match='"x"')[0] == 404
    assert ask(s3_server, "PUT", path, b"1", If_None_Match="*")[0] == 200
    assert ask(s3_server, "PUT", path, b"2", If_None_Match="*")[0] == 412
    assert ask(s3_server, "PUT", path, b"2", If_Match='"x"')[0] == 412
    etag = ask(s3_server, "GET", path)[2]["etag"]
    assert ask(s3_server, "GET", path, If_None_Match=etag)[:2] == (304, b"")
    assert ask(s3_server, "PUT", path, b"2", If_Match=etag)[0] == 200
    assert s3_server.objects() == {"m": b"2"}


def test_ranges(s3_server: S3Server) -> None:
    ask(s3_server, "PUT", "/bucket/r", b"0123456789")
    status, body, headers = ask(s3_server, "GET", "/bucket/r", Range="bytes=8-20")
    assert (status, body, headers["content-range"]) == (206, b"89", "bytes 8-9/10")
    status, body, _ = ask(s3_server, "GET", "/bucket/r", Range="bytes=10-20")
    assert (status, code(body)) == (416, "InvalidRange")


def test_a_wrong_checksum_is_refused(s3_server: S3Server) -> None:
    status, body, _ = ask(s3_server, "PUT", "/bucket/a", b"1", x_amz_checksum_crc32="AAAAAA==")
    assert (status, code(body), s3_server.objects()) == (400, "BadDigest", {})


def test_listing_goes_by_pages() -> None:
    with S3Server(page_size=2) as server:
        for name in ("a", "b", "c%2B", "other"):
            ask(server, "PUT", f"/bucket/in/{name}", b"12")
        ask(server, "PUT", "/bucket/out", b"")
        tag = "{http://s3.amazonaws.com/doc/2006-03-01/}"
        keys: list[str] = []
        token = ""
        while True:
            path = f"/bucket?list-type=2&prefix=in/&continuation-token={token}"
            page = ElementTree.fromstring(ask(server, "GET", path)[1])
            keys += [item.findtext(f"{tag}Key") or "" for item in page.iter(f"{tag}Contents")]
            if page.findtext(f"{tag}IsTruncated") == "false":
                break
            token = page.findtext(f"{tag}NextContinuationToken") or ""
        assert keys == ["in/a", "in/b", "in/c%2B", "in/other"]


def test_other_buckets_and_operations(s3_server: S3Server) -> None:
    status, body, _ = ask(s3_server, "GET", "/other/a")
    assert (status, code(body)) == (404, "NoSuchBucket")
    status, body, _ = ask(s3_server, "GET", "/bucket?acl")
    assert (status, code(body)) == (501, "NotImplemented")


@pytest.mark.parametrize("applied", [True, False])
@pytest.mark.parametrize("answer", [500, Answer.CLOSE, Answer.RESET])
def test_a_fault_hits_once_and_may_be_applied(
    s3_server: S3Server, answer: int | Answer, applied: bool
) -> None:
    s3_server.inject(Fault(answer, applied=applied), key="m")
    assert ask(s3_server, "PUT", "/bucket/other", b"")[0] == 200
    if isinstance(answer, int):
        assert ask(s3_server, "PUT", "/bucket/m", b"1")[0] == answer
    else:
        kind = ConnectionResetError if answer is Answer.RESET else http.client.RemoteDisconnected
        with pytest.raises(kind) as raised:
            ask(s3_server, "PUT", "/bucket/m", b"1")
        assert type(raised.value) is kind
    assert ("m" in s3_server.objects()) is applied
    assert ask(s3_server, "PUT", "/bucket/m", b"1")[0] == 200
    assert [(each.method, each.key) for each in s3_server.requests] == [
        ("PUT", "other"),
        ("PUT", "m"),
        ("PUT", "m"),
    ]
    assert s3_server.count("PUT") == 3


def test_a_fault_can_be_for_keys_that_end_so(s3_server: S3Server) -> None:
    s3_server.inject(Fault(500, applied=False), ends="/manifest")
    keys = ("manifest.probe-1", "manifest", "manifest")
    assert [ask(s3_server, "PUT", f"/bucket/a/{key}")[0] for key in keys] == [200, 500, 200]


def test_bodies_are_spoilt(s3_server: S3Server) -> None:
    ask(s3_server, "PUT", "/bucket/a", b"0123456789")
    s3_server.inject(Fault(Answer.CORRUPT), method="GET")
    assert ask(s3_server, "GET", "/bucket/a")[1] == b"1123456789"
    s3_server.inject(Fault(Answer.TRUNCATE), method="GET")
    with pytest.raises(http.client.IncompleteRead) as raised:
        ask(s3_server, "GET", "/bucket/a")
    assert raised.value.partial == b"01234"


def test_ignored_conditions_are_ignored() -> None:
    with S3Server(ignored_conditions=frozenset({"if-match"})) as server:
        assert ask(server, "PUT", "/bucket/m", b"1", If_Match='"x"')[0] == 200
        assert ask(server, "PUT", "/bucket/m", b"2", If_None_Match="*")[0] == 412


def test_the_clock_is_the_callers_and_can_be_hidden() -> None:
    with S3Server(now_ms=lambda: 1_767_225_600_000) as server:
        assert ask(server, "PUT", "/bucket/a")[2]["date"] == "Thu, 01 Jan 2026 00:00:00 GMT"
        _, _, headers = ask(server, "GET", "/bucket/a")
        assert headers["last-modified"] == "Thu, 01 Jan 2026 00:00:00 GMT"
        server.sends_date = False
        assert "date" not in ask(server, "GET", "/bucket/a")[2]


def test_stopping_ends_a_hanging_answer() -> None:
    server = S3Server()
    with server:
        port = int(server.endpoint.split(":")[2])
        server.inject(Fault(Answer.HANG))
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=0.2)
        connection.request("PUT", "/bucket/a", b"1")
        with pytest.raises(TimeoutError):
            connection.getresponse()
        connection.close()
        # A busy server may come to the request only now.
        eventually(lambda: server.objects() == {"a": b"1"})
