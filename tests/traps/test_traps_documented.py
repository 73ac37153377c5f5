"""docs/concepts/traps.md names tests that there are, and all that are named after a trap."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROWS = [
    line
    for line in (ROOT / "docs/concepts/traps.md").read_text().splitlines()
    if re.match(r"\| \d+ \|", line)
]
NUMBERS = range(1, 13)


def names_in(file: Path) -> set[str]:
    return {f"{file.name}::{name}" for name in _functions(file) if name.startswith("test_")}


def _functions(file: Path) -> list[str]:
    return [
        node.name for node in ast.parse(file.read_text()).body if isinstance(node, ast.FunctionDef)
    ]


def cells(number: int) -> list[str]:
    [row] = [row for row in ROWS if row.startswith(f"| {number} |")]
    return [cell.strip() for cell in row.strip("|").split(" | ")]


def named_after(number: int, folder: str) -> list[Path]:
    return sorted((ROOT / "tests" / folder).glob(f"test_trap_{number:02}_*.py"))


def complaints(number: int, row: list[str]) -> list[str]:
    """What is wrong with a row of the page."""
    _, _, here, with_vllm = row
    said = re.findall(r"`(test_\w+\.py)(?:::(test_\w+))?`", with_vllm)
    there = {test for file in (ROOT / "tests/vllm").glob("test_*.py") for test in names_in(file)}
    named = {f"{file}::{test}" for file, test in said}
    own = {test for file in named_after(number, "vllm") for test in names_in(file)}
    found = [f"{test} is not there" for test in sorted(named - there)]
    found += [f"{test} is not named" for test in sorted(own - named)]
    found += [] if said else ["no test with vLLM is named"]
    if [f"`{file.name}`" for file in named_after(number, "traps")] != re.findall(
        r"`test_\w+\.py`", here
    ):
        found.append("not the file of tests/traps that is named after it")
    return found


def test_each_trap_has_its_row() -> None:
    assert [int(row.split("|")[1]) for row in ROWS] == list(NUMBERS)


@pytest.mark.parametrize("number", NUMBERS)
def test_what_is_said_of_a_trap_is_there(number: int) -> None:
    assert complaints(number, cells(number)) == []


def test_no_file_is_named_after_a_trap_that_there_is_not() -> None:
    files = {
        file
        for folder in ("traps", "vllm")
        for file in (ROOT / "tests" / folder).glob("test_trap_*.py")
    }
    known = {
        file
        for number in NUMBERS
        for folder in ("traps", "vllm")
        for file in named_after(number, folder)
    }
    assert files == known and len(named_after(1, "traps")) == 1


def test_mistakes_would_be_seen() -> None:
    number, title, here, with_vllm = cells(2)
    for row in (
        [number, title, here, with_vllm.replace("answered`", "heard`")],
        [number, title, here, with_vllm.partition(";")[2]],
        [number, title, here, "`test_connector_outage.py`"],
        [number, title, here, "nothing"],
        [number, title, here.replace("test_trap_02", "test_trap_03"), with_vllm],
    ):
        assert complaints(2, row)
