"""Which partition of a topic a record goes to, by its key.

Each function takes a column of keys and the names of the partitions, in the order in which the
topic lists them, and gives one index into that list for each key. Equal keys get equal indices
as long as the list does not change, so records of one key keep their order. A function of the
caller's own, of the type :data:`Partitioner`, can take their place.

What happens when partitions are added tells the two hashed mappings apart: ``modulo`` moves
nearly every key, ``rendezvous`` only those that the new partitions take over. How evenly
``rendezvous`` spreads depends on the names: those that partitions of a topic get are made for it.
Both agree, key by key, with Gazette's ``ModuloMapping`` and ``RendezvousMapping``.
"""

from __future__ import annotations

import random as system_random
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeAlias

from opendata_buffer.errors import InvalidInput

__all__ = ["Keys", "Partitioner", "modulo", "random", "rendezvous", "split"]


if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import pyarrow as pa

    Indices: TypeAlias = npt.NDArray[np.int64]

Keys: TypeAlias = "pa.Array | pa.ChunkedArray | Sequence[bytes | str]"
"""A column of binary or string type, or bytes and text; text counts as its UTF-8 bytes."""

Partitioner: TypeAlias = "Callable[[Keys, Sequence[str]], Indices]"
"""From keys and the partitions' names to an index into the names for each key."""

_OFFSET_BASIS = 0x811C9DC5
PRIME = 0x01000193

_TABLE_BITS = 16
"""A table of so many bits fits into the processor's cache, and takes a millisecond to make."""

_CHUNK = 1 << 14
"""Keys hashed together: their hashes and one byte of each stay in the processor's cache."""


def modulo(keys: Keys, partitions: Sequence[str]) -> Indices:
    """The key's 32-bit FNV-1a hash modulo the number of partitions.

    Raises:
        InvalidInput: A key is null or no text or bytes, or there are no partitions.
    """
    import numpy as np

    _check(partitions)
    count = np.uint32(len(partitions))
    return _concatenate(np.remainder(hashes, count).astype(np.int64) for hashes in _hashes(keys))


def rendezvous(keys: Keys, partitions: Sequence[str]) -> Indices:
    """The partition with the highest weight for the key (highest random weight hashing).

    The weight of a partition for a key is the exclusive or of their 32-bit FNV-1a hashes; of
    equal weights the first in the list wins.

    Raises:
        InvalidInput: A key is null or no text or bytes, or there are no partitions.
    """
    _check(partitions)
    names = tuple(fnv1a(name.encode()) for name in partitions)
    bits = _deciding_bits(names)
    if bits > _TABLE_BITS:
        return _concatenate(_heaviest(hashes, names) for hashes in _hashes(keys))
    table, low = _table(names, bits), 32 - bits
    return _concatenate(table[hashes >> low] for hashes in _hashes(keys))


def random(
    keys: Keys, partitions: Sequence[str], *, source: Callable[[], float] | None = None
) -> Indices:
    """Any partition, whatever the key: an even spread, and no order between records.

    Args:
        keys: Only their number counts.
        partitions: The partitions' names.
        source: Numbers in [0, 1); one is drawn for a call. Default: the system's.

    Raises:
        InvalidInput: There are no partitions.
    """
    import numpy as np

    _check(partitions)
    seed = int((source or system_random.SystemRandom().random)() * (1 << 53))
    generator = np.random.default_rng(seed)
    return generator.integers(0, len(partitions), len(keys), dtype=np.int64)


def fnv1a(data: bytes) -> int:
    """The 32-bit FNV-1a hash of some bytes."""
    value = _OFFSET_BASIS
    for byte in data:
        value = ((value ^ byte) * PRIME) & 0xFFFFFFFF
    return value


def _heaviest(hashes: npt.NDArray[np.uint32], names: Sequence[int]) -> Indices:
    """For each key's hash the name with the highest weight; of equal ones the first."""
    import numpy as np

    best = hashes ^ np.uint32(names[0])
    index = np.zeros(len(hashes), np.int64)
    for position, name in enumerate(names[1:], 1):
        weight = hashes ^ np.uint32(name)
        index[weight > best] = position
        np.maximum(best, weight, out=best)
    return index


