from __future__ import annotations

import pytest

from opendata_buffer.values.chars import BadJson
from opendata_buffer.values.tokens import Token, Tokens


def all_of(text: str) -> list[Token]:
    tokens, found = Tokens(text), []
    while (token := tokens.next()) is not None:
        found.append(token)
    return found


def test_a_record_is_its_tokens() -> None:
    assert all_of('{"a": [1, 2.5, "x", null], "b": true}') == [
        Token.START_OBJECT, Token.NAME, Token.START_ARRAY, Token.INT, Token.FLOAT, Token.STRING,
        Token.NULL, Token.END_ARRAY, Token.NAME, Token.TRUE, Token.END_OBJECT,
    ]  # fmt: skip


@pytest.mark.parametrize(
    "text",
    ["{", '{"a"', '{"a":', '{"a":1', '{"a":1,}', "[1,]", "[1 2]", "{a:1}", "[01]", "[1.]", "[+1]",
     "[.5]", "[1e]", "[tru]", "[truex]", "[nan]", '["\\q"]', '["\\u12"]', '["a\x01"]', '["a', "[1}",
     "]", '{"a" 1}', "/**/[]", "\ufeff[]", "[-]"],
)  # fmt: skip
def test_what_is_no_json_is_refused(text: str) -> None:
    with pytest.raises(BadJson):
        all_of(text)


def test_what_spark_takes_besides_json_is_taken() -> None:
    assert all_of("{'a': 'b'}")[2] is Token.STRING
    assert all_of("[NaN, Infinity, +INF, -Infinity]")[1:5] == [Token.FLOAT] * 4


def test_a_string_is_read_when_it_is_asked_for_or_passed() -> None:
    tokens = Tokens('["a\\u0041\\n", "x\x01"]')
    tokens.next()
    tokens.next()
    assert tokens.value == "aA\n"
    assert tokens.next() is Token.STRING
    with pytest.raises(BadJson):
        _ = tokens.value


def test_after_a_broken_string_it_goes_on_behind_what_broke_it() -> None:
    tokens = Tokens('{"c":"x\x01,"a":5}')
    for _ in range(3):
        tokens.next()
    with pytest.raises(BadJson):
        _ = tokens.value
    assert tokens.next() is Token.NAME
    assert tokens.name == "a"


def test_objects_are_skipped_whole_and_scalars_not_at_all() -> None:
    tokens = Tokens('{"a":{"b":[1,{}]},"c":2}')
    tokens.next()
    tokens.next()
    tokens.skip()
    assert tokens.token is Token.NAME
    tokens.next()
    tokens.skip()
    assert tokens.token is Token.END_OBJECT
    assert tokens.next() is Token.NAME
    assert tokens.name == "c"


def test_limits_of_the_parser_are_kept() -> None:
    assert len(all_of("[" * 1000 + "]" * 1000)) == 2000
    with pytest.raises(BadJson, match="nested deeper"):
        all_of("[" * 1001 + "]" * 1001)
    with pytest.raises(BadJson, match="more than 1000 digits"):
        all_of(f"[{'1' * 1001}]")
    with pytest.raises(BadJson, match="longer than 50000"):
        all_of(f'{{"{"n" * 50_001}":1}}')
