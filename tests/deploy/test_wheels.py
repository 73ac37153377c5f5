"""The wheels of `make dist`: what is built, and what is said where a tool is missing."""

from __future__ import annotations

import importlib.util
import platform
import shutil
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
MACHINES = ("x86_64", "aarch64")
OTHER = next(each for each in MACHINES if each != platform.machine())
ELF_MACHINE = {"x86_64": 62, "aarch64": 183}


@pytest.fixture(scope="module")
def dist() -> Any:
    spec = importlib.util.spec_from_file_location("dist", ROOT / ".ci" / "dist.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("machine", MACHINES)
def test_one_wheel_of_an_architecture_serves_all_versions_of_python(
    dist: Any, machine: str, tmp_path: Path
) -> None:
    try:
        wheel = dist.build(machine, tmp_path)
    except dist.NotInstalled as missing:
        pytest.skip(str(missing))
    assert wheel.name.endswith(f"-py3-none-linux_{machine}.whl")
    with zipfile.ZipFile(wheel) as files:
        library = files.read("kvkeep/kv/_native.so")
        assert sum(each.endswith(".so") for each in files.namelist()) == 1
        assert "kvkeep/server/dashboard_files/index.html" in files.namelist()
    assert library[:4] == b"\x7fELF"
    assert int.from_bytes(library[18:20], "little") == ELF_MACHINE[machine]
    assert str(Path(sys.base_prefix)).encode() not in library, "a folder of the machine that built"


def only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *programs: str) -> None:
    """A search path with these programs and nothing else."""
    for program in programs:
        (tmp_path / program).symlink_to(shutil.which("true") or "/bin/true")
    monkeypatch.setenv("PATH", str(tmp_path))


def test_a_missing_compiler_is_named_with_how_to_get_it(
    dist: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setitem(sys.modules, "ziglang", None)  # not installed
    only(tmp_path, monkeypatch)
    with pytest.raises(dist.NotInstalled, match=r"no C compiler. hint: install gcc"):
        dist.build(platform.machine(), tmp_path)
    with pytest.raises(dist.NotInstalled, match=r"apt-get install gcc-.*pip install ziglang"):
        dist.build(OTHER, tmp_path)


def test_a_missing_wheel_or_trial_of_the_other_architecture_is_said_and_fails_nothing(
    dist: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def build(machine: str, scratch: Path) -> Path:
        if machine == missing:
            raise dist.NotInstalled("no compiler. hint: install it")
        wheel = scratch / f"kvkeep-9-py3-none-linux_{machine}.whl"
        wheel.touch()
        return wheel

    def try_out(wheel: Path, machine: str, _scratch: Path) -> str:
        if machine == OTHER:
            raise dist.NotInstalled("no emulator. hint: install it")
        return ""

    monkeypatch.setattr(dist, "build", build)
    monkeypatch.setattr(dist, "as_manylinux", lambda wheel, _folder: wheel)
    monkeypatch.setattr(dist, "try_out", try_out)
    missing = ""
    assert dist.main(tmp_path) == 0
    said = capsys.readouterr().out
    assert f"linux_{platform.machine()}.whl works in an empty environment\n" in said
    assert f"linux_{OTHER}.whl WAS NOT TRIED: no emulator. hint: install it\n" in said
    assert len(list(tmp_path.glob("*.whl"))) == 2

    missing = OTHER
    assert dist.main(tmp_path) == 0
    assert f"dist: NO WHEEL FOR {OTHER}: no compiler. hint" in capsys.readouterr().out
    assert len(list(tmp_path.glob("*.whl"))) == 1, "the wheel of the run before is gone"

    missing = platform.machine()
    with pytest.raises(SystemExit, match=r"dist: no compiler. hint"):
        dist.main(tmp_path)
