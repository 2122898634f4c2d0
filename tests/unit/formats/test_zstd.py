"""Malicious and damaged zstd frames, and the batch decoders that read them."""

from __future__ import annotations

import io
import random
import struct
import tracemalloc
from itertools import accumulate

import pytest
import zstandard

from opendata_buffer.errors import CorruptBatch
from opendata_buffer.formats import zstd
from opendata_buffer.formats.arrow import decode_arrow
from opendata_buffer.formats.batch import decode_batch
from opendata_buffer.formats.zstd import (
    MOST_FRAMES,
    compress,
    decompress,
    decompress_into,
    plan_frames,
)

CAP = 1 << 20
MAGIC = b"\x28\xb5\x2f\xfd"
TEXT = b"a record block, sort of " * 400


def no_size(data: bytes, level: int = 3) -> bytes:
    """Return a frame without a declared content size, as streaming encoders write it."""
    return zstandard.ZstdCompressor(level=level, write_content_size=False).compress(data)


def rle_bomb(blocks: int, declared: int | None) -> bytes:
    """Return a frame whose blocks of 4 bytes each repeat one byte 128 Ki times."""
    window = b"\x38"  # 128 KiB
    header = b"\x00" + window if declared is None else b"\xc0" + window
    size = b"" if declared is None else struct.pack("<Q", declared)
    block = (128 * 1024) << 3 | 1 << 1
    body = b"".join(
        (block | (index == blocks - 1)).to_bytes(3, "little") + b"\0" for index in range(blocks)
    )
    return MAGIC + header + size + body


def into(data: bytes, max_bytes: int) -> bytes:
    frames = plan_frames(memoryview(data), max_bytes)
    target = bytearray(min(sum(frame.most for frame in frames), max_bytes) + 1)
    return bytes(target[: decompress_into(frames, memoryview(target), max_bytes)])


def assert_refused(frames: bytes, match: str, max_bytes: int = CAP) -> None:
    for attempt in (lambda: decompress(memoryview(frames), max_bytes), lambda: into(frames, CAP)):
        with pytest.raises(CorruptBatch, match=match):
            attempt()
    for count in (1, 300):
        with pytest.raises(CorruptBatch):
            decode_batch(frames + b"\x01" + struct.pack("<IH", count, 1), max_bytes)
        with pytest.raises(CorruptBatch):
            decode_arrow(frames + b"\x01" + struct.pack("<IH", count, 1), max_bytes)


SKIPPABLE = b"\x50\x2a\x4d\x18\x03\x00\x00\x00abc"


@pytest.mark.parametrize(
    "parts",
    [
        [compress(TEXT, 3)],
        [no_size(TEXT)],
        [no_size(TEXT, 22)],
        [compress(TEXT[:100], 3), compress(TEXT[100:], 3)],
        [no_size(TEXT[:100]), compress(TEXT[100:], 19)],
        [compress(b"", 3), no_size(b""), compress(TEXT, 1), no_size(b"")],
        [SKIPPABLE, compress(TEXT, 3), b"\x5f\x2a\x4d\x18" + bytes(4)],
        [compress(TEXT, 3), SKIPPABLE],
    ],
    ids=["sized", "no size", "wide window", "two", "mixed", "empty ones", "skippable", "last"],
)
def test_f22_every_frame_is_decoded_and_every_cut_inside_one_is_refused(parts: list[bytes]) -> None:
    frames = b"".join(parts)
    for cap in (CAP, len(TEXT)):
        assert decompress(memoryview(frames), cap) == TEXT
        assert into(frames, cap) == TEXT
    # A cut between frames leaves complete frames. The record count shows that some are missing.
    between = set(accumulate(map(len, parts)))
    for size in set(range(len(frames))) - between:
        with pytest.raises(CorruptBatch):
            decompress(memoryview(frames)[:size], CAP)


def test_f21_a_declared_size_above_the_limit_is_refused_without_decompression() -> None:
    assert_refused(compress(bytes(CAP + 1), 3), f"declares {CAP + 1} bytes, more than the limit of")
    assert_refused(
        compress(bytes(CAP - 9), 3) + compress(bytes(10), 3), f"declares {CAP + 1} bytes"
    )


def test_f21_content_above_the_limit_is_refused() -> None:
    assert_refused(no_size(bytes(CAP + 1)), "more than the limit of")
    assert_refused(rle_bomb(2048, None), "more than the limit of")
    assert_refused(no_size(bytes(CAP)) + no_size(b"x"), "more than the limit of")


@pytest.mark.parametrize("size", [CAP, CAP - 1, 1, 0])
def test_content_up_to_the_limit_is_decoded(size: int) -> None:
    for frames in (compress(bytes(size), 3), no_size(bytes(size))):
        assert decompress(memoryview(frames), CAP) == bytes(size)
        assert into(frames, CAP) == bytes(size)


@pytest.mark.parametrize("declared", [2**17 * 3 + 1, 2**40, 2**62, 2**64 - 3])
def test_f22_a_declared_size_that_the_blocks_cannot_have_is_refused(declared: int) -> None:
    assert_refused(rle_bomb(3, declared), "but its blocks hold at most 393216")


@pytest.mark.parametrize(
    ("kind", "content"),
    [(0, b"abcde"), (1, b"a")],
    ids=["stored", "one byte repeated"],
)
def test_f22_a_short_block_has_only_the_bytes_of_its_header(kind: int, content: bytes) -> None:
    block = (5 << 3 | kind << 1 | 1).to_bytes(3, "little") + content
    assert_refused(MAGIC + b"\x20\x06" + block, "declares 6 bytes but its blocks hold at most 5")


