"""Choose the partition of a topic that a record goes to, by its key.

A partitioner takes a column of keys and the names of the partitions, in the order of the topic's
description. It returns one index into the names for each key. Equal keys get equal indices as long
as the names do not change, so records of one key keep their order. Any function of the type
:data:`Partitioner` can be used.

When partitions are added, ``modulo`` moves nearly every key. ``rendezvous`` moves only the keys
that the new partitions take over. It spreads keys evenly because the names of a topic's partitions
are chosen for that. Both agree, key by key, with Gazette's ``ModuloMapping`` and
``RendezvousMapping``.
"""

from __future__ import annotations

import random as system_random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set, Sized
from functools import lru_cache
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from opendata_buffer.arguments import wrong_type
from opendata_buffer.errors import InvalidInput
from opendata_buffer.formats.arrow import listed
from opendata_buffer.topic.description import OFFSET_BASIS, PRIME, fnv1a

__all__ = ["Keys", "Partitioner", "fnv1a", "modulo", "random", "rendezvous", "split"]

Indices: TypeAlias = npt.NDArray[np.int64]
Records: TypeAlias = (
    bytes
    | bytearray
    | memoryview
    | Iterable[bytes | bytearray | memoryview]
    | pa.Array
    | pa.ChunkedArray
    | pa.RecordBatch
)
"""Records of one call: see :data:`.batching.Records`; and rows, which Spark's sink divides."""

Keys: TypeAlias = pa.Array | pa.ChunkedArray | Sequence[bytes | str]
"""A column of binary or string type, or a list of bytes and text. Text is hashed as UTF-8."""

Partitioner: TypeAlias = Callable[[Keys, Sequence[str]], Indices]
"""A function from keys and the partitions' names to an index into the names for each key."""

_TABLE_BITS = 16
"""A table of 2 ** 16 indices fits into the processor's cache, and takes a millisecond to make."""

_CHUNK = 1 << 14
"""Keys that are hashed together: their hashes and one byte of each fit into the processor's cache.
"""

_NONE = np.empty(0, np.int64)


def modulo(keys: Keys, partitions: Sequence[str]) -> Indices:
    """Return, for each key, its 32-bit FNV-1a hash modulo the number of partitions.

    Args:
        keys: The keys.
        partitions: Names of the partitions.

    Returns:
        An index into ``partitions`` for each key.

    Raises:
        InvalidInput: A key is null or neither text nor bytes, or ``partitions`` is empty.
    """
    _check(partitions)
    count = np.uint32(len(partitions))
    parts = (np.remainder(hashes, count).astype(np.int64) for hashes in _hashes(keys))
    return np.concatenate([_NONE, *parts])


def rendezvous(keys: Keys, partitions: Sequence[str]) -> Indices:
    """Return the partition with the highest weight for each key (highest random weight hashing).

    The weight of a partition for a key is the exclusive or of their 32-bit FNV-1a hashes. If two
    weights are equal, the first partition in the list wins.

    Args:
        keys: The keys.
        partitions: Names of the partitions.

    Returns:
        An index into ``partitions`` for each key.

    Raises:
        InvalidInput: A key is null or neither text nor bytes, or ``partitions`` is empty.
    """
    _check(partitions)
    names = tuple(fnv1a(name.encode()) for name in partitions)
    bits = _deciding_bits(names)
    if bits > _TABLE_BITS:
        return np.concatenate([_NONE, *(_heaviest(hashes, names) for hashes in _hashes(keys))])
    table, low = _table(names, bits), 32 - bits
    return np.concatenate([_NONE, *(table[hashes >> low] for hashes in _hashes(keys))])


def random(
    keys: Keys, partitions: Sequence[str], *, source: Callable[[], float] | None = None
) -> Indices:
    """Return a random partition for each key: an even spread, without an order of records.

    Args:
        keys: The keys, of which only the number counts.
        partitions: Names of the partitions.
        source: Returns a number in [0, 1); called once. Default: the system's.

    Returns:
        An index into ``partitions`` for each key.

    Raises:
        InvalidInput: ``partitions`` is empty.
    """
    _check(partitions)
    _check_keys(keys)
    if source is not None and not callable(source):
        raise wrong_type("source", source, "a function that returns a number in [0, 1)")
    seed = int((source or system_random.SystemRandom().random)() * (1 << 53))
    generator = np.random.default_rng(seed)
    return generator.integers(0, len(partitions), len(keys), dtype=np.int64)


def _heaviest(hashes: npt.NDArray[np.uint32], names: Sequence[int]) -> Indices:
    """Return, for each key's hash, the index of the first name with the highest weight."""
    best = hashes ^ np.uint32(names[0])
    index = np.zeros(len(hashes), np.int64)
    for position, name in enumerate(names[1:], 1):
        weight = hashes ^ np.uint32(name)
        index[weight > best] = position
        np.maximum(best, weight, out=best)
    return index


def _deciding_bits(names: Sequence[int]) -> int:
    """Return the number of highest bits in which all names differ; 33 when two are equal.

    The higher of two weights is the one that has a 1 in the first bit where the names differ.
    """
    shared = (32 - (a ^ b).bit_length() for a, b in pairwise(sorted(names)))
    return 1 + max(shared, default=0)


