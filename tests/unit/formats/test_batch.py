"""The name and bytes of a batch in plain Python. Both decoders must refuse most damage."""

from __future__ import annotations

import random
import struct
import subprocess
import sys
import uuid
from typing import Any

import pytest
import ulid as ulids
from hypothesis import given
from hypothesis import strategies as st

from opendata_buffer.errors import CorruptBatch, InvalidInput
from opendata_buffer.formats.arrow import decode_arrow, decode_records
from opendata_buffer.formats.batch import (
    MAX_PREFIX_BYTES,
    BatchFooter,
    BatchLocation,
    Compression,
    Transaction,
    batch_key,
    check_key,
    decode_batch,
    encode_batch,
    encode_block,
    is_confined,
    is_ulid,
    join_records,
    largest_object,
    later_ulid,
    location_tag,
    location_timestamp_ms,
    name_time_ms,
    open_batch,
    parse_location,
    prefix_of,
    seal_block,
    seal_pieces,
    tagged_ulid,
    ulid_tag,
    ulid_timestamp_ms,
)
from opendata_buffer.runtime import ulid_of

# Three records "hello", "" and 00 ff: every byte of the format.
BLOCK = b"\x05\x00\x00\x00hello" + b"\x00\x00\x00\x00" + b"\x02\x00\x00\x00\x00\xff"
FOOTER = b"\x00" + b"\x03\x00\x00\x00" + b"\x01\x00"
THREE = BLOCK + FOOTER
RECORDS = [b"hello", b"", b"\x00\xff"]


def assert_refused(data: bytes, match: str, max_bytes: int = 1 << 20) -> None:
    """Check that both decoders refuse these bytes."""
    with pytest.raises(CorruptBatch, match=match):
        decode_batch(data, max_bytes)
    for decode in (decode_arrow, decode_records):
        with pytest.raises(CorruptBatch):
            decode(data, max_bytes)


def test_literal_bytes() -> None:
    assert encode_block(RECORDS) == BLOCK
    assert encode_batch(RECORDS) == THREE
    assert decode_batch(THREE) == RECORDS
    footer, block = open_batch(THREE)
    assert footer == BatchFooter(Compression.NONE, 3)
    assert bytes(block) == BLOCK


def test_an_empty_batch_is_its_footer() -> None:
    assert encode_batch([]) == b"\x00" + b"\x00\x00\x00\x00" + b"\x01\x00"
    assert decode_batch(encode_batch([])) == []
    assert decode_batch(encode_batch([], Compression.ZSTD)) == []


def test_a_zstd_batch_has_a_footer_and_a_frame_with_a_checksum() -> None:
    data = encode_batch(RECORDS, Compression.ZSTD)
    assert data[:4] == b"\x28\xb5\x2f\xfd"
    assert data[-7:] == b"\x01" + b"\x03\x00\x00\x00" + b"\x01\x00"
    assert decode_batch(data) == RECORDS
    # failure F36: the checksum of the frame detects bit rot in the content.
    rotten = bytearray(data)
    rotten[data.index(b"hello")] ^= 1
    assert_refused(bytes(rotten), "damaged")


@pytest.mark.parametrize(
    "record",
    [
        b"abcd",
        bytearray(b"abcd"),
        memoryview(b"abcd"),
        memoryview(b"xabcdx")[1:5],
        memoryview(b"abcd").cast("H"),
        memoryview(b"abcd").cast("B", [2, 2]),
    ],
)
def test_a_record_may_be_any_bytes_like_object(record: bytes) -> None:
    assert encode_block([record]) == b"\x04\x00\x00\x00abcd"
    assert encode_block([record] * 2000) == b"\x04\x00\x00\x00abcd" * 2000


