"""The chosen records become what Spark made of them, which was written down."""

from __future__ import annotations

import pyarrow as pa
import pytest

from opendata_buffer.values.decoder import Decoder
from tests.values.compare import differences
from tests.values.golden import FORMATS, read_golden
from tests.values.schemas import SCHEMAS


@pytest.mark.parametrize("library", ["msgspec", "json"])
@pytest.mark.parametrize("name", FORMATS)
def test_the_chosen_records_become_the_rows_that_spark_made_of_them(
    name: str, library: str
) -> None:
    form = FORMATS[name]
    assert len(form.chosen) > 1000
    decoder = Decoder(SCHEMAS[name], form.options, library=library)
    arrays = decoder.decode(pa.array(form.chosen, pa.binary())).arrays
    found = differences(form.chosen, read_golden(name), pa.table(arrays, schema=SCHEMAS[name]))
    assert not found, "\n".join([f"{len(found)} differ", *found[:20]])
