"""Where Azure's listings go on."""

from __future__ import annotations

import pickle

from opendata_buffer.stores.azure import MOST, Places


def test_a_listing_goes_on_behind_the_key_where_it_ended_and_nowhere_else() -> None:
    places = Places()
    places.remember("in/", "in/b", "token")
    assert places.behind("in/", "in/b") == "token"
    assert places.behind("in/", "in/a") is None
    assert places.behind("", "in/b") is None


def test_the_oldest_are_forgotten() -> None:
    places = Places()
    for number in range(MOST + 1):
        places.remember("in/", str(number), "token")
    assert places.behind("in/", "0") is None
    assert [places.behind("in/", str(number)) for number in range(1, MOST + 1)] == ["token"] * MOST


def test_tokens_stay_in_their_process() -> None:
    places = Places()
    places.remember("in/", "in/b", "token")
    copied = pickle.loads(pickle.dumps(places))
    assert copied.behind("in/", "in/b") is None
    copied.remember("in/", "in/c", "other")
    assert places.behind("in/", "in/c") is None
