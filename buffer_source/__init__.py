"""The Spark source: ``spark.readStream.format("opendata-buffer")`` and ``spark.read``.

Keep this module cheap to import: Spark imports it whenever it looks for data sources.
"""
