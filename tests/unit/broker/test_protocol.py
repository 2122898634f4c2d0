"""The messages between clients and brokers."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opendata_buffer import errors
from opendata_buffer.broker.protocol import (
    MAX_CLAIMED,
    VALID_MS,
    ProtocolError,
    append_body,
    clock_body,
    error_body,
    error_of,
    parse_append,
    parse_beat,
    parse_claim,
    parse_finish,
    parse_reader,
)
from opendata_buffer.errors import CommitStateUnknown, Conflict, OpenDataBufferError, QueueFull
from opendata_buffer.formats.manifest import Metadata, NewEntry
from opendata_buffer.hints import QueueName, Setting, Surface
from opendata_buffer.runtime import Moment

ENTRIES = (
    NewEntry("ingest/a.batch", (Metadata(0, -5, b"\x00\xff"), Metadata(3, 1 << 60, b""))),
    NewEntry("ingest/app=x/batch=1/b.batch"),
)


CLOCK = clock_body(Moment(1_700_000_000_000, 12.5))


@pytest.fixture(autouse=True)
def patient() -> None:
    """Keep the real time limits."""


def travelled(body: dict[str, Any]) -> dict[str, Any]:
    found = json.loads(json.dumps(body))
    assert isinstance(found, dict)
    return found


def test_an_append_is_parsed_as_it_was_sent() -> None:
    request = parse_append(travelled(append_body(4, ENTRIES, CLOCK, 900, 17)), "ingest", print)
    assert (request.number, request.entries, request.valid_ms) == (4, ENTRIES, 900)
    assert (request.since, request.heard) == (17, Moment(1_700_000_000_000, 12.5))
    # No request is valid for longer than the protocol allows.
    longer = append_body(1, ENTRIES, CLOCK, 60_000, None)
    assert parse_append(travelled(longer), "ingest", print).valid_ms == VALID_MS


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", -1),
        ("n", True),
        ("n", None),
        ("valid_ms", "1"),
        ("since", -3),
        ("since", 1.5),
        ("clock", None),
        ("clock", [1]),
        ("clock", ["a", 1]),
        ("clock", [1e400, 5]),
        ("clock", [-1e400, 5]),
        ("clock", [10**400, 5]),
        ("clock", [1.0, 10**400]),
        ("clock", [1.0, -(10**400)]),
        ("entries", []),
        ("entries", {}),
        ("entries", [["ingest/a"]]),
        ("entries", [["other/a.batch", []]]),
        ("entries", [["ingest/" + "a" * 3_000, []]]),
        ("entries", [["ingest/\ud800.batch", []]]),
        ("entries", [["ingest/a.batch", []], ["ingest/../../secret.batch", []]]),
        ("entries", [["ingest/a\n\x1b[2J.batch", []]]),
        ("entries", [["ingest//a.batch", []]]),
        ("entries", [["ingest/", []]]),
        ("entries", [["ingest/a.batch", [[0, 0]]]]),
        ("entries", [["ingest/a.batch", [[0, 0, "no base64"]]]]),
        ("entries", [["ingest/a.batch", [[-1, 0, ""]]]]),
        ("entries", [["ingest/a.batch", [[0, 1 << 63, ""]]]]),
        ("entries", [["ingest/a.batch", []]] * 10_001),
    ],
)
def test_a_field_out_of_bounds_is_refused(field: str, value: object) -> None:
    body = travelled(append_body(1, ENTRIES, CLOCK, 500, None))
    parse_append(body, "ingest", print)
    with pytest.raises(ProtocolError):
        parse_append(travelled({**body, field: value}), "ingest", print)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda each: (
        st.lists(each, max_size=4) | st.dictionaries(st.text(max_size=3), each, max_size=3)
    ),
)


FIELDS = st.sampled_from(["n", "valid_ms", "since", "clock", "entries"])


@given(st.dictionaries(FIELDS, JSON), JSON)
def test_any_json_is_parsed_or_refused(body: dict[str, Any], error: Any) -> None:
    with suppress(ProtocolError):
        parse_append(body, "ingest", print)
    with suppress(ProtocolError):
        assert isinstance(error_of(error), OpenDataBufferError)


@pytest.mark.parametrize(
    "error",
    [
        Conflict("ingest/manifest", 7, 1.5),
        QueueFull("ingest/manifest", 9, 8, 3, None),
        CommitStateUnknown("ingest/manifest", 4, ("a", "b"), 9, "reason"),
        errors.TransientStorageError("did not answer"),
        errors.QueueReset("went backwards"),
        errors.TransientStorageError("not within ", Setting("timeout_ms")),
        errors.Fenced("ingest/manifest", 7, 8).at(
            QueueName("s3://b", "m", (("manifest_path", "m"), ("anonymous", True)))
        ),
    ],
)
def test_an_error_of_the_queue_arrives_with_its_type_and_values(error: OpenDataBufferError) -> None:
    found = error_of(travelled({"e": error_body(error)})["e"])
    assert type(found) is type(error)
    assert str(found) == str(error)
    assert vars(found) == vars(error)
    assert found.hints == error.hints
    for surface in Surface:
        assert found.text(surface) == error.text(surface)


@pytest.mark.parametrize(
    "parts",
    [
        None,
        7,
        [7],
        [{"hint": "AN_ACTION_OF_A_LATER_RELEASE", "values": {"queue": None, "readers": []}}],
        [{"hint": "RESTORE_POSITION", "values": {"queue": None, "readers": []}}],
        [{"hint": "INSPECT", "values": {"queue": {"store": "s3://b"}, "readers": []}}],
        [{"hint": "INSPECT", "values": {"queue": None, "readers": [], "new_field": 1}}],
    ],
)
def test_an_error_with_parts_that_are_not_known_arrives_as_text(parts: object) -> None:
    body = {"name": "QueueReset", "text": "went backwards", "values": {}, "parts": parts}
    assert error_of(body).args == ("went backwards",)


def test_requests_out_of_bounds_are_clamped_or_refused() -> None:
    claim = {"n": 1, "max": 10**9, "wait_ms": 10**9, "worker": "w", "timeout_ms": 0}
    claim["max_deliveries"] = 0
    parsed = parse_claim(claim, 0.0, print)
    assert (parsed.most, parsed.until, parsed.timeout_ms) == (MAX_CLAIMED, 60.0, 1)
    finish = {"n": 1, "how": "done", "reason": "", "sequence": 1, "token": 1, "rest_ms": 0}
    assert parse_finish(finish, print).how == "done"
    assert parse_beat({"tokens": [1, 2]}) == [1, 2]
    for wrong in ({"worker": "w" * 1_000}, {"max_deliveries": None}):
        with pytest.raises(ProtocolError):
            parse_claim({**claim, **wrong}, 0.0, print)
    for wrong in ({"how": "drop"}, {"token": -1}):
        with pytest.raises(ProtocolError):
            parse_finish({**finish, **wrong}, print)
    for reader in ("a/b", 7):
        with pytest.raises(ProtocolError):
            parse_reader({"reader": reader})
    for tokens in (None, ["a"], "12"):
        with pytest.raises(ProtocolError):
            parse_beat({"tokens": tokens})
