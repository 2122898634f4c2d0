"""Find the place to begin or to end at in each partition of a topic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from opendata_buffer.arguments import wrong_type
from opendata_buffer.consumer.place import Place, PlaceLike
from opendata_buffer.errors import InvalidInput
from opendata_buffer.topic.description import resolve


class TopicPlaces:
    """The places that a caller has given for a topic.

    Args:
        given: One place for all partitions, or places by the partition's name or number. Partitions
            that are not named get ``default``.
        names: The partitions of the topic.
        name: The name of the argument, for errors.
        default: The place in the other partitions.

    Raises:
        InvalidInput: A value names no place, a partition does not exist or is given twice, or one
            sequence is given for all partitions.
    """

    def __init__(
        self,
        given: PlaceLike | Place | Mapping[str | int, PlaceLike],
        names: Sequence[str],
        name: str = "start",
        default: Place | None = None,
    ) -> None:
        self.default = default
        """The place in partitions that were not named; None to leave them alone."""
        self.by_partition: dict[str, Place] = {}
        """The places of the partitions that were named, by full name."""
        if not isinstance(given, Mapping):
            self.default = Place.of(given, name)
            if self.default.is_of_one_queue:
                raise InvalidInput(
                    f"{name} is {self.default.text}, and each partition counts its own sequences. "
                    f"Give them by partition, such as {name}={{0: 42}}, or give 'earliest', "
                    "'latest', or a time"
                )
            return
        for key, place in given.items():
            if not isinstance(key, str | int) or isinstance(key, bool):
                raise wrong_type(f"a key of {name}", key, "names or numbers of partitions")
            partition = resolve(key, names)
            if partition in self.by_partition:
                raise InvalidInput(f"{name} names partition {partition} twice")
            self.by_partition[partition] = Place.of(place, f"{name}[{key!r}]")

    @property
    def given(self) -> list[Place]:
        """All places that were given."""
        named = [*self.by_partition.values()]
        return named if self.default is None else [*named, self.default]

    def at(self, partition: str) -> Place | None:
        """Return the place in a partition, given by its full name; None if there is none."""
        return self.by_partition.get(partition, self.default)
