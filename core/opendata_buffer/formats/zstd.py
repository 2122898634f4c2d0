"""Zstandard that proves every length before it allocates memory (RFC 8878; failures F21, F22).

zstandard's own decoders trust the frame: they allocate a declared size despite any limit, drop a
second frame, and end without an error in a truncated stream. This module therefore reads the
headers of frames and blocks first, which show where every frame ends and how much it can hold.
"""

from __future__ import annotations

from dataclasses import dataclass

import zstandard

from opendata_buffer.errors import CorruptBatch

_FRAME_MAGIC = 0xFD2FB528
_SKIPPABLE_MAGIC = 0x184D2A50  # the lowest four bits are free
_MAX_BLOCK = 128 * 1024
_LEAST_WINDOW = 8 * 1024 * 1024  # RFC 8878 asks decoders to support this much
_MOST_WINDOW = 128 * 1024 * 1024  # windowLog 27, zstd's own default limit
_RESERVED, _RLE = 3, 1

MOST_FRAMES = 4_096
"""Most frames in a batch. Writers make one; a parallel compressor makes one per chunk.
"""

_LEAST_BLOCKS = 4_096
_LEAST_BLOCK = 1_024
"""Writers fill blocks of 128 KiB; many blocks with a lower average than this are an attack.
"""


@dataclass(frozen=True, slots=True)
class Frame:
    """One frame of compressed data.

    Attributes:
        data: The frame's bytes.
        most: Largest number of bytes that it can decompress to.
        declared: Whether ``most`` is the size that the frame's header declares.
        blocks: Number of its blocks.
    """

    data: memoryview
    most: int
    declared: bool
    blocks: int


def compress(block: bytes | memoryview, level: int) -> bytes:
    """Return one frame with content size and checksum, which costs almost nothing (failure F36)."""
    return zstandard.ZstdCompressor(level=level, write_checksum=True).compress(block)


def plan_frames(data: memoryview, max_bytes: int) -> list[Frame]:
    """Find the concatenated frames by their headers, without decompressing anything.

    Skippable frames are skipped.

    Args:
        data: The compressed block.
        max_bytes: Largest decompressed size, in bytes.

    Returns:
        The frames, in order.

    Raises:
        CorruptBatch: A frame is truncated or malformed, bytes are not a frame, a declared size
            exceeds ``max_bytes`` or the capacity of the blocks, a window is too large, or there are
            more frames or blocks than a writer makes of ``max_bytes``.
    """
    frames: list[Frame] = []
    position, end = 0, len(data)
    count, blocks_left = 0, _LEAST_BLOCKS + max_bytes // _LEAST_BLOCK
    declared_total = 0
    if not end:
        raise CorruptBatch("zstd block is empty: not even a frame header")
    while position < end:
        count += 1
        if count > MOST_FRAMES:
            raise CorruptBatch(
                f"zstd block has more than {MOST_FRAMES} frames: a batch is one frame, and no "
                "writer makes this many"
            )
        magic = int.from_bytes(data[position : position + 4], "little")
        if magic & 0xFFFFFFF0 == _SKIPPABLE_MAGIC:
            size = int.from_bytes(data[position + 4 : position + 8], "little")
            if size > end - position - 8:  # also true if its size field is truncated
                raise CorruptBatch(f"zstd skippable frame at byte {position} is truncated")
            position += 8 + size
            continue
        frame = _plan_frame(data[position:], position, max_bytes, blocks_left)
        blocks_left -= frame.blocks
        if frame.declared:
            declared_total += frame.most
            if declared_total > max_bytes:
                # failure F21: refuse by the declared sizes, before anything is expanded.
                raise CorruptBatch.too_large(
                    f"zstd block declares {declared_total} bytes, more than the limit of "
                    f"{max_bytes}",
                    max_bytes,
                )
        frames.append(frame)
        position += len(frame.data)
    return frames


