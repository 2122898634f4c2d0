"""Describe which partitions a topic has, in one small object at the store's root.

::

    {"version": 1, "id": "01J5...", "next": 3,
     "partitions": [{"name": "p-00000-04pn", "state": "active"},
                    {"name": "p-00002-0bvb", "state": "draining", "since": 1767225600000}],
     "left": ["p-00001-05mv"], "readers": {"billing": 1767225600000},
     "unread": {"p-00001-05mv": ["search"]}}

``readers`` exists once the partitions are logs. It names the readers of the topic, and when each of
them was registered. A reader that is named here is registered in every active partition (decision
0039).

``unread`` names the readers that had expired, and had not read a partition to its end, when the
partition left. For these readers the partition is still there, so they learn what they have lost
(failure F53).

A partition is an ordinary v1 queue, and its name is the queue's data prefix. Its number is never
used again. So a position in a partition that has left the topic cannot be mistaken for one in
another partition.

**Names.** Rendezvous hashing gives a key to the partition whose name's hash differs from the key's
hash in the highest bits. So the hashes of the names divide the keys as a binary tree does. The
letters of a name are chosen so that the tree is balanced. The hash begins with three zeros, because
FNV-1a hardly distinguishes short keys in these bits. Then come the ten bits of the partition's
**slot**, the lowest bit first::

    slot    0               1               2               3               4
    hash    000 0000000000  000 1000000000  000 0100000000  000 1100000000  000 0010000000

New partitions take the lowest free slots, so no partition has more than twice the share of another.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from opendata_buffer.arguments import checked, how_to_get_bytes, wrong_type
from opendata_buffer.config import PARTITION_NAME
from opendata_buffer.errors import InvalidInput
from opendata_buffer.hints import Action, Hint
from opendata_buffer.queue.neighbours import TOPIC_KEY
from opendata_buffer.queue.sidecar import Sidecar, SidecarFields, is_number
from opendata_buffer.stores.base import Get, exists

DESCRIPTION = Sidecar(
    "the topic's description",
    "Restore its latest version (bucket versioning): nothing else names the topic's partitions.",
    max_bytes=1024 * 1024,
)

DRAIN_S = 60.0
"""Least seconds that a partition drains, so that producers can finish. Safety does not depend on
it."""

MAX_PARTITIONS = 1_000
"""Most partitions of a topic. Readers read the manifest of each partition with every trigger."""

MAX_LEFT = 1_000
"""Most partitions that have left and are listed because their objects are not deleted yet."""

MAX_UNREAD = 1_000
"""Most readers in ``unread``, counted in each partition. Readers that never return stay there."""

_MOST_NUMBERS = 100_000

_ZEROS = 3
_BITS = 10
SLOTS = 1 << _BITS
"""Number of slots. A topic has fewer partitions, so a slot is always free."""

_LETTERS = "0123456789bcdfghjkmnpqrstvwxyz"
"""Letters of names. Vowels are left out because they make words, and l because it looks like a 1.
"""

_SHORT = re.compile(r"(?:p-)?(?P<number>[0-9]{1,5})")

OFFSET_BASIS = 0x811C9DC5
PRIME = 0x01000193


def fnv1a(data: bytes) -> int:
    """Return the 32-bit FNV-1a hash of some bytes.

    Args:
        data: Any bytes.

    Returns:
        The hash, 0 to 2^32 - 1.

    Raises:
        InvalidInput: ``data`` is not bytes.
    """
    if not isinstance(data, bytes | bytearray | memoryview):
        raise wrong_type("data", data, how_to_get_bytes(data))
    value = OFFSET_BASIS
    for byte in data:
        value = ((value ^ byte) * PRIME) & 0xFFFFFFFF
    return value


def is_topic(store: Get) -> bool:
    """Return whether there is a topic at the store's root, with one small read."""
    return exists(store, TOPIC_KEY)


