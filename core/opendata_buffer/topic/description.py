"""Which partitions a topic has: one small object at the store's root, as a pure value.

::

    {"version": 1, "id": "01J5...", "next": 3,
     "partitions": [{"name": "p-00000-04pn", "state": "active"},
                    {"name": "p-00002-0bvb", "state": "draining", "since": 1767225600000}],
     "left": ["p-00001-05mv"]}

A partition is an ordinary v1 queue: its data prefix is its name, its manifest lies below that.
Numbers are given once: a partition that has left the topic never comes back under its name, so
positions in it cannot be taken for positions in another one. The letters after the number are
chosen when a partition is added (:mod:`.topic.names`); what counts is the name as it is listed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from opendata_buffer.errors import InvalidInput
from opendata_buffer.formats.sidecar import Fields, Sidecar
from opendata_buffer.topic.names import (
    free_places,
    is_abbreviated,
    name_of,
    number_meant,
    number_of,
)
from opendata_buffer.topic.presence import MAX_BYTES

__all__ = ["DESCRIPTION", "DRAIN_S", "MAX_PARTITIONS", "Partition", "State", "TopicDescription"]

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
