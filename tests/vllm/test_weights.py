"""Which changes of a checkpoint a fingerprint sees, and that no file, however broken, makes it raise."""

from __future__ import annotations

import json
import os
import shutil
import struct
import sys
from pathlib import Path
from typing import Any

import pytest

from kvkeep.vllm import weights
from kvkeep.vllm.weights import PLACES, SAMPLE_BYTES, weights_fingerprint

TENSORS = {"a": 5000, "b": 3, "c": 0, "d": 20_000}  # bytes of each, in the file's order
DIGEST = 32  # hex digits


def safetensors(tensors: dict[str, int] = TENSORS, **more: Any) -> bytes:
    """A file with these tensors, each byte a function of its place."""
    header, end = {**more}, 0
    for name, size_bytes in tensors.items():
        header[name] = {"dtype": "U8", "shape": [size_bytes], "data_offsets": [end, end + size_bytes]}
        end += size_bytes
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(place * 7 % 251 for place in range(end))


def with_header(header: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(header) if length is None else length) + header + bytes(range(256)) * 50


def flipped(content: bytes, place: int) -> bytes:
    changed = bytearray(content)
    changed[place] ^= 0xFF
    return bytes(changed)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    (directory / "model-00001-of-00002.safetensors").write_bytes(safetensors())
    (directory / "model-00002-of-00002.safetensors").write_bytes(safetensors({"e": 4000}))
    (directory / "tokenizer.json").write_text("{}")
    return directory


def of(directory: Path) -> str:
    digest = weights_fingerprint(str(directory), None)
    assert digest is not None and len(digest) == DIGEST and int(digest, 16) >= 0
    return digest


# --- what is the same, and what is not --------------------------------------------------------------------------


def test_a_copy_elsewhere_is_the_same_also_through_links(checkpoint: Path, tmp_path: Path) -> None:
    before = of(checkpoint)
    assert of(Path(shutil.copytree(checkpoint, tmp_path / "copy"))) == before
    linked = tmp_path / "snapshot"
    linked.mkdir()
    for file in checkpoint.iterdir():
        (linked / file.name).symlink_to(file)
    assert of(linked) == before
    assert of(checkpoint.rename(tmp_path / "renamed")) == before
    assert weights_fingerprint(str(tmp_path / "renamed"), "another") == before  # of a directory, which has no revisions


def test_what_is_no_weight_does_not_matter(checkpoint: Path) -> None:
    before = of(checkpoint)
    (checkpoint / "tokenizer.json").write_text('{"other": 1}')
    (checkpoint / "README.md").write_text("better now")
    (checkpoint / "folder.safetensors").mkdir()
    os.mkfifo(checkpoint / "pipe.bin")  # reading it would take for ever
    assert of(checkpoint) == before


@pytest.mark.parametrize("name", weights.CONFIGS)
def test_another_config_is_another_checkpoint(checkpoint: Path, name: str) -> None:
    before = of(checkpoint)
    (checkpoint / name).write_text('{"rope_theta": 1}')
    assert of(checkpoint) != before


