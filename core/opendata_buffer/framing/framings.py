"""The framings by their names, each with both directions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pyarrow as pa

from opendata_buffer.errors import InvalidInput
from opendata_buffer.framing.fixed import FixedSplitter, join_fixed
from opendata_buffer.framing.length import LengthSplitter, join_length
from opendata_buffer.framing.lines import LineSplitter, join_lines
from opendata_buffer.framing.splitter import Splitter
from opendata_buffer.framing.text import CsvSplitter, NdjsonSplitter

__all__ = ["FRAMINGS", "Framing"]


@dataclass(frozen=True)
class Framing:
    """One way to tell records apart.

    Attributes:
        name: As the command line has it.
        unit: What a record is called in messages, in the plural.
        splitter: From the largest record, in bytes, to a new splitter of a stream.
        join: From records to the bytes of a stream.
        checks: Whether a record must look like something to be one; then :meth:`framed` looks.
    """

    name: str
    unit: str
    splitter: Callable[[int], Splitter]
    join: Callable[[pa.BinaryArray], bytes | memoryview]
    checks: bool = False

    def framed(self, records: pa.BinaryArray, sequence: int) -> bytes | memoryview:
        """The bytes of a batch's records.

        Raises:
            InvalidInput: A record would not be read again as what it is: no JSON value on one
                line, no row, or nothing at all. None of the batch must be written then.
        """
        data = self.join(records)
        if self.checks:
            self._check(records, data, sequence)
        return data

    def _check(self, records: pa.BinaryArray, data: bytes | memoryview, sequence: int) -> None:
        expected = records.to_pylist()
        reason = ""
        found: list[bytes] = []
        try:
            splitter = self.splitter(len(data))
            found += splitter.feed(bytes(data))
            found += splitter.finish()
        except InvalidInput as error:
            reason = f": {error}"
        if found != expected:
            pairs = enumerate(zip(found, expected, strict=False))
            number = next((n for n, (one, other) in pairs if one != other), len(found))
            raise InvalidInput(
                f"record {number} of batch {sequence} cannot be written as {self.name}{reason} "
                "Nothing of the batch was written or acknowledged; records of any bytes go "
                "through --framing length."
            )


FRAMINGS = {
    framing.name: framing
    for framing in (
        Framing("lines", "lines", LineSplitter, join_lines),
        Framing("ndjson", "records", NdjsonSplitter, join_lines, checks=True),
        Framing("csv", "records", CsvSplitter, lambda each: join_lines(each, b"\r\n"), checks=True),
        Framing(
            "protobuf-fixed", "records", FixedSplitter, lambda each: join_fixed(each.to_pylist())
        ),
        Framing("length", "records", LengthSplitter, lambda each: join_length(each.to_pylist())),
    )
}
