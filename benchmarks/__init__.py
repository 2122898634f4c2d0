"""Benchmarks: ``./run bench`` prints one table, with the bar of each line."""
