from __future__ import annotations

import json

import pytest

from kvkeep.cli.output import counted, help_section, note, show_facts, show_json, show_table


def test_a_table_shows_numbers_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    show_table(
        ("name", "count", "share", "own"),
        [("a [bold]b", 1_234_567, 0.5, True), ("c", None, 2.25, False)],
    )
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["a", "[bold]b", "1,234,567", "0.50", "yes"], (
        "text is not read as markup"
    )
    assert lines[2].split() == ["c", "-", "2.25", "no"]
    assert lines[1].index("1,234,567") + len("1,234,567") == lines[2].index("-") + 1, (
        "numbers stand right"
    )
    show_table(("seconds saved",), [(-1.5,), (-0.001,)])
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:] == ["-1.50".rjust(13), "0.00".rjust(13)]


def test_what_is_piped_is_not_cut(capsys: pytest.CaptureFixture[str]) -> None:
    show_table(("name",), [("x" * 300,)])
    show_facts([("name", "y" * 300)])
    out = capsys.readouterr().out
    assert "x" * 300 in out and "y" * 300 in out


def test_an_empty_table_has_its_head(capsys: pytest.CaptureFixture[str]) -> None:
    show_table(("tenant", "blocks"), [])
    assert capsys.readouterr().out.split() == ["tenant", "blocks"]


def test_json_alone_is_on_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    note("for people")
    show_json({"a": [1]})
    said = capsys.readouterr()
    assert json.loads(said.out) == {"a": [1]} and said.err == "for people\n"


def test_a_help_text_grows_by_a_section() -> None:
    text = help_section(
        "Usage: x", "Things", [("--a", "word " * 60), ("--longer", "b")], "The end."
    )
    assert text.startswith("Usage: x\n\nThings:\n  --a       word")
    assert text.endswith("  --longer  b\n\nThe end.")
    assert max(map(len, text.splitlines())) <= 110


def test_no_line_ends_in_blanks(capsys: pytest.CaptureFixture[str]) -> None:
    show_table(("name", "own"), [("a", ""), ("b", "yes, its own")])
    show_facts([("name", "y"), ("longer name", "yyy")])
    assert all(line == line.rstrip() for line in capsys.readouterr().out.splitlines())


def test_one_is_not_many() -> None:
    assert [counted(number, "lease") for number in (0, 1, 2000)] == [
        "0 leases",
        "1 lease",
        "2,000 leases",
    ]
