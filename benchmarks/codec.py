"""Encoding and decoding batches, and appending to a long manifest, beside the bare minimum.

Each ratio interleaves the measured call and its yardstick in one loop and takes the median of
the pairwise ratios, so that a busy machine slows both.
"""

from __future__ import annotations

import gc
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pyarrow as pa
import zstandard

from benchmarks.table import Row
from opendata_buffer.formats.arrow import decode_arrow, decode_records, encode_arrow_block
from opendata_buffer.formats.batch import (
    FOOTER_SIZE,
    Compression,
    encode_batch,
    seal_block,
)
from opendata_buffer.formats.manifest import Manifest, Metadata, NewEntry
from opendata_buffer.producer.batching import encode_bytes

MIB = 1024 * 1024
BLOCK_BYTES = 32 * MIB
RUNS = 15


@dataclass(frozen=True)
class Pair:
    """Medians of interleaved runs, CPU seconds; ``ratio`` is the median of the runs' ratios."""

    ours: float
    base: float
    ratio: float


def seconds(call: Callable[[], object]) -> float:
    # CPU time of all threads: nothing here waits, and other processes must not count.
    start = time.process_time()
    result = call()
    taken = time.process_time() - start
    del result  # freeing is not part of either side
    return taken


def interleave(ours: Callable[[], object], base: Callable[[], object], runs: int = RUNS) -> Pair:
    gc.collect()
    seconds(ours)
    seconds(base)
    pairs = [(seconds(ours), seconds(base)) for _ in range(runs)]
    return Pair(
        statistics.median(first for first, _ in pairs),
        statistics.median(second for _, second in pairs),
        statistics.median(first / second for first, second in pairs),
    )


def at_most(name: str, bar: float, pair: Pair, detail: str) -> Row:
    ok = pair.ratio <= bar
    return Row(name, f"{pair.ratio:.2f} x", f"<= {bar:g} x", ok, detail)


def rate(count: int, taken: float) -> str:
    return f"{count / taken / 1e6:.1f} M records/s"


def logs(rng: random.Random, size: int = 263) -> list[bytes]:
    """JSON log events of equal size, as many as make a block of 32 MiB."""
    kinds = ["click", "view", "purchase", "error", "login"]
    records = []
    for number in range(BLOCK_BYTES // (size + 4)):
        event = {
            "ts": 1_700_000_000_000 + number * 7,
            "user": f"user-{rng.randint(0, 99_999):05d}",
            "kind": rng.choice(kinds),
            "url": f"/products/{rng.randint(0, 9_999)}/details",
            "ip": ".".join(str(rng.randint(0, 255)) for _ in range(4)),
            "agent": "Mozilla/5.0 (X11; Linux x86_64)",
            "session": f"{rng.getrandbits(80):020x}",
        }
        text = json.dumps(event).encode()
        records.append(text + b" " * (size - len(text)))
    return records


def random_records(rng: random.Random, least: int, most: int) -> list[bytes]:
    """Records of varying length, as many as make a block of 32 MiB on average."""
    count = BLOCK_BYTES // ((least + most) // 2 + 4)
    return [rng.randbytes(rng.randint(least, most)) for _ in range(count)]


def zstd_rows(rng: random.Random) -> list[Row]:
    records = logs(rng)
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
    encoded = interleave(encode, lambda: encoder.compress(block), runs=9)
    decoder = zstandard.ZstdDecompressor()
    decoded = interleave(lambda: decode_arrow(data), lambda: decoder.decompress(frame))
    return [
        at_most(
            "decode a zstd batch of 263-byte records to Arrow / bare zstd decompression",
            1.3,
            decoded,
            f"{decoded.ours * 1e3:.0f} against {decoded.base * 1e3:.0f} ms, {sizes}; "
            f"{rate(len(records), decoded.ours)}",
        ),
        at_most(
            "encode it from Arrow at level 3 / bare zstd compression",
            1.2,
            encoded,
            f"{encoded.ours * 1e3:.0f} against {encoded.base * 1e3:.0f} ms; "
            f"{rate(len(records), encoded.ours)}",
        ),
    ]


def plain_row(rng: random.Random) -> Row:
    records = random_records(rng, 60, 140)
    data = encode_batch(records)
    assert decode_arrow(data).to_pylist() == records
    block = memoryview(data)[:-FOOTER_SIZE]
    decoded = interleave(lambda: decode_arrow(data), lambda: bytes(block))
    return at_most(
        "decode uncompressed records of 60 to 140 bytes to Arrow / one copy of the block",
        5,
        decoded,
        f"{decoded.ours * 1e3:.1f} against {decoded.base * 1e3:.1f} ms; "
        f"{rate(len(records), decoded.ours)}",
    )


def speed_rows(rng: random.Random) -> list[Row]:
    """Records/s for 100-byte records, for orientation."""
    records = [record[:100] for record in logs(rng, 300)] * 3
    array = pa.array(records, pa.binary())
    rows = []
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
        for what, arrow, listed in (
            ("encode", encode, encode_list),
            ("decode", decode, decode_list),
        ):
            pair = interleave(arrow, listed, runs=5)
            rows.append(
                Row(
                    f"{what} 100-byte records, {name}",
                    rate(len(records), pair.ours),
                    detail=f"from Arrow; {rate(len(records), pair.base)} as a Python list"
                    if what == "encode"
                    else f"to Arrow; {rate(len(records), pair.base)} as a Python list",
                )
            )
    return rows


def manifest_of(rng: random.Random, count: int) -> Manifest:
    return Manifest.empty().append(
        [
            NewEntry(
                f"ingest/{number:010d}{rng.getrandbits(60):016x}.batch",
                (Metadata(0, 1_700_000_000_000 + number, b""),),
            )
            for number in range(count)
        ]
    )


def append_row(rng: random.Random) -> Row:
    """The CPU of an append beside a plain copy of the manifest's bytes."""
    new = [NewEntry("ingest/01J5T4R3KXBMZ7QV9N2WG8YDHP.batch", (Metadata(0, 1_700_000_000_000),))]
    long, short = manifest_of(rng, 100_000), manifest_of(rng, 100)
    view = memoryview(long.raw)
    appended = interleave(lambda: long.append(new), lambda: bytes(view), runs=101)
    few = interleave(lambda: short.append(new), lambda: None, runs=1001)
    # The work that does not grow with the queue is what 100 entries cost.
    pair = Pair(appended.ours, appended.base + few.ours, appended.ours / (appended.base + few.ours))
    return at_most(
        "append with 100,000 entries queued / append with 100 plus one copy of the bytes",
        1.25,
        pair,
        f"{appended.ours * 1e3:.2f} ms against {few.ours * 1e6:.0f} us + "
        f"{appended.base * 1e3:.2f} ms for {long.size / MIB:.1f} MiB",
    )


def run() -> Iterator[Row]:
    """All lines of this suite, in the order of the report."""
    rng = random.Random(7)
    yield from zstd_rows(rng)
    yield plain_row(rng)
    yield append_row(rng)
    yield from speed_rows(rng)