def name_of(number: int, slot: int) -> str:
    """Name a new partition, with the first letters that fit the slot.

    Args:
        number: Number of the partition.
        slot: Its slot in the hash tree.

    Returns:
        The name, such as ``p-00000-04pn``.
    """
    import numpy as np  # The import takes 50 ms, and only making or growing a topic needs it.

    shift = np.uint32(32 - _ZEROS - _BITS)
    letters = np.frombuffer(_LETTERS.encode(), np.uint8)
    for first in _LETTERS:
        stem = f"p-{number:05}-{first}"
        # The hashes of the stem followed by any three letters, in their order.
        hashes = np.array([fnv1a(stem.encode())], np.uint32)
        for _ in range(3):
            hashes = ((hashes[:, None] ^ letters) * np.uint32(PRIME)).ravel()
        found = np.flatnonzero(hashes >> shift == _reversed(slot))
        if len(found):
            rest = np.unravel_index(found[0], (len(_LETTERS),) * 3)
            return stem + "".join(_LETTERS[each] for each in rest)
    raise AssertionError(f"no name for partition {number} in slot {slot}")


def slot_of(name: str) -> int:
    """Return a partition's slot.

    Names without letters have any slot, and several of them may have the same one.
    """
    bits = fnv1a(name.encode()) >> (32 - _ZEROS - _BITS)
    return _reversed(bits & (SLOTS - 1))


def _reversed(bits: int) -> int:
    return int(f"{bits:0{_BITS}b}"[::-1], 2)


def number_of(name: str) -> int | None:
    """Return the number in a partition's name, which may be an old name without letters.

    Args:
        name: Any text.

    Returns:
        The number; None if this is not the name of a partition.
    """
    found = PARTITION_NAME.fullmatch(name)
    return int(found["number"]) if found else None


def number_meant(given: str) -> int | None:
    """Return the number in a name or in an abbreviation of one: ``3``, ``p-3``, ``p-00003``."""
    found = _SHORT.fullmatch(given)
    return int(found["number"]) if found else number_of(given)


def is_abbreviated(given: str, name: str) -> bool:
    """Return whether ``3``, ``p-3`` or ``p-00003`` is an abbreviation of this name."""
    found = _SHORT.fullmatch(given)
    return found is not None and int(found["number"]) == number_of(name)


class State(StrEnum):
    """Whether a partition is written. A draining one is still read, and leaves once it is empty."""

    ACTIVE = "active"
    DRAINING = "draining"


@dataclass(frozen=True, slots=True)
class Partition:
    """One queue of a topic.

    Attributes:
        name: Its data prefix, as column ``partition`` shows it: ``p-00000-04pn``.
        state: Whether it is still written.
        since_ms: When it began to drain, milliseconds since the Unix epoch; 0 for active ones.
        others: Fields of later versions, kept when the object is written again.
    """

    name: str
    state: State = State.ACTIVE
    since_ms: int = 0
    others: Mapping[str, Any] = field(default_factory=dict, compare=False)


