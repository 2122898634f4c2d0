"""Which partitions a topic has: one small object at the store's root, as a pure value.

::

    {"version": 1, "id": "01J5...", "next": 3,
     "partitions": [{"name": "p-00000-04pn", "state": "active"},
                    {"name": "p-00002-0bvb", "state": "draining", "since": 1767225600000}],
     "left": ["p-00001-05mv"]}

A partition is an ordinary v1 queue: its data prefix is its name, its manifest lies below that.
Numbers are given once: a partition that has left the topic never comes back under its name, so
positions in it cannot be taken for positions in another one. The letters after the number are
chosen when a partition is added (:mod:`.topic.description`); what counts is the name as it is
listed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from opendata_buffer.errors import CorruptData, InvalidInput, ObjectNotFound
from opendata_buffer.formats.sidecar import Fields, Sidecar
from opendata_buffer.queue.ownership import PARTITION_NAME, TOPIC_KEY
from opendata_buffer.stores.base import Get
from opendata_buffer.topic.partitioner import PRIME, fnv1a

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

__all__ = [
    "DESCRIPTION",
    "DRAIN_S",
    "MAX_BYTES",
    "MAX_PARTITIONS",
    "PLACES",
    "Partition",
    "State",
    "TopicDescription",
    "free_places",
    "has_letters",
    "is_abbreviated",
    "is_topic",
    "name_of",
    "number_meant",
    "number_of",
    "place_of",
]


# ---- Whether a store has a topic: all that a query over one queue needs to know of topics. ----


MAX_BYTES = 1024 * 1024
"""Of a topic's description."""


def is_topic(store: Get) -> bool:
    """Whether a topic lies at the store's root, by one small read.

    Raises:
        TransientStorageError, PermanentStorageError: The store did not answer.
    """
    try:
        store.get(TOPIC_KEY, max_bytes=MAX_BYTES)
    except ObjectNotFound:
        return False
    except CorruptData:
        return True  # too large to read, but there; whoever reads it says so
    return True


# ---- What partitions are called: ``p-00003-04vf``, a number and four letters. ----
#
# The number says which partition it is, and is never given twice. The letters say where it lies.
# Rendezvous hashing gives a key to the partition whose name's hash differs from the key's in the
# highest bits, so it divides the keys as a binary tree over the names' hashes does. Of names like
# ``p-00000`` and ``p-00001`` those hashes are nearly the same, and the tree is lopsided. So the
# letters are searched for: behind three zeros the hash of the whole name has the ten bits of the
# partition's **place**, the lowest bit first::
#
#     place   0               1               2               3               4
#     hash    000 0000000000  000 1000000000  000 0100000000  000 1100000000  000 0010000000
#
# However many of the lowest places are taken, the tree is as full as it can be: all partitions have
# the same share of the keys if there is a power of two of them, and otherwise none has more than
# twice the share of another. A partition that is added takes half of one other's keys.
#
# The three zeros leave out of account the bits in which FNV-1a hardly tells short keys apart: of
# all keys of one letter the highest three bits are the same.


_ZEROS = 3
_BITS = 10
PLACES = 1 << _BITS
"""More than a topic has partitions, so that there is always a free one."""

_LETTERS = "0123456789bcdfghjkmnpqrstvwxyz"
"""No vowels, so that no words come out; no l, which looks like a 1. Four of them have 810,000
possibilities, to find one of 8,192 beginnings of a hash with."""

_SHORT = re.compile(r"(?:p-)?(?P<number>[0-9]{1,5})")


def name_of(number: int, place: int) -> str:
    """The name of a new partition; always the same for the same arguments.

    The letters are the first that do, in the order of :data:`_LETTERS`.
    """
    import numpy as np

    shift = np.uint32(32 - _ZEROS - _BITS)
    for first in _LETTERS:
        stem = f"p-{number:05}-{first}"
        found = np.flatnonzero(_behind(stem) >> shift == _reversed(place))
        if len(found):
            return stem + "".join(_LETTERS[each] for each in _digits(int(found[0])))
    raise AssertionError(f"no name for partition {number} at place {place}")


