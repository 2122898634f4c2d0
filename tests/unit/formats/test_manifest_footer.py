"""The footer of a manifest, and what is said of bytes that do not end with one."""

from __future__ import annotations

import pytest

from opendata_buffer.errors import CorruptManifest
from opendata_buffer.formats.entries import LEAST_SIZE
from opendata_buffer.formats.manifest import FOOTER_SIZE, Footer, Manifest, NewEntry

LITERAL = (
    b"\x02\x00\x00\x00"  # entry_count
    b"\x09\x00\x00\x00\x00\x00\x00\x00"  # next_sequence
    b"\x03\x00\x00\x00\x00\x00\x00\x00"  # epoch
    b"\x01\x00"  # version
)
BODY = bytes(2 * LEAST_SIZE)


def test_literal_bytes() -> None:
    assert Footer(2, 9, 3).pack() == LITERAL
    assert len(LITERAL) == FOOTER_SIZE
    assert Footer.parse(BODY + LITERAL) == Footer(entry_count=2, next_sequence=9, epoch=3)


def test_the_largest_values_round_trip() -> None:
    largest = Footer(0, 2**64 - 1, 2**64 - 1)
    assert Footer.parse(largest.pack()) == largest


@pytest.mark.parametrize("version", [0, 2, 256, 65535])
def test_other_versions_are_refused(version: int) -> None:
    with pytest.raises(CorruptManifest, match=f"has version {version}"):
        Footer.parse(Footer(0, 0, 0).pack()[:-2] + version.to_bytes(2, "little"))


@pytest.mark.parametrize(
    ("body", "count"), [(b"", 1), (b"", 2**32 - 1), (b"x", 0), (bytes(2 * LEAST_SIZE - 1), 2)]
)
def test_f16_a_count_without_bytes_and_bytes_without_a_count_are_refused(
    body: bytes, count: int
) -> None:
    with pytest.raises(CorruptManifest, match=f"counts {count} entries but they have"):
        Footer.parse(body + Footer(count, 2**64 - 1, 0).pack())


def test_f16_more_entries_than_sequences_is_said_as_it_is() -> None:
    with pytest.raises(CorruptManifest, match="counts 2 entries but its next sequence is 1"):
        Footer.parse(BODY + Footer(2, 1, 0).pack())


LONG = Manifest.empty().append([NewEntry(f"ingest/{n:026d}.batch") for n in range(3)]).raw


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"", "manifest is empty: 0 bytes"),
        (LONG[:-1], f"manifest is truncated: its {len(LONG) - 1} bytes begin with an entry"),
        (LONG[:100], "manifest is truncated: its 100 bytes"),
        (LONG[:20], "manifest is truncated: its 20 bytes"),
        (
            b"<html><body>404</body></html>",
            "manifest was overwritten: its 29 bytes begin",
        ),
        (b"PAR1" * 100, "manifest was overwritten: its 400 bytes begin with b'PAR1"),
        (b"\n", "manifest was overwritten: its 1 bytes begin"),
        (LONG[:-2] + b"\x02\x00", "manifest has version 2, .* a later release wrote it"),
    ],
)
def test_empty_truncated_overwritten_and_newer_manifests_are_told_apart(
    raw: bytes, says: str
) -> None:
    with pytest.raises(CorruptManifest, match=says):
        Footer.parse(raw)
