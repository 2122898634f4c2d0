"""Topics: several queues as one stream. Each partition of a topic is an ordinary queue."""
