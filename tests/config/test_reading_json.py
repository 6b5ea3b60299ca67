"""JSON is read strictly."""

from pathlib import Path

import pytest

from megaspeed.config.document import JsonSyntaxError, parse_json, read_json_object


@pytest.mark.parametrize(
    ("text", "line", "column", "shown"),
    [
        ('{\n  "a": 1\n  "b": 2\n}', 3, 3, '"b": 2'),
        ('{\n  # why\n  "a": 1}', 2, 3, "# why"),
        ('{"a": True}', 1, 7, "True"),
        ("{'a': 1}", 1, 2, "'a'"),
        ("", 1, 1, "Expecting value"),
    ],
)
def test_a_syntax_error_shows_its_line(text: str, line: int, column: int, shown: str) -> None:
    with pytest.raises(JsonSyntaxError) as caught:
        parse_json(text)
    assert f"line {line}, column {column}:" in str(caught.value)
    assert shown in str(caught.value)


def test_nan_is_not_a_number() -> None:
    with pytest.raises(JsonSyntaxError, match="NaN is not a JSON number"):
        parse_json('{"lr": NaN}')


def test_duplicate_keys_are_found_at_every_depth() -> None:
    text = '{"a": {"b": [{"c": 1, "c": 2}], "b": 3}, "d": 1, "d": 1}'
    _, problems = parse_json(text)
    assert [problem.message.split(" is a duplicate")[0] for problem in problems] == [
        "a.b[0].c",
        "a.b",
        "d",
    ]


def test_equal_keys_in_different_objects_are_no_duplicates() -> None:
    value, problems = parse_json('{"a": {"x": 1}, "b": {"x": 1}, "x": [{"x": 1}, {"x": 2}]}')
    assert problems == []
    assert value == {"a": {"x": 1}, "b": {"x": 1}, "x": [{"x": 1}, {"x": 2}]}


def test_a_file_must_hold_an_object(tmp_path: Path) -> None:
    file = tmp_path / "list.json"
    file.write_text("[1]")
    with pytest.raises(JsonSyntaxError, match=r"must contain one JSON object .* \[1\] \(a list\)"):
        read_json_object(file)


def test_a_file_that_is_not_utf8_names_the_byte(tmp_path: Path) -> None:
    file = tmp_path / "latin.json"
    file.write_bytes(b'{"a": "\xe9"}')
    with pytest.raises(JsonSyntaxError, match="byte 7 is 0xe9"):
        read_json_object(file)


def test_a_byte_order_mark_does_no_harm(tmp_path: Path) -> None:
    file = tmp_path / "bom.json"
    file.write_bytes(b'\xef\xbb\xbf{"a": 1}')
    assert read_json_object(file) == ({"a": 1}, [])


def test_nesting_without_end_is_refused() -> None:
    with pytest.raises(JsonSyntaxError, match="nested too deeply"):
        parse_json("[" * 100_000)


@pytest.mark.parametrize("levels", [65, 900, 5_000])
def test_more_than_64_levels_are_refused(levels: int) -> None:
    deepest = "[" * 64 + "]" * 64
    assert parse_json(deepest)[1] == []
    for opening, closing in (("[", "]"), ('{"a":', "}")):
        with pytest.raises(JsonSyntaxError, match="must be at most 64 levels deep"):
            parse_json(opening * levels + "1" + closing * levels)


def test_a_number_of_5000_digits_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "long.json"
    file.write_text(f'{{"a": {"1" * 5000}}}')
    with pytest.raises(JsonSyntaxError, match="a number with more than 4,300 digits"):
        read_json_object(file)
