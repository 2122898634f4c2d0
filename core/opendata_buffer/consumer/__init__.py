"""Reading a queue: claim it, fetch batches in parallel, acknowledge them in order."""