def _deciding_bits(names: Sequence[int]) -> int:
    """In how many of the highest bits all names differ; 33 when two are equal.

    The others never decide: of two weights that one is higher which has the higher bit where
    their names differ first.
    """
    ordered = sorted(names)
    shared = (32 - (a ^ b).bit_length() for a, b in pairwise(ordered))
    return 1 + max(shared, default=0)


@lru_cache(maxsize=16)
def _table(names: tuple[int, ...], bits: int) -> Indices:
    """The name with the highest weight for each value of a hash's highest bits."""
    import numpy as np

    low = 32 - bits
    return _heaviest(np.arange(1 << bits, dtype=np.uint32), [name >> low for name in names])


def _check(partitions: Sequence[str]) -> None:
    if not partitions:
        raise InvalidInput("there are no partitions to map keys to: create the topic with some")


def _concatenate(parts: Iterator[Indices]) -> Indices:
    import numpy as np

    found = list(parts)
    return np.concatenate(found) if found else np.empty(0, np.int64)


def _hashes(keys: Keys) -> Iterator[npt.NDArray[np.uint32]]:
    """The hashes of all keys, in order, some thousand at a time."""
    import pyarrow as pa

    if not isinstance(keys, pa.Array | pa.ChunkedArray):
        keys = _column(keys)
    chunks = keys.chunks if isinstance(keys, pa.ChunkedArray) else [keys]
    passed = 0
    for chunk in chunks:
        if pa.types.is_dictionary(chunk.type):
            chunk = chunk.dictionary_decode()
        if chunk.null_count:
            position = passed + chunk.is_null().index(True).as_py()
            raise InvalidInput(
                f"key {position} is null: give each record a key, or use the random mapping"
            )
        for begin in range(0, len(chunk), _CHUNK):
            yield _hash_chunk(chunk.slice(begin, _CHUNK))
        passed += len(chunk)


def _column(keys: Sequence[bytes | str]) -> pa.Array:
    import pyarrow as pa

    values = [key.encode() if isinstance(key, str) else key for key in keys]
    for position, value in enumerate(values):
        if not isinstance(value, bytes | bytearray | memoryview):
            raise InvalidInput(f"key {position} is {value!r}: use bytes, text or an Arrow column")
    return pa.array(values, pa.large_binary())


def _hash_chunk(chunk: pa.Array) -> npt.NDArray[np.uint32]:
    """FNV-1a of many keys side by side: step ``i`` takes the ``i``-th byte of every key.

    The hash of one key needs its bytes one after the other, but the keys do not need each
    other: so the loop is over the length of the longest key, and not over the keys.
    """
    import numpy as np

    offsets, data = _bytes_of(chunk)
    starts = offsets[:-1]
    lengths = np.diff(offsets)
    count = len(lengths)
    hashes = np.full(count, _OFFSET_BASIS, np.uint32)
    longest = int(lengths.max()) if count else 0
    prime = np.uint32(PRIME)
    if count and int(lengths.min()) == longest:
        matrix = data[int(starts[0]) : int(starts[0]) + count * longest].reshape(count, longest)
        for step in range(longest):
            hashes ^= matrix[:, step]
            hashes *= prime
        return hashes
    # Longest first: the keys that still have bytes are always the first ones.
    order = np.argsort(-lengths, kind="stable")
    starts, lengths = starts[order], lengths[order]
    open_keys = count - np.searchsorted(lengths[::-1], np.arange(longest), side="right")
    for step in range(longest):
        some = hashes[: open_keys[step]]
        some ^= data.take(starts[: open_keys[step]] + step)
        some *= prime
    result = np.empty(count, np.uint32)
    result[order] = hashes
    return result


def _bytes_of(chunk: pa.Array) -> tuple[Any, npt.NDArray[np.uint8]]:
    """The offsets of a chunk's keys and the memory they point into; nothing is copied."""
    import numpy as np
    import pyarrow as pa

    kind = chunk.type
    if pa.types.is_fixed_size_binary(kind):
        data = np.frombuffer(chunk.buffers()[1], np.uint8)
        first = chunk.offset * kind.byte_width
        return np.arange(len(chunk) + 1, dtype=np.int64) * kind.byte_width + first, data
    if pa.types.is_binary(kind) or pa.types.is_string(kind):
        width: Any = np.int32
    elif pa.types.is_large_binary(kind) or pa.types.is_large_string(kind):
        width = np.int64
    elif kind in (pa.binary_view(), pa.string_view()):
        return _bytes_of(chunk.cast(pa.large_binary()))
    else:
        raise InvalidInput(f"keys have the type {kind}: use binary or string")
    _, offsets, values = chunk.buffers()
    wanted = np.frombuffer(offsets, width)[chunk.offset : chunk.offset + len(chunk) + 1]
    data = np.frombuffer(values, np.uint8) if values is not None else np.empty(0, np.uint8)
    return wanted.astype(np.int64), data