def place_of(name: str) -> int:
    """Where a partition lies, by its name. Names without letters lie anywhere, often together."""
    bits = fnv1a(name.encode()) >> (32 - _ZEROS - _BITS)
    return _reversed(bits & (PLACES - 1))


def free_places(names: Iterable[str]) -> Iterator[int]:
    """The places that none of these partitions has, the lowest first."""
    taken = {place_of(name) for name in names}
    return (place for place in range(PLACES) if place not in taken)


def number_of(name: str) -> int | None:
    """The number in a partition's name; None if it is no such name.

    Partitions of topics that were made before there were letters have names like ``p-00003``.
    """
    found = PARTITION_NAME.fullmatch(name)
    return int(found["number"]) if found else None


def has_letters(name: str) -> bool:
    """Whether this is the whole name of a partition, and not what may be an abbreviation."""
    found = PARTITION_NAME.fullmatch(name)
    return found is not None and found["letters"] is not None


def number_meant(given: str) -> int | None:
    """The number in a name or an abbreviation of one: ``3``, ``p-3``, ``p-00003``."""
    found = _SHORT.fullmatch(given)
    return int(found["number"]) if found else number_of(given)


def is_abbreviated(given: str, name: str) -> bool:
    """Whether somebody who writes ``3``, ``p-3`` or ``p-00003`` means this partition."""
    found = _SHORT.fullmatch(given)
    return found is not None and int(found["number"]) == number_of(name)


def _reversed(bits: int) -> int:
    return int(f"{bits:0{_BITS}b}"[::-1], 2)


def _behind(stem: str) -> npt.NDArray[np.uint32]:
    """The hashes of a stem with any three letters behind it, in their order."""
    import numpy as np

    letters = np.frombuffer(_LETTERS.encode(), np.uint8)
    hashes = np.array([fnv1a(stem.encode())], np.uint32)
    for _ in range(3):
        hashes = ((hashes[:, None] ^ letters) * np.uint32(PRIME)).ravel()
    return hashes


def _digits(number: int) -> tuple[int, int, int]:
    high, low = divmod(number, len(_LETTERS))
    return (*divmod(high, len(_LETTERS)), low)


DESCRIPTION = Sidecar(
    "the topic's description",
    "Restore its latest version (bucket versioning): it alone says which partitions there are.",
    max_bytes=MAX_BYTES,
)

DRAIN_S = 60.0
"""How long a partition drains at least. Nothing depends on it but that producers, which notice
within seconds, can finish what they have begun instead of being refused."""

MAX_PARTITIONS = 1_000
"""Most partitions of a topic: each is a manifest that readers look at with every trigger."""

_MOST_NUMBERS = 100_000
MAX_LEFT = 1_000
"""Most partitions that have left and are remembered, because objects of theirs may be there."""


class State(StrEnum):
    """What may be done with a partition."""

    ACTIVE = "active"
    """Written and read."""
    DRAINING = "draining"
    """Read, and written no more; it leaves the topic once it is empty."""


@dataclass(frozen=True, slots=True)
class Partition:
    """One queue of a topic.

    Attributes:
        name: Its data prefix, as column ``partition`` shows it: ``p-00000-04pn``.
        state: Whether it is still written.
        since_ms: When it began to drain, milliseconds since the Unix epoch, by the clock of
            whoever said so; 0 while it does not.
        others: Fields of later versions, kept when the object is written again.
    """

    name: str
    state: State = State.ACTIVE
    since_ms: int = 0
    others: Mapping[str, Any] = field(default_factory=dict, compare=False)

    def as_json(self) -> dict[str, Any]:
        """Its fields as they are stored."""
        since = {"since": self.since_ms} if self.since_ms else {}
        return {**self.others, "name": self.name, "state": str(self.state), **since}


