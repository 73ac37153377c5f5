"""Which changes of a checkpoint its digest sees (all), and that asking for it never blocks nor
raises."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvkeep.connector import checkpoint as module
from kvkeep.connector import file_hashes
from kvkeep.connector.checkpoint import CONFIGS, MAX_WAITING, NOT_WEIGHTS, CheckpointDigest
from kvkeep.connector.file_hashes import FileHashes, hashes_of_user

COMMIT = "1" * 40


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Caches of this test's own, whose timestamps are fine."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_MODULES_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setattr(file_hashes, "SETTLED_NS", 0)
    return tmp_path


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    (directory / "model-00001-of-00002.safetensors").write_bytes(os.urandom(5000))
    (directory / "model-00002-of-00002.safetensors").write_bytes(os.urandom(3000))
    (directory / "model.safetensors.index.json").write_text("{}")
    (directory / "tokenizer.json").write_text("{}")
    return directory


def of(model: object, revision: str | None = None, **more: Any) -> str:
    digest = CheckpointDigest.of(str(model), revision, **more)
    assert digest.wait(60) and not digest.pending and not digest.problem
    assert digest.value is not None and len(digest.value) == 32 and int(digest.value, 16) >= 0
    return digest.value


def problem_of(model: object, revision: str | None = None, **more: Any) -> str:
    digest = CheckpointDigest.of(str(model), revision, **more)
    assert digest.wait(60) and not digest.pending and digest.value is None
    return digest.problem


@contextlib.contextmanager
def nothing_is_hashed() -> Iterator[None]:
    """As if another process had its turn."""
    directory = Path(hashes_of_user().directory)
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    with open(directory / "lock", "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def in_hub(
    checkpoint: Path, home: Path, name: str = "org/model", commit: str = COMMIT, ref: str = "main"
) -> Path:
    """A copy as huggingface_hub makes it: large files are named by sha256, small ones by git's
    hash."""
    repository = home / "hf" / "hub" / ("models--" + name.replace("/", "--"))
    snapshot = repository / "snapshots" / commit
    for folder in (repository / "refs", repository / "blobs", snapshot):
        folder.mkdir(parents=True, exist_ok=True)
    (repository / "refs" / ref).write_text(commit)
    for file in sorted(each for each in checkpoint.rglob("*") if each.is_file()):
        content = file.read_bytes()
        is_large = file.suffix == ".safetensors"
        digest = (
            hashlib.sha256(content)
            if is_large
            else hashlib.sha1(b"blob %d\0" % len(content) + content)
        )
        blob = repository / "blobs" / digest.hexdigest()
        if not blob.exists():
            blob.write_bytes(content)
        link = snapshot / file.relative_to(checkpoint)
        link.parent.mkdir(exist_ok=True)
        link.symlink_to(os.path.relpath(blob, link.parent))
    return snapshot


# --- what is the same, and what is not ------------------------------------------------------------


def test_a_copy_elsewhere_is_the_same_also_through_links(checkpoint: Path, tmp_path: Path) -> None:
    before = of(checkpoint)
    assert of(shutil.copytree(checkpoint, tmp_path / "copy")) == before
    linked = tmp_path / "linked"
    linked.mkdir()
    for file in checkpoint.iterdir():
        (linked / file.name).symlink_to(file)
    assert of(linked) == of(f"{linked}/") == before
    assert of(checkpoint.rename(tmp_path / "renamed")) == before
    assert of(tmp_path / "renamed", "another") == before, "a directory has no revisions"


def test_what_is_no_weight_does_not_matter(checkpoint: Path) -> None:
    before = of(checkpoint)
    (checkpoint / "tokenizer.json").write_text('{"other": 1}')
    (checkpoint / "README.md").write_text("better now")
    (checkpoint / "modeling.py").write_text("not run without trust_remote_code")
    (checkpoint / "folder.safetensors").mkdir()
    os.mkfifo(checkpoint / "pipe.bin")  # reading it would take for ever
    for name in NOT_WEIGHTS:
        (checkpoint / name).write_text("what a trainer leaves")
    assert of(checkpoint) == before


@pytest.mark.parametrize("name", [*CONFIGS, "model.safetensors.index.json"])
def test_another_config_is_another_checkpoint(checkpoint: Path, name: str) -> None:
    before = of(checkpoint)
    (checkpoint / name).write_text('{"rope_theta": 1}')
    assert of(checkpoint) != before


def test_a_quarter_of_the_embedding_rows_changed_is_another_checkpoint(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    embeddings = np.zeros((32_000, 64), np.float16)
    file = tmp_path / "model.safetensors"
    (tmp_path / "config.json").write_text("{}")
    save_file({"model.embed_tokens.weight": embeddings}, file)
    before = of(tmp_path)
    embeddings[100:8050] += 1  # 7,950 rows, neither at an end nor in the middle
    save_file({"model.embed_tokens.weight": embeddings}, file)
    assert of(tmp_path) != before


@pytest.mark.parametrize("place", [0, 1, 2499, 4998, 4999])
def test_every_bit_of_the_weights_counts(checkpoint: Path, place: int) -> None:
    before = of(checkpoint)
    file = checkpoint / "model-00001-of-00002.safetensors"
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(content)
    assert of(checkpoint) != before


def test_a_file_more_or_less_or_two_that_changed_names_are_seen(checkpoint: Path) -> None:
    seen = {of(checkpoint)}
    one, two = sorted(checkpoint.glob("*.safetensors"))
    one.rename(checkpoint / "aside")
    two.rename(one)
    seen.add(of(checkpoint))
    (checkpoint / "aside").rename(two)
    seen.add(of(checkpoint))
    (checkpoint / "more.pt").write_bytes(b"")
    seen.add(of(checkpoint))
    assert len(seen) == 4


def test_a_file_by_itself_is_known_by_its_content(tmp_path: Path) -> None:
    for name, content in (("a.gguf", b"one"), ("b.gguf", b"one"), ("c.gguf", b"two")):
        (tmp_path / name).write_bytes(content)
    assert of(tmp_path / "a.gguf") == of(tmp_path / "b.gguf") != of(tmp_path / "c.gguf")


# --- remote code ----------------------------------------------------------------------------------


def test_edited_remote_code_is_another_checkpoint(checkpoint: Path) -> None:
    (checkpoint / "modeling_new.py").write_text("SCALE = 1\n")
    (checkpoint / "parts").mkdir()
    (checkpoint / "parts" / "attention.py").write_text("SCALE = 1\n")
    seen = {of(checkpoint), of(checkpoint, remote_code=True)}
    (checkpoint / "modeling_new.py").write_text("SCALE = 2\n")
    seen.add(of(checkpoint, remote_code=True))
    (checkpoint / "parts" / "attention.py").write_text("SCALE = 2\n")
    seen.add(of(checkpoint, remote_code=True))
    assert len(seen) == 4
    (checkpoint / "__pycache__").mkdir()
    (checkpoint / "__pycache__" / "x.py").write_text("")
    assert of(checkpoint, remote_code=True) in seen


def test_without_code_it_does_not_matter_whether_code_may_run(checkpoint: Path) -> None:
    assert of(checkpoint) == of(checkpoint, remote_code=True)


@pytest.mark.parametrize(
    "config", ["config.json", "tokenizer_config.json", "preprocessor_config.json"]
)
def test_code_in_another_repository_counts(checkpoint: Path, home: Path, config: str) -> None:
    auto_map = {
        "AutoModel": "other/code--modeling.New",
        "AutoTokenizer": ["other/code--tokens.Slow", None],
        "x": 1,
    }
    (checkpoint / config).write_text(json.dumps({"auto_map": auto_map}))
    absent = of(checkpoint, remote_code=True)
    code = home / "code"
    code.mkdir()
    (code / "modeling.py").write_text("SCALE = 1\n")
    in_hub(code, home, "other/code", "a" * 40)
    (code / "modeling.py").write_text("SCALE = 2\n")
    in_hub(code, home, "other/code", "b" * 40, ref="next")
    seen = [
        of(checkpoint, remote_code=True, code_revision=each) for each in (None, "next", "b" * 40)
    ]
    assert len({absent, *seen}) == 3 and seen[1] == seen[2]
    assert of(checkpoint) == of(checkpoint, code_revision="next") not in seen


def test_another_revision_of_the_code_counts(checkpoint: Path, home: Path) -> None:
    (checkpoint / "modeling.py").write_text("SCALE = 1\n")
    in_hub(checkpoint, home)
    (checkpoint / "modeling.py").write_text("SCALE = 2\n")
    in_hub(checkpoint, home, commit="2" * 40, ref="newer")
    plain, same, newer = (
        of("org/model", remote_code=True, code_revision=each) for each in (None, "main", "newer")
    )
    assert plain == same != newer


def test_the_copy_of_the_code_that_runs_counts_if_it_was_edited(
    checkpoint: Path, home: Path
) -> None:
    (checkpoint / "modeling.py").write_text("SCALE = 1\n")
    in_hub(checkpoint, home)
    before = of("org/model", remote_code=True)
    copy = home / "hf" / "modules" / "transformers_modules" / "org" / "model" / COMMIT
    copy.mkdir(parents=True)
    shutil.copy(checkpoint / "modeling.py", copy)
    (copy / "__init__.py").touch()
    assert of("org/model", remote_code=True) == of(checkpoint, remote_code=True) == before
    (copy / "modeling.py").write_text("SCALE = 2\n")
    assert of("org/model", remote_code=True) != before


@pytest.mark.parametrize(
    "config", ["", "[", "[]", '{"auto_map": 1}', '{"auto_map": {"a": {"b": "--"}}}', "[" * 100_000]
)
def test_no_config_makes_it_raise(checkpoint: Path, config: str) -> None:
    (checkpoint / "config.json").write_text(config)
    assert of(checkpoint, remote_code=True)


def test_too_many_python_files_are_a_problem(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_CODE_FILES", 3)
    for number in range(4):
        (checkpoint / f"{number}.py").touch()
    assert "Python files" in problem_of(checkpoint, remote_code=True)
    assert of(checkpoint)


# --- the hub's cache ------------------------------------------------------------------------------


def test_a_copy_in_the_hubs_cache_has_the_digest_of_a_plain_one(
    checkpoint: Path, home: Path
) -> None:
    (checkpoint / "modeling.py").write_text("SCALE = 1\n")
    snapshot = in_hub(checkpoint, home)
    assert of("org/model") == of("org/model", "main") == of("org/model", COMMIT) == of(snapshot)
    by_name = hashes_of_user().hashed_bytes
    large = sum(file.stat().st_size for file in checkpoint.glob("*.safetensors"))
    assert 0 < by_name < large, "small files are read, large ones are known by their names"
    assert of(checkpoint) == of("org/model")
    assert of(checkpoint, remote_code=True) == of("org/model", remote_code=True) != of(checkpoint)
    assert "no weights of org/model were found" in problem_of("org/model", "none-of-this-name")


def test_weights_that_were_saved_into_the_snapshot_are_read(checkpoint: Path, home: Path) -> None:
    snapshot = in_hub(checkpoint, home)
    before = of("org/model")
    link = snapshot / "model-00001-of-00002.safetensors"
    link.write_bytes(b"trained further")
    os.utime(link, ns=(0, os.lstat(link).st_mtime_ns + 1))  # a clock may be coarse
    assert of("org/model") != before
    (checkpoint / link.name).write_bytes(b"trained further")
    assert of("org/model") == of(checkpoint)


def test_models_may_be_kept_in_another_directory_than_the_hubs(
    checkpoint: Path, home: Path
) -> None:
    in_hub(checkpoint, home)
    (home / "hf" / "hub").rename(home / "downloads")
    assert problem_of("org/model")
    assert of("org/model", download_dir=str(home / "downloads")) == of(checkpoint)
    (checkpoint / "config.json").write_text("{}")
    in_hub(checkpoint, home)
    assert (
        of("org/model", download_dir=str(home / "downloads")) != of("org/model") == of(checkpoint)
    )
    assert of("org/model", download_dir=str(home / "nothing")) == of("org/model")


def test_one_file_of_a_repository_may_be_named(checkpoint: Path, home: Path) -> None:
    in_hub(checkpoint, home)
    assert of("org/model:Q4_K_M") == of(checkpoint)


# --- no digest ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    ["org/model", "", "/nowhere", "a" * 10_000, "a\0b", "\ud800", "~nobody-of-this-name/x", "."],
)
@pytest.mark.parametrize("revision", [None, "main\0"])
def test_what_is_not_there_is_a_problem_and_no_exception(
    name: str, revision: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "weights" in problem_of(name, revision)


def test_a_directory_without_weights_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert problem_of(tmp_path) == f"there are no weights in {tmp_path}"


def test_a_file_that_cannot_be_read_is_a_problem_that_names_it(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(hashes: FileHashes, path: str, *_: object) -> None:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(FileHashes, "hash", refuse)
    assert problem_of(checkpoint) == f"{checkpoint}/config.json: Permission denied"


def test_a_fault_of_our_own_is_a_problem_and_no_exception(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("a fault")

    monkeypatch.setattr(FileHashes, "hash", fail)
    assert "a fault" in problem_of(checkpoint)
    monkeypatch.setattr(os.path, "expanduser", fail)  # before any file is found
    assert "a fault" in problem_of(checkpoint)


def change_before(directory: Path) -> None:
    (directory / "config.json").write_text("{}")


def change_after(directory: Path) -> None:
    (directory / "model-00002-of-00002.safetensors").write_bytes(b"other")


def add_file(directory: Path) -> None:
    (directory / "more.safetensors").write_bytes(b"other")


@pytest.mark.parametrize("change", [change_before, change_after, add_file])
def test_files_that_change_before_they_are_hashed_have_no_digest(
    checkpoint: Path, change: Callable[[Path], None]
) -> None:
    with nothing_is_hashed():
        digest = CheckpointDigest.of(str(checkpoint), None)
        assert digest.pending and digest.is_current()
        change(checkpoint)
        assert not digest.is_current()
    assert digest.wait(60)
    assert digest.value is None and "changed since the engine read" in digest.problem
    assert of(checkpoint), "an engine that is started now has read them"


# --- when it is known -----------------------------------------------------------------------------


def test_of_a_checkpoint_that_was_seen_before_nothing_is_read(checkpoint: Path) -> None:
    value = of(checkpoint)
    size = sum(
        file.stat().st_size for file in checkpoint.iterdir() if file.name != "tokenizer.json"
    )
    assert hashes_of_user().hashed_bytes == size
    file_hashes.hashes_in.cache_clear()  # as in another process
    with nothing_is_hashed():
        digest = CheckpointDigest.of(str(checkpoint), None)
        assert not digest.pending and digest.value == value and digest.total_bytes == size
    assert hashes_of_user().hashed_bytes == 0


def test_a_new_checkpoint_is_pending_until_it_is_hashed_by_another_thread(checkpoint: Path) -> None:
    with nothing_is_hashed():
        digest = CheckpointDigest.of(str(checkpoint), None)
        assert digest.pending and digest.value is None and not digest.problem
        assert not digest.wait(0.1)
        assert "kvkeep-hasher" in [thread.name for thread in threading.enumerate()]
    assert digest.wait(60) and digest.value
    assert digest.total_bytes == hashes_of_user().hashed_bytes and digest.is_current()


def test_the_number_of_waiting_checkpoints_is_limited(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_WAITING", 2)
    with nothing_is_hashed():
        taken = list[CheckpointDigest]()
        while len(taken) < 3:  # one is under way at last, and two wait
            if (digest := CheckpointDigest.of(str(checkpoint), None)).pending:
                taken.append(digest)
        assert "waiting to be hashed" in problem_of(checkpoint)
    assert all(each.wait(60) and each.value for each in taken)
    assert MAX_WAITING > 2
