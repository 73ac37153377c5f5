"""What the package is made of: each dependency has a range that was tested and a reason, and audits
can fail."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
REQUIREMENT = re.compile(r"([A-Za-z0-9-]+)(?:>=([0-9.]+),<([0-9.]+)|==([0-9.]+))")


def requirements() -> list[str]:
    extras = [each for extra in PYPROJECT["optional-dependencies"].values() for each in extra]
    return sorted({*PYPROJECT["dependencies"], *extras})


def reasons() -> set[str]:
    """The names in the tables of decision 2."""
    text = (ROOT / "docs" / "decisions" / "0002-dependencies.md").read_text()
    rows = re.findall(r"^\| ([a-z][a-z0-9, -]*) \| \S", text, flags=re.MULTILINE)
    return {name.strip() for row in rows for name in row.split(",")} - {"dependency"}


def numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])


def complaints(requirement: str, installed: str | None, explained: set[str]) -> list[str]:
    """What is wrong with a line of pyproject.toml."""
    match = REQUIREMENT.fullmatch(requirement.partition(";")[0])  # after that: where it is wanted
    if match is None:
        return [
            f"{requirement}: expected name>=low,<high or name==version: what was not tested is not promised"
        ]
    name, low, high, exact = match.groups()
    found = (
        []
        if name in explained
        else [f"{name} has no reason in docs/decisions/0002-dependencies.md"]
    )
    if installed is not None:
        inside = (
            numbers(low) <= numbers(installed) < numbers(high)
            if low
            else numbers(installed) == numbers(exact)
        )
        found += [] if inside else [f"{requirement}: what is tested here is {installed}"]
    return found


def installed_version(requirement: str) -> str | None:
    """None for what some environments are without, such as pip-audit where nothing can be
    downloaded."""
    try:
        return metadata.version(re.split(r"[><=]", requirement)[0])
    except metadata.PackageNotFoundError:
        return None


@pytest.mark.parametrize("requirement", requirements())
def test_a_dependency_has_a_tested_range_and_a_reason(requirement: str) -> None:
    assert complaints(requirement, installed_version(requirement), reasons()) == []


def test_every_dependency_of_the_server_is_installed_here() -> None:
    assert [each for each in PYPROJECT["dependencies"] if installed_version(each) is None] == []


def test_no_reason_is_given_for_what_is_gone() -> None:
    assert reasons() - {re.split(r"[><=]", each)[0] for each in requirements()} == set()


@pytest.mark.parametrize(
    ("requirement", "installed", "word"),
    [
        ("a>=1", None, "expected"),
        ("a", None, "expected"),
        ("a<2", None, "expected"),
        ("b>=1,<2", None, "no reason"),
        ("a>=1,<2", "2.0", "tested here is 2.0"),
        ("a>=1.5,<2", "1.4.9", "tested here"),
        ("a==1.2", "1.3", "tested here"),
    ],
)
def test_a_bad_line_is_found(requirement: str, installed: str | None, word: str) -> None:
    (complaint,) = complaints(requirement, installed, {"a"})
    assert word in complaint
    assert complaints("a>=1.5,<2", "1.10.0+cpu", {"a"}) == complaints("a==1.2", "1.2", {"a"}) == []


# -- the changelog


def test_the_changelog_has_this_version_and_room_for_the_next() -> None:
    heads = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert heads[0] == "[Unreleased]"
    assert re.fullmatch(rf"\[{re.escape(PYPROJECT['version'])}\] - \d{{4}}-\d\d-\d\d", heads[1])


# -- the audit


def ci_module(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, ROOT / ".ci" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def audit() -> Any:
    return ci_module("audit")


def said(*packages: dict[str, Any]) -> str:
    return json.dumps({"dependencies": packages, "fixes": []})


CLEAN = {"name": "a", "version": "1", "vulns": []}
FLAWED = {
    "name": "b",
    "version": "1",
    "vulns": [{"id": "CVE-1", "fix_versions": ["2"], "description": ""}],
}
SKIPPED = {"name": "c", "skip_reason": "Dependency not found"}
OURS = {"name": "kvkeep", "skip_reason": "not on an index"}


def test_a_known_vulnerability_fails_whatever_else_could_not_be_known(audit: Any) -> None:
    for packages in ((FLAWED,), (CLEAN, FLAWED, SKIPPED)):
        code, lines = audit.verdict(said(*packages), "")
        assert code == 1 and "b 1: CVE-1, mended in 2" in lines[0]


def test_all_known_and_nothing_found_passes_quietly(audit: Any) -> None:
    assert audit.verdict(said(CLEAN, OURS), "") == (
        0,
        ["audit: 1 packages, no known vulnerability"],
    )


@pytest.mark.parametrize(
    ("stdout", "stderr", "why"),
    [
        ("", "warning\nNo module named pip_audit\n", "No module named pip_audit"),
        ("", "", "said nothing"),
        ("[]", "ConnectionError: no route", "no route"),
        (said(CLEAN, SKIPPED), "", "1 of 2 packages are not in its database: c"),
        (said(), "", "0 of 0"),
    ],
)
def test_what_nobody_could_say_passes_loudly(
    audit: Any, stdout: str, stderr: str, why: str
) -> None:
    code, lines = audit.verdict(stdout, stderr)
    assert code == 0 and why in "\n".join(lines)
    assert "NOT AUDITED" in lines[1] and len(lines[0]) >= 80


def run_audit(tmp_path: Path, program: str) -> subprocess.CompletedProcess[str]:
    """The command, with this program in place of pip-audit."""
    (tmp_path / "pip_audit.py").write_text(program)
    command = [sys.executable, str(ROOT / ".ci" / "audit.py")]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=60, check=False
    )


def test_the_command_fails_for_a_known_vulnerability_and_names_it(tmp_path: Path) -> None:
    """pip-audit ends with 1 then, but it does so for other reasons as well."""
    done = run_audit(tmp_path, f"print({said(CLEAN, FLAWED)!r}); raise SystemExit(1)")
    assert done.returncode == 1 and "audit: b 1: CVE-1, mended in 2" in done.stdout
    assert "NOT AUDITED" not in done.stdout


@pytest.mark.parametrize(
    ("program", "why"),
    [
        (
            "raise ConnectionError('no route to the database')",
            "ConnectionError: no route to the database",
        ),
        (f"print({said(SKIPPED)!r})", "1 of 1 packages are not in its database: c"),
        ("raise SystemExit(1)", "pip-audit said nothing"),
    ],
)
def test_the_command_is_loud_where_nothing_could_be_known(
    tmp_path: Path, program: str, why: str
) -> None:
    done = run_audit(tmp_path, program)
    bar, what, hint, same = done.stdout.splitlines()
    assert done.returncode == 0 and bar == same == "!" * 100
    assert what == f"audit: NOT AUDITED: {why}" or what.startswith(f"audit: NOT AUDITED: {why} ...")
    assert "make audit" in hint


def test_an_audit_that_does_not_end_is_none(
    audit: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "pip_audit.py").write_text("import time; time.sleep(600)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(audit, "TIMEOUT_S", 0.1)
    assert audit.main() == 0
    assert "NOT AUDITED: pip-audit did not end within 0.1 s" in capsys.readouterr().out


def test_the_check_that_everybody_runs_has_the_audit_in_it() -> None:
    rules = (ROOT / "Makefile").read_text()
    check = rules.partition("\ncheck:")[2].partition("\n\n")[0]
    audited = rules.partition("\naudit:")[2].partition("\n\n")[0]
    assert re.search(r"^\t@\$\(MAKE\) .*\baudit$", check, re.MULTILINE)
    assert re.search(r"^\t@\S+/python \.ci/audit\.py$", audited, re.MULTILINE), (
        "its exit code is make's"
    )


# -- the sources of a vLLM release


@pytest.fixture
def sources() -> Any:
    return ci_module("vllm_sources")


def test_modules_and_metadata_are_taken_from_the_wheel_and_nothing_compiled(
    sources: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index, target = tmp_path / "index", tmp_path / "made" / "9.9.9-sources"
    index.mkdir()
    info = "vllm-9.9.9.dist-info"
    with zipfile.ZipFile(index / "vllm-9.9.9-py3-none-any.whl", "w") as wheel:
        wheel.writestr("vllm/__init__.py", "")
        wheel.writestr("vllm/v1/core.py", "")
        wheel.writestr("vllm/_C.abi3.so", "compiled")
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: vllm\nVersion: 9.9.9\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    assert sources.main("9.9.9", str(target)) == 0
    found = sorted(str(path.relative_to(target)) for path in target.rglob("*") if path.is_file())
    assert found == [
        f"{info}/METADATA",
        f"{info}/RECORD",
        f"{info}/WHEEL",
        "vllm/__init__.py",
        "vllm/v1/core.py",
    ]
    assert list(target.parent.iterdir()) == [target], "the wheel is gone"
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    assert sources.main("9.9.9", str(target)) == 0, "what is there is not downloaded again"


def test_sources_that_cannot_be_had_are_said_loudly_and_leave_nothing(
    sources: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    assert sources.main("9.9.9", str(tmp_path / "sources")) == sources.CANNOT_BE_HAD == 75
    said = capsys.readouterr().out
    assert (
        "vLLM 9.9.9 NOT TESTED" in said and "!" * 80 in said and "make test-vllm-contract" in said
    )
    assert not list(tmp_path.iterdir())


def test_make_tests_the_contract_and_does_not_fail_where_its_sources_cannot_be_had() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target, runs in (("test-all", "test-vllm-contract"), ("nightly", ".ci/vllm_sources.py")):
        would_run = subprocess.run(
            ["make", "-n", target], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout
        assert "ruff check" in would_run and runs in would_run
    assert (ROOT / ".ci" / "run").read_text().endswith("make test-all\n")
    assert "test $$code = 75 || exit $$code" in makefile


# -- lanes

LANE_TESTS = """
from pathlib import Path

