"""Tells two checkpoints of one name apart without reading all of them: vLLM's own keys do not name the weights.

    safetensors    │ length │ header │ tensor        │ tensor        │ …      header, and of EVERY tensor
                            └─ all ──┘ └─┘  └─┘  └─┘ └─┘  └─┘  └─┘          begin, middle and end
    other files    │ └─┘    └─┘    └─┘    └─┘    └─┘    └─┘ │               size, and 64 places

Files come from anywhere, so nothing in them is believed: a header that is broken makes its file one of the other kind.
"""

from __future__ import annotations

import json
import os
import struct
from hashlib import blake2b
from pathlib import Path

CONFIGS = ("config.json", "adapter_config.json", "params.json", "hf_quant_config.json", "quantize_config.json")
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
SAMPLE_BYTES = 256
PLACES = 64
MAX_HEADER_BYTES = 32 << 20  # some 200,000 tensors in one file
MAX_CONFIG_BYTES = 16 << 20

_LENGTH = struct.Struct("<Q")


def weights_fingerprint(model: str, revision: str | None) -> str | None:
    """A digest of the checkpoint in a directory, of a single file of weights, or of a Hugging Face model's local copy.

    It is the same for every copy, wherever that lies, and another one for a checkpoint that was trained further or
    quantized otherwise: that changes numbers all over, and some in each tensor are looked at. It does NOT see an edit
    of a few numbers in the middle of a tensor that no sample meets; whoever makes such edits sets `kvkeep.revision`.

    Reads a few hundred bytes a tensor, so some megabytes of the largest checkpoints. None, and never an exception, if
    no weights are found or some of them cannot be read: then nothing is known, and the caller decides.
    """
    try:
        if os.path.isfile(model):
            return _fingerprint([], [Path(model)])
        directory = model if os.path.isdir(model) else _local_copy(model, revision)
        if directory is None:
            return None
        files = sorted((each for each in Path(directory).iterdir() if each.is_file()), key=os.fsencode)
        configs = [file for file in files if file.name in CONFIGS]
        return _fingerprint(configs, [file for file in files if file.suffix in WEIGHTS])
    except OSError:
        return None


def _local_copy(model: str, revision: str | None) -> str | None:
    """The directory that huggingface_hub has of this model and revision; None if it has none, or is not installed."""
    try:
        from huggingface_hub import try_to_load_from_cache

        found = [try_to_load_from_cache(model, name, revision=revision) for name in CONFIGS]
    except (ImportError, ValueError):  # ValueError: the name cannot be one of the hub's
        return None
    # What is known not to exist there comes back as an object, and what is not known as None.
    return next((os.path.dirname(path) for path in found if isinstance(path, str)), None)


def _fingerprint(configs: list[Path], weights: list[Path]) -> str | None:
    if not weights:
        return None
    digest = blake2b(digest_size=16, person=b"kvkeep.samples")
    for file in configs:
        with file.open("rb", buffering=0) as content:
            _add(digest, os.fsencode(file.name), content.read(MAX_CONFIG_BYTES) or b"")
    for file in weights:
        # A file by itself may be called anything; among others its name says which part it is.
        _add(digest, os.fsencode(file.name) if len(weights) > 1 else b"")
        with file.open("rb", buffering=0) as content:
            _add_weights(digest, content.fileno(), safetensors=file.suffix == ".safetensors")
    return digest.hexdigest()


def _add_weights(digest: blake2b, fd: int, safetensors: bool) -> None:
    size_bytes = os.fstat(fd).st_size
    header = _header(fd, size_bytes) if safetensors else None
    places = None if header is None else _places_in_tensors(header, size_bytes)
    if header is None or places is None:
        header, places = b"", _spread(0, size_bytes, PLACES)
    _add(digest, _LENGTH.pack(size_bytes), header)
    for place in places:
        _add(digest, os.pread(fd, SAMPLE_BYTES, place))


def _header(fd: int, size_bytes: int) -> bytes | None:
    """The JSON at the begin of a safetensors file; None where there cannot be one."""
    length = os.pread(fd, _LENGTH.size, 0)
    if len(length) < _LENGTH.size:
        return None
    (header_bytes,) = _LENGTH.unpack(length)
    if header_bytes > min(MAX_HEADER_BYTES, size_bytes - _LENGTH.size):
        return None
    return os.pread(fd, header_bytes, _LENGTH.size)


def _places_in_tensors(header: bytes, size_bytes: int) -> list[int] | None:
    """Where to read samples, for each tensor in the file's order. None if it says nothing, or what cannot be."""
    try:
        tensors = json.loads(header)
    except (ValueError, RecursionError):
        return None
    first = _LENGTH.size + len(header)
    if not isinstance(tensors, dict):
        return None
    ranges = []
    for name, tensor in tensors.items():
        if name == "__metadata__":
            continue
        match tensor:
            case {"data_offsets": [int(begin), int(end)]} if 0 <= begin <= end <= size_bytes - first:
                ranges.append((first + begin, first + end))
            case _:
                return None
    return [place for begin, end in sorted(ranges) for place in _spread(begin, end, 3)] or None


def _spread(begin: int, end: int, count: int) -> list[int]:
    """Where samples begin that lie evenly from `begin` to `end`, the first and the last bytes among them."""
    last = max(begin, end - SAMPLE_BYTES)
    return sorted({begin + (last - begin) * index // (count - 1) for index in range(count)})


def _add(digest: blake2b, *parts: bytes) -> None:
    """Each part with its length, so that no two sequences of parts are the same to the digest."""
    for part in parts:
        digest.update(_LENGTH.pack(len(part)))
        digest.update(part)