@pytest.mark.parametrize("tensor", [name for name in TENSORS if TENSORS[name]])
@pytest.mark.parametrize("part", ["first", "middle", "last"])
def test_a_change_at_either_end_or_in_the_middle_of_any_tensor_is_seen(
    checkpoint: Path, tensor: str, part: str
) -> None:
    before = of(checkpoint)
    file = checkpoint / "model-00001-of-00002.safetensors"
    content = file.read_bytes()
    data = len(content) - sum(TENSORS.values())
    begin = data + sum(size for name, size in TENSORS.items() if name < tensor)
    offset = {"first": 0, "middle": TENSORS[tensor] // 2, "last": TENSORS[tensor] - 1}[part]
    file.write_bytes(flipped(content, begin + offset))
    assert of(checkpoint) != before


def test_a_change_that_no_sample_meets_is_not_seen_as_the_docstring_says(checkpoint: Path) -> None:
    before = of(checkpoint)
    file = checkpoint / "model-00001-of-00002.safetensors"
    content = file.read_bytes()
    file.write_bytes(flipped(content, len(content) - TENSORS["d"] + 2 * SAMPLE_BYTES))
    assert of(checkpoint) == before
    assert "kvkeep.revision" in (weights_fingerprint.__doc__ or "")


def test_another_header_with_the_same_bytes_is_another_checkpoint(checkpoint: Path) -> None:
    before = of(checkpoint)
    file = checkpoint / "model-00001-of-00002.safetensors"
    file.write_bytes(file.read_bytes().replace(b'"U8"', b'"I8"', 1))
    assert of(checkpoint) != before


def test_a_file_more_or_less_or_two_that_changed_names_are_seen(checkpoint: Path) -> None:
    before = {of(checkpoint)}
    one, two = sorted(checkpoint.glob("*.safetensors"))
    one.rename(checkpoint / "aside")
    two.rename(one)
    before.add(of(checkpoint))
    (checkpoint / "aside").rename(two)
    before.add(of(checkpoint))
    (checkpoint / "extra.bin").write_bytes(b"more")
    before.add(of(checkpoint))
    assert len(before) == 4


@pytest.mark.parametrize("suffix", [".bin", ".pt", ".pth", ".gguf"])
def test_files_of_other_kinds_are_sampled_all_over(tmp_path: Path, suffix: str) -> None:
    file = tmp_path / f"model{suffix}"
    content = bytes(10 * SAMPLE_BYTES * PLACES)
    digests = set()
    places = [(len(content) - SAMPLE_BYTES) * index // (PLACES - 1) for index in range(PLACES)]
    for changed in (content, content + b"\0", *(flipped(content, place) for place in places)):
        file.write_bytes(changed)
        digests.add(of(tmp_path))
    file.write_bytes(flipped(content, len(content) - 1))
    digests.add(of(tmp_path))
    assert len(digests) == PLACES + 3


def test_a_single_file_is_a_checkpoint_too_whatever_it_is_called(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF" + bytes(1000))
    before = of(file)
    assert of(file.rename(tmp_path / "other.gguf")) == before
    (tmp_path / "other.gguf").write_bytes(b"GGUF" + bytes(999) + b"\1")
    assert of(tmp_path / "other.gguf") != before


def test_a_checkpoint_of_many_tensors_is_read_at_its_samples_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = safetensors({"a": 1, "b": 10_000_000})
    (tmp_path / "model.safetensors").write_bytes(content)
    read = []
    pread = os.pread
    monkeypatch.setattr(weights.os, "pread", lambda *args: read.append(args[1]) or pread(*args))
    of(tmp_path)
    assert sum(read) < 3000


# --- what is broken ---------------------------------------------------------------------------------------------

BROKEN = {
    "empty": b"",
    "shorter than a length": b"\0\0\0",
    "a length and no more": struct.pack("<Q", 100),
    "truncated in the header": safetensors()[:100],
    "truncated in a tensor": safetensors()[:-1],
    "no header": with_header(b""),
    "2**63": with_header(b"{}", 2**63),
    "2**64 - 1": with_header(b"{}", 2**64 - 1),
    "no JSON": with_header(b"{" * 50),
    "no UTF-8": with_header(b'{"\xff": 1}'),
    "a deep nest": with_header(b"[" * 100_000),
    "a list": with_header(b"[1, 2]"),
    "a long number": with_header(b'{"a": ' + b"1" * 10_000 + b"}"),
    **{
        f"offsets {offsets}": with_header(json.dumps({"a": {"data_offsets": offsets}}).encode())
        for offsets in (None, [], [0], [0, 1, 2], [5, 1], [-5, 1], [0, 10**9], [0, 10**30], ["0", "1"], [0.5, 1], {})
    },
    "no tensor": with_header(b'{"a": 1}'),
    "no tensors": with_header(b'{"__metadata__": {"format": "pt"}}'),
}


@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_file_is_sampled_like_any_other(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    (tmp_path / "config.json").write_bytes(b"\xff{")
    before = of(tmp_path)
    assert of(tmp_path) == before
    if content:
        (tmp_path / "model.safetensors").write_bytes(flipped(content, len(content) - 1))
        assert of(tmp_path) != before


def test_a_header_beyond_the_limit_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model.safetensors").write_bytes(safetensors())
    before = of(tmp_path)
    monkeypatch.setattr(weights, "MAX_HEADER_BYTES", 10)
    assert of(tmp_path) != before


def test_names_that_no_model_has_are_nothing() -> None:
    for name in ("", "\0", "nobody/nothing-of-this-name", "s3://bucket/model", "a/b/c/d", "x" * 10_000, "\ud800", ".."):
        assert weights_fingerprint(name, None) is None
        assert weights_fingerprint(name, "main\0") is None


def test_a_directory_without_weights_is_nothing(tmp_path: Path) -> None:
    assert weights_fingerprint(str(tmp_path), None) is None
    (tmp_path / "config.json").write_text("{}")  # two checkpoints of one name have this in common
    assert weights_fingerprint(str(tmp_path), None) is None


def test_weights_that_cannot_be_read_are_nothing(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> bytes:
        raise PermissionError

    monkeypatch.setattr(weights.os, "pread", refuse)
    assert weights_fingerprint(str(checkpoint), None) is None


# --- models of the hub ------------------------------------------------------------------------------------------


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of huggingface_hub, with two snapshots of org/model to come."""
    constants = pytest.importorskip("huggingface_hub.constants", reason="huggingface_hub comes with transformers")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    repository = tmp_path / "hub" / "models--org--model"
    (repository / "refs").mkdir(parents=True)
    return repository


def test_a_model_of_the_hub_is_that_of_its_snapshot(hub: Path, checkpoint: Path) -> None:
    assert weights_fingerprint("org/model", None) is None
    for ref, commit in (("main", "1" * 40), ("tuned", "2" * 40)):
        (hub / "refs" / ref).write_text(commit)
        shutil.copytree(checkpoint, hub / "snapshots" / commit)
    assert weights_fingerprint("org/model", None) == weights_fingerprint("org/model", "tuned") == of(checkpoint)
    (hub / "snapshots" / ("2" * 40) / "config.json").write_text("{}")
    tuned = weights_fingerprint("org/model", "tuned")
    assert tuned == weights_fingerprint("org/model", "2" * 40) == of(hub / "snapshots" / ("2" * 40))
    assert tuned != weights_fingerprint("org/model", "main") == of(checkpoint)
    assert weights_fingerprint("org/model", "none-of-this-name") is None


def test_a_file_that_the_hub_is_known_not_to_have_is_not_taken_for_one(hub: Path) -> None:
    (hub / "refs" / "main").write_text("1" * 40)
    (hub / ".no_exist" / ("1" * 40)).mkdir(parents=True)
    for name in weights.CONFIGS:
        (hub / ".no_exist" / ("1" * 40) / name).touch()
    (hub / "snapshots").mkdir()
    assert weights_fingerprint("org/model", None) is None


def test_without_the_hub_package_only_local_paths_are_found(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert weights_fingerprint("org/model", None) is None
    assert of(checkpoint)