def test_good(): pass

def test_flaky():
    first = Path("first")
    is_first = not first.exists()
    first.touch()
    assert not is_first

def test_bad(): assert not Path("is-bad").exists()
"""


@pytest.fixture
def lane(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with one target, `some`, whose tests are LANE_TESTS."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "test_lane.py").write_text(LANE_TESTS)
    (tmp_path / "Makefile").write_text(f"some:\n\t@{sys.executable} -m pytest -q test_lane.py\n")
    return tmp_path


def test_a_test_that_fails_once_is_named_and_fails_nothing(
    lane: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ci_module("lanes").main(["some", "TIER=all"]) == 0
    said = capsys.readouterr().out
    assert "1 failed, 2 passed" in said and "1 passed" in said
    assert "lanes: PASSED AT THE SECOND TRY ONLY: test_lane.py::test_flaky" in said
    assert "0 of 1 lanes passed at the first try" in said
    assert ci_module("lanes").main(["some"]) == 0
    assert "1 of 1 lanes passed at the first try" in capsys.readouterr().out


def test_a_test_that_fails_twice_fails_the_run(
    lane: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (lane / "is-bad").touch()
    assert ci_module("lanes").main(["some"]) == 1
    said = capsys.readouterr().out
    assert "lanes: FAILED: test_lane.py::test_bad" in said
    assert "test_flaky" not in said.rpartition("lanes: FAILED")[2]


@pytest.mark.parametrize("target", ["true:\n\t@true\n", "some:\n\t@exit 3\n"])
def test_a_lane_that_ends_without_a_failed_test_fails_the_run(
    lane: Path, capsys: pytest.CaptureFixture[str], target: str
) -> None:
    (lane / "Makefile").write_text(target)
    assert ci_module("lanes").main(["some"]) == 1
    assert "lanes: FAILED: some: 0 failed tests" in capsys.readouterr().out


def test_a_lane_with_many_failures_is_not_tried_again(
    lane: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    many = "import pytest\n@pytest.mark.parametrize('at', range(11))\ndef test_bad(at): assert 0\n"
    (lane / "test_lane.py").write_text(many)
    assert ci_module("lanes").main(["some"]) == 1
    said = capsys.readouterr().out
    assert "lanes: FAILED: some: 11 failed tests" in said
    assert said.count("lanes: some begins") == 1