@dataclass(frozen=True, slots=True)
class TopicDescription:
    """The partitions of a topic. A value: changes return another one, unless nothing changes.

    Attributes:
        topic_id: A ULID that was drawn when the topic was created.
        partitions: In the order of their numbers; partitioners index them in this order.
        next_number: Number of the next partition.
        left: Names of partitions that have left, and whose objects are not deleted yet.
        readers: When each named reader was registered, milliseconds since the Unix epoch. None if
            the partitions are queues, or if an earlier release made logs of them.
        unread: By partition that has left, the readers that had not read it to its end. Each of
            them still opens it.
        others: Fields of later versions, kept when the object is written again.
    """

    topic_id: str
    partitions: tuple[Partition, ...]
    next_number: int
    left: tuple[str, ...] = ()
    readers: Mapping[str, int] | None = None
    unread: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    others: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    @checked
    def new(cls, topic_id: str, partitions: int) -> TopicDescription:
        """Describe a new topic.

        Args:
            topic_id: The id of the topic, a ULID.
            partitions: 1 to :data:`MAX_PARTITIONS`.

        Returns:
            The description, in which all partitions are active.

        Raises:
            InvalidInput: The number is out of bounds.
        """
        return cls(topic_id, (), 0).expanded(partitions)

    @property
    def names(self) -> list[str]:
        """Names of all partitions, which are read."""
        return [each.name for each in self.partitions]

    @property
    def active(self) -> list[str]:
        """Names of the partitions that are written."""
        return [each.name for each in self.partitions if each.state is State.ACTIVE]

    @property
    def draining(self) -> list[str]:
        """Names of the partitions that leave once they are empty."""
        return [each.name for each in self.partitions if each.state is State.DRAINING]

    @checked
    def unread_by(self, reader: str) -> list[str]:
        """Find the partitions that left before a reader had read them to their end.

        Args:
            reader: The reader.

        Returns:
            The names of the partitions, in the order in which they left.
        """
        return [name for name, readers in self.unread.items() if reader in readers]

    @checked
    def names_for(self, reader: str) -> list[str]:
        """Find the partitions that a reader reads.

        Args:
            reader: Name of the reader; empty for the only reader of a topic of queues.

        Returns:
            The names of all current partitions, and of those that left before the reader had read
            them to their end.
        """
        return sorted({*self.names, *self.unread_by(reader)})

    def expanded(self, partitions: int) -> TopicDescription:
        """Add partitions up to a total of active ones; a repeated call adds none.

        Args:
            partitions: 1 to :data:`MAX_PARTITIONS`.

        Returns:
            The changed description.

        Raises:
            InvalidInput: The topic has more already, the number is out of bounds, or all numbers of
                five digits are used.
        """
        use = f"a whole number of at least 1 and at most {MAX_PARTITIONS}"
        if type(partitions) is not int:
            raise wrong_type("partitions", partitions, use)
        if not 1 <= partitions <= MAX_PARTITIONS:
            raise InvalidInput(f"partitions is {partitions!r}: use {use}")
        missing = partitions - len(self.active)
        if missing < 0:
            raise InvalidInput(
                f"partitions is {partitions}, and the topic has {len(self.active)} already: give "
                "the number it shall have in all",
                Hint(Action.DRAIN_PARTITION, partition=self.active[-1]),
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
        # Draining partitions are not written, so their slots, and with them their keys, are free.
        free = sorted({*range(SLOTS)} - {slot_of(name) for name in self.active})
        numbers = range(self.next_number, last)
        new = [
            Partition(name_of(number, slot)) for number, slot in zip(numbers, free, strict=False)
        ]
        return replace(self, partitions=(*self.partitions, *new), next_number=last)

    @checked
    def drained(self, name: str | int, now_ms: int = 0) -> TopicDescription:
        """Begin to drain one partition.

        Args:
            name: Name or number of the partition.
            now_ms: The time at which it begins to drain, milliseconds since the Unix epoch.

        Returns:
            The changed description; this one if the partition drains already or has left.

        Raises:
            InvalidInput: The topic never had such a partition, or it is the last active one.
        """
        if self.has_left(name):
            return self
        name = self.resolved(name)
        if name in self.draining:
            return self
        if self.active == [name]:
            raise InvalidInput(
                f"partition {name!r} is the last one that is written",
                Hint(Action.EXPAND_FIRST, count=2),
            )
        partitions = tuple(
            replace(each, state=State.DRAINING, since_ms=now_ms) if each.name == name else each
            for each in self.partitions
        )
        return replace(self, partitions=partitions)

    @checked
    def without(
        self, names: Iterable[str], unread: Mapping[str, Sequence[str]] | None = None
    ) -> TopicDescription:
        """Remove those of these partitions that are draining.

        Args:
            names: The partitions.
            unread: By partition, the readers that have not read it to its end, the one that moved
                last at the end. If the description has no room for all readers, those at the
                beginning of the oldest partitions are dropped.

        Returns:
            The topic without them.
        """
        wanted = set(names)
        gone = [name for name in self.draining if name in wanted]
        if not gone:
            return self
        rest = tuple(each for each in self.partitions if each.name not in gone)
        behind = {name: tuple((unread or {}).get(name, ())) for name in gone}
        return replace(
            self,
            partitions=rest,
            left=(*self.left, *gone)[-MAX_LEFT:],
            unread=_last({**self.unread, **behind}, MAX_UNREAD),
        )

    @checked
    def without_unread(self, reader: str, names: Iterable[str]) -> TopicDescription:
        """Note that a reader has read some partitions that have left.

        Args:
            reader: The reader.
            names: Names of the partitions.

        Returns:
            The changed description; the same one if nothing changes.
        """
        wanted = {*names}.intersection(self.unread_by(reader))
        if not wanted:
            return self
        unread = {
            name: tuple(other for other in readers if other != reader or name not in wanted)
            for name, readers in self.unread.items()
        }
        return replace(self, unread={name: readers for name, readers in unread.items() if readers})

    @checked
    def collected(self, names: Iterable[str]) -> TopicDescription:
        """Remove partitions that have left, after all their objects were deleted.

        Args:
            names: Names of the partitions.

        Returns:
            The changed description.
        """
        gone = set(names)
        left = tuple(name for name in self.left if name not in gone)
        return self if left == self.left else replace(self, left=left)

    @checked
    def with_readers(self, names: Iterable[str], now_ms: int) -> TopicDescription:
        """Replace the readers; known readers keep their time.

        Args:
            names: The readers.
            now_ms: The time of new readers, milliseconds since the Unix epoch.

        Returns:
            The changed description.
        """
        known = self.readers or {}
        return replace(self, readers={name: known.get(name, now_ms) for name in sorted(names)})

    @checked
    def with_reader(self, name: str, now_ms: int) -> TopicDescription:
        """Add a reader that has just been registered.

        Args:
            name: The reader.
            now_ms: The current time, milliseconds since the Unix epoch.

        Returns:
            The changed description. It differs from this one even if the reader is known, so that a
            concurrent change that is based on this one fails.
        """
        known = self.readers or {}
        times = {**known, name: max(now_ms, known.get(name, 0) + 1)}
        return replace(self, readers=dict(sorted(times.items())))

    @checked
    def without_reader(self, name: str) -> TopicDescription:
        """Remove a reader.

        Args:
            name: The reader.

        Returns:
            The changed description; the same one if it does not have this reader.
        """
        found = self.without_unread(name, [*self.unread])
        if name not in (self.readers or {}):
            return found
        return found.with_readers({*(self.readers or {})} - {name}, 0)

    @checked
    def may_leave(self, now_ms: int, after_s: float = DRAIN_S) -> list[str]:
        """Find the partitions that have been draining for long enough.

        Args:
            now_ms: The current time, milliseconds since the Unix epoch.
            after_s: Least seconds that a partition drains.

        Returns:
            Their names.
        """
        draining = (each for each in self.partitions if each.state is State.DRAINING)
        return [each.name for each in draining if each.since_ms <= now_ms - after_s * 1000]

    def resolved(self, given: str | int) -> str:
        """Return the name of a partition, from its name or number.

        Args:
            given: Name or number of the partition.

        Returns:
            The name.

        Raises:
            InvalidInput: The topic has no such partition.
        """
        return resolve(given, self.names)

    def left_name(self, given: str | int) -> str:
        """Find the name of a partition that has left, and whose objects are not deleted yet.

        Args:
            given: Name or number of the partition.

        Returns:
            The name; the argument if there is no such partition.
        """
        text = _text("given", given)
        return _meant(text, self.left) or text

    def has_left(self, given: str | int) -> bool:
        """Return whether the topic had a partition that has left.

        Args:
            given: Name or number of the partition.

        Returns:
            Whether it has left the topic.
        """
        number = number_meant(_text("given", given))
        if number is None or number >= self.next_number:
            return False
        return number not in map(number_of, self.names)

    def to_json(self) -> bytes:
        """Return the object's bytes."""
        partitions = [
            {**each.others, "name": each.name, "state": str(each.state)}
            | ({"since": each.since_ms} if each.since_ms else {})
            for each in self.partitions
        ]
        fields = {"id": self.topic_id, "next": self.next_number, "partitions": partitions}
        if self.left:
            fields["left"] = list(self.left)
        if self.readers is not None:
            fields["readers"] = dict(self.readers)
        if self.unread:
            fields["unread"] = {name: list(readers) for name, readers in self.unread.items()}
        return DESCRIPTION.encode(fields, self.others)

    @classmethod
    @checked
    def from_json(cls, raw: bytes) -> TopicDescription:
        """Parse the bytes of the topic's object.

        Args:
            raw: The bytes.

        Returns:
            The description. Unknown fields are kept.

        Raises:
            CorruptData: The bytes are not a description of this version, or contradict themselves.
        """
        fields = DESCRIPTION.decode(raw)
        topic_id, number = fields.text("id"), fields.number("next")
        partitions = tuple(map(_partition, fields.objects("partitions")))
        left = fields.items("left", [])
        for name in left:
            if not isinstance(name, str) or number_of(name) is None:
                raise fields.wrong("left", "names of partitions", name)
        readers = fields.mapping("readers", None)
        for name, time_ms in (readers or {}).items():
            if not is_number(time_ms):
                raise fields.wrong("readers", "names with times in milliseconds", {name: time_ms})
        unread, others = _unread(fields), fields.others()
        left_last = tuple(left[-MAX_LEFT:])
        found = cls(topic_id, partitions, number, left_last, readers, unread, others)
        if problem := found._contradiction():
            raise DESCRIPTION.unreadable(problem)
        return found

    def _contradiction(self) -> str:
        """Return why this cannot be a topic; empty if it can."""
        numbers = [number_of(name) or 0 for name in self.names]
        if not self.active:
            return "the topic has no partition that is written"
        if len(numbers) > MAX_PARTITIONS:
            return f"the topic has {len(numbers)} partitions, and not {MAX_PARTITIONS} at most"
        if numbers != sorted(set(numbers)):
            return f"the topic's partitions are out of order or twice: {_listed(self.names)}"
        if numbers[-1] >= self.next_number:
            last = self.names[-1]
            return f"the topic's next partition is {self.next_number}, and it has {last!r}"
        return ""


def resolve(given: str | int, names: Sequence[str]) -> str:
    """Find a partition by its name or number.

    Args:
        given: The name or the number.
        names: The names of all partitions.

    Returns:
        The name.

    Raises:
        InvalidInput: None of them has this name or number.
    """
    found = _meant(_text("partition", given), names)
    if found is None:
        raise InvalidInput(f"partition is {given!r}: the topic has {_listed(names)}")
    return found


def _text(argument: str, given: str | int) -> str:
    """Return the name or number of a partition as text."""
    if isinstance(given, str):
        return given
    if type(given) is int and 0 <= given < _MOST_NUMBERS:
        return str(given)
    raise wrong_type(argument, given, "the name or the number of a partition, such as 3")


def _meant(given: str, names: Iterable[str]) -> str | None:
    return next((each for each in names if given == each or is_abbreviated(given, each)), None)


def _partition(fields: SidecarFields) -> Partition:
    name, state = fields.text("name"), fields.text("state")
    if number_of(name) is None:
        raise fields.wrong("name", "the name of a partition, such as 'p-00000-04pn'")
    if state not in tuple(State):
        raise fields.wrong("state", " or ".join(map(repr, map(str, State))))
    return Partition(name, State(state), fields.number("since", 0), fields.others())


def _unread(fields: SidecarFields) -> dict[str, tuple[str, ...]]:
    found = {}
    for name, readers in fields.mapping("unread", {}).items():
        is_list = isinstance(readers, list) and all(isinstance(each, str) for each in readers)
        if number_of(name) is None or not is_list:
            raise fields.wrong(
                "unread", "names of partitions with names of readers", {name: readers}
            )
        found[name] = tuple(readers)
    return found


def _last(unread: Mapping[str, tuple[str, ...]], limit: int) -> dict[str, tuple[str, ...]]:
    """Return the last readers of the last partitions, at most ``limit`` of them together."""
    found: dict[str, tuple[str, ...]] = {}
    for name, readers in reversed([*unread.items()]):
        kept = readers[max(0, len(readers) - limit) :]
        limit -= len(kept)
        if kept:
            found[name] = kept
    return dict(reversed([*found.items()]))


def _listed(names: Sequence[str]) -> str:
    if len(names) <= 4:
        return ", ".join(names)
    return f"{names[0]}, {names[1]}, ... {names[-1]}"