@pytest.mark.parametrize("declared", [0, 1, 2**17 * 3 - 1])
def test_f22_a_declared_size_below_the_content_is_refused(declared: int) -> None:
    assert_refused(rle_bomb(3, declared), "damaged|declares")


@pytest.mark.parametrize("given", [9_599, 9_601])
def test_f22_output_of_another_size_than_declared_is_refused(
    monkeypatch: pytest.MonkeyPatch, given: int
) -> None:
    # The library refuses such frames itself, but this must not depend on its version.
    frame = compress(TEXT, 3)
    monkeypatch.setattr(zstd, "_reader", lambda frame: io.BytesIO(bytes(given)))
    for decode in (lambda: decompress(memoryview(frame), CAP), lambda: into(frame, CAP)):
        with pytest.raises(CorruptBatch, match=f"declares 9600 bytes and holds {given}"):
            decode()


def test_f22_a_thirteen_byte_frame_with_a_huge_window_is_refused() -> None:
    # windowLog 41, no content size, one empty last block
    frame = MAGIC + b"\x00" + bytes([(41 - 10) << 3]) + b"\x01\x00\x00"
    assert_refused(frame + b"\x00\x00\x00\x00", "window|header")


def test_f22_a_window_up_to_eight_mib_is_accepted_with_a_small_limit() -> None:
    # A streaming encoder uses the window of its level, even for little data.
    frame = MAGIC + b"\x00" + bytes([(23 - 10) << 3]) + b"\x19\x00\x00" + b"abc"
    assert decompress(memoryview(frame), 3) == b"abc"
    wider = MAGIC + b"\x00" + bytes([(24 - 10) << 3]) + b"\x19\x00\x00" + b"abc"
    assert_refused(wider, "needs a window of 16777216 bytes")


@pytest.mark.parametrize(
    ("frames", "match"),
    [
        (b"", "empty"),
        (b"\x28\xb5\x2f", "no frame at byte 0"),
        (MAGIC, "header at byte 0 is broken"),
        (b"PK\x03\x04 is a zip", "no frame at byte 0"),
        (compress(TEXT, 3) + b"trailing", "no frame at byte"),
        (compress(TEXT, 3) + b"\0", "no frame at byte"),
        (b"\x27\xb5\x2f\xfd" + b"\0" * 20, "no frame at byte 0"),
        (b"\x50\x2a\x4d\x18\xff\xff\xff\xff", "skippable frame at byte 0 is truncated"),
        (b"\x50\x2a\x4d\x18\x01", "skippable frame at byte 0 is truncated"),
        (MAGIC + b"\x20\x04" + b"\x07\x00\x00", "reserved"),
        (compress(TEXT, 3)[:-1], "truncated at its checksum"),
        (compress(TEXT, 3)[:-5], "truncated inside a block"),
        (compress(TEXT, 3)[:8], "truncated at a block header"),
    ],
)
def test_f22_broken_frames_are_refused(frames: bytes, match: str) -> None:
    assert_refused(frames, match)


def test_a_frame_that_needs_a_dictionary_is_refused() -> None:
    samples = [b"sample %d of the dictionary " % n * 9 for n in range(200)]
    dictionary = zstandard.train_dictionary(1024, samples)
    assert_refused(zstandard.ZstdCompressor(dict_data=dictionary).compress(TEXT), "damaged")


def test_f36_a_flipped_bit_in_the_content_is_found() -> None:
    frame = bytearray(compress(b"stored raw, as it is too short", 3))
    frame[12] ^= 1
    assert_refused(bytes(frame), "damaged")


EMPTY_FRAME = MAGIC + b"\x20\x00" + b"\x01\x00\x00"  # nine bytes without content
EMPTY_BLOCK = b"\x00\x00\x00"


def test_f21_an_object_of_millions_of_tiny_frames_is_refused_at_once() -> None:
    frames = EMPTY_FRAME * ((16 << 20) // len(EMPTY_FRAME))  # took 104 s and 486 MiB
    tracemalloc.start()
    with pytest.raises(CorruptBatch, match="more than 4096 frames"):
        decompress(memoryview(frames), 256 << 20)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 8 << 20
    assert_refused(frames, "more than 4096 frames", 256 << 20)


def test_f21_an_object_of_millions_of_tiny_blocks_is_refused_at_once() -> None:
    blocks = EMPTY_BLOCK * ((16 << 20) // len(EMPTY_BLOCK))
    frame = MAGIC + b"\x00\x38" + blocks + b"\x01\x00\x00"
    assert_refused(
        frame, "has more blocks than the limit of 1048576 bytes allows, one per 1024 bytes"
    )


def test_blocks_of_all_frames_are_counted_together() -> None:
    frame = MAGIC + b"\x00\x38" + EMPTY_BLOCK * 2_047 + b"\x01\x00\x00"
    assert len(plan_frames(memoryview(frame * 2), 1)) == 2
    with pytest.raises(CorruptBatch, match="has more blocks"):
        plan_frames(memoryview(frame * 2 + EMPTY_FRAME), 1)


def test_f21_a_small_frame_without_a_size_does_not_allocate_the_largest_batch() -> None:
    frame = no_size(TEXT)
    tracemalloc.start()
    assert decompress(memoryview(frame), 256 << 20) == TEXT
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20


def test_a_higher_level_makes_a_smaller_frame() -> None:
    words = random.Random(1)
    text = " ".join(str(words.randrange(10_000)) for _ in range(5_000)).encode()
    assert len(compress(text, 19)) < len(compress(text, 1))


def test_the_many_frames_of_a_parallel_compressor_are_decoded() -> None:
    part = compress(b"x" * 64, 3)
    assert decompress(memoryview(part * MOST_FRAMES), CAP) == b"x" * 64 * MOST_FRAMES
    assert_refused(part * MOST_FRAMES + SKIPPABLE, "frames")