@pytest.mark.parametrize(
    ("records", "message"),
    [
        (["text"], r"record 0 is of type str: use bytes; encode text"),
        ([b"", None], r"record 1 is of type NoneType"),
        ([b"", b"", 5], r"record 2 is of type int: use bytes, bytearray"),
        ([memoryview(b"abcd")[::2]], r"record 0 is a view with gaps"),
        ([b"x"] * 3000 + ["text"], r"record 3000 is of type str"),
    ],
)
def test_values_that_are_not_records_are_refused(records: list[object], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        encode_batch(records)  # type: ignore[arg-type]


def test_f34_record_counts_are_checked_before_encoding() -> None:
    for count in (-1, 2**32):
        with pytest.raises(InvalidInput, match="at most 4294967295"):
            seal_block(b"", count, Compression.NONE)
    with pytest.raises(InvalidInput, match="cannot hold 4294967295 records"):
        seal_block(b"", 2**32 - 1, Compression.NONE)
    with pytest.raises(InvalidInput, match="cannot hold 4 records"):
        seal_block(b"\0" * 15, 4, Compression.NONE)
    with pytest.raises(InvalidInput, match="cannot hold 0 records"):
        seal_block(b"\0" * 4, 0, Compression.NONE)


@pytest.mark.parametrize("level", [0, 23, -1])
def test_levels_outside_1_to_22_are_refused(level: int) -> None:
    with pytest.raises(InvalidInput, match="zstd_level"):
        encode_batch([b"a"], Compression.ZSTD, level)


def test_level_1_is_the_default_and_22_the_highest() -> None:
    words = random.Random(1)
    text = " ".join(str(words.randrange(10_000)) for _ in range(5_000)).encode()
    first, second = (encode_batch([text], Compression.ZSTD, level) for level in (1, 2))
    assert first != second
    assert encode_batch([text], Compression.ZSTD) == first
    assert seal_block(encode_block([text]), 1, Compression.ZSTD) == first
    assert b"".join(seal_pieces(encode_block([text]), 1, Compression.ZSTD)) == first
    assert decode_batch(encode_batch([text], Compression.ZSTD, 22)) == [text]


@pytest.mark.parametrize("size", [0, 100, 1 << 17, 1 << 20])
def test_an_incompressible_block_fits_into_the_largest_object(size: int) -> None:
    block = encode_block([random.Random(size).randbytes(size)] if size else [])
    sealed = seal_block(block, int(size > 0), Compression.ZSTD, 19)
    # Readers refuse larger objects without reading them, so the limit must not be much higher.
    assert len(sealed) <= largest_object(len(block)) <= len(block) * 1.01 + 2048


def test_f20_truncation_at_any_byte_under_a_valid_footer_is_refused() -> None:
    for size in range(len(BLOCK)):
        assert_refused(BLOCK[:size] + FOOTER, "truncated|cannot|footer counts 3")


def test_other_versions_and_less_than_a_footer_are_refused() -> None:
    for version in (0, 2, 65535):
        assert_refused(
            THREE[:-2] + struct.pack("<H", version), f"has version {version}, .* Upgrade this"
        )
    assert_refused(FOOTER[1:], "6 bytes, less than its 7-byte footer")
    assert_refused(
        BLOCK[:-1] + FOOTER, "record 2 of 3 ends at byte 19 of 18: the block is truncated"
    )


@pytest.mark.parametrize(
    ("data", "fault"),
    [
        (BLOCK + struct.pack("<BIH", 0, 4, 2), "has version 2"),
        (BLOCK + struct.pack("<BIH", 0, 5, 2), "truncated or overwritten"),
        (bytes(16) + struct.pack("<BIH", 0, 4, 2), "has version 2"),
        (bytes(16) + struct.pack("<BIH", 1, 900, 2), "has version 2"),
        (bytes(16) + struct.pack("<BIH", 2, 4, 2), "truncated or overwritten"),
    ],
    ids=["none", "none, short", "none, empty records", "zstd", "another compression"],
)
def test_another_version_is_reported_only_if_the_rest_of_the_footer_is_plausible(
    data: bytes, fault: str
) -> None:
    assert_refused(data, fault)


@pytest.mark.parametrize("raw", [b"<html>404</html>", b"garbage", b"\xff" * 100])
def test_a_truncated_or_overwritten_object_is_not_reported_as_another_version(raw: bytes) -> None:
    assert_refused(raw, f"truncated or overwritten: its {len(raw)} bytes begin with")


@pytest.mark.parametrize("kind", [2, 255])
def test_unknown_compression_is_refused(kind: int) -> None:
    assert_refused(BLOCK + bytes([kind]) + FOOTER[1:], rf"compression type {kind} \(supported: 0")


@pytest.mark.parametrize("count", [4, 5, 1 << 31, 2**32 - 1])
def test_f18_a_huge_record_count_is_refused_before_allocating(count: int) -> None:
    footer = b"\x00" + struct.pack("<I", count) + b"\x01\x00"
    assert_refused(footer, f"counts {count} records but the block has 0 bytes")
    assert_refused(BLOCK + footer, f"counts {count}|record 3 of 4 starts at byte 19")
    frame = encode_batch(RECORDS, Compression.ZSTD)
    assert_refused(frame[:-6] + struct.pack("<IH", count, 1), f"counts {count}|record 3 of 4")


@pytest.mark.parametrize("count", [0, 1, 2])
def test_f20_bytes_after_the_last_counted_record_are_refused(count: int) -> None:
    assert_refused(BLOCK + b"\x00" + struct.pack("<IH", count, 1), "no records but|bytes after its")


def test_f21_an_uncompressed_block_above_the_limit_is_refused() -> None:
    assert decode_batch(THREE, len(BLOCK)) == RECORDS
    assert_refused(THREE, "19 bytes, more than the limit of 18", len(BLOCK) - 1)


@pytest.mark.parametrize("compression", list(Compression))
def test_a_block_in_pieces_is_encoded_like_a_whole_block(compression: Compression) -> None:
    pieces = [encode_block([b"a", b""]), memoryview(encode_block([b"bc"]))]
    assert decode_batch(seal_block(pieces, 3, compression)) == [b"a", b"", b"bc"]
    assert seal_block((), 0, compression)[-7:] == seal_block(b"", 0, compression)[-7:]
    with pytest.raises(InvalidInput, match="15 bytes cannot hold 4 records"):
        seal_block(pieces, 4, compression)


class Endless(bytes):
    def __len__(self) -> int:
        return 2**32


class Largest(bytes):
    def __len__(self) -> int:
        return 2**32 - 1


def test_the_error_about_a_record_above_four_gigabytes_names_it() -> None:
    with pytest.raises(InvalidInput, match="record 2 has 4294967296 bytes"):
        join_records([b"a", Largest(), Endless()])


ULID = "01J5T4R3KXBMZ7QV9N2WG8YDHP"
MESSAGE = uuid.UUID("9a1b2c3d-4e5f-1678-8a02-010203040506")
STRANGE = "tenant#1/%20 %/a?b*[c]{d}~|\\^<>\"'/données/été/日本/\U0001f600"


@pytest.mark.parametrize("key", ["a", "ingest/manifest", "a.b/..c/d..", ".hidden", "k" * 744])
def test_plain_keys_are_accepted(key: str) -> None:
    check_key("manifest_path", key)
    check_key("data_path_prefix", key, MAX_PREFIX_BYTES)


def test_f24_characters_that_stores_escape_are_allowed_and_kept() -> None:
    check_key("data_path_prefix", STRANGE, MAX_PREFIX_BYTES)
    key = batch_key(STRANGE, ULID)
    assert key == f"{STRANGE}/{ULID}.batch"
    assert is_confined(key, STRANGE)
    assert parse_location(key, STRANGE) == BatchLocation(ULID, ulid_timestamp_ms(ULID))


@pytest.mark.parametrize(
    ("key", "why"),
    [
        ("", "empty"),
        ("/a", "'/'"),
        ("a/", "'/'"),
        ("a//b", "'//'"),
        (".", "segment"),
        ("..", "segment"),
        ("a/../b", "segment"),
        ("a/./b", "segment"),
        ("a\nb", "control"),
        ("a\x85b", "control"),
        ("a\ud800b", "Unicode"),
        ("é" * 513, "1026 bytes"),
        (7, "some_setting is 7"),
    ],
)
def test_keys_that_no_store_accepts_are_refused(key: Any, why: str) -> None:
    with pytest.raises(InvalidInput, match=why) as caught:
        check_key("some_setting", key)
    assert "some_setting" in str(caught.value)


def test_a_refused_key_is_shown_up_to_its_eightieth_character() -> None:
    for key, shown in (("/" + "k" * 79, "/" + "k" * 79), ("/" + "k" * 80, "/" + "k" * 79 + "…")):
        with pytest.raises(InvalidInput) as caught:
            check_key("some_setting", key)
        assert f"some_setting is {shown!r}: it starts" in str(caught.value)


def test_f23_a_location_that_leaves_the_prefix_is_refused() -> None:
    assert is_confined("ingest/any name", "ingest")
    for location in ("ingest/../other/a.batch", "ingestion/a.batch", "other/a.batch", "ingest"):
        assert not is_confined(location, "ingest")


@pytest.mark.parametrize(
    ("ulid", "timestamp_ms"),
    [
        ("00000000000000000000000000", 0),
        ("0000000001ZZZZZZZZZZZZZZZZ", 1),
        ("01J5T4R3KXBMZ7QV9N2WG8YDHP", 1_724_233_027_197),
        ("7ZZZZZZZZZZZZZZZZZZZZZZZZZ", 2**48 - 1),
    ],
)
def test_the_timestamp_of_a_ulid_is_read(ulid: str, timestamp_ms: int) -> None:
    assert is_ulid(ulid)
    library = ulids.ULID.from_str(ulid)
    assert ulid_timestamp_ms(ulid) == timestamp_ms == library.milliseconds
    assert ulid_of(timestamp_ms, library.bytes[6:]) == ulid
    assert location_timestamp_ms(f"any/where/{ulid}.batch") == timestamp_ms
    assert location_timestamp_ms(f"{ulid}.batch") == timestamp_ms


@pytest.mark.parametrize(
    "text",
    [
        "",
        ULID[:-1],
        ULID.lower(),
        "8" + ULID[1:],
        ULID[:-1] + "U",
        ULID[:-1] + "\u0660",
        ULID + "\n",
    ],
)
def test_a_text_that_is_not_a_ulid_is_refused(text: str) -> None:
    assert not is_ulid(text)
    assert location_timestamp_ms(f"p/{text}.batch") is None
    with pytest.raises(InvalidInput, match="not a ULID"):
        ulid_timestamp_ms(text)
    with pytest.raises(InvalidInput, match="not a ULID"):
        batch_key("p", text)


@pytest.mark.parametrize(
    ("txn", "message", "name"),
    [
        (None, None, f"{ULID}.batch"),
        (Transaction("my-query", 7), None, f"app=my-query/batch=7/{ULID}.batch"),
        (Transaction("..", 0), None, f"app=../batch=0/{ULID}.batch"),
        (
            Transaction("x" * 200, 2**63 - 1),
            None,
            f"app={'x' * 200}/batch={2**63 - 1}/{ULID}.batch",
        ),
        (None, MESSAGE, f"message={MESSAGE}/{ULID}.batch"),
        (
            Transaction("my-query", 7),
            MESSAGE,
            f"app=my-query/batch=7/message={MESSAGE}/{ULID}.batch",
        ),
    ],
)
def test_batch_keys_round_trip(
    txn: Transaction | None, message: uuid.UUID | None, name: str
) -> None:
    key = batch_key("ingest", ULID, txn, message)
    assert key == f"ingest/{name}"
    assert parse_location(key, "ingest") == BatchLocation(ULID, 1_724_233_027_197, txn, message)
    assert is_confined(key, "ingest")
    assert location_timestamp_ms(key) == 1_724_233_027_197


@pytest.mark.parametrize("version", [3, 4, 5])
def test_a_message_of_another_version_is_refused(version: int) -> None:
    other = uuid.UUID(int=MESSAGE.int, version=version)
    with pytest.raises(InvalidInput, match="use a version 1 UUID"):
        batch_key("ingest", ULID, message=other)
    assert parse_location(f"ingest/message={other}/{ULID}.batch", "ingest") is None


def test_the_longest_prefix_leaves_room_for_a_message_or_a_transaction_but_not_both() -> None:
    longest, prefix = Transaction("a" * 200, 2**63 - 1), "é" * 372
    check_key("data_path_prefix", prefix, MAX_PREFIX_BYTES)
    with pytest.raises(InvalidInput, match="745 bytes, at most 744"):
        check_key("data_path_prefix", "p" * 745, MAX_PREFIX_BYTES)
    check_key("location", batch_key(prefix, ULID, longest))
    check_key("location", batch_key(prefix, ULID, message=MESSAGE))
    with pytest.raises(InvalidInput, match=r"1053 bytes, at most 1024.* by 29 bytes.*app id 'aaa"):
        batch_key(prefix, ULID, longest, MESSAGE)
    check_key("location", batch_key("p" * (744 - 29), ULID, longest, MESSAGE))
    with pytest.raises(InvalidInput, match=r"shorten the data prefix 'p+ by \d+ bytes$"):
        batch_key("p" * 1000, ULID, message=MESSAGE)


@given(st.text(max_size=60), st.integers(0, 3))
def test_parsing_never_fails_for_any_key_below_the_prefix(text: str, at: int) -> None:
    parts = ["app=a", "batch=1", f"message={MESSAGE}", f"{ULID}.batch"]
    for name in (text, "/".join([*parts[:at], text, *parts[at:]]), "/".join(parts)[:at] + text):
        found = parse_location(f"ingest/{name}", "ingest")
        if found is not None and not is_ulid(name.split("/")[-2:][0]):
            # A parsed name is exactly the name that its parts would produce.
            assert batch_key("ingest", found.ulid, found.txn, found.message) == f"ingest/{name}"


def test_a_name_of_the_go_producer_carries_the_ulid_of_its_run() -> None:
    key = f"ingest/{ULID}/00000000000000fe"
    assert parse_location(key, "ingest") == BatchLocation(ULID, 1_724_233_027_197)
    assert location_timestamp_ms(key) == 1_724_233_027_197
    assert location_timestamp_ms(f"{ULID}/00000000000000fe") == 1_724_233_027_197
    assert location_timestamp_ms("ingest/events/00000000000000fe") is None


def test_the_time_of_a_batch_is_read_from_its_name_unless_it_is_the_time_of_a_run() -> None:
    assert name_time_ms(f"any/where/{ULID}.batch") == 1_724_233_027_197
    assert name_time_ms(f"ingest/{ULID}/00000000000000fe") is None
    assert name_time_ms("any/where/x.batch") is None


@pytest.mark.parametrize("prefix", ["ingest", "deep/er/prefix", "tenant=1/app=a"])
@pytest.mark.parametrize(
    "name",
    [
        f"{ULID}.batch",
        f"app=a/batch=7/{ULID}.batch",
        f"message={MESSAGE}/{ULID}.batch",
        f"{ULID}/00000000000000fe",
    ],
)
def test_the_prefix_of_a_batch_is_in_its_name(prefix: str, name: str) -> None:
    assert prefix_of(f"{prefix}/{name}") == prefix


@pytest.mark.parametrize("location", ["", "ingest", f"{ULID}.batch", "ingest/other.parquet"])
def test_a_name_that_no_producer_creates_has_no_prefix(location: str) -> None:
    assert prefix_of(location) is None


@pytest.mark.parametrize(
    ("app", "batch"),
    [
        *((app, 0) for app in ("", "a/b", "a%b", "é", "a\n", "x" * 201)),
        *(("a", batch) for batch in (-1, 2**63, True, 1.0, "1")),
    ],
)
def test_unsafe_transactions_are_refused(app: str, batch: Any) -> None:
    with pytest.raises(InvalidInput, match=r"transaction|batch is .*: use int"):
        Transaction(app, batch)


@pytest.mark.parametrize(
    "location",
    [
        f"{ULID}.batch",
        f"ingestion/{ULID}.batch",
        f"ingest/x/{ULID}.batch",
        f"ingest/{ULID}.parquet",
        f"ingest/{ULID}.batch\n",
        f"ingest/app=a/{ULID}.batch",
        f"ingest/app=a/batch=07/{ULID}.batch",
        f"ingest/app=a/batch=1/x/{ULID}.batch",
        f"ingest/app=a/batch={2**63}/{ULID}.batch",
        f"ingest/message={MESSAGE}/x/{ULID}.batch",
        f"ingest/message={MESSAGE.hex}/{ULID}.batch",
        f"ingest/message={str(MESSAGE).upper()}/{ULID}.batch",
        f"ingest/message={MESSAGE}/{ULID}/000000000000002a",
        f"ingest/message={MESSAGE}/app=a/batch=1/{ULID}.batch",
        f"ingest/message={MESSAGE}/message={MESSAGE}/{ULID}.batch",
        f"ingest/{ULID}/000000000000002",
        f"ingest/{ULID}/000000000000002a.batch",
        f"ingest/{ULID.lower()}/000000000000002a",
        f"ingest/x/{ULID}/000000000000002a",
        "",
    ],
)
def test_other_names_are_not_parsed(location: str) -> None:
    assert parse_location(location, "ingest") is None


def test_a_later_ulid_differs_only_in_its_time() -> None:
    ulid = "01JD0000000000000000000ABC"
    later = later_ulid(ulid, 21_600_000)
    assert is_ulid(later)
    assert ulid_timestamp_ms(later) == ulid_timestamp_ms(ulid) + 21_600_000
    assert later[10:] == ulid[10:]
    assert later_ulid(ulid, 0) == ulid
    with pytest.raises(InvalidInput, match="not a ULID"):
        later_ulid("x", 1)
    for milliseconds in (2**48, -(2**48)):
        with pytest.raises(InvalidInput, match="cannot be moved by"):
            later_ulid(ulid, milliseconds)


LIBRARY_TEXTS = st.binary(min_size=16, max_size=16).map(lambda bits: str(ulids.ULID(bits)))


@given(
    LIBRARY_TEXTS
    | LIBRARY_TEXTS.map(str.lower)
    | st.text(alphabet="0178AILOUZaz{é", min_size=25, max_size=27)
)
def test_a_ulid_is_canonical_if_the_library_writes_the_same_text(text: str) -> None:
    try:
        is_canonical = str(ulids.ULID.from_str(text)) == text
    except (ValueError, IndexError):
        is_canonical = False
    assert is_ulid(text) is is_canonical


def test_the_ulid_library_is_loaded_with_the_first_ulid() -> None:
    code = (
        "import sys; from opendata_buffer import Consumer, Producer; "
        "from opendata_buffer.formats.batch import location_timestamp_ms; "
        "assert 'ulid' not in sys.modules; "
        "location_timestamp_ms('p/other.batch'); assert 'ulid' not in sys.modules; "
        f"location_timestamp_ms('p/{ULID}.batch'); assert 'ulid' in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_tag_replaces_the_first_random_characters_and_can_be_read() -> None:
    ulid = "01JD0000000123456789ABCDEF"
    tagged = tagged_ulid(ulid, "ZZZZZZ")
    assert is_ulid(tagged)
    assert (tagged[:10], tagged[10:16], tagged[16:]) == (ulid[:10], "ZZZZZZ", ulid[16:])
    assert ulid_timestamp_ms(tagged) == ulid_timestamp_ms(ulid)
    assert ulid_tag(tagged) == "ZZZZZZ"
    assert tagged_ulid(ulid, ulid_tag(ulid)) == ulid
    for location in (batch_key("deep/down", tagged), f"ingest/app=a/batch=7/{tagged}.batch"):
        assert location_tag(location) == "ZZZZZZ"
    for foreign in ("ingest/mine.batch", "", "ingest/", f"ingest/{tagged}.parquet"):
        assert location_tag(foreign) is None


@pytest.mark.parametrize("tag", ["", "ZZZZZ", "ZZZZZZZ", "ZZZZZU", "zzzzz/", "ZZZZ Z"])
def test_a_tag_that_does_not_make_a_ulid_is_refused(tag: str) -> None:
    with pytest.raises(InvalidInput, match="not a ULID"):
        tagged_ulid(ULID, tag)
