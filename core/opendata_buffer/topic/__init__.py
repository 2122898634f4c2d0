"""Topics: many queues as one stream. Each partition is an ordinary queue."""

from __future__ import annotations
