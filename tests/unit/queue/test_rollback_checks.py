"""Whether a manifest continues what is known of its queue, and what the errors say."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from opendata_buffer.config import QueueConfig
from opendata_buffer.errors import CorruptManifest, QueueReset
from opendata_buffer.formats.entries import NewEntry
from opendata_buffer.formats.manifest import FOOTER_SIZE, Manifest
from opendata_buffer.queue.rollback_checks import (
    Watermark,
    check_follows,
    check_reached,
    parse_manifest,
    queue_hint,
    vanished,
)


def test_the_watermark_of_a_manifest_knows_what_has_left_it() -> None:
    assert Watermark.of(Manifest.empty()) == Watermark(0, 0, None, "")
    assert Watermark.of(Manifest.starting_at(7, 3), "in/x.batch") == Watermark(
        7, 3, 6, "in/x.batch"
    )


def test_f4_a_manifest_that_is_gone_or_behind_cannot_follow() -> None:
    seen = Watermark(5, 2)
    assert seen.allows(Manifest.starting_at(5, 2))
    assert seen.allows(Manifest.starting_at(9, 4))
    assert not seen.allows(None)
    assert not seen.allows(Manifest.starting_at(4, 9))
    assert not seen.allows(Manifest.starting_at(9, 1))


def test_one_covers_another_if_it_is_below_it_in_nothing() -> None:
    assert Watermark(5, 2, 3).covers(Watermark(5, 2, 3))
    assert Watermark(5, 2, 0).covers(Watermark(5, 2))
    for higher in (Watermark(6, 2, 3), Watermark(5, 3, 3), Watermark(5, 2, 4)):
        assert not Watermark(5, 2, 3).covers(higher)


def test_a_watermark_without_the_last_location_is_incomplete() -> None:
    located, bare = Watermark(5, 2, 3, "in/x.batch"), Watermark(5, 2, 3)
    assert not bare.includes(located)
    assert located.includes(bare)
    assert located.includes(located)
    assert not located.includes(Watermark(5, 2, 4))


def test_two_joined_are_as_high_as_the_higher_in_everything() -> None:
    early, late = Watermark(5, 9, 3, "in/early.batch"), Watermark(8, 2, 6, "in/late.batch")
    assert early.joined(late) == late.joined(early) == Watermark(8, 9, 6, "in/late.batch")
    assert Watermark(1, 1).joined(early) == early


URL = "s3://bucket/root"
CONFIG = QueueConfig(store=URL, data_path_prefix="orders", manifest_path="orders/manifest")
REBUILD = "'opendata-buffer manifest rebuild s3://bucket/root --data-path-prefix orders'"


def at(next_sequence: int, epoch: int) -> Manifest:
    return Manifest.starting_at(next_sequence, epoch)


def test_f4_a_manifest_follows_only_forwards() -> None:
    check_follows(at(3, 1), at(3, 1), CONFIG, URL)
    check_follows(at(3, 1), at(5, 2), CONFIG, URL)
    for behind in (at(2, 1), at(5, 0)):
        with pytest.raises(QueueReset, match=r"went backwards: next sequence 3 -> ") as caught:
            check_follows(at(3, 1), behind, CONFIG, URL)
        assert REBUILD in str(caught.value)


def test_f4_what_the_marker_saw_tells_a_lost_manifest_from_one_that_never_was() -> None:
    check_reached(Watermark(3, 1), at(3, 1), CONFIG, URL)
    check_reached(Watermark(3, 1, 2, "orders/x.batch"), at(9, 4), CONFIG, URL)
    with pytest.raises(QueueReset, match="is gone from s3://bucket/root: it had reached next") as e:
        check_reached(Watermark(3, 1), None, CONFIG, URL)
    assert REBUILD in str(e.value)
    assert "recreate=True" in str(e.value)
    with pytest.raises(QueueReset, match="epoch 1 -> 0"):
        check_reached(Watermark(3, 1), at(7, 0), CONFIG, URL)


def test_f4_a_manifest_lost_in_use_is_an_error_with_its_restore() -> None:
    error = vanished(CONFIG, URL)
    assert "'orders/manifest' in s3://bucket/root vanished" in str(error)
    assert REBUILD in str(error)


def test_what_is_the_default_is_left_out() -> None:
    url = "s3://bucket"
    assert queue_hint(url, QueueConfig(store=url)) == url
    config = QueueConfig(store=url, data_path_prefix="p-00003-04vf")
    assert queue_hint(url, config) == f"{url} --data-path-prefix p-00003-04vf"
    config = QueueConfig(store=url, data_path_prefix="a b", manifest_path="m")
    assert queue_hint(url, config) == f"{url} --data-path-prefix 'a b' --manifest-path m"


SOUND = Manifest.empty().append([NewEntry(f"p-1/{n}.batch") for n in range(3)])
PARTITION = QueueConfig(store="s3://bucket", data_path_prefix="p-1")
COMMAND = "'opendata-buffer manifest rebuild s3://bucket --data-path-prefix p-1'"


@pytest.mark.parametrize(
    "read",
    [
        Manifest.entries,
        Manifest.locations,
        lambda manifest: manifest.drop_through(0),
        lambda manifest: manifest.append([NewEntry("p-1/x.batch")]).with_epoch(1).entries(),
        lambda manifest: manifest.replace(0, NewEntry("p-1/x.batch")),
        lambda manifest: manifest.find("p-1/2.batch"),
    ],
)
def test_damage_behind_the_first_entry_names_the_manifest_and_the_command(
    read: Callable[[Manifest], object],
) -> None:
    size = (SOUND.size - FOOTER_SIZE) // 3
    damaged = bytearray(SOUND.raw)
    damaged[size + 4] ^= 0xFF  # the second entry's sequence
    manifest = parse_manifest(bytes(damaged), "s3://bucket", PARTITION)
    with pytest.raises(CorruptManifest) as caught:
        read(manifest)
    text = str(caught.value)
    assert text.startswith("'p-1/manifest' in s3://bucket: manifest entry at byte")
    assert COMMAND in text
    assert text.count("s3://bucket") == 2


def test_what_is_no_manifest_at_all_names_the_command() -> None:
    with pytest.raises(CorruptManifest) as caught:
        parse_manifest(b"<html>", "s3://bucket", PARTITION)
    assert COMMAND in str(caught.value)
