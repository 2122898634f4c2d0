"""Which partition of a topic each row goes to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from buffer_sink.blocks import Columns
from buffer_sink.topic_write import TopicWrite
from opendata_buffer.errors import InvalidInput
from opendata_buffer.formats import MIB
from opendata_buffer.runtime import Runtime
from opendata_buffer.topic import partitioner as mapping
from opendata_buffer.topic.partitioner import split

if TYPE_CHECKING:
    from opendata_buffer.topic.partitioner import Partitioner

__all__ = ["GATHERED_BYTES", "Router", "check_topic", "gathered"]

GATHERED_BYTES = 8 * MIB
"""Rows that are divided at once; a single batch of Spark's may be larger."""


def check_topic(columns: Columns, partitioner: str | None) -> None:
    """Refuse columns and a partitioner that do not go together.

    Args:
        columns: Of the rows.
        partitioner: As the option says; None where it is not given.

    Raises:
        InvalidInput: Column ``key`` is missing or has no use, or two things choose the partition.
    """
    if columns.partition is not None:
        if partitioner is not None or columns.key is not None:
            other = f"option partitioner ({partitioner!r})" if partitioner else "column 'key'"
            raise InvalidInput(
                f"column 'partition' and {other} both choose the partition: leave out one of them"
            )
    elif partitioner in ("modulo", "rendezvous"):
        if columns.key is None:
            raise InvalidInput(
                f"column 'key' is missing: partitioner {partitioner!r} chooses the partition by "
                "it. Select it, BINARY or STRING, or use the partitioner 'random'."
            )
    elif columns.key is not None:
        raise InvalidInput(
            "column 'key' is there, and the partitioner is 'random': rows of one key would go "
            "anywhere, and lose their order. Set option partitioner to 'modulo' or 'rendezvous', "
            "or drop the column."
        )


def gathered(rows: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The same rows in larger batches: what dividing them costs is per part, not per row.

    Spark gives 10,000 rows at a time; among many partitions only a few hundred would be left.
    """
    waiting: list[pa.RecordBatch] = []
    size = 0
    for batch in rows:
        waiting.append(batch)
        size += batch.nbytes
        if size >= GATHERED_BYTES:
            yield from pa.Table.from_batches(waiting).combine_chunks().to_batches()
            waiting, size = [], 0
    if waiting:
        yield from pa.Table.from_batches(waiting).combine_chunks().to_batches()


class Router:
    """Divides a task's rows among the partitions: by one sort and one copy of each batch.

    Args:
        columns: Where key and partition are in the rows; checked by :func:`check_topic`.
        partitioner: As the option says; None for ``random``.
        write: The partitions.
        task: Number of the task; for messages.
        runtime: For ``random``.
    """

    def __init__(
        self,
        columns: Columns,
        partitioner: str | None,
        write: TopicWrite,
        *,
        task: int,
        runtime: Runtime,
    ) -> None:
        self._columns = columns
        self._write = write
        self._names = write.active
        self._task = task
        mappings: dict[str, Partitioner] = {
            "modulo": mapping.modulo,
            "rendezvous": mapping.rendezvous,
            "random": partial(mapping.random, source=runtime.random),
        }
        self._mapping = mappings[partitioner or "random"]
        self._rows = 0

    def split(self, rows: pa.RecordBatch) -> dict[str, pa.RecordBatch]:
        """The rows of each partition that gets some, in the order in which they came.

        Raises:
            InvalidInput: A key or a partition is null, or there is no such partition.
        """
        columns = self._columns
        if columns.partition is not None:
            parts = split(rows, rows.column(columns.partition), self._names, self._chosen)
        elif columns.key is None:
            # Only their number counts, and so the values serve as keys.
            parts = split(rows, rows.column(columns.value), self._names, self._mapping)
        else:
            self._check_keys(rows.column(columns.key))
            parts = split(rows, rows.column(columns.key), self._names, self._mapping)
        self._rows += len(rows)
        return parts

    def _check_keys(self, keys: pa.Array) -> None:
        if keys.null_count:
            raise InvalidInput(
                f"key is null in {self._row(pc.is_null(keys))}: a row without a key belongs to no "
                "partition. Give it one, df.selectExpr(\"coalesce(key, '') AS key\", ...), or "
                "filter it out."
            )

    def _chosen(self, names: Any, partitions: Sequence[str]) -> Any:
        found = pc.index_in(names, value_set=pa.array(partitions, names.type))
        if not found.null_count:
            return found.to_numpy(zero_copy_only=False)
        wrong = pc.is_null(found)
        name = names[pc.index(wrong, True).as_py()].as_py()
        if name is None:
            why = "null"
        elif name in self._write.draining:
            why = f"{name!r}, which is being drained"
        else:
            why = f"{name!r}, which the topic does not have"
        raise InvalidInput(
            f"partition is {why}, in {self._row(wrong)}: use one of {_listed(self._names)}, or "
            "leave out the column and let option partitioner choose"
        )

    def _row(self, where: pa.Array) -> str:
        row = self._rows + pc.index(where, True).as_py()
        return f"row {row} of partition {self._task} of the DataFrame (counted from 0)"


def _listed(names: Iterable[str]) -> str:
    given = list(names)
    return ", ".join(given if len(given) <= 4 else [given[0], given[1], "...", given[-1]])
