"""Writing to a queue: collect records, upload batches, append them to the manifest."""
