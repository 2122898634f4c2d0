"""How far a manifest was: what may follow, and what two of them know together."""

from __future__ import annotations

from opendata_buffer.formats.manifest import Manifest
from opendata_buffer.queue.rollback_checks import Watermark


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


def test_who_does_not_know_where_the_last_batch_was_does_not_know_all() -> None:
    located, bare = Watermark(5, 2, 3, "in/x.batch"), Watermark(5, 2, 3)
    assert not bare.knows(located)
    assert located.knows(bare)
    assert located.knows(located)
    assert not located.knows(Watermark(5, 2, 4))


def test_two_joined_are_as_high_as_the_higher_in_everything() -> None:
    early, late = Watermark(5, 9, 3, "in/early.batch"), Watermark(8, 2, 6, "in/late.batch")
    assert early.joined(late) == late.joined(early) == Watermark(8, 9, 6, "in/late.batch")
    assert Watermark(1, 1).joined(early) == early
