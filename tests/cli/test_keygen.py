"""`kvkeep keygen` as people run it: files for their owner alone, nothing overwritten, lines to be
used as they are."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import socket
import ssl
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvkeep.cli.keygen import lines_for_people, make
from kvkeep.errors import SettingsError
from kvkeep.kv.identity import tenant_of
from kvkeep.server.auth import read_authorized, read_line
from kvkeep.server.settings import Settings
from kvkeep.tiers.tier_keys import read_tier_keys
from kvkeep.wire.secret_files import read_token
from kvkeep.wire.tls import TlsFiles, client_context, server_context, tls_files

TLS = ("tls_cert", "tls_key", "tls_ca")
ENDS = ("key", "pem")
Run = Callable[..., "subprocess.CompletedProcess[str]"]


def files(directory: Path) -> dict[str, int]:
    """Every file and directory with its mode."""
    found = [directory, *directory.rglob("*")]
    return {str(path.relative_to(directory)): path.stat().st_mode & 0o7777 for path in found}


def refuse(problem: str) -> None:
    raise AssertionError(problem)


def check(made: dict[str, Any], host: str = "localhost") -> None:
    """Each client can talk to the server."""
    server = server_context(TlsFiles(*(Path(made["server"][name]) for name in TLS)))
    for client in made["clients"]:
        context = client_context(TlsFiles(*(Path(client[name]) for name in TLS)))
        to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
        there = context.wrap_bio(to_client, to_server, server_hostname=host)
        here = server.wrap_bio(to_server, to_client, server_side=True)
        for side in (there, here, there, here):
            with contextlib.suppress(ssl.SSLWantReadError):
                side.do_handshake()
        assert dict(pair for rdn in here.getpeercert()["subject"] for pair in rdn) == {
            "commonName": client["name"]
        }  # type: ignore[index, misc]


def openssl(*words: str) -> str:
    """What another implementation says of our certificates."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    return subprocess.run(["openssl", *words], capture_output=True, text=True, check=True).stdout