def _plan_frame(data: memoryview, at: int, max_bytes: int, blocks_left: int) -> Frame:
    if int.from_bytes(data[:4], "little") != _FRAME_MAGIC:
        raise CorruptBatch(f"zstd block has no frame at byte {at}: found {bytes(data[:4])!r}")
    try:
        header = zstandard.get_frame_parameters(data[:18])
        position = zstandard.frame_header_size(data[:18])
    except zstandard.ZstdError as error:
        raise CorruptBatch(f"zstd frame header at byte {at} is broken: {error}") from error
    declared = header.content_size != zstandard.CONTENTSIZE_UNKNOWN
    window_limit = min(max(max_bytes, _LEAST_WINDOW), _MOST_WINDOW)
    # A frame with a single segment has no window of its own: its content is the window.
    if not declared and header.window_size > window_limit:
        raise CorruptBatch(
            f"zstd frame at byte {at} needs a window of {header.window_size} bytes, more than "
            f"the limit of {window_limit}"
        )
    end = len(data)
    most, blocks, last = 0, 0, False
    while not last:
        blocks += 1
        if blocks > blocks_left:
            raise CorruptBatch.too_large(
                f"zstd frame at byte {at} has more blocks than the limit of {max_bytes} bytes "
                f"allows, one per {_LEAST_BLOCK} bytes: no writer makes blocks this small",
                max_bytes,
            )
        if end - position < 3:
            raise CorruptBatch(f"zstd frame at byte {at} is truncated at a block header")
        head = data[position] | data[position + 1] << 8 | data[position + 2] << 16
        position += 3
        last, kind, size = bool(head & 1), head >> 1 & 3, head >> 3
        if kind == _RESERVED or size > _MAX_BLOCK:
            raise CorruptBatch(f"zstd frame at byte {at} has a block of a reserved kind or size")
        on_wire = 1 if kind == _RLE else size
        if end - position < on_wire:
            raise CorruptBatch(f"zstd frame at byte {at} is truncated inside a block")
        position += on_wire
        most += size if kind <= _RLE else _MAX_BLOCK
    if header.has_checksum:
        if end - position < 4:
            raise CorruptBatch(f"zstd frame at byte {at} is truncated at its checksum")
        position += 4
    if declared and header.content_size > most:
        # failure F22: a 13-byte frame may declare terabytes, but its blocks limit its content.
        raise CorruptBatch(
            f"zstd frame at byte {at} declares {header.content_size} bytes but its blocks hold "
            f"at most {most}"
        )
    return Frame(data[:position], header.content_size if declared else most, declared, blocks)


def _reader(frame: Frame) -> zstandard.ZstdDecompressionReader:
    # plan_frames() has checked that the window is not larger.
    return zstandard.ZstdDecompressor(max_window_size=_MOST_WINDOW).stream_reader(frame.data)


def decompress(data: memoryview, max_bytes: int) -> memoryview:
    """Decompress all frames of a block.

    Args:
        data: The compressed block.
        max_bytes: Largest decompressed size, in bytes.

    Returns:
        The content of all frames.

    Raises:
        CorruptBatch: The content is damaged or exceeds ``max_bytes``.
    """
    frames = plan_frames(data, max_bytes)
    target = memoryview(bytearray(min(sum(frame.most for frame in frames), max_bytes) + 1))
    return target[: decompress_into(frames, target, max_bytes)]


def decompress_into(frames: list[Frame], target: memoryview, max_bytes: int) -> int:
    """Write the content of all frames to the start of ``target``.

    Args:
        frames: The frames, from :func:`plan_frames`.
        target: One byte longer than ``min(sum of frame.most, max_bytes)``, so that a full target
            can be told from an overflow.
        max_bytes: Largest content, in bytes.

    Returns:
        The number of bytes written.

    Raises:
        CorruptBatch: The content is damaged or exceeds ``max_bytes``.
    """
    total = 0
    for frame in frames:
        room = target[total : total + frame.most + 1]
        try:
            written = _reader(frame).readinto(room)
        except (zstandard.ZstdError, MemoryError) as error:
            raise CorruptBatch(f"zstd block is damaged: {error}") from error
        total += written
        if total > max_bytes:
            raise CorruptBatch.too_large(
                f"zstd block holds more than the limit of {max_bytes}", max_bytes
            )
        if frame.declared and written != frame.most:
            raise CorruptBatch(f"zstd frame declares {frame.most} bytes and holds {written}")
    return total
