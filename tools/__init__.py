"""Tools for ``./run`` and the tests, which are not installed with the project."""
