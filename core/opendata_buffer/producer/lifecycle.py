"""The end of a process, and its fork, as producers see them.

A forked child has a copy of each producer, but none of its threads. So its producers refuse calls.
A process that ends has records in memory if its producers were not closed. So they are closed
then.

Only senders are remembered, and only while something else keeps them alive, for example their
threads.
"""

from __future__ import annotations

import atexit
import logging
import os
import weakref

from opendata_buffer.producer.batching import CLOSED
from opendata_buffer.producer.sender import Sender

log = logging.getLogger(__name__)

_open_senders: weakref.WeakSet[Sender] = weakref.WeakSet()


def register(sender: Sender) -> None:
    """Remember the sender of an open producer."""
    # Arrow imports pandas when it first converts a list of records, and pandas imports this module.
    # Python refuses to import it during its exit, so a batch could not be encoded any more.
    import concurrent.futures.thread  # noqa: F401

    _open_senders.add(sender)


def forget(sender: Sender) -> None:
    """Forget the sender of a closed producer."""
    _open_senders.discard(sender)


def _refuse_in_child() -> None:
    """Make all producers of a forked child refuse calls.

    ``send()`` adds to the open buffer without any check. A closed one leads it to the check of the
    process.
    """
    for sender in list(_open_senders):
        sender.accumulator.batcher.buffer = CLOSED
    _open_senders.clear()


os.register_at_fork(after_in_child=_refuse_in_child)


@atexit.register
def _close_at_exit() -> None:
    """Close the producers that the program has not closed (failure F30)."""
    for sender in list(_open_senders):
        log.warning("a producer was not closed before exit; closing it now")
        try:
            sender.close(None)
            sender.accumulator.check()
        except KeyboardInterrupt:
            held = sender.accumulator.held_bytes()
            log.error("interrupted: about %d bytes of produced records are not durable", held)
            return
        except Exception:
            log.exception("closing the producer failed")
