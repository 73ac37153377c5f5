"""Tests for keys and tokens in files: what is made can be read, by its owner alone, and what is none is named."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import zmq

from kvkeep.errors import SettingsError
from kvkeep.wire.auth import (
    MAX_FILE_BYTES,
    PRIVATE,
    is_key,
    key_lines,
    new_pair,
    read_pair,
    read_public,
    read_text,
    read_token,
    write_new,
)


def secret_file(path: Path, text: str, mode: int = 0o600) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


def test_a_pair_is_one_and_looks_like_nothing_else(tmp_path: Path) -> None:
    for _ in range(50):
        public, secret = new_pair()
        assert zmq.curve_public(secret.encode()).decode() == public
        assert is_key(public) and is_key(secret)
        assert public[0].isalnum() and secret[0].isalnum()
    path = secret_file(tmp_path / "a.key", f"# a comment\n\n{secret}\n")
    assert read_pair(path) == (public, secret)


@pytest.mark.parametrize("text", ["", "a" * 39, "a" * 41, "_" * 40, "é" * 40, "#" * 40, "a" * 39 + "\n"])
def test_what_is_no_key(text: str) -> None:
    assert not is_key(text)


@pytest.mark.parametrize("text", ["", "# nothing\n", "short\n", "two", "a b"])
def test_a_file_without_one_key_is_named(tmp_path: Path, text: str) -> None:
    public, secret = new_pair()
    text = f"{secret}\n{public}\n" if text == "two" else f"{secret} name\n" if text == "a b" else text
    with pytest.raises(SettingsError, match=r"a\.key is no secret-key file") as caught:
        read_pair(secret_file(tmp_path / "a.key", text))
    assert "kvkeep keygen" in caught.value.hint and secret not in str(caught.value)


@pytest.mark.parametrize("mode", [0o604, 0o602, 0o620, 0o601, 0o666, 0o644])
def test_a_secret_that_others_can_reach_is_refused_with_the_remedy(tmp_path: Path, mode: int) -> None:
    path = secret_file(tmp_path / "a.key", new_pair()[1], mode)
    with pytest.raises(SettingsError, match=f"open to others .mode {mode:04o}") as caught:
        read_pair(path)
    assert caught.value.hint == f"chmod 600 {path}"
    with pytest.raises(SettingsError, match="open to others"):
        read_token(secret_file(tmp_path / "token", "t" * 43, mode))


@pytest.mark.parametrize("mode", [0o400, 0o600, 0o440])
def test_a_secret_that_its_owner_and_group_can_read_is_fine(tmp_path: Path, mode: int) -> None:
    public, secret = new_pair()
    assert read_pair(secret_file(tmp_path / "a.key", secret, mode)) == (public, secret)


def test_a_public_key_is_itself_or_the_file_that_holds_it(tmp_path: Path) -> None:
    public, _ = new_pair()
    assert read_public(public) == public
    for text in (public, f"# of the server\n{public}\n", f"{public} engine tenants=default\n"):
        assert read_public(str(secret_file(tmp_path / "server.pub", text, 0o644))) == public


def test_a_path_is_never_taken_for_a_key(tmp_path: Path) -> None:
    path = "/" + "a" * 39
    assert is_key(path)
    with pytest.raises(SettingsError, match=f"{path} cannot be read"):
        read_public(path)
    with pytest.raises(SettingsError, match="is no public-key file"):
        read_public(str(secret_file(tmp_path / "x", "nothing here")))


def test_what_is_no_small_text_file_is_named(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    secret_file(tmp_path / "long", "x" * (MAX_FILE_BYTES + 1))
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    for name, words in (("pipe", "is no file"), ("long", "is no text"), ("bytes", "is no text"), ("none", "No such")):
        with pytest.raises(SettingsError, match=words) as caught:
            read_text(tmp_path / name)
        assert str(tmp_path / name) in caught.value.message and caught.value.hint
    with pytest.raises(SettingsError, match="is no file"):
        read_text(tmp_path, PRIVATE)


@pytest.mark.parametrize("text", ["", "short", "t" * 15, "a b" * 10, "é" * 20])
def test_a_token_that_is_none_is_refused_and_not_quoted(tmp_path: Path, text: str) -> None:
    with pytest.raises(SettingsError, match="holds no token") as caught:
        read_token(secret_file(tmp_path / "token", text))
    assert not text or text not in str(caught.value)
    assert read_token(secret_file(tmp_path / "token", "t" * 16 + "\n")) == b"t" * 16


def test_comments_and_keys_that_begin_with_a_hash() -> None:
    assert key_lines("# a\n#\n\n  x  \n#y z\n#" + "1" * 39) == ["x", "#y z", "#" + "1" * 39]


def test_a_new_file_is_its_owners_alone_and_replaces_nothing(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        write_new(tmp_path / "a", "text")
    finally:
        os.umask(before)
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o600
    with pytest.raises(FileExistsError):
        write_new(tmp_path / "a", "other")
    os.symlink(tmp_path / "elsewhere", tmp_path / "link")
    with pytest.raises(FileExistsError):
        write_new(tmp_path / "link", "other")
    assert (tmp_path / "a").read_text() == "text" and not (tmp_path / "elsewhere").exists()


def test_a_key_of_the_wrong_half_is_refused_by_what_its_file_says(tmp_path: Path) -> None:
    """A public key works as a secret one, and everybody would have it."""
    public, secret = new_pair()
    pub = secret_file(tmp_path / "server.pub", f"# kvkeep: public key of the server\n{public}\n")
    key = secret_file(tmp_path / "server.key", f"# kvkeep: secret key of the server\n{secret}\n")
    assert read_pair(key) == (public, secret) and read_public(str(pub)) == public
    with pytest.raises(SettingsError, match=r"server.pub holds a public key") as refused:
        read_pair(pub)
    assert ".key" in str(refused.value)
    with pytest.raises(SettingsError, match=r"server.key holds a secret key"):
        read_public(str(key))
