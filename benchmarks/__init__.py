"""Benchmarks: ``./run bench`` measures the library and prints a table of figures and goals."""
