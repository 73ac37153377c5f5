"""A request with a LoRA adapter is cached once it is certain which adapter vLLM computes it
with."""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from kvkeep.connector import checkpoint, file_hashes
from kvkeep.connector.checkpoint import CheckpointDigest
from kvkeep.connector.file_hashes import hashes_of_user
from kvkeep.testing.clock import eventually
from kvkeep.vllm import keys as module
from kvkeep.vllm.keys import Adapters


@pytest.fixture(autouse=True)
def _own_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(file_hashes, "SETTLED_NS", 0)


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    directory = tmp_path / "style"
    directory.mkdir()
    (directory / "adapter_config.json").write_text('{"r": 8}')
    (directory / "adapter_model.safetensors").write_bytes(b"one" * 1000)
    return directory


def lora(path: object, number: int = 1, name: str = "style", **more: Any) -> Any:
    return SimpleNamespace(lora_int_id=number, lora_name=name, lora_path=str(path), **more)


def wait_for_hashes(path: object) -> None:
    """Until every digest that was asked for before is taken: threads take them in turn."""
    assert checkpoint.CheckpointDigest.of(str(path), None).wait(60)


def name_of(adapters: Adapters, used: Any) -> str:
    """Of an adapter whose digest may still have to be taken."""
    assert eventually(lambda: adapters.name_of(used) is not None)
    name = adapters.name_of(used)
    assert name is not None
    return name


def test_what_is_unknown_is_not_waited_for_and_known_to_later_requests(adapter: Path) -> None:
    adapters = Adapters()
    directory = Path(hashes_of_user().directory)
    directory.mkdir(mode=0o700, parents=True)
    with open(directory / "lock", "wb") as lock:  # as if another process hashed
        fcntl.flock(lock, fcntl.LOCK_EX)
        with mock.patch.object(CheckpointDigest, "of", wraps=CheckpointDigest.of) as asked:
            assert adapters.name_of(lora(adapter)) is None
            assert adapters.name_of(lora(adapter, load_inplace=True)) is None
        assert asked.call_count == 1, "it is hashed once, however many requests ask"
    assert name_of(adapters, lora(adapter))
    assert Adapters().name_of(lora(adapter)) == adapters.name_of(lora(adapter)), (
        "a host's other engines need not wait"
    )


def test_name_path_and_every_file_count(adapter: Path, tmp_path: Path) -> None:
    seen = {name_of(Adapters(), lora(adapter)), name_of(Adapters(), lora(adapter, name="tone"))}
    elsewhere = Path(shutil.copytree(adapter, tmp_path / "elsewhere"))
    seen.add(name_of(Adapters(), lora(elsewhere)))
    (adapter / "adapter_config.json").write_text('{"r": 4}')
    seen.add(name_of(Adapters(), lora(adapter)))
    content = bytearray((adapter / "adapter_model.safetensors").read_bytes())
    content[1700] ^= 1
    (adapter / "adapter_model.safetensors").write_bytes(content)
    seen.add(name_of(Adapters(), lora(adapter)))
    assert len(seen) == 5
    assert name_of(Adapters(), lora(adapter, number=7)) in seen, "vLLM's numbers do not"


def rewrite(adapter: Path) -> None:
    (adapter / "adapter_model.safetensors").write_bytes(b"two" * 1000)


def rewrite_config(adapter: Path) -> None:
    (adapter / "adapter_config.json").write_text('{"r": 4}')


def rewrite_with_its_old_mtime(adapter: Path) -> None:
    found = (adapter / "adapter_model.safetensors").stat()
    rewrite(adapter)
    os.utime(adapter / "adapter_model.safetensors", ns=(found.st_atime_ns, found.st_mtime_ns))


def add_embeddings(adapter: Path) -> None:
    (adapter / "new_embeddings.safetensors").write_bytes(b"x")


@pytest.mark.parametrize(
    "change", [rewrite, rewrite_config, rewrite_with_its_old_mtime, add_embeddings, shutil.rmtree]
)
def test_files_that_changed_since_are_not_cached_until_vllm_reads_them_again(
    adapter: Path, change: Callable[[Path], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    adapters, kept = Adapters(), Path(shutil.copytree(adapter, tmp_path / "kept"))
    before = name_of(adapters, lora(adapter))
    change(adapter)
    assert adapters.name_of(lora(adapter)) is None
    assert adapters.name_of(lora(adapter)) is None
    [warning] = caplog.messages
    assert "adapter style" in warning and "changed since it was first used" in warning
    if not adapter.exists():
        shutil.copytree(kept, adapter)
        rewrite(adapter)
    after = name_of(adapters, lora(adapter, load_inplace=True))
    assert after != before
    assert adapters.name_of(lora(adapter)) == after == name_of(Adapters(), lora(adapter))


def test_files_that_change_before_they_are_hashed_are_not_cached_either(adapter: Path) -> None:
    adapters = Adapters()
    directory = Path(hashes_of_user().directory)
    directory.mkdir(mode=0o700, parents=True)
    with open(directory / "lock", "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert adapters.name_of(lora(adapter)) is None
        rewrite(adapter)
    wait_for_hashes(adapter)
    assert adapters.name_of(lora(adapter)) is None, "vLLM may have read it before"
    assert name_of(adapters, lora(adapter, load_inplace=True))


def test_another_path_under_the_same_number_is_not_cached_until_vllm_reads_it(
    adapter: Path, tmp_path: Path
) -> None:
    other = Path(shutil.copytree(adapter, tmp_path / "other"))
    adapters = Adapters()
    first = name_of(adapters, lora(adapter))
    assert adapters.name_of(lora(other)) is None, "vLLM goes by the number, and keeps what it has"
    assert adapters.name_of(lora(adapter)) == first
    assert name_of(adapters, lora(other, load_inplace=True)) != first
    assert adapters.name_of(lora(adapter)) is None


def test_an_adapter_that_is_not_here_is_looked_for_again_with_each_request(
    adapter: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    adapters = Adapters()
    for _ in range(2):
        assert adapters.name_of(lora("org/style")) is None
    [warning] = caplog.messages
    assert "without the cache: no weights of org/style were found" in warning
    repository = tmp_path / "hub" / "models--org--style"
    shutil.copytree(adapter, repository / "snapshots" / ("1" * 40))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("1" * 40)
    assert name_of(adapters, lora("org/style")), "vLLM has downloaded it meanwhile"


def test_when_too_many_wait_it_is_looked_for_again(
    adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapters = Adapters()
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "MAX_WAITING", 0)
        assert adapters.name_of(lora(adapter)) is None
    assert name_of(adapters, lora(adapter))


def test_the_number_of_adapters_is_limited(adapter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_ADAPTERS", 3)
    adapters = Adapters()
    for number in (1, 2, 3, 1, 4):
        assert name_of(adapters, lora(adapter, number))
    assert "seen=[3, 1, 4]" in repr(adapters), "the one that was not used for the longest time goes"
    for number in range(1, 9):
        adapters.name_of(lora("/nowhere", number))
    assert repr(adapters) == "Adapters(seen=[6, 7, 8], warned=3)"


def test_nothing_that_a_request_names_raises(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    for number, path in enumerate(("", "\0", "\ud800", "/", "~", "a" * 10_000, "../..")):
        assert Adapters().name_of(lora(path, number)) is None
