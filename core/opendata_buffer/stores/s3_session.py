"""What comes back from S3, before boto3 sees it: not too long, and from S3.

boto3 reads every answer but an object whole, however long it is. It follows a redirect by asking
for the bucket's region, which is redirected as well, and so on until Python's stack ends. And it
takes a 404 of a proxy for a missing object.
"""

from __future__ import annotations

import io
from typing import Any

import botocore.exceptions as boto
import urllib3.exceptions
from botocore.awsrequest import AWSPreparedRequest, AWSResponse
from urllib3.response import HTTPResponse

from opendata_buffer.redaction import redacted
from opendata_buffer.stores.s3_errors import NotS3
from opendata_buffer.stores.wire import MOST_OF_A_PAGE, MOST_OF_AN_ERROR, PIECE, TooLong, limited

__all__ = ["S3Session"]

_SHOWN = 100


class S3Session:
    """botocore's HTTP session. Only objects are left to be read by who asked for them.

    Args:
        session: That sends.
    """

    def __init__(self, session: Any) -> None:
        self._session = session

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def send(self, request: AWSPreparedRequest) -> AWSResponse:
        """The answer to one request.

        Raises:
            BotoCoreError: There is none, it is too long, or it is not S3's.
        """
        is_object, request.stream_output = request.stream_output, True
        answer: AWSResponse = self._session.send(request)
        if is_object and answer.status_code < 300:
            return answer
        body = _body(answer, request)
        _check_sender(answer, body)
        answer.raw = HTTPResponse(io.BytesIO(body), preload_content=False)
        return answer


def _body(answer: AWSResponse, request: AWSPreparedRequest) -> bytes:
    most = MOST_OF_A_PAGE if answer.status_code < 300 else MOST_OF_AN_ERROR
    try:
        return b"".join(limited(answer.raw.stream(PIECE), most))
    except TooLong as error:
        answer.raw.close()  # the rest of it is on its way
        raise boto.HTTPClientError(error=error) from error
    except urllib3.exceptions.ReadTimeoutError as error:
        raise boto.ReadTimeoutError(endpoint_url=answer.url, error=error) from error
    except urllib3.exceptions.HTTPError as error:
        raise boto.ConnectionClosedError(
            endpoint_url=answer.url, request=request, error=error
        ) from error


def _check_sender(answer: AWSResponse, body: bytes) -> None:
    """Refuse what S3 does not say: its errors have a code, and its redirects a code or a region."""
    status = answer.status_code
    redirects = 300 <= status < 400 and status != 304
    if b"<Code>" in body or "x-amz-bucket-region" in answer.headers:
        return
    # One without a body may come from a store that says no more.
    if redirects or (status == 404 and body.strip()):
        to = f" to {redacted(answer.headers.get('location', 'nowhere'))!r}" if redirects else ""
        shown = body[:_SHOWN].decode(errors="replace").strip()
        raise NotS3(status=status, to=to, shown=shown)
