from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable

import pytest
import typer

from kvkeep import __version__
from kvkeep.cli import main as module
from kvkeep.errors import (
    KVKeepError,
    PoolError,
    ProtocolError,
    RequestError,
    SettingsError,
    Unavailable,
)

Run = Callable[..., "subprocess.CompletedProcess[str]"]


def test_version_and_help(kvkeep: Run) -> None:
    assert kvkeep("--version").stdout == f"kvkeep {__version__}\n"
    text = kvkeep("--help").stdout
    for command in ("serve", "status", "tenants", "settings", "bench"):
        assert f"  {command} " in text
    assert kvkeep("no-such-command").returncode == 2


def test_help_has_every_command_in_one_section_and_fits_80_columns(kvkeep: Run) -> None:
    text = kvkeep("--help", env={"COLUMNS": "80"}).stdout
    assert all(len(line) <= 80 for line in text.splitlines())
    sections = [*module.SECTIONS]
    assert sections[-1] == "Development"
    places = [text.index(f"\n{title}:\n") for title in sections]
    assert places == sorted(places)
    for name, command in typer.main.get_command(module.app).commands.items():  # type: ignore[attr-defined]
        assert len(re.findall(rf"^  {name} ", text, re.MULTILINE)) == 1, command.name


def test_a_misspelt_command_is_guessed(kvkeep: Run) -> None:
    assert "'status'" in kvkeep("stauts").stderr


def test_a_command_imports_no_other() -> None:
    program = (
        "import sys; from kvkeep.cli.main import app;"
        "app(['serve', '--help'], standalone_mode=False);"
        "print([name for name in sys.modules if name.startswith('kvkeep.cli.')], file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert "kvkeep.cli.serve" in done.stderr
    assert not re.search(r"kvkeep\.cli\.(bench|demo|plan|tenants)", done.stderr)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (SettingsError("m", "h"), 2),
        (PoolError("m", "h"), 2),
        (RequestError("bad_tenant", "m", hint="h"), 2),
        (RequestError("quota_too_large", "m", hint="h"), 1),
        (ProtocolError("m", "h"), 1),
        (Unavailable("m", "h"), 3),
    ],
)
def test_each_error_has_its_exit_code_and_two_lines(
    error: KVKeepError,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(**_: object) -> None:
        raise error

    monkeypatch.setattr(module, "app", fail)
    with pytest.raises(SystemExit) as caught:
        module.main()
    assert caught.value.code == code
    assert capsys.readouterr().err == "error: m\nhint: h\n"
