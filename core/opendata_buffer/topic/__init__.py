"""Topics: many queues as one stream. Each partition is an ordinary queue."""
