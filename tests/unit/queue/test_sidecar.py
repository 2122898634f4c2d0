"""The small JSON objects next to a manifest: reading fields, and every kind of object."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from opendata_buffer.broker import claims
from opendata_buffer.broker.client import DiscoveryRecord
from opendata_buffer.errors import CorruptData, ObjectNotFound
from opendata_buffer.formats.manifest import Metadata
from opendata_buffer.quarantine import QuarantineReport, read_report, write_report
from opendata_buffer.queue.consumer_note import ConsumerInfo
from opendata_buffer.queue.marker import PrefixOwner
from opendata_buffer.queue.sidecar import LARGEST, Sidecar, SidecarFields, read_sidecar
from opendata_buffer.stores.memory import MemoryStore
from opendata_buffer.topic.description import TopicDescription
from opendata_buffer.transactions import CommitRecord

NOTE = Sidecar("the note", "Delete it.", version=2, max_bytes=100_000)
SECRET = Sidecar("the secret note", "Delete it.", confidential=True)


def fields_of(**values: Any) -> SidecarFields:
    return NOTE.decode(json.dumps({"version": 1, **values}).encode())


def test_fields_are_read_by_name_and_type() -> None:
    fields = fields_of(a="text", b=7, c=[1, "x"], d={"e": None}, f=[{"g": 1}, {"g": 2}])
    assert (fields.text("a"), fields.number("b")) == ("text", 7)
    assert (fields.items("c"), fields.mapping("d")) == ([1, "x"], {"e": None})
    assert fields_of(version=2, a=1).number("a") == 1, "the written version"
    assert [each.number("g") for each in fields.objects("f")] == [1, 2]


def test_a_field_with_a_default_may_be_missing_or_null() -> None:
    fields = fields_of(null=None)
    for name in ("null", "missing"):
        assert (fields.text(name, ""), fields.text(name, None)) == ("", None)
        assert (fields.number(name, 3, least=5), fields.number(name, None)) == (3, None)
        assert (fields.items(name, None), fields.mapping(name, {})) == (None, {})


def test_the_error_about_a_later_version_names_the_release_that_can_read_it() -> None:
    with pytest.raises(CorruptData) as caught:
        NOTE.decode(b'{"version": 3}')
    assert str(caught.value) == (
        "the note is not readable: it has version 3, and this release reads versions up to 2: a "
        "later release of opendata-buffer wrote it. Use that release. Do the following only if no "
        "later release has ever been used here. Delete it."
    )


@pytest.mark.parametrize("version", [0, True, 1.0, None])
def test_an_invalid_version_is_refused(version: Any) -> None:
    with pytest.raises(CorruptData) as caught:
        NOTE.decode(json.dumps({"version": version}).encode())
    assert str(caught.value) == (
        f"the note is not readable: field 'version' is {version!r}, and not a whole number of at "
        "least 1. Delete it."
    )


@pytest.mark.parametrize(
    "data",
    [b"", b"null", b"7", b"[1]", b'"text"', b"\xff{}", b"{", b"[" * 99_999, b'{"a":' * 9_999],
)
def test_the_error_about_bytes_that_are_not_an_object_shows_their_beginning(data: bytes) -> None:
    with pytest.raises(
        CorruptData, match=r"^the note is not readable: it is not a JSON obj"
    ) as caught:
        NOTE.decode(data)
    assert repr(data[:100]) in str(caught.value)
    assert len(str(caught.value)) < 600


def test_more_bytes_than_the_limit_are_not_parsed() -> None:
    with pytest.raises(CorruptData, match="100001 bytes, more than the limit of 100000"):
        NOTE.decode(b" " * 100_001)


@pytest.mark.parametrize("read", ["text", "number", "items", "mapping", "objects"])
def test_the_error_about_a_missing_field_has_its_name_and_type(read: str) -> None:
    with pytest.raises(CorruptData, match=r"field 'x' is missing, a .*\. Delete it\.$"):
        getattr(fields_of(), read)("x")


@pytest.mark.parametrize(
    ("read", "wrong"),
    [
        ("text", [True, 0, [], {}]),
        ("number", [True, -1, LARGEST + 1, 1.0, "1", [], {}]),
        ("items", [True, 0, "", {}]),
        ("mapping", [True, 0, "", []]),
        ("objects", [True, 0, "", {}]),
    ],
)
def test_a_field_of_another_type_is_named_with_its_value(read: str, wrong: list[Any]) -> None:
    for value in wrong:
        with pytest.raises(CorruptData) as caught:
            getattr(fields_of(x=value), read)("x")
        assert f"field 'x' is {value!r}, and not a" in str(caught.value)


def test_the_error_about_a_number_outside_its_range_has_the_range() -> None:
    fields = fields_of(x=3)
    assert fields.number("x", least=3, most=3) == 3
    with pytest.raises(CorruptData, match="'x' is 3, and not a whole number from 4 to 9"):
        fields.number("x", least=4, most=9)
    with pytest.raises(CorruptData, match="'x' is 3, and not a whole number of at least 4"):
        fields.number("x", None, least=4)


def test_a_nested_field_is_named_by_its_path() -> None:
    fields = fields_of(parts=[{"name": "a"}, {"name": 7}], rows=[{}, 8])
    parts = fields.objects("parts")
    with pytest.raises(CorruptData, match=r"field 'parts\[1\]\.name' is 7, and not a text"):
        parts[1].text("name")
    with pytest.raises(CorruptData, match=r"field 'rows\[1\]' is 8, and not a JSON object"):
        fields.objects("rows")


def test_errors_of_the_owner_of_an_object_have_the_same_wording() -> None:
    error = fields_of(state="x").wrong("state", "'open' or 'shut'")
    assert str(error) == (
        "the note is not readable: field 'state' is 'x', and not 'open' or 'shut'. Delete it."
    )
    error = fields_of(rows=[1, 2]).wrong("rows", "pairs", [2])
    assert "field 'rows' is [2], and not pairs" in str(error)


@pytest.mark.parametrize("value", ["x" * 50_000, list(range(10_000)), {"a" * 9_999: 1}, 10**4000])
def test_a_large_value_is_not_shown_whole(value: Any) -> None:
    with pytest.raises(CorruptData) as caught:
        fields_of(x=value).number("x")
    assert len(str(caught.value)) < 400


def test_errors_never_show_a_byte_of_a_secret() -> None:
    for data in (b'{"version": 1, "secret": 4711', b'{"version": 1, "secret": 4711}', b"4711"):
        with pytest.raises(CorruptData) as caught:
            SECRET.decode(data).text("secret")
        assert "4711" not in str(caught.value)
        shown = caught.value.__cause__ or caught.value.__context__
        assert shown is None or "4711" not in str(vars(shown))


def test_unknown_fields_are_written_first() -> None:
    fields = fields_of(mine=1, later=[2], missing=None)
    assert (fields.number("mine"), fields.text("missing", "")) == (1, "")
    assert fields.others() == {"later": [2]}
    assert NOTE.encode({"mine": 5}, fields.others()) == b'{"later": [2], "version": 2, "mine": 5}\n'
    written = json.loads(NOTE.encode({"mine": 5}, {"version": 9, "mine": 6}))
    assert written == {"version": 2, "mine": 5}


@pytest.mark.parametrize("name", ["é", "worker-\udcff"])
def test_any_name_is_written_and_read(name: str) -> None:
    data = NOTE.encode({"name": name})
    assert NOTE.decode(data).text("name") == name
    assert (name.encode(errors="replace") in data) == (name == "é")


REPORT = QuarantineReport(
    id="7-ab",
    sequence=7,
    location="in/a.batch",
    copied_bytes=3,
    error="torn",
    query="",
    time="2026-01-01T00:00:00.000+00:00",
    metadata=(Metadata(0, -5, b"payload"),),
)


def read_quarantine(data: bytes) -> object:
    store = MemoryStore()
    store.put("in/_quarantine/7-ab.json", data)
    return read_report(store, "in", "7-ab")


def written(report: QuarantineReport) -> bytes:
    store = MemoryStore()
    write_report(store, "in", report)
    return bytes(store.get("in/_quarantine/7-ab.json").data)  # type: ignore[union-attr]


OWNER = (
    b'{"version": 1, "manifest": "manifest", "id": "01J5", "next_sequence": 42, "epoch": 3, '
    b'"acked": 39, "acked_location": "in/a.batch"}\n'
)

# For each kind of object, its bytes as written and the function that reads them.
OBJECTS: dict[str, tuple[bytes, Callable[[bytes], object]]] = {
    "the owner marker": (OWNER, lambda data: PrefixOwner.from_json(data, "in")),
    "the note of the consumer": (
        ConsumerInfo(3, "host", 4711, "Spark", "", 1_767_225_600_000).to_json(),
        ConsumerInfo.from_json,
    ),
    "the commit record": (
        CommitRecord(3, 7, "q", {}, "run", "01" * 6, {"p-00000": 1}).to_json(),
        CommitRecord.from_json,
    ),
    "a broker's discovery record": (
        DiscoveryRecord(3, "01K9", "h:1", b"s" * 32, "ab", 4, 5).to_json(),
        DiscoveryRecord.from_json,
    ),
    "the record of workers' claims": (
        claims.encode(
            claims.Claims(1, 2, 3, {3: claims.ClaimHolder("w", 4, 5)}, frozenset({7}), {3: 1}, "q")
        ),
        claims.decode,
    ),
    "the topic's description": (
        TopicDescription.new("01J5", 2).drained("0", 5).to_json(),
        TopicDescription.from_json,
    ),
    "the report of a batch in quarantine": (written(REPORT), read_quarantine),
}

FIELDS = [
    (name, field) for name, (data, _) in OBJECTS.items() for field in json.loads(data) if field
]


def with_field(data: bytes, field: str, value: Any) -> bytes:
    return json.dumps({**json.loads(data), field: value}).encode()


@pytest.mark.parametrize("name", OBJECTS)
def test_every_written_object_can_be_read_also_with_a_field_of_a_later_release(name: str) -> None:
    data, read = OBJECTS[name]
    assert read(data) == read(with_field(data, "of_a_later_release", [1])) or name in (
        "the owner marker",  # these keep the field
        "the note of the consumer",
        "the commit record",
        "the topic's description",
        "a broker's discovery record",
    )


@pytest.mark.parametrize(("name", "field"), FIELDS)
def test_the_error_about_a_field_of_another_type_names_the_field(name: str, field: str) -> None:
    data, read = OBJECTS[name]
    for value in (True, -(2**70), {"a": [7.5]} if field != "transactions" else [7.5]):
        with pytest.raises(CorruptData, match=f"{name} is not readable: field '{field}' is .*not "):
            read(with_field(data, field, value))


SMALL = Sidecar("the note", "Delete it.", max_bytes=30)


def small(data: bytes) -> int:
    return SMALL.decode(data).number("a")


def test_an_object_in_a_store_is_decoded() -> None:
    store = MemoryStore()
    store.put("in/_note.json", SMALL.encode({"a": 7}))
    assert read_sidecar(store, "in/_note.json", SMALL, small) == 7


def test_a_missing_object_raises_object_not_found() -> None:
    with pytest.raises(ObjectNotFound):
        read_sidecar(MemoryStore(), "in/_note.json", SMALL, small)


@pytest.mark.parametrize("data", [b"{}", b"x" * 31])
def test_the_error_about_an_unreadable_object_has_its_key(data: bytes) -> None:
    store = MemoryStore()
    store.put("in/_note.json", data)
    with pytest.raises(CorruptData, match=r"'in/_note\.json': the note is not .* Delete it\."):
        read_sidecar(store, "in/_note.json", SMALL, small)
