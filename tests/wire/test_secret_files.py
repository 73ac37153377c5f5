"""Tests for secrets and lists in files: what is made can be read, by its owner alone; other files
are refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvkeep.errors import SettingsError
from kvkeep.wire.secret_files import (
    MAX_FILE_BYTES,
    PRIVATE,
    at_home,
    key_lines,
    read_text,
    read_token,
    write_new,
)


def secret_file(path: Path, text: str, mode: int = 0o600) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


@pytest.mark.parametrize("mode", [0o604, 0o602, 0o620, 0o601, 0o666, 0o644])
def test_a_secret_that_others_can_reach_is_refused_with_the_remedy(
    tmp_path: Path, mode: int
) -> None:
    path = secret_file(tmp_path / "token", "t" * 43, mode)
    with pytest.raises(SettingsError, match=f"open to other users .mode {mode:04o}") as caught:
        read_token(path)
    assert caught.value.hint == f"chmod 600 {path}"


@pytest.mark.parametrize("mode", [0o400, 0o600, 0o440])
def test_a_secret_that_its_owner_and_group_can_read_is_fine(tmp_path: Path, mode: int) -> None:
    assert read_token(secret_file(tmp_path / "token", "t" * 43, mode)) == b"t" * 43


def test_what_is_no_small_text_file_is_named(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    secret_file(tmp_path / "long", "x" * (MAX_FILE_BYTES + 1))
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    for name, words in (
        ("pipe", "is not a plain file"),
        ("long", "is not a text"),
        ("bytes", "is not a text"),
        ("none", "No such"),
    ):
        with pytest.raises(SettingsError, match=words) as caught:
            read_text(tmp_path / name)
        assert str(tmp_path / name) in caught.value.message and caught.value.hint
    with pytest.raises(SettingsError, match="is not a plain file"):
        read_text(tmp_path, PRIVATE)


@pytest.mark.parametrize("text", ["", "short", "t" * 15, "a b" * 10, "é" * 20])
def test_a_token_that_is_none_is_refused_and_not_quoted(tmp_path: Path, text: str) -> None:
    with pytest.raises(SettingsError, match="holds no token") as caught:
        read_token(secret_file(tmp_path / "token", text))
    assert not text or text not in str(caught.value)
    assert read_token(secret_file(tmp_path / "token", "t" * 16 + "\n")) == b"t" * 16


def test_comments_and_names_that_begin_with_a_hash() -> None:
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


def test_a_home_directory_that_is_none_is_refused(tmp_path: Path) -> None:
    assert at_home("~/a") == Path.home() / "a" and at_home("/a") == Path("/a")
    with pytest.raises(SettingsError, match="names an unknown home directory"):
        at_home("~no-such-user/a")


def test_a_file_that_we_may_not_read_comes_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(SettingsError, match="cannot be read: Permission denied") as caught:
        read_text(tmp_path / "server.key")
    assert f"chown {os.geteuid()} {tmp_path / 'server.key'}" in caught.value.hint