@lru_cache(maxsize=16)
def _table(names: tuple[int, ...], bits: int) -> Indices:
    """Return the name with the highest weight for each value of a hash's highest bits."""
    low = 32 - bits
    return _heaviest(np.arange(1 << bits, dtype=np.uint32), [name >> low for name in names])


def _check(partitions: Sequence[str]) -> None:
    if not isinstance(partitions, Sequence) or isinstance(partitions, str | bytes):
        raise wrong_type("partitions", partitions, "a list of names")
    if not {*map(type, partitions)} <= {str}:
        raise wrong_type("partitions", partitions, "a list of names, which are text")
    if not partitions:
        raise InvalidInput("there are no partitions to map keys to: create the topic with some")


def _hashes(keys: Keys) -> Iterator[npt.NDArray[np.uint32]]:
    """Yield the hashes of all keys, in order, some thousands at a time.

    Raises:
        InvalidInput: A key is null or neither text nor bytes.
    """
    _check_keys(keys)
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
        try:
            wide = chunk.cast(pa.large_binary())
        except pa.ArrowNotImplementedError:
            raise InvalidInput(f"keys have the type {chunk.type}: use binary or string") from None
        for begin in range(0, len(wide), _CHUNK):
            yield _hash_chunk(wide.slice(begin, _CHUNK))
        passed += len(chunk)


def _check_keys(keys: Keys) -> None:
    """Refuse an argument that is not an ordered collection. The partitioner checks the keys.

    Raises:
        InvalidInput: The argument is one key, or cannot have keys in an order.
    """
    if isinstance(keys, bytes | str):
        raise InvalidInput(f"keys is one {type(keys).__name__}: give a list of keys, [key]")
    if (
        isinstance(keys, type | bytearray | memoryview | Mapping | Set)
        or not isinstance(keys, Iterable)
        or not isinstance(keys, Sized)
    ):
        raise wrong_type("keys", keys, "a list of bytes and text, or an Arrow column")


def _column(keys: Sequence[bytes | str]) -> pa.Array:
    values = [key.encode() if isinstance(key, str) else key for key in keys]
    for position, value in enumerate(values):
        if not isinstance(value, bytes | bytearray | memoryview):
            raise wrong_type(f"key {position}", value, "bytes, text or an Arrow column")
    return pa.array(values, pa.large_binary())


def _hash_chunk(chunk: pa.LargeBinaryArray) -> npt.NDArray[np.uint32]:
    """Return FNV-1a of many keys at once: step ``i`` hashes the ``i``-th byte of every key."""
    _, buffer, values = chunk.buffers()
    offsets = np.frombuffer(buffer, np.int64)[chunk.offset : chunk.offset + len(chunk) + 1]
    data = np.frombuffer(values, np.uint8) if values is not None else np.empty(0, np.uint8)
    starts, lengths = offsets[:-1], np.diff(offsets)
    count, longest = len(lengths), int(lengths.max())
    hashes = np.full(count, OFFSET_BASIS, np.uint32)
    prime = np.uint32(PRIME)
    if int(lengths.min()) == longest:
        matrix = data[int(starts[0]) : int(starts[0]) + count * longest].reshape(count, longest)
        for step in range(longest):
            hashes ^= matrix[:, step]
            hashes *= prime
        return hashes
    # Sort the longest keys first: then the keys that still have bytes are always at the front.
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


def split(
    entries: Records, keys: Keys, partitions: Sequence[str], partitioner: Partitioner
) -> dict[str, Records]:
    """Divide entries among partitions, and keep their order.

    This takes one sort and one copy. The parts are of the same kind as the entries.

    Args:
        entries: The entries.
        keys: One key for each entry.
        partitions: Names of the partitions.
        partitioner: Maps the keys to partitions.

    Returns:
        The entries of each partition that gets some.

    Raises:
        InvalidInput: The numbers of keys and entries differ, or the partitioner did not return one
            index into the names for each key.
    """
    _check(partitions)
    _check_keys(keys)
    if not callable(partitioner):
        raise wrong_type("partitioner", partitioner, "a function such as modulo")
    if not isinstance(entries, pa.RecordBatch):
        entries = listed(entries)
    if len(keys) != len(entries):
        raise InvalidInput(f"there are {len(keys)} keys for {len(entries)} records: one each")
    if not len(entries):
        return {}
    indices = _checked(partitioner(keys, partitions), len(entries), len(partitions), partitioner)
    return _parted(entries, indices, partitions)


def _checked(found: Any, count: int, partitions: int, partitioner: Partitioner) -> Any:
    name = getattr(partitioner, "__name__", repr(partitioner))
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
    counts = np.bincount(indices, minlength=len(partitions))
    wanted: list[int] = np.flatnonzero(counts).tolist()
    if len(wanted) == 1:
        return {partitions[wanted[0]]: entries}
    # The sort is stable, so entries of one partition keep their order. NumPy uses a radix sort for
    # 16-bit numbers, which takes an eighth of the time.
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
    """Return one array with 64-bit offsets.

    32-bit offsets end at 2 GiB, and the chunks together may have more.
    """
    if not isinstance(entries, pa.ChunkedArray):
        return entries
    wide = {pa.binary(): pa.large_binary(), pa.string(): pa.large_string()}.get(entries.type)
    return (entries if wide is None else entries.cast(wide)).combine_chunks()
