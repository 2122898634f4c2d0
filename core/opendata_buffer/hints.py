"""Hints as data: what a caller can do about an error, in the words of the place that shows it.

The problem: the same error may reach a Python program, a command line, or a Spark query, and the
remedy has another name in each. To wait longer, a program sets ``timeout_ms``, and a command takes
``--timeout-ms``. A command to run must name the store, the partition, and the endpoint, which the
code that finds the fault may not know.

The idea: the message of an error is a sequence of parts (:class:`Message`). A part is plain text,
the name of a setting (:class:`Setting`), or a :class:`Hint`: an :class:`Action` with its values. A
hint has no text until it is shown on a :class:`Surface`. For example::

    error = Conflict("ingest/manifest", attempts=12, waited_s=60.0)
    error.hints                  # (Hint(Action.LET_FEWER_WRITE),)
    str(error)                   # "... Try again, raise timeout_ms, or let fewer ..."
    error.text(Surface.SHELL)    # "... Try again, raise --timeout-ms, or let fewer ..."

Code that does not know its queue leaves :attr:`Hint.queue` out, and the caller that knows it calls
``error.at(queue)``.

To add a hint, add a member to :class:`Action`. A test shows every member on every surface and runs
the commands that it prints.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any, NamedTuple


class Surface(Enum):
    """A place that shows errors, with names of its own for settings and remedies."""

    PYTHON = auto()
    SHELL = auto()
    SPARK = auto()


_FLAGS = {"delivery_timeout_ms": "--timeout-ms"}
"""Settings whose option of the command line has another name."""

_OPTIONS = {"store": "path"}
"""Settings whose option of Spark has another name."""


@dataclass(frozen=True, slots=True)
class Setting:
    """The name of a setting in a message.

    Attributes:
        name: The field of a configuration, such as ``timeout_ms``.
    """

    name: str

    def text(self, surface: Surface) -> str:
        """Return the name: ``timeout_ms``, ``--timeout-ms``, or ``timeoutMs``."""
        if surface is Surface.SHELL:
            return _FLAGS.get(self.name) or "--" + self.name.replace("_", "-")
        if surface is Surface.SPARK:
            first, *others = self.name.split("_")
            return _OPTIONS.get(self.name) or first + "".join(map(str.capitalize, others))
        return self.name

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class QueueName:
    """The name of a queue or topic, for a message or a command. It never contains a secret.

    Attributes:
        store: The URL of the store.
        manifest_path: The key of the manifest.
        options: The settings that a command needs to find the queue and to reach its store, with
            their values. Settings with their default value are left out.
    """

    store: str
    manifest_path: str
    options: tuple[tuple[str, str | bool], ...] = ()

    @property
    def place(self) -> str:
        """The manifest and its store, as errors name them."""
        return f"{self.manifest_path!r} in {self.store}"

    def words(self) -> str:
        """Return the arguments by which a command finds the queue, quoted for a shell."""
        import shlex  # only for a message that is shown

        found = [self.store]
        for name, value in self.options:
            found.append(Setting(name).text(Surface.SHELL))
            if value is not True:
                found.append(str(value))
        return shlex.join(found)


class Texts(NamedTuple):
    """The text of an action on each surface; Python's if a surface has no text of its own.

    A text is a template: braces name an attribute of :class:`Hint`.
    """

    python: str
    shell: str | None = None
    spark: str | None = None

    def on(self, surface: Surface) -> str:
        """Return the template for a surface."""
        own = {Surface.SHELL: self.shell, Surface.SPARK: self.spark}.get(surface)
        return self.python if own is None else own


class Action(Enum):
    """What a caller can do about an error, with its text on each surface."""

    # ---- Manifests
    REPAIR_MANIFEST = Texts(
        "Stop producers, consumers and collectors. 'opendata-buffer fsck {queue}' shows what is "
        "there, and 'opendata-buffer fsck {queue} --repair' repairs it."
    )
    RESTORE_OR_REPAIR_MANIFEST = Texts(
        "Restore the object's latest version (bucket versioning), or stop producers, consumers and "
        "collectors and run 'opendata-buffer fsck {queue} --repair'."
    )
    RESTORE_OR_REBUILD_MANIFEST = Texts(
        "Stop producers, consumers and collectors. Restore the latest version (bucket versioning), "
        "or let 'opendata-buffer fsck {queue} --repair' enqueue the batches again that are still "
        "there."
    )
    START_OVER = Texts(
        "To start over without them, use 'opendata-buffer produce {queue} --recreate'."
    )
    REPAIR = Texts("Stop everything and repair it with 'opendata-buffer fsck {queue} --repair'.")
    INSPECT = Texts("Look at it with 'opendata-buffer status {queue}'.")


@dataclass(frozen=True, slots=True)
class Hint:
    """An action with the values that its text names.

    Attributes:
        action: What to do.
        queue: The queue that a command names. None if the code that made the hint does not know
            it; commands then show the word ``STORE``.
    """

    action: Action
    queue: QueueName | None = None

    def at(self, queue: QueueName) -> Hint:
        """Return the hint for a queue, unless it already names one."""
        return self if self.queue is not None else replace(self, queue=queue)

    def text(self, surface: Surface) -> str:
        """Return the text for a surface: one or more whole sentences."""
        values: dict[str, Any] = {name: getattr(self, name) for name in self.__slots__}
        values["queue"] = "STORE" if self.queue is None else self.queue.words()
        template: Texts = self.action.value
        return template.on(surface).format_map(values)

    def __str__(self) -> str:
        return self.text(Surface.PYTHON)


Part = str | Setting | Hint
"""A part of a message."""


def render(parts: Iterable[object], surface: Surface) -> str:
    """Put the parts of a message together for a surface.

    A hint begins a new sentence, and the text after it another one. All else is joined as it is.

    Args:
        parts: The parts of the message. Other objects are shown as ``str()`` shows them.
        surface: Where the message is shown.

    Returns:
        The message.
    """
    found, after_hint = "", False
    for part in parts:
        if isinstance(part, Hint):
            found = _sentence(found) + part.text(surface)
            after_hint = True
            continue
        text = part.text(surface) if isinstance(part, Setting) else str(part)
        found = _sentence(found) + text.lstrip() if after_hint and text else found + text
        after_hint = False
    return found


def _sentence(text: str) -> str:
    """Return a text to which a sentence can be appended."""
    text = text.rstrip()
    if not text:
        return text
    return f"{text} " if text.endswith((".", "?", "!", ":")) else f"{text}. "


class Message(tuple[Part, ...]):
    """A message in parts that is not an error, such as the reason why nothing was collected."""

    __slots__ = ()

    @property
    def hints(self) -> tuple[Hint, ...]:
        """What the reader of the message can do, as data."""
        return tuple(part for part in self if isinstance(part, Hint))

    def at(self, queue: QueueName) -> Message:
        """Return the message with the queue in those hints that do not name one."""
        return Message(part.at(queue) if isinstance(part, Hint) else part for part in self)

    def text(self, surface: Surface) -> str:
        """Return the message for a surface."""
        return render(self, surface)

    def __str__(self) -> str:
        return self.text(Surface.PYTHON)
