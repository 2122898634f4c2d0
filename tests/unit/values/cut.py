"""Values as they stand in a run of bytes."""

from __future__ import annotations

import numpy as np

from opendata_buffer.values.spans import Bytes, Spans


def spans(*texts: bytes) -> Spans:
    lengths = np.array([len(each) for each in texts], np.int64)
    begins = np.concatenate([[3], 3 + np.cumsum(lengths)[:-1]]).astype(np.int64)
    return Spans(Bytes(np.frombuffer(b"???" + b"".join(texts), np.uint8)), begins, lengths)