# ---- Records divided among partitions ----
#
# By one sort and one copy, with no loop over the records.


if TYPE_CHECKING:
    import pyarrow as pa

    Entries: TypeAlias = (
        pa.Array | pa.ChunkedArray | pa.RecordBatch | Sequence[bytes | bytearray | memoryview]
    )


def split(
    entries: Entries, keys: Keys, partitions: Sequence[str], mapping: Partitioner
) -> dict[str, Entries]:
    """The entries of each partition that gets some; each in the order in which they came.

    Args:
        entries: An Arrow array or record batch, or bytes-like objects. The parts are of the
            same kind.
        keys: One for each entry.
        partitions: The partitions' names.
        mapping: From keys and names to an index into the names for each key.

    Raises:
        InvalidInput: There are not as many keys as entries; or the mapping's answer is not one
            index into the names for each key.
    """
    if isinstance(keys, bytes | str):
        raise InvalidInput(f"keys is one {type(keys).__name__}: give a list of keys, [key]")
    if len(keys) != len(entries):
        raise InvalidInput(f"there are {len(keys)} keys for {len(entries)} entries: one each")
    if not len(entries):
        return {}
    indices = _checked(mapping(keys, partitions), len(entries), len(partitions), mapping)
    return _parted(entries, indices, partitions)


def _checked(found: Any, count: int, partitions: int, mapping: Partitioner) -> Any:
    import numpy as np

    name = getattr(mapping, "__name__", repr(mapping))
    indices = np.asarray(found)
    if indices.shape != (count,) or not np.issubdtype(indices.dtype, np.integer):
        raise InvalidInput(
            f"partitioner {name} gave {indices.dtype} of shape {indices.shape} for {count} keys: "
            "return one whole number for each key"
        )
    least, most = int(indices.min()), int(indices.max())
    if least < 0 or most >= partitions:
        wrong = least if least < 0 else most
        raise InvalidInput(
            f"partitioner {name} gave {wrong}: return an index into the {partitions} partitions, "
            f"0 to {partitions - 1}"
        )
    return indices


def _parted(entries: Any, indices: Any, partitions: Sequence[str]) -> dict[str, Any]:
    import numpy as np
    import pyarrow as pa

    counts = np.bincount(indices, minlength=len(partitions))
    wanted: list[int] = np.flatnonzero(counts).tolist()
    if len(wanted) == 1:
        return {partitions[wanted[0]]: entries}
    # Stable: entries of one partition keep their order. Numbers of 16 bits are sorted by their
    # digits, which takes an eighth of the time.
    few = np.uint16 if len(partitions) <= 1 << 16 else np.int64
    order = np.argsort(indices.astype(few), kind="stable")
    ends = np.cumsum(counts)
    if isinstance(entries, pa.Array | pa.ChunkedArray | pa.RecordBatch):
        ordered = _wide(entries).take(pa.array(order))
        return {
            partitions[each]: ordered.slice(ends[each] - counts[each], counts[each])
            for each in wanted
        }
    return {
        partitions[each]: [entries[at] for at in order[ends[each] - counts[each] : ends[each]]]
        for each in wanted
    }


def _wide(entries: Any) -> Any:
    """With 64-bit offsets: 32-bit ones end at 2 GiB, and chunks may have more together."""
    import pyarrow as pa

    if isinstance(entries, pa.ChunkedArray):
        kind = entries.type
        if pa.types.is_binary(kind):
            return entries.cast(pa.large_binary()).combine_chunks()
        if pa.types.is_string(kind):
            return entries.cast(pa.large_string()).combine_chunks()
        return entries.combine_chunks()
    return entries
