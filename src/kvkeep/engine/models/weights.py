"""The numbers of a model: drawn from a seed, or read from a Hugging Face checkpoint.

Both go by the Hugging Face parameter names, and both carry a fingerprint, which stands for the
weights in the identity of every KV block: KV computed with other weights is never taken for one's
own."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path

import torch

from kvkeep.engine.models.settings import ModelSettings
from kvkeep.errors import SettingsError

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
READ_BYTES = 1 << 20

# Random attention over a long context is nearly an average, which hardly changes with the context.
# Queries this much longer make it pick a few tokens, as trained models do, so that wrong KV gives
# other tokens.
QUERY_GAIN = 4.0
# below what layers add, or a model with tied embeddings would repeat its last token for ever
EMBEDDING_STD = 0.3


@dataclass(frozen=True)
class Weights:
    """Tensors by their Hugging Face names, all of one dtype and on one device, and what identifies
    them."""

    tensors: Mapping[str, torch.Tensor]
    fingerprint: str

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.tensors[name]


def random_weights(
    settings: ModelSettings,
    seed: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Weights:
    """Weights that are a function of settings and seed, bit by bit on any machine, then rounded to
    `dtype`."""
    _check_dtype(dtype)
    tensors = {
        name: _random_tensor(name, shape, seed).to(device, dtype)
        for name, shape in parameter_shapes(settings).items()
    }
    return Weights(tensors, f"random-{_digest_of(settings, seed).hexdigest()}")


def _random_tensor(name: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    digest = blake2b(f"{seed} {name}".encode(), digest_size=7, person=b"kvkeep.weights").digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
    # Evenly spread numbers are exact fractions. Normal ones need a logarithm, which differs between
    # processors.
    unit = torch.rand(shape, generator=generator, dtype=torch.float32) * 2 - 1
    parameter = name.rpartition(".")[0].rpartition(".")[2]
    if parameter == "embed_tokens":
        return unit * (EMBEDDING_STD * math.sqrt(3))
    gain = QUERY_GAIN if parameter in ("q_proj", "q_b_proj", "q_norm") else 1.0
    if "norm" in parameter:
        return (1 + unit * 0.1) * gain
    if name.endswith(".bias"):
        return unit
    # what goes in with variance 1 comes out with gain²
    return unit * (gain * math.sqrt(3 / shape[-1]))


def load_weights(
    directory: Path, settings: ModelSettings, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> Weights:
    """Reads a checkpoint, casts it, and fingerprints it from the settings and every byte of its
    files.

    SettingsError, naming tensor and file, unless the checkpoint holds exactly what `settings` ask
    for."""
    _check_dtype(dtype)
    files = _checkpoint_files(directory)
    shapes = parameter_shapes(settings)
    tensors: dict[str, torch.Tensor] = {}
    unused: dict[str, torch.Tensor] = {}
    for file in files:
        for name, tensor in _read_tensors(file):
            if name in tensors or name in unused:
                raise _refusal(directory, f"{name} occurs twice, again in {file.name}")
            if name in shapes:
                _check_tensor(file, name, tensor, shapes[name])
                # Copied, never a view of the file: somebody may write over the checkpoint while we
                # serve.
                tensors[name] = tensor.to(device, dtype, copy=True)
            else:
                unused[name] = tensor
    if missing := sorted(set(shapes) - set(tensors)):
        raise _refusal(directory, f"{len(missing)} tensors are missing, the first is {missing[0]}")
    _check_unused(directory, settings, tensors, unused)
    return Weights(tensors, _fingerprint(settings, files))


def parameter_shapes(settings: ModelSettings) -> dict[str, tuple[int, ...]]:
    """Every tensor of the model: its Hugging Face name, and its shape (outputs first)."""
    hidden, wide = settings.hidden_size, settings.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (settings.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not settings.tie_word_embeddings:
        shapes["lm_head.weight"] = (settings.vocab_size, hidden)
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (wide, hidden),
        "mlp.up_proj.weight": (wide, hidden),
        "mlp.down_proj.weight": (hidden, wide),
    }
    attention = _gqa_shapes(settings) if settings.kind == "gqa" else _mla_shapes(settings)
    layer |= {f"self_attn.{name}": shape for name, shape in attention.items()}
    for number in range(settings.num_layers):
        shapes |= {f"model.layers.{number}.{name}": shape for name, shape in layer.items()}
    return shapes


def _gqa_shapes(settings: ModelSettings) -> dict[str, tuple[int, ...]]:
    queries, keys = (
        settings.num_heads * settings.head_dim,
        settings.num_kv_heads * settings.head_dim,
    )
    shapes: dict[str, tuple[int, ...]] = {
        "q_proj.weight": (queries, settings.hidden_size),
        "k_proj.weight": (keys, settings.hidden_size),
        "v_proj.weight": (keys, settings.hidden_size),
        "o_proj.weight": (settings.hidden_size, queries),
    }
    if settings.qkv_bias:
        shapes |= {"q_proj.bias": (queries,), "k_proj.bias": (keys,), "v_proj.bias": (keys,)}
    if settings.qk_norm:
        shapes |= {"q_norm.weight": (settings.head_dim,), "k_norm.weight": (settings.head_dim,)}
    return shapes


def _mla_shapes(settings: ModelSettings) -> dict[str, tuple[int, ...]]:
    hidden, heads, latent = settings.hidden_size, settings.num_heads, settings.kv_lora_rank
    queries = heads * (settings.qk_nope_head_dim + settings.qk_rope_head_dim)
    shapes: dict[str, tuple[int, ...]] = {
        "kv_a_proj_with_mqa.weight": (latent + settings.qk_rope_head_dim, hidden),
        "kv_a_layernorm.weight": (latent,),
        "kv_b_proj.weight": (heads * (settings.qk_nope_head_dim + settings.v_head_dim), latent),
        "o_proj.weight": (hidden, heads * settings.v_head_dim),
    }
    if settings.q_lora_rank is None:
        return shapes | {"q_proj.weight": (queries, hidden)}
    return shapes | {
        "q_a_proj.weight": (settings.q_lora_rank, hidden),
        "q_a_layernorm.weight": (settings.q_lora_rank,),
        "q_b_proj.weight": (queries, settings.q_lora_rank),
    }


# --- reading a checkpoint -------------------------------------------------------------------------


def _checkpoint_files(directory: Path) -> list[Path]:
    """The index names the files where there is one; other files beside them can be the same weights
    in other forms."""
    index = directory / "model.safetensors.index.json"
    if index.exists():
        try:
            names = {str(name) for name in json.loads(index.read_bytes())["weight_map"].values()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise _refusal(directory, f"{index.name} cannot be read: {error!r}") from error
        for name in names:
            # unlike Path's, it never raises
            if Path(name).name != name or not os.path.isfile(directory / name):
                raise _refusal(directory, f"{index.name} names {name[:200]!r}, which is not there")
        return sorted(directory / name for name in names)
    single = directory / "model.safetensors"
    files = [single] if single.exists() else sorted(directory.glob("*.safetensors"))
    if not files:
        raise _refusal(directory, "there are no *.safetensors")
    return files


def _read_tensors(file: Path) -> Iterator[tuple[str, torch.Tensor]]:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise SettingsError(
            "reading a checkpoint needs safetensors", "pip install safetensors"
        ) from error
    try:
        with safe_open(file, framework="pt", device="cpu") as content:
            for name in content.keys():  # noqa: SIM118  # it is no mapping
                yield name, content.get_tensor(name)
    except (OSError, SafetensorError) as error:
        raise _refusal(file.parent, f"{file.name} cannot be read: {error}") from error


def _check_tensor(file: Path, name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape:
        raise _refusal(
            file.parent,
            f"{name} in {file.name} is {tuple(tensor.shape)}, the config asks for {shape}",
        )
    if tensor.dtype not in DTYPES:
        raise _refusal(
            file.parent,
            f"{name} in {file.name} is {tensor.dtype}: quantized weights are not supported",
        )


def _check_unused(
    directory: Path,
    settings: ModelSettings,
    tensors: Mapping[str, torch.Tensor],
    unused: Mapping[str, torch.Tensor],
) -> None:
    """Two leftovers are harmless: stored rotary frequencies, and a head equal to the embeddings it
    is tied to."""
    for name, tensor in sorted(unused.items()):
        if name.endswith(".rotary_emb.inv_freq"):
            continue
        if name == "lm_head.weight" and settings.tie_word_embeddings:
            embeddings = tensors["model.embed_tokens.weight"]
            if torch.equal(tensor.to(embeddings.device, embeddings.dtype), embeddings):
                continue
            raise _refusal(
                directory, f"{name} differs from the embeddings, but tie_word_embeddings is true"
            )
        raise _refusal(
            directory,
            f"{name} is not a tensor of a model with {settings.num_layers} layers of this kind",
        )


def _fingerprint(settings: ModelSettings, files: list[Path]) -> str:
    digest = _digest_of(settings, "checkpoint")
    for file in files:
        digest.update(f"{file.name} {file.stat().st_size} ".encode())
        with file.open("rb") as content:
            while block := content.read(READ_BYTES):
                digest.update(block)
    return digest.hexdigest()


def _digest_of(settings: ModelSettings, source: object) -> blake2b:
    text = json.dumps([asdict(settings), source], sort_keys=True)
    return blake2b(text.encode(), digest_size=16, person=b"kvkeep.weights")


def _check_dtype(dtype: torch.dtype) -> None:
    if dtype not in DTYPES:
        raise SettingsError(
            f"models do not compute in {dtype}",
            "choose " + ", ".join(str(known) for known in DTYPES),
        )


def _refusal(directory: Path, problem: str) -> SettingsError:
    return SettingsError(
        f"checkpoint {directory}: {problem}",
        "its files must match its config.json, nothing less or more",
    )
