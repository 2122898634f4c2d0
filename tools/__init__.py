"""What ``./run`` and the tests need beside the project: nothing here is installed with it."""