def test_it_makes_a_server_and_a_client_and_says_how_to_use_them(
    kvkeep: Run, tmp_path: Path
) -> None:
    keys = tmp_path / "deep" / "keys"
    before = os.umask(0)
    try:
        done = kvkeep("keygen", "--dir", str(keys))
    finally:
        os.umask(before)
    assert done.returncode == 0, done.stderr
    names = (
        "authorized/engine.client",
        *(f"{name}.{end}" for name in ("ca", "engine", "server") for end in ENDS),
    )
    assert files(keys) == {".": 0o700, "authorized": 0o700, **dict.fromkeys(names, 0o600)}
    assert list(read_authorized(keys / "authorized", refuse)) == ["engine"]
    for secret in keys.glob("*.key"):
        assert secret.read_text().splitlines()[1] not in done.stdout + done.stderr
    text = done.stdout.partition("settings file:\n")[2].partition("\n\n")[0]
    told = tomllib.loads("\n".join(line.strip() for line in text.splitlines()))
    argv = [word for name, value in told.items() for word in ("--" + name.replace("_", "-"), value)]
    settings = Settings.load(
        None, {}, ["--pool-size", "64MiB", "--address", "tcp://0.0.0.0:1", *argv]
    )
    assert tls_files(settings) == TlsFiles(
        keys / "server.pem", keys / "server.key", keys / "ca.pem"
    )
    assert settings.authorized_clients == keys / "authorized"
    (extra,) = [line for line in done.stdout.splitlines() if "kvkeep.tls_ca" in line]
    wanted = dict(
        zip(TLS, (str(keys / name) for name in ("engine.pem", "engine.key", "ca.pem")), strict=True)
    )
    assert json.loads(extra) == {f"kvkeep.{name}": path for name, path in wanted.items()}
    assert "is called engine" in done.stderr and "--name host-a --name host-b" in done.stderr
    exports = [line.strip() for line in done.stdout.splitlines() if "export" in line]
    shell = subprocess.run(
        ["sh", "-c", "\n".join([*exports, "env"])], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert {f"KVKEEP_CLIENT_{name.upper()}={path}" for name, path in wanted.items()} <= set(shell)


def test_openssl_finds_the_certificates_sound(tmp_path: Path) -> None:
    make(keys := tmp_path / "keys", ["a"], hosts=("cache.example", "192.0.2.7"), days=30)
    for purpose, name in (("sslserver", "server"), ("sslclient", "a")):
        words = (
            "-x509_strict",
            "-purpose",
            purpose,
            "-CAfile",
            str(keys / "ca.pem"),
            str(keys / f"{name}.pem"),
        )
        assert "OK" in openssl("verify", *words)
    text = openssl("x509", "-in", str(keys / "server.pem"), "-noout", "-text")
    for host in (
        "DNS:localhost",
        "IP Address:127.0.0.1",
        "DNS:cache.example",
        "IP Address:192.0.2.7",
        "prime256v1",
    ):
        assert host in text
    serials = {
        openssl("x509", "-in", str(path), "-noout", "-serial") for path in keys.glob("*.pem")
    }
    assert len(serials) == 3
    openssl("x509", "-in", str(keys / "a.pem"), "-noout", "-checkend", str(29 * 86_400))
    with pytest.raises(subprocess.CalledProcessError):
        openssl("x509", "-in", str(keys / "a.pem"), "-noout", "-checkend", str(31 * 86_400))
    openssl("x509", "-in", str(keys / "ca.pem"), "-noout", "-checkend", str(3_640 * 86_400))


def test_the_server_is_made_for_the_names_it_is_reached_by(tmp_path: Path) -> None:
    made = make(tmp_path / "keys", ["a"], hosts=("cache.example", "192.0.2.7"))
    for host in (
        socket.gethostname(),
        "localhost",
        "127.0.0.1",
        "::1",
        "cache.example",
        "192.0.2.7",
    ):
        check(made, host)
    with pytest.raises(ssl.SSLCertVerificationError):
        check(made, "other.example")


def test_every_line_can_be_pasted_wherever_the_keys_are(tmp_path: Path) -> None:
    keys = tmp_path / "a \"b\" 'c' ü"
    made = make(keys, ["one", "two"], "", True)
    lines = [line.strip() for line in lines_for_people(made) if line.startswith("    ")]
    settings = tomllib.loads(
        "\n".join(line for line in lines if " = " in line and not line[0].isdigit())
    )
    assert settings == made["server"] and set(settings) == {
        *TLS,
        "authorized_clients",
        "admin_token",
    }
    extras = [json.loads(line) for line in lines if line.startswith("{")]
    assert extras == [{f"kvkeep.{name}": each[name] for name in TLS} for each in made["clients"]]
    exports = [shlex.split(line) for line in lines if line.startswith("export ")]
    assert exports[3] == ["export", f"KVKEEP_CLIENT_TLS_CERT={keys / 'two.pem'}"]
    (token,) = [shlex.split(line) for line in lines if line.startswith("--token-file")]
    assert token == ["--token-file", str(keys / "admin-token")]
    check(made)


def test_it_says_what_to_do_next(kvkeep: Run, tmp_path: Path) -> None:
    done = kvkeep("keygen", "--dir", str(tmp_path / "keys"), "--name", "host-a")
    steps = done.stdout.partition("\nnext:\n")[2].splitlines()
    assert len(steps) == 5
    assert all(step.startswith(f"    {number}. ") for number, step in enumerate(steps, 1))
    assert "is called" not in done.stderr, "it was named"
    done = kvkeep("keygen", "--dir", str(tmp_path / "keys"), "--admin-token")
    assert done.stdout.count("\n    1. start the server") == 1 and "    2. " not in done.stdout
    assert "asks for the token" in done.stdout and "# address" not in done.stdout
    for path in (tmp_path / "keys").glob("server.*"):
        path.unlink()
    done = kvkeep("keygen", "--dir", str(tmp_path / "keys"), "--host", "cache.example")
    assert "token" not in done.stdout and "reads its new certificate" in done.stdout
    assert '# address = "tcp://0.0.0.0:5555"' in done.stdout
    assert '# http_address = "0.0.0.0:5556"' in done.stdout


def test_more_clients_join_the_same_server(tmp_path: Path) -> None:
    first = make(tmp_path / "keys", ["a", "b"], "", False)
    certificate = (tmp_path / "keys" / "server.pem").read_bytes()
    second = make(tmp_path / "keys", ["c"], f"default,{tenant_of('x')},t-0*", False)
    assert second["server"] == first["server"] and len(second["files"]) == 3
    assert (tmp_path / "keys" / "server.pem").read_bytes() == certificate
    callers = {
        each.name: each.tenants
        for each in read_authorized(tmp_path / "keys" / "authorized", refuse).values()
    }
    assert callers == {"a": None, "b": None, "c": ("default", tenant_of("x"), "t-0*")}
    check(first)
    check(second)


def test_a_certificate_that_was_moved_away_is_made_again_with_the_same_line(
    kvkeep: Run, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    make(keys, ["a"], "default")
    for name in ("a.pem", "a.key", "server.pem", "server.key"):
        (keys / name).unlink()
    with pytest.raises(SettingsError, match=r"a\.client is there already") as caught:
        make(keys, ["a"], "t-*")
    assert "repeat the --tenants and --admin" in caught.value.hint
    assert "move" not in caught.value.hint
    made = make(keys, ["a"], "default")
    assert [Path(path).name for path in made["files"]] == [
        "server.key",
        "server.pem",
        "a.key",
        "a.pem",
    ]
    check(made)
    done = kvkeep("keygen", "--dir", str(keys), "--host", "cache.example")
    assert done.returncode == 2 and "server.key is there already" in done.stderr
    for name in ("server.pem", "server.key"):
        (keys / name).unlink()
    done = kvkeep("keygen", "--dir", str(keys), "--host", "cache.example", "--json")
    assert [Path(path).name for path in json.loads(done.stdout)["files"]] == [
        "server.key",
        "server.pem",
    ]
    check(made, "cache.example")


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("ca.key", None, "ca.key cannot be read"),
        ("ca.key", "nonsense", "no PEM file"),
        ("ca.pem", "nonsense", "no PEM file"),
        ("ca.key", "other", "does not belong to its certificate"),
    ],
)
def test_a_ca_that_cannot_sign_is_named_and_nothing_is_made(
    tmp_path: Path, name: str, text: str | None, words: str
) -> None:
    keys = tmp_path / "keys"
    make(keys, ["a"])
    if text is None:
        (keys / name).unlink()
    else:
        (keys / name).write_text((keys / "a.key").read_text() if text == "other" else text)
    before = set(keys.rglob("*"))
    with pytest.raises(SettingsError, match=words):
        make(keys, ["b"])
    assert set(keys.rglob("*")) == before


