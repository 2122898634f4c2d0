"""The threads of a producer, as they are counted."""

from __future__ import annotations

from opendata_buffer.producer.accumulator import Crew


def test_while_some_upload_and_tell_one_more_keeps_the_time() -> None:
    crew = Crew(uploads_at_once=2)
    crew.hire(1)
    hired = []
    while crew.may_upload:
        hired.append(crew.send_off())
        crew.begin_upload()
    assert hired == [True, True]
    assert (crew.threads, crew.in_store) == (3, 2)
    # The third one leaves to tell: more are not hired, one of the two will be back.
    assert not crew.send_off()
    crew.take_back()
    crew.end_upload()
    assert crew.may_upload
    assert not crew.send_off()


def test_who_did_not_start_is_hired_again_when_there_is_need() -> None:
    crew = Crew(uploads_at_once=1)
    crew.hire(1)
    assert crew.send_off()
    crew.hire(-1)
    assert crew.threads == 1
    crew.take_back()
    assert crew.send_off()


def test_the_appender_is_in_the_store_while_it_appends() -> None:
    crew = Crew(uploads_at_once=1)
    crew.begin()
    crew.begin_append()
    assert (crew.threads, crew.in_store) == (1, 1)
    crew.end_append()
    crew.end()
    assert (crew.threads, crew.in_store) == (0, 0)
