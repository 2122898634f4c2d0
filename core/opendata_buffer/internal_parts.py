"""Arguments of the public classes that only tests and this library pass.

A user of ``Producer`` gives a URL and settings. Tests also give a store and a clock, and the parts
of the library give what they have opened already. Those arguments would come first in an editor's
list, and mean nothing to a user. So the signatures of the public classes have the settings only::

    def __init__(self, config, **settings: Unpack[ProducerSettings]) -> None:
        given, parts = take_parts(settings, "store", "runtime", "open_committer")
        config = ProducerConfig.of(config, given)

The constructors accept the parts by name nevertheless, and take them out of the settings with
:func:`take_parts`. A type checker refuses them, unless they are passed with :func:`internals`.
"""

from __future__ import annotations

from os import PathLike
from typing import Any, NamedTuple

from opendata_buffer.errors import InvalidInput


class InternalParts(NamedTuple):
    """What tests and the library may pass. None stands for the part that users get.

    Attributes:
        store: An opened store.
        runtime: Clock and threads.
        queue: An opened queue, for a consumer.
        topic: An opened topic, for a producer.
        open_committer: Opens the committer of a queue.
        open_pause: Opens the pause of a queue's broker.
        network: Connects to brokers and listens.
        entropy: Returns random bytes.
    """

    store: Any = None
    runtime: Any = None
    queue: Any = None
    topic: Any = None
    open_committer: Any = None
    open_pause: Any = None
    network: Any = None
    entropy: Any = None


def internals(**parts: Any) -> Any:
    """Return parts to pass to a public class, as ``Producer(config, **internals(store=store))``."""
    return parts


def take_parts(settings: Any, *names: str) -> tuple[dict[str, Any], InternalParts]:
    """Divide the keywords of a constructor.

    Args:
        settings: The keywords.
        *names: The parts that the class has.

    Returns:
        The settings without the parts, and the parts.

    Raises:
        InvalidInput: A store is named by its URL.
    """
    rest = {**settings}
    parts = {name: rest.pop(name) for name in names if name in rest}
    if isinstance(parts.get("store"), str | PathLike):
        raise InvalidInput("store is given twice: the first argument is the URL, leave store out")
    return rest, InternalParts(**parts)
