"""The description of a topic, and the names of partitions."""

from __future__ import annotations

import json
import random
import string
from collections.abc import Sequence

import numpy as np
import pytest

from opendata_buffer.errors import CorruptData, InvalidInput
from opendata_buffer.queue.neighbours import has_letters
from opendata_buffer.topic.description import (
    MAX_PARTITIONS,
    MAX_UNREAD,
    SLOTS,
    Partition,
    State,
    TopicDescription,
    is_abbreviated,
    name_of,
    number_meant,
    number_of,
    slot_of,
)
from opendata_buffer.topic.partitioner import rendezvous

THREE = TopicDescription.new("01J5", 3)


def test_a_written_description_can_be_read() -> None:
    topic = THREE.drained("p-00001-05mv", 17).expanded(4)
    assert TopicDescription.from_json(topic.to_json()) == topic
    first, second, *_ = json.loads(topic.to_json())["partitions"]
    assert first == {"name": "p-00000-04pn", "state": "active"}
    assert second == {"name": "p-00001-05mv", "state": "draining", "since": 17}


def test_a_topic_of_a_version_without_letters_is_read_and_keeps_its_names() -> None:
    old = {"name": "p-00000", "state": "active"}
    raw = {"version": 1, "id": "01J5", "next": 2, "partitions": [old, old | {"name": "p-00001"}]}
    topic = TopicDescription.from_json(json.dumps(raw).encode())
    assert topic.names == ["p-00000", "p-00001"]
    assert topic.resolved("1") == "p-00001"
    grown = topic.expanded(4)
    assert grown.names[:2] == topic.names
    assert [number_of(name) for name in grown.names] == [0, 1, 2, 3]
    assert len({slot_of(name) for name in grown.names[2:]} - set(map(slot_of, topic.names))) == 2


def test_fields_of_later_versions_are_kept_in_partitions_too() -> None:
    document = json.loads(THREE.to_json()) | {"owner": "billing"}
    for number, each in enumerate(document["partitions"]):
        each["colour"] = number
    found = TopicDescription.from_json(json.dumps(document).encode())
    changed = found.expanded(4).drained("1", 5).drained("2", 5).without([found.names[2]])
    fields = json.loads(changed.to_json())
    assert fields["owner"] == "billing"
    assert [each.get("colour") for each in fields["partitions"]] == [0, 1, None]
    assert fields["partitions"][1]["state"] == "draining"


def test_expand_takes_the_total_so_that_it_can_be_repeated() -> None:
    five = THREE.expanded(5)
    assert five.names == five.active == NAMES[:5]
    assert five.expanded(5) is five
    assert five.next_number == 5


def test_a_draining_partition_is_read_and_not_written() -> None:
    topic = THREE.drained("p-00001-05mv")
    assert topic.names == THREE.names
    assert topic.active == ["p-00000-04pn", "p-00002-0bvb"]
    assert topic.draining == ["p-00001-05mv"]
    assert topic.drained("p-00001-05mv") is topic
    assert topic.without(["p-00000-04pn", "p-00001-05mv"]).names == topic.active
    assert topic.without(["p-00000-04pn"]) is topic


def test_a_partition_number_is_never_reused() -> None:
    topic = THREE.drained("p-00002-0bvb").without(["p-00002-0bvb"]).expanded(3)
    assert [number_of(name) for name in topic.names] == [0, 1, 3]
    for given in ("p-00002-0bvb", "p-00002", "2"):
        assert topic.has_left(given)
        assert topic.drained(given) is topic  # nothing is left to do


def test_a_new_partition_takes_the_slot_of_a_draining_one() -> None:
    drained = THREE.drained("p-00001-05mv")
    for before in (drained, drained.without(["p-00001-05mv"])):
        assert list(map(slot_of, before.expanded(4).active)) == [0, 2, 1, 3]
    assert not drained.has_left("1")
    assert SLOTS > MAX_PARTITIONS


def test_a_removed_partition_is_remembered_until_it_is_collected() -> None:
    topic = THREE.drained("1").drained("0").without(["p-00001-05mv", "p-00000-04pn"])
    assert topic.left == ("p-00000-04pn", "p-00001-05mv")
    assert topic.left_name("1") == topic.left_name("p-00001-05mv") == "p-00001-05mv"
    assert topic.left_name("9") == "9"
    assert TopicDescription.from_json(topic.to_json()) == topic
    assert topic.collected(["p-00000-04pn"]).left == ("p-00001-05mv",)
    assert topic.collected(["p-00002-0bvb"]) is topic
    assert b'"left"' not in THREE.to_json()


def test_the_last_active_partition_cannot_be_drained() -> None:
    topic = THREE.drained("p-00000-04pn").drained("p-00001-05mv")
    with pytest.raises(InvalidInput, match=r"'p-00002-0bvb' is the last one.*topic expand"):
        topic.drained("p-00002-0bvb")


