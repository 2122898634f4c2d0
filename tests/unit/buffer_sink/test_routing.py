from __future__ import annotations

from collections import defaultdict
from typing import Any

import pyarrow as pa
import pytest

from buffer_sink.messages import TopicWrite
from buffer_sink.rows import COALESCED_BYTES, Columns, PartitionRouter, check_topic, coalesced
from opendata_buffer.errors import InvalidInput
from opendata_buffer.testing.runtime import ManualRuntime
from opendata_buffer.topic import partitioner as mapping

NAMES = ("p-00000", "p-00002", "p-00003", "p-00004", "p-00005")
WRITE = TopicWrite(NAMES, ("p-00001",), b"\x01" * 6, "write-x")
KEYED = Columns(0, None, key=1)
CHOSEN = Columns(0, None, partition=1)


def router(columns: Columns = KEYED, partitioner: str | None = "rendezvous") -> PartitionRouter:
    return PartitionRouter(columns, partitioner, WRITE, task=3, runtime=ManualRuntime())


def rows(values: list[Any], second: list[Any] | None = None, kind: Any = None) -> pa.RecordBatch:
    columns = [pa.array(values, pa.string())]
    if second is not None:
        columns.append(pa.array(second, kind or pa.string()))
    return pa.record_batch(columns, names=["value", "second"][: len(columns)])


def parts(found: dict[str, pa.RecordBatch]) -> dict[str, list[str]]:
    return {name: part.column(0).to_pylist() for name, part in found.items()}


@pytest.mark.parametrize("kind", [pa.string(), pa.binary()])
@pytest.mark.parametrize("partitioner", ["modulo", "rendezvous"])
def test_rows_go_where_the_mapping_says_and_keep_their_order(partitioner: str, kind: Any) -> None:
    keys = [str(number % 17) for number in range(200)]
    values = [f"{key}/{number}" for number, key in enumerate(keys)]
    given = rows(values, [key.encode() for key in keys] if kind == pa.binary() else keys, kind)
    indices = getattr(mapping, partitioner)(keys, NAMES)
    wanted: defaultdict[str, list[str]] = defaultdict(list)
    for value, index in zip(values, indices, strict=True):
        wanted[NAMES[index]].append(value)
    assert parts(router(partitioner=partitioner).split(given)) == wanted
    assert len(wanted) > 1


@pytest.mark.parametrize("partitioner", [None, "random"])
def test_at_random_each_row_goes_to_some_active_partition(partitioner: str | None) -> None:
    values = [str(number) for number in range(1_000)]
    found = parts(router(Columns(0, None), partitioner).split(rows(values)))
    assert set(found) == set(NAMES)
    assert sorted(value for each in found.values() for value in each) == sorted(values)
    assert all(100 < len(each) < 300 for each in found.values())


def test_the_column_partition_chooses() -> None:
    given = rows(["a", "b", "c"], ["p-00005", "p-00000", "p-00005"])
    found = parts(router(CHOSEN, None).split(given))
    assert found == {"p-00005": ["a", "c"], "p-00000": ["b"]}


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("p-00009", "'p-00009', which the topic does not have"),
        ("p-00001", "'p-00001', which is being drained"),
        ("", "'', which the topic does not have"),
        (None, "null"),
    ],
)
def test_a_partition_that_cannot_be_written_is_named_with_its_row(
    name: str | None, why: str
) -> None:
    routes = router(CHOSEN, None)
    routes.split(rows(["a"] * 10, ["p-00000"] * 10))
    with pytest.raises(InvalidInput) as refused:
        routes.split(rows(["a", "b"], ["p-00000", name]))
    assert f"partition is {why}, in row 11 of task 3" in str(refused.value)
    assert "p-00000, p-00002, ..., p-00005" in str(refused.value)


def test_a_key_that_is_null_is_named_with_its_row() -> None:
    routes = router()
    routes.split(rows(["a"] * 10, ["k"] * 10))
    with pytest.raises(InvalidInput, match="key is null in row 12 of task 3"):
        routes.split(rows(["a", "b", "c"], ["k", "k", None]))


def test_no_rows_go_nowhere() -> None:
    assert router().split(rows([], [])) == {}
    assert router(CHOSEN, None).split(rows([], [])) == {}
    assert router(Columns(0, None), None).split(rows([])) == {}


def test_small_batches_are_gathered_and_large_ones_are_not() -> None:
    small = [rows([f"{number}/{row}" for row in range(100)]) for number in range(50)]
    large = rows(["x" * COALESCED_BYTES])
    found = list(coalesced([*small, large, small[0]]))
    assert [len(each) for each in found] == [5_001, 100]
    assert found[0].column(0).to_pylist()[:5_000] == [
        value for each in small for value in each.column(0).to_pylist()
    ]
    assert list(coalesced([])) == []


@pytest.mark.parametrize(
    ("columns", "partitioner"),
    [(Columns(0, None), None), (Columns(0, None), "random"), (KEYED, "modulo"), (CHOSEN, None)],
)
def test_columns_that_fit_the_partitioner(columns: Columns, partitioner: str | None) -> None:
    check_topic(columns, partitioner)


@pytest.mark.parametrize(
    ("columns", "partitioner", "message"),
    [
        (Columns(0, None), "modulo", "column 'key' is missing: partitioner 'modulo'"),
        (KEYED, None, "rows of one key would go anywhere"),
        (KEYED, "random", "Set option partitioner to 'modulo'"),
        (CHOSEN, "modulo", "column 'partition' and option partitioner"),
        (Columns(0, None, 1, 2), None, "column 'partition' and column 'key' both choose"),
    ],
)
def test_columns_that_do_not(columns: Columns, partitioner: str | None, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        check_topic(columns, partitioner)
