"""Test tools of the project: simulation, models and servers."""