def test_a_partition_is_found_by_its_number() -> None:
    for given in ("1", "001", "p-1", "p-00001", "p-00001-05mv"):
        assert THREE.resolved(given) == "p-00001-05mv"
    assert THREE.drained("1").draining == ["p-00001-05mv"]


@pytest.mark.parametrize("name", ["p-00003-04vf", "p-00001-zzz", "ingest", "p-3", "3", "-1", ""])
def test_the_error_about_an_unknown_partition_lists_the_existing_ones(name: str) -> None:
    all_of_them = "p-00000-04pn, p-00001-05mv, p-00002-0bvb"
    for call in (THREE.drained, THREE.resolved):
        with pytest.raises(InvalidInput, match=rf"'{name}': the topic has {all_of_them}"):
            call(name)


def test_a_long_list_of_partitions_is_shortened() -> None:
    with pytest.raises(InvalidInput, match=r"has p-00000-04pn, p-00001-05mv, \.\.\. p-00099-01y0$"):
        TopicDescription.new("01J5", 100).resolved("x")


@pytest.mark.parametrize(
    ("partitions", "message"),
    [
        (0, "at least 1"),
        (-1, "at least 1"),
        (True, "at least 1"),
        (MAX_PARTITIONS + 1, f"at most {MAX_PARTITIONS}"),
        (10**18, f"at most {MAX_PARTITIONS}"),
        (2, "has 3 already.*topic drain"),
    ],
)
def test_an_invalid_number_of_partitions_is_refused(partitions: int, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        THREE.expanded(partitions)


def test_draining_partitions_count_against_the_limit() -> None:
    full = TopicDescription.new("01J5", MAX_PARTITIONS).drained("p-00000-04pn")
    with pytest.raises(InvalidInput, match="with 1 that drain"):
        full.expanded(MAX_PARTITIONS)


def test_a_topic_that_has_used_all_partition_numbers_raises_an_error() -> None:
    old = TopicDescription("01J5", (Partition("p-99999"),), 100_000)
    with pytest.raises(InvalidInput, match="Create another topic"):
        old.expanded(2)


ACTIVE = {"name": "p-00000-04pn", "state": "active"}


@pytest.mark.parametrize(
    "wrong",
    [
        {"version": 2},
        {"next": 0},
        {"left": ["x"]},
        {"left": 7},
        {"partitions": []},
        {"partitions": [ACTIVE | {"name": "x"}]},
        {"partitions": [{"name": "p-00000-04pn"}]},
        {"partitions": [ACTIVE | {"state": "frozen"}]},
        {"partitions": [ACTIVE | {"since": "now"}]},
        {"partitions": [ACTIVE | {"state": "draining"}]},
    ],
)
def test_a_description_with_a_wrong_field_is_corrupt_data(wrong: dict[str, object]) -> None:
    fields = {"version": 1, "id": "a", "next": 1, "partitions": [ACTIVE]}
    assert TopicDescription.from_json(json.dumps(fields).encode()).active == ["p-00000-04pn"]
    with pytest.raises(CorruptData):
        TopicDescription.from_json(json.dumps(fields | wrong).encode())


def test_duplicate_or_unsorted_partitions_are_corrupt_data() -> None:
    for names in (["p-00001-05mv", "p-00000-04pn"], ["p-00000-04pn", "p-00000-04pn"]):
        topic = TopicDescription("a", tuple(Partition(name) for name in names), 2)
        with pytest.raises(CorruptData, match="out of order or twice"):
            TopicDescription.from_json(topic.to_json())
    many = tuple(Partition(f"p-{number:05}", State.ACTIVE) for number in range(MAX_PARTITIONS + 1))
    with pytest.raises(CorruptData, match="1001 partitions, and not 1000"):
        TopicDescription.from_json(TopicDescription("a", many, 2000).to_json())


def pairs(letters: str) -> list[str]:
    return [a + b for a in letters for b in letters]


NAMES = [name_of(number, number) for number in range(129)]
DRAWN = random.Random(7)
KEYS = [DRAWN.randbytes(8) for _ in range(1 << 16)]
CHANCE = 0.08
"""The largest error of a share with this number of random keys."""


def indices(partitions: int) -> np.ndarray:
    return rendezvous(KEYS, NAMES[:partitions])


def shares(partitions: int) -> np.ndarray:
    """Return the share of each partition, in multiples of an even share."""
    return np.bincount(indices(partitions), minlength=partitions) * partitions / len(KEYS)


@pytest.mark.parametrize("partitions", [1, 2, 4, 8, 16, 32, 64])
def test_a_power_of_two_of_partitions_have_equal_shares(partitions: int) -> None:
    assert np.abs(shares(partitions) - 1).max() < CHANCE


@pytest.mark.parametrize("partitions", [1, 2, 3, 4, 7, 15, 16, 17, 31, 63])
def test_a_new_partition_takes_half_of_the_keys_of_one_other(partitions: int) -> None:
    before, after = indices(partitions), indices(partitions + 1)
    moved = before != after
    assert set(after[moved]) == {partitions}
    (split,) = set(before[moved])
    assert abs(moved.sum() / (before == split).sum() - 0.5) < CHANCE


def test_a_partition_in_the_slot_of_another_one_gets_exactly_its_keys() -> None:
    names = [*NAMES[:3], *NAMES[4:16], name_of(16, 3)]
    chosen = rendezvous(KEYS, names)
    assert [names[each] for each in chosen] == [
        names[-1] if each == 3 else NAMES[each] for each in indices(16)
    ]


def test_a_name_is_a_function_of_number_and_slot() -> None:
    """This must never change: two processes that add the same partition must agree on its name."""
    assert NAMES[:4] == ["p-00000-04pn", "p-00001-05mv", "p-00002-0bvb", "p-00003-04vf"]
    assert name_of(16, 3) == name_of(16, 3) != name_of(16, 16)
    for number, slot in ((0, 0), (7, 1023), (999, 5), (99_999, 511)):
        name = name_of(number, slot)
        assert (number_of(name), slot_of(name)) == (number, slot)


@pytest.mark.parametrize("number", [0, 2_047, 3_332, 99_999])
def test_every_number_has_a_name_in_every_slot(number: int) -> None:
    """Numbers in the middle have the fewest possible names."""
    slots = range(number % 8, SLOTS, 8)
    names = [name_of(number, slot) for slot in slots]
    assert [slot_of(name) for name in names] == list(slots)
    assert {number_of(name) for name in names} == {number}


@pytest.mark.parametrize("keys", [string.ascii_uppercase, pairs(string.ascii_uppercase)])
def test_short_keys_are_not_all_in_one_partition(keys: Sequence[str]) -> None:
    counts = np.bincount(rendezvous(list(keys), NAMES[:8]), minlength=8)
    assert counts.max() * 8 / len(keys) < 1.5


@pytest.mark.parametrize(
    ("given", "number"),
    [
        *[("p-00003", 3), ("p-00003-04vf", 3), ("p-99999", 99_999), ("p-00830-00bc", 830)],
        *dict.fromkeys(["", "ingest", "3", "p-3", "p-00003-", "p-00003-AB9", "p-00003-12"]).items(),
        ("p-00003-04vf/x", None),
    ],
)
def test_only_a_partition_name_has_a_number(given: str, number: int | None) -> None:
    assert number_of(given) == number
    assert has_letters(given) == (number is not None and len(given) > len("p-00003"))


def test_an_abbreviated_name_means_exactly_one_partition() -> None:
    assert number_meant("p-00003-04vf") == 3
    for given in ("3", "03", "p-3", "p-00003"):
        assert number_meant(given) == 3
        assert is_abbreviated(given, "p-00003-04vf")
        assert not is_abbreviated(given, "p-00030-0w11")
    for given in ("p-00003-04vf", "p-00003-", "-3", "3x", "123456", "\u0663"):
        assert not is_abbreviated(given, "p-00003-04vf")


def test_readers_that_had_not_read_a_removed_partition_are_kept_and_still_read_it() -> None:
    topic = TopicDescription.new("id", 3).drained(0).without([NAMES[0]], {NAMES[0]: ["a", "b"]})
    assert topic.unread == {NAMES[0]: ("a", "b")}
    assert TopicDescription.from_json(topic.to_json()) == topic
    assert topic.names_for("a") == NAMES[:3]
    assert topic.names_for("c") == NAMES[1:3]
    assert topic.without([NAMES[0]], {NAMES[0]: ["c"]}) == topic, "it has left already"
    assert topic.without_unread("a", [NAMES[1]]) == topic
    one = topic.without_unread("a", NAMES)
    assert one.unread == {NAMES[0]: ("b",)}
    assert one.without_reader("b").unread == {}
    assert b"unread" not in one.without_reader("b").to_json()


def test_only_the_latest_readers_of_removed_partitions_are_kept() -> None:
    topic = TopicDescription.new("id", 4)
    many = [f"reader-{number}" for number in range(MAX_UNREAD - 1)]
    for number, readers in enumerate((["a", "b", "c"], [], many)):
        topic = topic.drained(number).without([NAMES[number]], {NAMES[number]: readers})
    assert topic.unread == {NAMES[0]: ("c",), NAMES[2]: tuple(many)}
    assert len(topic.to_json()) < 100_000


@pytest.mark.parametrize("wrong", ['["a"]', '{"p-00000-04pn": "a"}', '{"orders": ["a"]}'])
def test_unread_partitions_of_another_form_are_refused(wrong: str) -> None:
    raw = (
        TopicDescription.new("id", 2).to_json().replace(b"}\n", b', "unread": %s}' % wrong.encode())
    )
    with pytest.raises(CorruptData, match="unread"):
        TopicDescription.from_json(raw)
