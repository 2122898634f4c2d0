"""Databricks' own Python calls the source and the sink: see ``engine.py``."""