@dataclass(frozen=True, slots=True)
class TopicDescription:
    """The partitions of a topic. A value: changes give a new one, or the same if nothing changes.

    Attributes:
        topic_id: A ULID, drawn when the topic was created.
        partitions: In the order of their numbers; mappings count in this order.
        next_number: Of the next partition.
        left: Names of partitions that have left, and whose last batches nobody has collected yet.
        others: Fields of later versions, kept when the object is written again.
    """

    topic_id: str
    partitions: tuple[Partition, ...]
    next_number: int
    left: tuple[str, ...] = ()
    others: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def new(cls, topic_id: str, partitions: int) -> TopicDescription:
        """A topic that begins with so many partitions.

        Raises:
            InvalidInput: Fewer than 1 or more than ``MAX_PARTITIONS``.
        """
        return cls(topic_id, (), 0).expanded(partitions)

    @property
    def names(self) -> list[str]:
        """Of all partitions: what a reader reads."""
        return [each.name for each in self.partitions]

    @property
    def active(self) -> list[str]:
        """Of the partitions that are written: what keys are mapped to."""
        return [each.name for each in self.partitions if each.state is State.ACTIVE]

    @property
    def draining(self) -> list[str]:
        """Of the partitions that leave once they are empty."""
        return [each.name for each in self.partitions if each.state is State.DRAINING]

    def expanded(self, partitions: int) -> TopicDescription:
        """The topic with so many active partitions in all; draining ones do not count.

        A total and no increment, so that a command that is repeated adds nothing twice.

        Raises:
            InvalidInput: Fewer than there are, more than ``MAX_PARTITIONS``, or the numbers of
                five digits are used up.
        """
        if not isinstance(partitions, int) or isinstance(partitions, bool) or partitions < 1:
            raise InvalidInput(f"partitions is {partitions!r}: use a whole number of at least 1")
        if partitions > MAX_PARTITIONS:  # before anything is made of the number
            raise InvalidInput(f"partitions is {partitions}: use at most {MAX_PARTITIONS}")
        missing = partitions - len(self.active)
        if missing < 0:
            raise InvalidInput(
                f"partitions is {partitions}, and the topic has {len(self.active)} already: give "
                "the number it shall have in all. Partitions are taken away one by one, with "
                "'opendata-buffer topic drain STORE PARTITION'."
            )
        if not missing:
            return self
        if len(self.partitions) + missing > MAX_PARTITIONS:
            raise InvalidInput(
                f"partitions is {partitions}: with {len(self.draining)} that drain the topic would "
                f"have more than {MAX_PARTITIONS}. Wait until those have left."
            )
        last = self.next_number + missing
        if last > _MOST_NUMBERS:
            raise InvalidInput(
                f"cannot add {missing} partitions: the topic has given {self.next_number} of "
                f"{_MOST_NUMBERS} numbers away, and none is given twice. Create another topic."
            )
        # One that drains is written no more, so its place, and with it its keys, may be taken.
        numbers, places = range(self.next_number, last), free_places(self.active)
        new = (Partition(name_of(each, next(places))) for each in numbers)
        return replace(self, partitions=(*self.partitions, *new), next_number=last)

    def drained(self, name: str, now_ms: int = 0) -> TopicDescription:
        """The topic with one partition draining; one that drains already, or has left, is let be.

        Args:
            name: Of the partition, or an abbreviation of it.
            now_ms: Since when it drains, milliseconds since the Unix epoch.

        Raises:
            InvalidInput: The topic never had such a partition, or it is the last one written.
        """
        if self.has_left(name):
            return self
        name = self.resolved(name)
        if self.active == [name]:
            raise InvalidInput(
                f"partition {name!r} is the last one that is written: add others first, with "
                "'opendata-buffer topic expand STORE --partitions N'"
            )
        return self._with(
            replace(each, state=State.DRAINING, since_ms=now_ms)
            if each.name == name and each.state is State.ACTIVE
            else each
            for each in self.partitions
        )

    def without(self, names: Iterable[str]) -> TopicDescription:
        """The topic without these partitions, as far as they are draining."""
        leave = set(names) & set(self.draining)
        gone = [each.name for each in self.partitions if each.name in leave]
        rest = self._with(each for each in self.partitions if each.name not in leave)
        return replace(rest, left=(*self.left, *gone)[-MAX_LEFT:]) if gone else self

    def collected(self, names: Iterable[str]) -> TopicDescription:
        """The topic, once nothing lies in these partitions any more that have left it."""
        gone = set(names)
        left = tuple(name for name in self.left if name not in gone)
        return self if left == self.left else replace(self, left=left)

    def may_leave(self, name: str, now_ms: int, after_s: float = DRAIN_S) -> bool:
        """Whether a partition has been draining for so long."""
        return any(
            each.name == name
            and each.state is State.DRAINING
            and each.since_ms <= now_ms - after_s * 1000
            for each in self.partitions
        )

    def resolved(self, given: str) -> str:
        """The name of the partition that is meant: by its name, or ``3`` for ``p-00003-04vf``.

        Raises:
            InvalidInput: There is no such partition; names those that there are.
        """
        for name in self.names:
            if given == name or is_abbreviated(given, name):
                return name
        raise InvalidInput(f"partition is {given!r}: the topic has {_listed(self.names)}")

    def left_name(self, given: str) -> str:
        """The name of a partition that has left and is remembered; what was given if none is."""
        meant = (name for name in self.left if given == name or is_abbreviated(given, name))
        return next(meant, given)

    def has_left(self, given: str) -> bool:
        """Whether this means a partition that the topic had once, and has no more."""
        number = number_meant(given)
        if number is None or number >= self.next_number:
            return False
        return number not in map(number_of, self.names)

    def to_json(self) -> bytes:
        """The object's bytes."""
        fields: dict[str, Any] = {
            "id": self.topic_id,
            "next": self.next_number,
            "partitions": [each.as_json() for each in self.partitions],
        }
        if self.left:
            fields["left"] = list(self.left)
        return DESCRIPTION.encode(fields, self.others)

    @classmethod
    def from_json(cls, raw: bytes) -> TopicDescription:
        """Read the object's bytes.

        Raises:
            CorruptData: They are no description of this version, or contradict themselves.
        """
        fields = DESCRIPTION.decode(raw)
        topic_id, number = fields.text("id"), fields.number("next")
        partitions = tuple(map(_partition, fields.objects("partitions")))
        found = cls(topic_id, partitions, number, _left(fields), fields.others())
        problem = found._contradiction()
        if problem:
            raise DESCRIPTION.unreadable(problem)
        return found

    def _with(self, partitions: Iterable[Partition]) -> TopicDescription:
        given = tuple(partitions)
        return self if given == self.partitions else replace(self, partitions=given)

    def _contradiction(self) -> str:
        """What cannot be of a topic; empty for a sound one."""
        numbers = [number_of(name) or 0 for name in self.names]
        if not self.active:
            return "the topic has no partition that is written"
        if len(numbers) > MAX_PARTITIONS:
            return f"the topic has {len(numbers)} partitions, and not {MAX_PARTITIONS} at most"
        if numbers != sorted(set(numbers)):
            return f"the topic's partitions are out of order or twice: {_listed(self.names)}"
        if numbers[-1] >= self.next_number:
            return (
                f"the topic's next partition is {self.next_number}, and it has {self.names[-1]!r}"
            )
        return ""


def _partition(fields: Fields) -> Partition:
    name, state = fields.text("name"), fields.text("state")
    if number_of(name) is None:
        raise fields.wrong("name", "the name of a partition, such as 'p-00000-04pn'")
    if state not in tuple(State):
        raise fields.wrong("state", " or ".join(map(repr, map(str, State))))
    return Partition(name, State(state), fields.number("since", 0), fields.others())


def _left(fields: Fields) -> tuple[str, ...]:
    names = fields.items("left", [])
    for name in names:
        if not isinstance(name, str) or number_of(name) is None:
            raise fields.wrong("left", "names of partitions", name)
    return tuple(names[-MAX_LEFT:])


def _listed(names: Sequence[str]) -> str:
    if len(names) <= 4:
        return ", ".join(names)
    return f"{names[0]}, {names[1]}, ... {names[-1]}"
