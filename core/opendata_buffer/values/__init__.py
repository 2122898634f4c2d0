"""Record values as typed columns: JSON objects and CSV lines to Arrow, by Spark's rules.

:class:`~opendata_buffer.values.decoder.Decoder` is the way in. It reads records in bulk where that
gives what Spark's ``from_json`` and ``from_csv`` give, and every other record by itself, by code
that follows Spark's parsers step by step. Pure: nothing here reads, writes or looks at a clock.
"""
