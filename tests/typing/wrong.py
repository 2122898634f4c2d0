"""Lines that a type checker has to refuse; each has a comment with the word ``wrong``."""

from opendata_buffer import Consumer, Producer, ProducerConfig

Producer("memory://x", flush_interval_ms="5")  # wrong
Producer("memory://x", compression="gzip")  # wrong
Consumer("memory://x").poll(1.0)  # wrong
Producer("memory://x").send(b"x").reslut()  # wrong
Producer("memory://x", linger_ms=5)  # wrong, but ty does not check names of an Unpack yet
Producer("memory://x", store=object())  # wrong, but ty
Producer("memory://x").produce([b"x"], headers={})  # wrong, but ty
Producer("memory://x").send(b"x", key=b"k")  # wrong
ProducerConfig(store="memory://x", compression="gzip")  # wrong
Consumer("memory://x", group_id="g")  # wrong, but ty
