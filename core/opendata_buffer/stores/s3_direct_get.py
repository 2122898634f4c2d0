"""Reads of S3 objects without the work that boto3 repeats for each of them.

Of the processor time that boto3's ``get_object`` takes, a tenth is the request: the rest chooses
an endpoint by rules, checks and serialises parameters, and parses the response into dictionaries,
the same for each object of a bucket. So the first read of a bucket goes through boto3, which
resolves all that, and the next ones repeat its request with another key: botocore's signer signs
(and renews credentials), botocore's HTTP session sends (with its connections, proxies,
certificates and timeouts), and the checksum is compared here (failure F36). That saves two fifths
of a consumer's processor time per object (decision 0028).

Only the responses 200, 206, 304 and "no such object" are taken from here. After any other one
boto3 sends the request again, so errors, redirects to another region and their messages are its
own.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import botocore
import botocore.exceptions as boto
import urllib3.exceptions
from botocore.awsrequest import AWSRequest

from opendata_buffer.stores.http import MAX_ERROR_BYTES, DeadlinePassed, as_base64, crc32

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

_EVENT = "before-sign.s3.GetObject"
_SIGNATURES = {"s3v4", "v4", botocore.UNSIGNED}
_CONTEXT = ("auth_type", "client_config", "client_region", "signing")
"""What of a request's context its signature depends on."""


@dataclass(frozen=True, slots=True)
class _Route:
    """How a bucket is reached: what boto3's ``client`` resolved for one of its objects."""

    client: S3Client
    base: str
    signer: Any
    region: str
    name: str
    context: Mapping[str, Any]


class DirectGet:
    """Reads of one bucket. Thread-safe; a pickle or a fork begins anew, with boto3."""

    def __init__(self) -> None:
        self._route: _Route | None = None
        self._current = threading.local()
        self._watched: S3Client | None = None

    def __reduce__(self) -> tuple[type[DirectGet], tuple[()]]:
        return DirectGet, ()

    def get(self, client: S3Client, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """A response such as boto3's ``get_object`` gives to these arguments, or its error.

        One without a body has a ``Status``, which is 304 or 404 (no such object).
        """
        response = self._send(client, arguments)
        if response is not None:
            return response
        if self._watched is not client:
            client.meta.events.register(_EVENT, self._remember)
            self._watched = client
        self._current.request = (client, arguments["Key"])
        try:
            return client.get_object(**arguments)
        finally:
            self._current.request = None

    def _send(self, client: S3Client, arguments: Mapping[str, Any]) -> dict[str, Any] | None:
        """The response; None where boto3 has to send the request."""
        route = self._route
        if route is None or route.client is not client:
            return None
        request = AWSRequest(
            method="GET",
            url=route.base + _quoted(arguments["Key"]),
            headers={"x-amz-checksum-mode": "ENABLED"},
        )
        for name, header in (("IfNoneMatch", "If-None-Match"), ("Range", "Range")):
            if name in arguments:
                request.headers[header] = arguments[name]
        request.context.update(route.context)
        try:
            route.signer.sign(
                "GetObject", request, region_name=route.region, signing_name=route.name
            )
            prepared = request.prepare()
            prepared.stream_output = True
            # As boto3 does at this point: a call that was left behind sends nothing.
            client.meta.events.emit("before-send.s3.GetObject", request=prepared)
            answer = client._endpoint.http_session.send(prepared)  # type: ignore[attr-defined]
        except DeadlinePassed:
            raise
        except Exception:
            return None  # boto3 meets the same error, and handles it
        return _response(answer)

    def _remember(
        self,
        request: AWSRequest,
        signing_name: str,
        region_name: str,
        signature_version: Any,
        request_signer: Any,
        **_: object,
    ) -> None:
        """Keep how boto3 sends this request; called before it signs."""
        current = getattr(self._current, "request", None)
        if current is None:
            return  # of another store of this client
        client, key = current
        suffix = _quoted(key)
        signing = request.context.get("signing", {})
        usual = signature_version in _SIGNATURES and "identity_cache" not in signing
        url = request.url or ""
        if not usual or not url.endswith(suffix) or "?" in url:
            self._route = None
            return
        self._route = _Route(
            client,
            url[: len(url) - len(suffix)],
            request_signer,
            signing.get("region", region_name),
            signing.get("signing_name", signing_name),
            {name: request.context[name] for name in _CONTEXT if name in request.context},
        )


def _quoted(key: str) -> str:
    """The key in a URL, as botocore writes it."""
    return quote(key, safe="/~")


def _response(answer: Any) -> dict[str, Any] | None:
    headers, status, raw = answer.headers, answer.status_code, answer.raw
    if status == 304 or (status == 404 and _is_no_such_key(raw)):
        raw.release_conn()
        return {"Status": status}
    if status not in (200, 206):
        raw.close()
        return None
    response: dict[str, Any] = {}
    for header in ("ETag", "Content-Range"):
        if (value := headers.get(header)) is not None:
            response[header.replace("-", "")] = value
    try:
        if (value := headers.get("Last-Modified")) is not None:
            response["LastModified"] = parsedate_to_datetime(value)
        if (value := headers.get("Content-Length")) is not None:
            response["ContentLength"] = int(value)
    except ValueError:
        raw.close()
        return None
    checksum = headers.get("x-amz-checksum-crc32")
    if status == 206 or (checksum is not None and "-" in checksum):
        checksum = None  # of the whole object, or with a dash: of the checksums of its parts
    response["Body"] = _Body(raw, response.get("ContentLength"), checksum)
    return response


def _is_no_such_key(raw: Any) -> bool:
    """Whether a 404 is S3's for a missing object: neither for a bucket, nor of a proxy."""
    try:
        body: bytes = raw.read(MAX_ERROR_BYTES)
    except (urllib3.exceptions.HTTPError, OSError):
        return False
    return not body.strip() or b"NoSuchKey" in body


class _Body:
    """As boto3's ``StreamingBody``, with the same errors."""

    def __init__(self, raw: Any, size: int | None, checksum: str | None) -> None:
        self._raw = raw
        self._size = size
        self._checksum = checksum

    def read(self, most: int | None = None) -> bytes:
        """All of it, or what there is up to so many bytes; called once."""
        try:
            data: bytes = self._raw.read(most)
        except urllib3.exceptions.ReadTimeoutError as error:
            raise boto.ReadTimeoutError(endpoint_url=error.url or "", error=error) from error
        except urllib3.exceptions.ProtocolError as error:
            raise boto.ResponseStreamingError(error=error) from error
        if most is not None:
            return data
        if self._size is not None and len(data) != self._size:
            raise boto.IncompleteReadError(actual_bytes=len(data), expected_bytes=self._size)
        if self._checksum is not None:
            found = as_base64(crc32(data))
            if found != self._checksum:
                raise boto.FlexibleChecksumError(
                    error_msg=f"Expected checksum {self._checksum} did not match calculated "
                    f"checksum: {found}"
                )
        self._raw.release_conn()
        return data

    def close(self) -> None:
        """Give the connection up, unless all of it was read."""
        self._raw.close()
