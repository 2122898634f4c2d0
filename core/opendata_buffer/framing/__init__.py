"""How records are told apart in a stream of bytes: a file, a pipe, a socket.

==================  ==========================================================  =============
framing             a record in the stream                                      any bytes?
==================  ==========================================================  =============
``lines``           what ends at a newline; a ``\\r`` before it belongs to it    without newline
``ndjson``          one JSON value and a newline                                JSON text
``csv``             one row of RFC 4180; quoted fields may hold newlines        CSV text
``protobuf-fixed``  magic word, u32 length, the record (Gazette's framing)      yes
``length``          u32 length, the record                                      yes
==================  ==========================================================  =============

All lengths are little-endian. A splitter is fed pieces of the stream, of any size, and gives
back the records that are complete; it holds one unfinished record and never more than the
largest record allowed.
"""

from __future__ import annotations

from opendata_buffer.framing.fixed import FixedSplitter, join_fixed, unpack_fixed
from opendata_buffer.framing.framings import FRAMINGS, Framing
from opendata_buffer.framing.length import LengthSplitter, join_length
from opendata_buffer.framing.lines import LineSplitter, join_lines
from opendata_buffer.framing.text import CsvSplitter, NdjsonSplitter, join_csv, join_ndjson

__all__ = [
    "FRAMINGS",
    "CsvSplitter",
    "FixedSplitter",
    "Framing",
    "LengthSplitter",
    "LineSplitter",
    "NdjsonSplitter",
    "join_csv",
    "join_fixed",
    "join_length",
    "join_lines",
    "join_ndjson",
    "unpack_fixed",
]
