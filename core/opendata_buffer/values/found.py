"""A column that was read in bulk, and which of its values are to be read again exactly. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from opendata_buffer.values.scalars import Unfit

__all__ = ["Found", "one_by_one"]

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Found:
    """A column, and where it is not to be trusted.

    Attributes:
        array: The values; null where there is none and where one is doubtful.
        doubtful: True where Spark may read another value, or call it malformed; None: nowhere.
    """

    array: pa.Array
    doubtful: Mask | None = None

    @classmethod
    def of(cls, array: pa.Array, doubtful: Mask) -> Found:
        """The same with a mask that may be empty."""
        return cls(array, doubtful if doubtful.any() else None)


def one_by_one(texts: pa.StringArray, dtype: pa.DataType, read: Callable[[str], Any]) -> Found:
    """A column of texts that Arrow does not read as Spark does.

    Args:
        texts: What to read; null stays null.
        dtype: Of the column.
        read: The value of one text; raises :class:`.Unfit` for one that has none.
    """
    unfit = np.zeros(len(texts), np.bool_)
    values: list[Any] = []
    known: dict[str, Any] = {}  # Times repeat, and reading one takes microseconds.
    for at, text in enumerate(texts.to_pylist()):
        value = None
        if text is not None:
            try:
                value = known[text] if text in known else known.setdefault(text, read(text))
            except Unfit:
                unfit[at] = True
        values.append(value)
    return Found.of(pa.array(values, dtype), unfit)
