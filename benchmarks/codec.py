"""How fast are batches encoded and decoded, and how fast is an append to a long manifest?

Each ratio compares a call with the least work that could do the same: bare zstd, or one copy of
the bytes. The two run in turns in one loop, so a busy machine slows both.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pyarrow as pa
import zstandard

from benchmarks.measuring import MIB, Pair, interleave, sized
from benchmarks.stores import BLOCK_BYTES, log_events
from benchmarks.tables import Row
from opendata_buffer.formats.arrow import decode_arrow, decode_records, encode_arrow_block
from opendata_buffer.formats.batch import (
    FOOTER_SIZE,
    Compression,
    encode_batch,
    seal_block,
)
from opendata_buffer.formats.manifest import Manifest, Metadata, NewEntry
from opendata_buffer.producer.batching import encode_bytes

DECODE_RUNS = sized(15, tiny=2)
ENCODE_RUNS = sized(9, tiny=2)
SPEED_RUNS = sized(5, tiny=1)
LONG, LONG_RUNS = sized(100_000, tiny=200), sized(101, tiny=2)
"""Entries of the long manifest, and the number of appends to it."""

SHORT, SHORT_RUNS = 100, sized(1_001, tiny=2)


def rows() -> Iterator[Row]:
    """Give all rows of this suite."""
    rng = random.Random(7)
    yield from zstd_rows(rng)
    yield plain_row(rng)
    yield append_row(rng)
    yield from speed_rows(rng)


def zstd_rows(rng: random.Random) -> list[Row]:
    """Compare decoding and encoding of compressed batches with bare zstd."""
    records = log_events(rng)
    array = pa.array(records, pa.binary())
    block = bytes(encode_arrow_block(array)[0])
    data = encode_batch(records, Compression.ZSTD, 3)
    assert decode_arrow(data).equals(array)
    frame = data[:-FOOTER_SIZE]
    sizes = f"{len(block) / MIB:.0f} MiB as {len(data) / MIB:.1f} MiB"

    def encode() -> bytes:
        made, count = encode_arrow_block(array)
        return seal_block(made, count, Compression.ZSTD, 3)

    encoder = zstandard.ZstdCompressor(level=3)
    encoded = interleave(encode, lambda: encoder.compress(block), ENCODE_RUNS)
    decoder = zstandard.ZstdDecompressor()
    decoded = interleave(lambda: decode_arrow(data), lambda: decoder.decompress(frame), DECODE_RUNS)
    return [
        _at_most(
            "decode a zstd batch of 263-byte records to Arrow / bare zstd decompression",
            1.3,
            decoded,
            f"{decoded.ours * 1e3:.0f} against {decoded.base * 1e3:.0f} ms, {sizes}; "
            f"{_rate(len(records), decoded.ours)}",
        ),
        _at_most(
            "encode it from Arrow at level 3 / bare zstd compression",
            1.2,
            encoded,
            f"{encoded.ours * 1e3:.0f} against {encoded.base * 1e3:.0f} ms; "
            f"{_rate(len(records), encoded.ours)}",
        ),
    ]


def plain_row(rng: random.Random) -> Row:
    """Compare decoding of an uncompressed batch with one copy of its bytes."""
    records = _random_records(rng, 60, 140)
    data = encode_batch(records)
    assert decode_arrow(data).to_pylist() == records
    block = memoryview(data)[:-FOOTER_SIZE]
    decoded = interleave(lambda: decode_arrow(data), lambda: bytes(block), DECODE_RUNS)
    return _at_most(
        "decode uncompressed records of 60 to 140 bytes to Arrow / one copy of the block",
        5,
        decoded,
        f"{decoded.ours * 1e3:.1f} against {decoded.base * 1e3:.1f} ms; "
        f"{_rate(len(records), decoded.ours)}",
    )


def append_row(rng: random.Random) -> Row:
    """Compare an append to a long manifest with one to a short manifest plus a copy of the bytes.

    The append to the short manifest is the work that does not grow with the queue.
    """
    new = [NewEntry("ingest/01J5T4R3KXBMZ7QV9N2WG8YDHP.batch", (Metadata(0, 1_700_000_000_000),))]
    long, short = _manifest_of(rng, LONG), _manifest_of(rng, SHORT)
    view = memoryview(long.raw)
    appended = interleave(lambda: long.append(new), lambda: bytes(view), LONG_RUNS)
    fixed = interleave(lambda: short.append(new), lambda: None, SHORT_RUNS)
    base = appended.base + fixed.ours
    return _at_most(
        f"append with {LONG:,} entries queued / append with {SHORT} plus one copy of the bytes",
        1.25,
        Pair(appended.ours, base, appended.ours / base),
        f"{appended.ours * 1e3:.2f} ms against {fixed.ours * 1e6:.0f} us + "
        f"{appended.base * 1e3:.2f} ms for {long.size / MIB:.1f} MiB",
    )


def speed_rows(rng: random.Random) -> list[Row]:
    """Report records per second for records of 100 bytes. There is no goal."""
    records = [record[:100] for record in log_events(rng, 300)] * 3
    array = pa.array(records, pa.binary())
    found = []
    for compression in Compression:
        data = encode_batch(records, compression, 3)

        def encode(compression: Compression = compression) -> bytes:
            made, count = encode_arrow_block(array)
            return seal_block(made, count, compression, 3)

        def encode_list(compression: Compression = compression) -> bytes:
            return seal_block(encode_bytes(records), len(records), compression, 3)

        def decode(data: bytes = data) -> pa.Array:
            return decode_arrow(data)

        def decode_list(data: bytes = data) -> list[bytes]:
            return decode_records(data)

        name = "uncompressed" if compression == Compression.NONE else "zstd level 3"
        for verb, direction, arrow, listed in (
            ("encode", "from", encode, encode_list),
            ("decode", "to", decode, decode_list),
        ):
            pair = interleave(arrow, listed, SPEED_RUNS)
            found.append(
                Row(
                    f"{verb} 100-byte records, {name}",
                    _rate(len(records), pair.ours),
                    detail=f"{direction} Arrow; {_rate(len(records), pair.base)} as a Python list",
                )
            )
    return found


def _at_most(name: str, goal: float, pair: Pair, detail: str) -> Row:
    return Row(name, f"{pair.ratio:.2f} x", f"<= {goal:g} x", pair.ratio <= goal, detail)


def _rate(count: int, taken: float) -> str:
    return f"{count / taken / 1e6:.1f} M records/s"


def _random_records(rng: random.Random, least: int, most: int) -> list[bytes]:
    """Return records of different lengths, as many as fill a block of 32 MiB on average."""
    count = BLOCK_BYTES // ((least + most) // 2 + 4)
    return [rng.randbytes(rng.randint(least, most)) for _ in range(count)]


def _manifest_of(rng: random.Random, count: int) -> Manifest:
    return Manifest.empty().append(
        [
            NewEntry(
                f"ingest/{number:010d}{rng.getrandbits(60):016x}.batch",
                (Metadata(0, 1_700_000_000_000 + number, b""),),
            )
            for number in range(count)
        ]
    )
