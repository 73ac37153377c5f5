"""Where the hub's cache has a checkpoint, and which of its names are hashes that can be
believed."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from kvkeep.connector.hub_cache import running_copies, sha256_by_name, snapshot_of

COMMIT, TUNED = "1" * 40, "2" * 40


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("HUGGINGFACE_HUB_CACHE", "HF_MODULES_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


@pytest.fixture
def repository(hub: Path) -> Path:
    made = hub / "models--org--model"
    for folder in ("refs", "blobs", f"snapshots/{COMMIT}", f"snapshots/{TUNED}"):
        (made / folder).mkdir(parents=True)
    (made / "refs" / "main").write_text(COMMIT)
    (made / "refs" / "pr").mkdir()
    (made / "refs" / "pr" / "1").write_text(TUNED)
    return made


def add(repository: Path, name: str, content: bytes, commit: str = COMMIT) -> Path:
    """As huggingface_hub does: the content first, then a relative link to it."""
    blob = repository / "blobs" / hashlib.sha256(content).hexdigest()
    if not blob.exists():
        blob.write_bytes(content)
    link = repository / "snapshots" / commit / name
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(os.path.relpath(blob, link.parent))
    return link


def test_the_layout_is_that_of_huggingface_hub(hub: Path, repository: Path) -> None:
    package = pytest.importorskip(
        "huggingface_hub", reason="huggingface_hub comes with transformers"
    )
    add(repository, "model.safetensors", b"weights")
    add(repository, "model.safetensors", b"tuned", TUNED)
    found = package.scan_cache_dir(hub)
    assert not found.warnings
    [scanned] = found.repos
    for revision in (None, "main", "pr/1", COMMIT, TUNED, "none-of-this-name"):
        path = package.try_to_load_from_cache(
            "org/model", "model.safetensors", cache_dir=hub, revision=revision
        )
        assert snapshot_of("org/model", revision) == (
            None if path is None else os.path.dirname(path)
        ), revision
    names = {file.blob_path.name for each in scanned.revisions for file in each.files}
    links = [repository / "snapshots" / commit / "model.safetensors" for commit in (COMMIT, TUNED)]
    assert {sha256_by_name(str(link)) for link in links} == names


@pytest.mark.parametrize(
    "name", ["org/other", "", "a/b/c", "../hub/models--org--model", "org/..", "org/mo\0del", "é/é"]
)
def test_other_names_are_not_there(repository: Path, name: str) -> None:
    assert snapshot_of(name, None) is None


@pytest.mark.parametrize("revision", ["../refs/main", "\0", "ü", "", "main/", "x" * 5000])
def test_strange_revisions_raise_nothing(repository: Path, revision: str) -> None:
    assert snapshot_of("org/model", revision) in (None, str(repository / "snapshots" / COMMIT))


def test_the_directory_is_the_one_that_huggingface_hub_uses(
    hub: Path, repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = str(repository / "snapshots" / COMMIT)
    assert snapshot_of("org/model", None) == expected
    monkeypatch.delenv("HF_HUB_CACHE")
    assert snapshot_of("org/model", None) is None
    assert snapshot_of("org/model", None, cache=str(hub)) == expected
    monkeypatch.setenv("HUGGINGFACE_HUB_CACHE", str(hub))
    assert snapshot_of("org/model", None) == expected
    monkeypatch.delenv("HUGGINGFACE_HUB_CACHE")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    assert snapshot_of("org/model", None) == expected
    monkeypatch.delenv("HF_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "cache" / "huggingface").mkdir(parents=True)
    (tmp_path / "cache" / "huggingface" / "hub").symlink_to(hub)
    assert os.path.realpath(snapshot_of("org/model", None) or "") == expected


def test_a_blob_is_known_by_its_name_also_from_below_and_through_links(
    repository: Path, tmp_path: Path
) -> None:
    expected = hashlib.sha256(b"weights").hexdigest()
    for name in ("model.safetensors", "folder/model.safetensors"):
        assert sha256_by_name(str(add(repository, name, b"weights"))) == expected
    (tmp_path / "short").symlink_to(repository / "snapshots" / COMMIT)
    assert sha256_by_name(str(tmp_path / "short" / "model.safetensors")) == expected


def test_a_blob_that_was_written_to_through_its_link_is_not_what_its_name_says(
    repository: Path,
) -> None:
    link = add(repository, "model.safetensors", b"weights")
    assert sha256_by_name(str(link)) is not None
    link.write_bytes(b"tuned, and saved into the snapshot")
    os.utime(link, ns=(0, os.lstat(link).st_mtime_ns + 1))  # a clock may be coarse
    assert sha256_by_name(str(link)) is None


def test_only_a_link_into_the_blobs_of_its_own_repository_is_believed(
    repository: Path, tmp_path: Path
) -> None:
    digest = hashlib.sha256(b"weights").hexdigest()
    good = add(repository, "model.safetensors", b"weights")
    blob = repository / "blobs" / digest
    snapshot = good.parent

    def said(name: str, target: Path | str) -> str | None:
        (snapshot / name).symlink_to(target)
        return sha256_by_name(str(snapshot / name))

    assert said("absolute.bin", blob) == digest
    blob.with_name(digest[:-1]).write_bytes(b"x")
    blob.with_name("A" * 64).write_bytes(b"x")
    blob.with_name(digest + ".incomplete").write_bytes(b"x")
    blob.with_name("b" * 40).write_bytes(b"a small file, by git's hash")
    blob.with_name("c" * 64).write_bytes(b"")
    blob.with_name("d" * 64).symlink_to(blob)
    blob.with_name("e" * 64).mkdir()
    for name in (
        digest[:-1],
        "A" * 64,
        digest + ".incomplete",
        "b" * 40,
        *(each * 64 for each in "cdef"),
    ):
        assert said(f"{name[:70]}.bin", f"../../blobs/{name}") is None, name
    other = tmp_path / "hub" / "models--org--other" / "blobs"
    other.mkdir(parents=True)
    (other / digest).write_bytes(b"x")
    assert said("elsewhere.bin", other / digest) is None
    assert sha256_by_name(str(blob)) is None, "no link"
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "model.safetensors").symlink_to(blob)
    assert sha256_by_name(str(tmp_path / "plain" / "model.safetensors")) is None, "no snapshot"
    assert sha256_by_name("\0") is None and sha256_by_name(str(tmp_path / "nothing")) is None


def test_copies_of_code_are_found_by_commit(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = str(repository / "snapshots" / COMMIT)
    assert running_copies(snapshot) == []
    modules = tmp_path / "hf" / "modules" / "transformers_modules"
    expected = [modules / "org" / "model" / COMMIT, modules / "model" / COMMIT]
    for each in (*expected, modules / "org" / "model" / TUNED):
        each.mkdir(parents=True)
    assert running_copies(snapshot) == sorted(map(str, expected))
    assert running_copies(str(tmp_path / "model")) == [], "of a directory that is no snapshot"
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "else[where]"))
    assert running_copies(snapshot) == []
    (tmp_path / "else[where]" / "transformers_modules" / "a" / "b" / COMMIT).mkdir(parents=True)
    assert len(running_copies(snapshot)) == 1