def test_without_the_package_that_makes_certificates_it_says_what_to_install(
    tmp_path: Path,
) -> None:
    program = (
        "import sys; sys.modules['cryptography'] = None; from kvkeep.cli.main import main; main()"
    )
    command = [sys.executable, "-c", program, "keygen", "--dir", str(tmp_path / "keys")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert "pip install 'kvkeep[tls]'" in done.stderr
    assert "Traceback" not in done.stderr
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    assert subprocess.run([*command, "--admin-token"], capture_output=True).returncode == 0, (
        "a token needs none"
    )


def test_nothing_is_ever_overwritten(kvkeep: Run, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    make(keys, ["a"], "", True)
    before = {path: path.read_bytes() for path in keys.rglob("*") if path.is_file()}
    for words in (
        ["--name", "a"],
        ["--name", "b", "--name", "a"],
        ["--admin-token"],
        ["--name", "c", "--admin-token"],
    ):
        done = kvkeep("keygen", "--dir", str(keys), *words)
        assert done.returncode == 2
        assert "is there already, and nothing was made" in done.stderr
        assert not done.stdout
        assert ("name the next client with --name" in done.stderr) != (
            words == ["--admin-token"] or words[1] == "c"
        )
    assert {path: path.read_bytes() for path in keys.rglob("*") if path.is_file()} == before


def test_a_token_alone(kvkeep: Run, tmp_path: Path) -> None:
    done = kvkeep("keygen", "--dir", str(tmp_path / "keys"), "--admin-token", "--json")
    said = json.loads(done.stdout)
    token = tmp_path / "keys" / "admin-token"
    assert said["server"] == {"admin_token": str(token)} and said["clients"] == []
    assert files(tmp_path / "keys") == {".": 0o700, "admin-token": 0o600}
    assert len(read_token(token)) >= 43
    assert token.read_text().strip() not in done.stdout + done.stderr


def test_the_secrets_of_a_shared_tier(kvkeep: Run, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    done = kvkeep("keygen", "--dir", str(keys), "--tier-keys", "--json")
    said = json.loads(done.stdout)
    made = keys / "tier.keys"
    assert said["server"] == {"tier_keys": str(made)} and said["clients"] == []
    assert files(keys) == {".": 0o700, "tier.keys": 0o600}
    read = read_tier_keys(made)
    assert read.log.hex() not in done.stdout and read.keys[0].hex() not in done.stdout
    again = kvkeep("keygen", "--dir", str(keys), "--tier-keys")
    assert again.returncode == 2 and "use that one, or move it away" in again.stderr
    assert read_tier_keys(made) == read
    other = kvkeep("keygen", "--dir", str(tmp_path / "other"), "--tier-keys")
    assert f'tier_keys = "{tmp_path / "other" / "tier.keys"}"' in other.stdout
    assert "every server of the shared tier needs the same file" in other.stdout


def test_json_names_all_and_tells_no_secret(kvkeep: Run, tmp_path: Path) -> None:
    done = kvkeep("keygen", "--dir", str(tmp_path / "keys"), "--name", "a", "--json")
    said = json.loads(done.stdout)
    assert sorted(said) == ["clients", "directory", "files", "server"]
    wanted = {"a.client", *(f"{name}.{end}" for name in ("ca", "server", "a") for end in ENDS)}
    assert {Path(each).name for each in said["files"]} == wanted
    (client,) = said["clients"]
    assert sorted(client) == ["admin", "fingerprint", "name", *sorted(TLS)]
    assert client["name"] == "a" and client["admin"] is False
    printed = openssl(
        "x509", "-in", client["tls_cert"], "-noout", "-fingerprint", "-sha256"
    ).strip()
    assert read_line("sha256:" + printed.partition("=")[2]).key == client["fingerprint"]
    for path in (tmp_path / "keys").glob("*.key"):
        assert path.read_text().splitlines()[1] not in done.stdout


@pytest.mark.parametrize(
    ("names", "tenants", "words"),
    [
        (["server"], "", "--name"),
        (["ca"], "", "--name"),
        (["admin-token"], "", "--name"),
        (["../a"], "", "--name"),
        ([".a"], "", "--name"),
        ([""], "", "--name"),
        (["a" * 65], "", "--name"),
        (["a", "a"], "", "a name of its own"),
        (["a"], "bad", "--tenants: a tenant is an id"),
        (["a"], "salt:so salty,x", "--tenants: there is a blank"),
        (["a"], "default,", "--tenants:"),
        (["a"], "default x", "--tenants:"),
        (["a"], "default admin", "--tenants:"),
        (["a"], "default\nadmin", "--tenants:"),
        ([], "default", "--tenants binds clients"),
    ],
)
def test_what_cannot_be_meant_is_named_and_nothing_is_made(
    tmp_path: Path, names: list[str], tenants: str, words: str
) -> None:
    with pytest.raises(SettingsError, match=words) as caught:
        make(tmp_path / "keys", names, tenants, not names)
    assert "salty" not in str(caught.value) + caught.value.hint
    assert ("%20" in caught.value.hint) == words.startswith("--tenants:")
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_client_that_administers_has_the_right_in_its_line(kvkeep: Run, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    make(keys, ["engine"])
    done = kvkeep("keygen", "--dir", str(keys), "--name", "ops", "--tenants", "default", "--admin")
    assert done.returncode == 0, done.stderr
    assert (keys / "authorized" / "ops.client").read_text() == "ops tenants=default admin\n"
    callers = read_authorized(keys / "authorized", refuse)
    assert callers["ops"].admin and not callers["engine"].admin
    assert f"export KVKEEP_CLIENT_TLS_CERT={keys / 'ops.pem'}" in done.stdout
    assert "--http https://HOST" in done.stdout
    assert "kv_connector_extra_config" not in done.stdout and "http_address" in done.stdout
    for words in (["--admin-token", "--admin"], ["--admin"], ["--admin", "--host", "a"]):
        refused = kvkeep(
            "keygen", "--dir", str(keys if len(words) < 3 else tmp_path / "new"), *words
        )
        assert refused.returncode == 2 and "--admin gives a right to clients" in refused.stderr
        assert "--name" in refused.stderr
    assert not (keys / "admin-token").exists() and not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    "host", ["", "a b", "cache:5555", "[::1]", "tcp://cache", "kä", "-a", "a" * 300]
)
def test_a_host_that_is_none_is_named_and_nothing_is_made(tmp_path: Path, host: str) -> None:
    with pytest.raises(SettingsError, match=r"--host .*expected a host name or an IP address"):
        make(tmp_path / "keys", ["a"], hosts=(host,))
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_directory_that_others_can_open_is_refused_with_the_remedy(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with pytest.raises(SettingsError, match="is open to others") as caught:
        make(tmp_path, ["a"], "", False)
    assert f"chmod 700 {tmp_path}" in caught.value.hint and not list(tmp_path.iterdir())


def test_when_a_file_cannot_be_written_none_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
