"""Looking for an append whose answer nobody got."""

from __future__ import annotations

import pytest

from opendata_buffer.broker.broker import Landed, find_earlier_attempt
from opendata_buffer.errors import CommitStateUnknown
from opendata_buffer.formats.manifest import Manifest, NewEntry

ASKED = [NewEntry("ingest/b"), NewEntry("ingest/c")]


def manifest(*locations: str) -> Manifest:
    return Manifest.empty().append([NewEntry(each) for each in locations])


def test_an_attempt_that_has_landed_is_found_with_its_first_sequence() -> None:
    guard = find_earlier_attempt("m", ASKED, since=0)
    assert guard(manifest("ingest/a", "ingest/b", "ingest/c", "ingest/d")) == Landed(1)


def test_it_is_found_by_its_end_when_a_consumer_took_its_beginning() -> None:
    guard = find_earlier_attempt("m", ASKED, since=0)
    taken = manifest("ingest/a", "ingest/b", "ingest/c").drop_through(1)
    assert guard(taken) == Landed(1)


def test_what_is_not_there_may_be_appended_while_nothing_was_taken_since() -> None:
    guard = find_earlier_attempt("m", ASKED, since=2)
    assert guard(manifest("ingest/a", "ingest/x", "ingest/y").drop_through(1)) is None


def test_what_may_have_been_taken_is_unknown_and_says_what_is_known() -> None:
    guard = find_earlier_attempt("m", ASKED, since=1)
    with pytest.raises(CommitStateUnknown, match="may or may not have landed") as caught:
        guard(manifest("ingest/a", "ingest/x", "ingest/y").drop_through(1))
    assert caught.value.sequence == 1
    assert caught.value.next_sequence == 3
    assert caught.value.locations == ("ingest/b", "ingest/c")
