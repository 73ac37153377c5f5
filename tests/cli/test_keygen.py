"""`kvkeep keygen` as people run it: files for their owner alone, nothing overwritten, lines to be used as they are."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from kvkeep.cli.keygen import lines_for_people, make
from kvkeep.errors import SettingsError
from kvkeep.kv.identity import tenant_of
from kvkeep.server.auth import read_authorized
from kvkeep.server.settings import Settings
from kvkeep.wire.auth import read_pair, read_public, read_token

Run = Callable[..., "subprocess.CompletedProcess[str]"]


def files(directory: Path) -> dict[str, int]:
    """Every file and directory with its mode."""
    found = [directory, *directory.rglob("*")]
    return {str(path.relative_to(directory)): path.stat().st_mode & 0o7777 for path in found}


def refuse(problem: str) -> None:
    raise AssertionError(problem)


def test_it_makes_a_server_and_a_client_and_says_how_to_use_them(kvkeep: Run, tmp_path: Path) -> None:
    keys = tmp_path / "deep" / "keys"
    before = os.umask(0)
    try:
        done = kvkeep("keygen", "--dir", str(keys))
    finally:
        os.umask(before)
    assert done.returncode == 0, done.stderr
    assert files(keys) == {
        ".": 0o700,
        "authorized": 0o700,
        "authorized/engine.pub": 0o600,
        "engine.key": 0o600,
        "server.key": 0o600,
        "server.pub": 0o600,
    }
    public, secret = read_pair(keys / "server.key")
    assert read_public(str(keys / "server.pub")) == public
    own, own_secret = read_pair(keys / "engine.key")
    assert list(read_authorized(keys / "authorized", refuse)) == [own]
    assert secret not in done.stdout + done.stderr and own_secret not in done.stdout + done.stderr
    text = done.stdout.partition("settings file:\n")[2].partition("\n\n")[0]
    told = tomllib.loads("\n".join(line.strip() for line in text.splitlines()))
    argv = [word for name, value in told.items() for word in ("--" + name.replace("_", "-"), value)]
    settings = Settings.load(None, {}, ["--pool-size", "64MiB", "--address", "tcp://0.0.0.0:1", *argv])
    assert settings.curve_key == keys / "server.key"
    (extra,) = [line for line in done.stdout.splitlines() if "kvkeep.server_key" in line]
    assert json.loads(extra) == {"kvkeep.curve_key": str(keys / "engine.key"), "kvkeep.server_key": public}
    assert "is called engine" in done.stderr and "--name host-a --name host-b" in done.stderr
    exports = [line.strip() for line in done.stdout.splitlines() if "export" in line]
    shell = subprocess.run(
        ["sh", "-c", "\n".join([*exports, 'printf "%s" "$KVKEEP_SERVER_KEY"'])],
        capture_output=True,
        text=True,
        check=True,
    )
    assert shell.stdout == public


def test_every_line_can_be_pasted_wherever_the_keys_are(tmp_path: Path) -> None:
    keys = tmp_path / "a \"b\" 'c' ü"
    made = make(keys, ["one", "two"], "", True)
    lines = [line.strip() for line in lines_for_people(made) if line.startswith("    ")]
    settings = tomllib.loads("\n".join(line for line in lines if " = " in line and not line[0].isdigit()))
    assert settings == made["server"] and set(settings) == {"curve_key", "authorized_keys", "admin_token"}
    extras = [json.loads(line) for line in lines if line.startswith("{")]
    wanted = [{f"kvkeep.{name}": each[name] for name in ("curve_key", "server_key")} for each in made["clients"]]
    assert extras == wanted
    exports = [shlex.split(line) for line in lines if line.startswith("export ")]
    assert exports[2] == ["export", f"KVKEEP_CLIENT_KEY={keys / 'two.key'}"]
    (token,) = [shlex.split(line) for line in lines if line.startswith("--token-file")]
    assert token == ["--token-file", str(keys / "admin-token")]


def test_it_says_what_to_do_next(kvkeep: Run, tmp_path: Path) -> None:
    done = kvkeep("keygen", "--dir", str(tmp_path / "keys"), "--name", "host-a")
    steps = done.stdout.partition("\nnext:\n")[2].splitlines()
    assert len(steps) == 4 and all(step.startswith(f"    {number}. ") for number, step in enumerate(steps, 1))
    assert "is called" not in done.stderr, "it was named"
    done = kvkeep("keygen", "--dir", str(tmp_path / "keys"), "--admin-token")
    assert done.stdout.count("\n    1. start the server") == 1 and "    2. " not in done.stdout


def test_more_clients_join_the_same_server(tmp_path: Path) -> None:
    first = make(tmp_path / "keys", ["a", "b"], "", False)
    second = make(tmp_path / "keys", ["c"], f"default,{tenant_of('x')},t-0*", False)
    assert {each["server_key"] for each in first["clients"] + second["clients"]} == {
        read_pair(tmp_path / "keys" / "server.key")[0]
    }
    callers = {each.name: each.tenants for each in read_authorized(tmp_path / "keys" / "authorized", refuse).values()}
    assert callers == {"a": None, "b": None, "c": ("default", tenant_of("x"), "t-0*")}


def test_nothing_is_ever_overwritten(kvkeep: Run, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    make(keys, ["a"], "", True)
    before = {path: path.read_bytes() for path in keys.rglob("*") if path.is_file()}
    for words in (["--name", "a"], ["--name", "b", "--name", "a"], ["--admin-token"], ["--name", "c", "--admin-token"]):
        done = kvkeep("keygen", "--dir", str(keys), *words)
        assert done.returncode == 2 and "is there already, and nothing was made" in done.stderr and not done.stdout
        assert ("name the next client with --name" in done.stderr) != (words == ["--admin-token"] or words[1] == "c")
    assert {path: path.read_bytes() for path in keys.rglob("*") if path.is_file()} == before


def test_a_token_alone(kvkeep: Run, tmp_path: Path) -> None:
    done = kvkeep("keygen", "--dir", str(tmp_path / "keys"), "--admin-token", "--json")
    said = json.loads(done.stdout)
    token = tmp_path / "keys" / "admin-token"
    assert said["server"] == {"admin_token": str(token)} and said["clients"] == []
    assert files(tmp_path / "keys") == {".": 0o700, "admin-token": 0o600}
    assert len(read_token(token)) >= 43 and token.read_text().strip() not in done.stdout + done.stderr


def test_json_names_all_and_tells_no_secret(kvkeep: Run, tmp_path: Path) -> None:
    done = kvkeep("keygen", "--dir", str(tmp_path / "keys"), "--name", "a", "--json")
    said = json.loads(done.stdout)
    assert sorted(said) == ["clients", "directory", "files", "server"]
    assert {Path(each).name for each in said["files"]} == {"server.key", "server.pub", "a.key", "a.pub"}
    (client,) = said["clients"]
    assert (client["public_key"], client["name"]) == (read_pair(Path(client["curve_key"]))[0], "a")
    for path in ("server.key", "a.key"):
        assert read_pair(tmp_path / "keys" / path)[1] not in done.stdout


@pytest.mark.parametrize(
    ("names", "tenants", "words"),
    [
        (["server"], "", "--name"),
        (["admin-token"], "", "--name"),
        (["../a"], "", "--name"),
        ([".a"], "", "--name"),
        ([""], "", "--name"),
        (["a" * 65], "", "--name"),
        (["a", "a"], "", "a name of its own"),
        (["a"], "bad", "--tenants bad"),
        (["a"], "default,", "--tenants"),
        (["a"], "default x", "--tenants"),
        ([], "default", "--tenants binds clients"),
    ],
)
def test_what_cannot_be_meant_is_named_and_nothing_is_made(
    tmp_path: Path, names: list[str], tenants: str, words: str
) -> None:
    with pytest.raises(SettingsError, match=words):
        make(tmp_path / "keys", names, tenants, not names)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_directory_that_others_can_open_is_refused_with_the_remedy(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with pytest.raises(SettingsError, match="is open to others") as caught:
        make(tmp_path, ["a"], "", False)
    assert f"chmod 700 {tmp_path}" in caught.value.hint and not list(tmp_path.iterdir())


def test_when_a_file_cannot_be_written_none_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvkeep.cli import keygen

    real, written = keygen.write_new, []

    def full_after_two(path: Path, text: str) -> None:
        if len(written) == 2:
            raise OSError(28, "No space left on device")
        written.append(path)
        real(path, text)

    monkeypatch.setattr(keygen, "write_new", full_after_two)
    with pytest.raises(SettingsError, match="No space left"):
        make(tmp_path / "keys", ["a"], "", True)
    assert len(written) == 2 and not [path for path in tmp_path.rglob("*") if path.is_file()]
