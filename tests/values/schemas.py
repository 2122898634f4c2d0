"""The schemas of the corpus as Arrow has them."""

from __future__ import annotations

import pyarrow as pa

from tests.values.corpus import CORRUPT

__all__ = ["SCHEMAS"]

_SCALARS = [
    ("a", pa.int32()), ("b", pa.int64()), ("c", pa.string()), ("d", pa.float64()),
    ("e", pa.float32()), ("f", pa.bool_()), ("g", pa.decimal128(10, 2)), ("h", pa.int8()),
    ("i", pa.int16()), ("j", pa.date32()), ("k", pa.timestamp("us", "UTC")),
    ("l", pa.timestamp("us")),
]  # fmt: skip
_NESTED = [
    ("m", pa.binary()), ("n", pa.list_(pa.int32())),
    ("o", pa.struct([("x", pa.int32()), ("y", pa.string())])),
    ("p", pa.map_(pa.string(), pa.int32())),
    ("q", pa.list_(pa.struct([("x", pa.int32()), ("y", pa.float64())]))),
]  # fmt: skip
SCHEMAS = {
    "json": pa.schema([*_SCALARS, *_NESTED, (CORRUPT, pa.string())]),
    "csv": pa.schema([*_SCALARS, (CORRUPT, pa.string())]),
}
