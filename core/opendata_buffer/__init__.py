"""A queue that lives in object storage.

::

    from opendata_buffer import Consumer, ConsumerConfig, Producer, ProducerConfig

    with Producer(ProducerConfig(store="s3://bucket")) as producer:
        producer.produce([b"one", b"two"]).watcher.await_durable()

    with Consumer(ConsumerConfig(store="s3://bucket")) as consumer:
        while batch := consumer.next_batch():
            print(batch.entries)
            consumer.ack(batch.sequence)

Everything public is here. Names are loaded when they are first used: Arrow takes 0.2 s.
"""

from __future__ import annotations

from opendata_buffer._public import attach

__getattr__, __dir__, __all__ = attach(__name__)
