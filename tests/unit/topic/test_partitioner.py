"""Mapping keys to partitions, and dividing records by partition."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from opendata_buffer.errors import InvalidInput
from opendata_buffer.topic.partitioner import Partitioner, fnv1a, modulo, random, rendezvous, split

VECTORS = Path(__file__).parents[2] / "golden" / "gazette" / "vectors.json.gz"
TOPICS = json.loads(gzip.decompress(VECTORS.read_bytes()))["mapping"]


@pytest.mark.parametrize("topic", TOPICS, ids=lambda topic: f"{len(topic['partitions'])}")
@pytest.mark.parametrize("mapping", [modulo, rendezvous])
def test_every_key_maps_to_the_same_partition_as_in_gazette(
    mapping: Partitioner, topic: dict
) -> None:  # type: ignore[type-arg]
    names = topic["partitions"]
    keys = [bytes.fromhex(each["key_hex"]) for each in topic["keys"]]
    chosen = [names[index] for index in mapping(keys, names)]
    assert chosen == [each[mapping.__name__] for each in topic["keys"]]


@given(st.lists(st.binary(max_size=40)), st.integers(0, 3))
def test_a_column_of_any_kind_is_hashed_key_by_key(keys: list[bytes], skip: int) -> None:
    expected = [fnv1a(key) % 7 for key in keys]
    names = [f"p{each}" for each in range(7)]
    for kind in (pa.binary(), pa.large_binary(), pa.binary_view()):
        column = pa.array(keys, kind)
        assert modulo(column, names).tolist() == expected
        assert modulo(column.slice(skip), names).tolist() == expected[skip:]
    chunked = pa.chunked_array([pa.array(keys[:skip], pa.binary()), pa.array(keys, pa.binary())])
    assert modulo(chunked, names).tolist() == expected[:skip] + expected


@given(
    st.lists(st.text("pq-0123456789", max_size=9), min_size=1, max_size=40),
    st.lists(st.binary(max_size=12), min_size=1, max_size=40),
)
def test_rendezvous_hashing_chooses_the_highest_weight_for_any_names(
    names: list[str], keys: list[bytes]
) -> None:
    weights = [[fnv1a(key) ^ fnv1a(name.encode()) for name in names] for key in keys]
    expected = [row.index(max(row)) for row in weights]
    assert rendezvous(keys, names).tolist() == expected


def test_text_keys_are_hashed_as_utf_8() -> None:
    texts = ["", "a", "Zürich", "東京"]
    raw = [text.encode() for text in texts]
    names = ["a", "b", "c"]
    for keys in (texts, pa.array(texts), pa.array(texts, pa.large_string())):
        assert modulo(keys, names).tolist() == modulo(raw, names).tolist()
    dictionary = pa.array(texts * 3).dictionary_encode()
    assert rendezvous(dictionary, names).tolist() == rendezvous(raw, names).tolist() * 3


def test_keys_of_fixed_size_are_hashed_also_in_a_slice() -> None:
    raw = [bytes([a, b]) for a in range(40) for b in range(40)]
    column = pa.array(raw, pa.binary(2))
    names = ["a", "b", "c"]
    assert modulo(column.slice(3), names).tolist() == modulo(raw, names).tolist()[3:]


def test_more_keys_than_are_hashed_at_once_keep_their_order() -> None:
    keys = [str(number).encode() for number in range(40_000)]
    names = [f"p{each}" for each in range(16)]
    assert modulo(keys, names).tolist() == [fnv1a(key) % 16 for key in keys]


def test_random_spreads_evenly_and_depends_on_its_generator() -> None:
    keys, names = ["same"] * 10_000, ["a", "b", "c", "d"]
    chosen = random(keys, names)
    assert all(2_000 < (chosen == index).sum() < 3_000 for index in range(4))
    again = [random(keys, names, source=lambda: 0.25).tolist() for _ in range(2)]
    assert again[0] == again[1]
    assert random(keys, names, source=lambda: 0.5).tolist() != again[0]


@pytest.mark.parametrize("mapping", [modulo, rendezvous, random])
def test_an_empty_list_of_partitions_is_refused(mapping: Partitioner) -> None:
    with pytest.raises(InvalidInput, match="no partitions"):
        mapping([b"key"], [])


@pytest.mark.parametrize("mapping", [modulo, rendezvous, random])
def test_no_keys_give_no_indices(mapping: Partitioner) -> None:
    assert mapping(pa.array([], pa.binary()), ["a"]).tolist() == []


@pytest.mark.parametrize("mapping", [modulo, rendezvous])
def test_the_error_about_a_null_key_has_its_index(mapping: Partitioner) -> None:
    column = pa.chunked_array([pa.array([b"a", b"b"]), pa.array([b"c", None])])
    with pytest.raises(InvalidInput, match="key 3 is null"):
        mapping(column, ["a"])


def test_keys_of_another_type_are_refused() -> None:
    with pytest.raises(InvalidInput, match="type int64"):
        modulo(pa.array([1, 2]), ["a"])
    with pytest.raises(InvalidInput, match="key 1 is 7"):
        modulo([b"a", 7], ["a"])  # type: ignore[list-item]


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
def test_every_entry_is_in_the_partition_of_its_key_and_in_order(kind: str, mapping: Any) -> None:
    wanted: dict[str, list[bytes]] = {}
    for entry, index in zip(ENTRIES, mapping(KEYS, NAMES), strict=True):
        wanted.setdefault(NAMES[index], []).append(entry)
    parts = split(KINDS[kind], pa.array(KEYS), NAMES, mapping)
    assert {name: listed(part) for name, part in parts.items()} == wanted
    assert len(parts) == 3
    if kind != "list":
        assert all(isinstance(part, pa.Array | pa.ChunkedArray) for part in parts.values())


def test_rows_keep_all_columns_when_they_are_divided() -> None:
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


def test_an_empty_list_is_divided_into_no_parts() -> None:
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
def test_the_error_about_a_partitioner_without_valid_indices_names_it(
    answer: Any, message: str
) -> None:
    def mine(keys: Any, partitions: Any) -> Any:
        return answer if answer is None else np.array(answer)

    with pytest.raises(InvalidInput, match=f"partitioner mine gave .*{message}"):
        split([b"a", b"b", b"c"], [b"k"] * 3, NAMES, mine)


def test_the_numbers_of_keys_and_entries_must_be_equal() -> None:
    with pytest.raises(InvalidInput, match="2 keys for 1 records"):
        split([b"a"], [b"k", b"l"], NAMES, modulo)
    with pytest.raises(InvalidInput, match=r"one bytes: give a list of keys, \[key\]"):
        split([b"a"], b"k", NAMES, modulo)  # type: ignore[arg-type]
