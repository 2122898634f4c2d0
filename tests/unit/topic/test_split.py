"""Records divided among partitions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from opendata_buffer.errors import InvalidInput
from opendata_buffer.topic.partitioner import modulo, rendezvous, split

NAMES = ["p-00000", "p-00001", "p-00002"]
ENTRIES = [b"entry %d" % number for number in range(1000)]
KEYS = [b"key %d" % (number % 37) for number in range(1000)]


def listed(part: Any) -> list[bytes]:
    found = part.to_pylist() if isinstance(part, pa.Array | pa.ChunkedArray) else part
    return [each.encode() if isinstance(each, str) else bytes(each) for each in found]


KINDS: dict[str, Any] = {
    "list": ENTRIES,
    "binary": pa.array(ENTRIES, pa.binary()),
    "string": pa.array([each.decode() for each in ENTRIES], pa.string()),
    "large": pa.array(ENTRIES, pa.large_binary()),
    "slice": pa.array([b"x", *ENTRIES, b"y"]).slice(1, 1000),
    "chunks": pa.chunked_array([ENTRIES[:1], [], ENTRIES[1:]], pa.binary()),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mapping", [modulo, rendezvous])
def test_every_entry_is_where_its_key_is_mapped_to_and_in_order(kind: str, mapping: Any) -> None:
    wanted: dict[str, list[bytes]] = {}
    for entry, index in zip(ENTRIES, mapping(KEYS, NAMES), strict=True):
        wanted.setdefault(NAMES[index], []).append(entry)
    parts = split(KINDS[kind], pa.array(KEYS), NAMES, mapping)
    assert {name: listed(part) for name, part in parts.items()} == wanted
    assert len(parts) == 3
    if kind != "list":
        assert all(isinstance(part, pa.Array | pa.ChunkedArray) for part in parts.values())


def test_rows_are_divided_with_all_their_columns() -> None:
    rows = pa.record_batch({"value": ENTRIES, "number": range(1000)})
    parts = split(rows, KEYS, NAMES, modulo)
    numbers = [each for part in parts.values() for each in part.column("number").to_pylist()]
    assert sorted(numbers) == list(range(1000))
    wanted = split(ENTRIES, KEYS, NAMES, modulo)
    for name, part in parts.items():
        assert part.column("value").to_pylist() == wanted[name]


def test_entries_of_one_partition_are_not_copied() -> None:
    entries = pa.array(ENTRIES)
    (part,) = split(entries, [b"same"] * 1000, NAMES, modulo).values()
    assert part is entries


def test_nothing_is_divided_into_nothing() -> None:
    assert split([], [], NAMES, modulo) == {}
    assert split(pa.array([], pa.binary()), pa.array([], pa.string()), NAMES, rendezvous) == {}


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ([0, 1], r"shape \(2,\) for 3 keys"),
        ([0.0, 1.0, 1.0], "float64"),
        ([0, 1, 3], "3: return an index into the 3 partitions, 0 to 2"),
        ([0, -1, 1], "-1"),
        (None, "object"),
    ],
)
def test_a_partitioner_that_gives_no_indices_is_named(answer: Any, message: str) -> None:
    def mine(keys: Any, partitions: Any) -> Any:
        return answer if answer is None else np.array(answer)

    with pytest.raises(InvalidInput, match=f"partitioner mine gave .*{message}"):
        split([b"a", b"b", b"c"], [b"k"] * 3, NAMES, mine)


def test_as_many_keys_as_entries() -> None:
    with pytest.raises(InvalidInput, match="2 keys for 1 entries"):
        split([b"a"], [b"k", b"l"], NAMES, modulo)
    with pytest.raises(InvalidInput, match=r"one bytes: give a list of keys, \[key\]"):
        split([b"a"], b"k", NAMES, modulo)  # type: ignore[arg-type]
