"""docs/concepts/traps.md names tests that exist, and all tests with vLLM that belong to a trap."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"
ROWS = re.findall(r"^\| \d+ \|.*", (ROOT / "docs/concepts/traps.md").read_text(), re.MULTILINE)
NUMBERS = range(1, 13)


def names_in(file: Path) -> set[str]:
    if not file.exists():
        return set()
    functions = [node for node in ast.parse(file.read_text()).body if hasattr(node, "name")]
    return {f"{file.name}::{each.name}" for each in functions if each.name.startswith("test_")}


def cells(number: int) -> list[str]:
    [row] = [row for row in ROWS if row.startswith(f"| {number} |")]
    return [cell.strip() for cell in row.strip("|").split(" | ")]


def complaints(number: int, here: str, with_vllm: str) -> list[str]:
    """What is wrong with the last two cells of a row."""
    found = []
    for cell, folder in ((here, ""), (with_vllm, "vllm/")):
        named = re.findall(r"`([\w/]+\.py)(?:::(test_\w+))?`", cell)
        found += [] if named else [f"no test is named: {cell}"]
        for file, test in named:
            path = TESTS / f"{folder}{file}"
            if f"{path.name}::{test}" not in names_in(path):
                found.append(f"{file}::{test} does not exist")
    for file in (TESTS / "vllm").glob(f"test_trap_{number:02}_*.py"):
        found += [f"{test} is not named" for test in names_in(file) if f"`{test}`" not in with_vllm]
    return found


def test_each_trap_has_its_row() -> None:
    assert [int(row.split("|")[1]) for row in ROWS] == list(NUMBERS)
    named_after = {int(file.name[10:12]) for file in (TESTS / "vllm").glob("test_trap_*.py")}
    assert named_after and named_after <= set(NUMBERS)


@pytest.mark.parametrize("number", NUMBERS)
def test_each_row_names_tests_that_exist(number: int) -> None:
    assert complaints(number, *cells(number)[2:]) == []


def test_mistakes_are_found() -> None:
    here, with_vllm = cells(2)[2:]
    for row in (
        (here, with_vllm.replace("answered`", "heard`")),
        (here, with_vllm.partition(";")[2]),
        (here, "`test_connector_outage.py`"),
        (here, "nothing"),
        (here.replace("test_traps", "test_nothing"), with_vllm),
    ):
        assert complaints(2, *row)
