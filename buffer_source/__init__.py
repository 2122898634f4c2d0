"""The Spark source: ``spark.readStream.format("opendata-buffer")`` and ``spark.read``.

Import-light: Spark imports this on every discovery of data sources.
"""
