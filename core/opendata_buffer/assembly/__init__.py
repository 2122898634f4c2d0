r"""The public classes: those of the packages below, with the broker put in.

A producer appends through the broker of its queue, if there is one. A consumer asks the broker to
pause while it changes the manifest. But the broker is built from producers, consumers and queues,
so their packages lie below it and may not import it. This package lies above all of them, and
joins the two::

    opendata_buffer.Producer             the public name
        |
    assembly.producer.Producer           chooses: this process, or its broker
        |                  \
    producer.producer      broker.committer
        \                  /
         producer.committer, queue

A class below that needs a broker has one method that names its default, such as
``Producer._default_committer``. Below, the default needs no broker; the class of the same name
here overrides that method, and nothing else. A caller can also pass ``open_committer`` or
``open_pause`` itself, as tests do.

Each class has a module of its own, so that a program that only produces loads no consumer. And
nothing here imports the broker before one is needed, because it loads an HTTP server and an event
loop.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from opendata_buffer.config import ProducerConfig, QueueConfig
    from opendata_buffer.producer.committer import Committer
    from opendata_buffer.queue.cas import CasStore
    from opendata_buffer.queue.ownership import QueueClaim
    from opendata_buffer.queue.queue import WritePause
    from opendata_buffer.runtime import Runtime
    from opendata_buffer.stores.base import Store


def open_committer(
    store: Store, config: ProducerConfig, runtime: Runtime, claim: QueueClaim | None
) -> Committer:
    """Open the committer that ``config.broker`` asks for.

    This is the :data:`~opendata_buffer.producer.committer.OpenCommitter` of the public
    producers. Only a setting other than ``off`` loads the broker.
    """
    if config.broker == "off":
        from opendata_buffer.producer.sharing import shared_committer

        return shared_committer(store, config, runtime, claim)
    from opendata_buffer.broker.committer import open_brokered_committer

    return open_brokered_committer(store, config, runtime, claim)


def open_pause(store: CasStore, config: QueueConfig, runtime: Runtime) -> WritePause:
    """Return what makes the queue's broker pause.

    This is the :data:`~opendata_buffer.queue.queue.OpenPause` of the public consumers and of
    Spark's sink. A queue calls it at its first lost race, which loads the broker.
    """
    from opendata_buffer.broker.committer import BrokerPause

    return BrokerPause(store, config, runtime)
