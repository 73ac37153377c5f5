"""What an engine of the vLLM benchmark is made of: a model, arguments of `vllm.LLM`, an
environment, and a connector with the server that it speaks to. vLLM itself is not imported here."""

from __future__ import annotations

import json
import math
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from kvkeep.errors import KVKeepError, SettingsError, Unavailable
from kvkeep.gpu.registration import POOL_REGISTERED
from kvkeep.testing.process import ServerProcess
from kvkeep.units import GIB, MIB

BLOCK_TOKENS = {"cpu": 32, "cuda": 16}  # what vLLM takes on each
GPU_SHARE = 0.85  # of its memory, for engines
SPARE_TOKENS = 64  # room for an answer behind the longest prompt
_LMCACHE_WITHIN_S = 120.0

# -- models

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
    "max_position_embeddings": 131072,
}
# Computes 2,000 tokens in about a second on two cores.
SMALL_LLAMA = LLAMA | {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 4096,
    "torch_dtype": "float32",
}
LLAMA_8B = LLAMA | {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "torch_dtype": "bfloat16",
}


@dataclass(frozen=True)
class ServedModel:
    """A checkpoint's folder and what must be known of it."""

    path: str
    description: str
    device: str
    vocab_size: int
    kv_token_bytes: int
    dummy: bool = False
    weight_bytes: int = 0

    @property
    def block_tokens(self) -> int:
        return BLOCK_TOKENS[self.device]


def own_model(folder: Path, device: str) -> ServedModel:
    """On a CPU a small Llama with weights from a seed. On a GPU only the geometry of one with 8
    billion parameters: vLLM makes up the weights, which is good enough for times, and proves little
    about tokens."""
    config = SMALL_LLAMA if device == "cpu" else LLAMA_8B
    (folder / "config.json").write_text(json.dumps(config))
    if device == "cpu":
        _save_weights(folder, config)
    kind = "small Llama, random weights" if device == "cpu" else "Llama 8B geometry, dummy weights"
    weight_bytes = sum(map(math.prod, _shapes(config).values())) * (4 if device == "cpu" else 2)
    return _served(str(folder), kind, config, device, weight_bytes, dummy=device != "cpu")


def given_model(path: str, device: str) -> ServedModel:
    """A checkpoint on this machine."""
    try:
        config = json.loads((Path(path) / "config.json").read_text())
        files = [
            file
            for kind in ("safetensors", "bin", "pt", "pth")
            for file in Path(path).glob(f"*.{kind}")
        ]
        weight_bytes = sum(file.stat().st_size for file in files if file.suffix == files[0].suffix)
        return _served(
            path, path, config.get("text_config", config), device, weight_bytes, dummy=False
        )
    except (OSError, ValueError, AttributeError) as error:
        raise SettingsError(
            f'--model "{path}": no checkpoint: {error}', "name a folder with a config.json"
        ) from None
    except (KeyError, TypeError) as error:
        raise SettingsError(
            f'--model "{path}": its config.json cannot be used: {error!r}'
        ) from None


def _served(
    path: str, kind: str, config: Mapping[str, Any], device: str, weight_bytes: int, *, dummy: bool
) -> ServedModel:
    layers, hidden_size, heads = (
        config[name] for name in ("num_hidden_layers", "hidden_size", "num_attention_heads")
    )
    head_bytes = (config.get("head_dim") or hidden_size // heads) * (4 if device == "cpu" else 2)
    kv_token_bytes = 2 * layers * (config.get("num_key_value_heads") or heads) * head_bytes
    said = f"{kind}, {layers} layers, hidden size {hidden_size}, {kv_token_bytes / 1024:g} KiB of KV a token, "
    vocab_size = config["vocab_size"]
    return ServedModel(
        path, said + _dtype(device), device, vocab_size, kv_token_bytes, dummy, weight_bytes
    )


def _dtype(device: str) -> str:
    # not every CPU has the instructions for the latter
    return "float32" if device == "cpu" else "bfloat16"


def _shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Of a Llama's matrices, all but the norms."""
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    q_size, kv_size = (
        config[f"num_{kind}_heads"] * config["head_dim"] for kind in ("attention", "key_value")
    )
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens": (vocab, hidden),
        "lm_head": (vocab, hidden),
    }
    for layer in range(config["num_hidden_layers"]):
        attention, mlp = f"model.layers.{layer}.self_attn", f"model.layers.{layer}.mlp"
        shapes |= {f"{attention}.q_proj": (q_size, hidden), f"{attention}.o_proj": (hidden, q_size)}
        shapes |= {f"{attention}.{name}_proj": (kv_size, hidden) for name in "kv"}
        shapes |= {f"{mlp}.{name}_proj": (inner, hidden) for name in ("gate", "up")}
        shapes |= {f"{mlp}.down_proj": (hidden, inner)}
    return shapes


def _save_weights(folder: Path, config: Mapping[str, Any]) -> None:
    """Random, and large enough that another token before changes the ones after it."""
    import torch
    from safetensors.torch import save_file

    norms = ["model.norm"] + [
        f"model.layers.{layer}.{name}_layernorm"
        for layer in range(config["num_hidden_layers"])
        for name in ("input", "post_attention")
    ]
    random = torch.Generator().manual_seed(0)
    shapes = _shapes(config).items()
    weights = {
        f"{name}.weight": torch.randn(*shape, generator=random) * 0.1 for name, shape in shapes
    }
    weights |= {f"{name}.weight": torch.ones(config["hidden_size"]) for name in norms}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


# -- what an engine is made with


def arguments(
    model: ServedModel, longest_prompt: int, engines: int, extra: Mapping[str, Any]
) -> dict[str, Any]:
    """Those of `vllm.LLM`. `engines` share the device."""
    made: dict[str, Any] = {
        "model": model.path,
        "dtype": _dtype(model.device),
        "block_size": model.block_tokens,
        "max_model_len": longest_prompt + SPARE_TOKENS,
        "enforce_eager": True,
        "skip_tokenizer_init": True,
        "enable_prefix_caching": True,
        "seed": 0,
    }
    if model.device == "cuda":
        made["gpu_memory_utilization"] = round(GPU_SHARE / engines, 3)
    if model.dummy:
        made["load_format"] = "dummy"
    return made | dict(extra)


def decoding_with_graphs(at_a_time: int, prompt_tokens: int) -> dict[str, Any]:
    """Steps that decode, of so many requests at most, are each started as one, also if they compute
    so many tokens of a prompt besides, or twice as many: a connector that finds whole chunks only
    leaves that much. Larger ones are computed as before: to have graphs of those, as it has by
    itself, vLLM compiles for minutes. Where attention can be in a graph only if there are no
    prompts, vLLM has graphs of steps that only decode."""
    sizes = [
        1,
        2,
        *range(4, at_a_time, 4),
        at_a_time,
        at_a_time + prompt_tokens,
        at_a_time + 2 * prompt_tokens,
    ]
    graphs = {"mode": 0, "cudagraph_mode": "FULL", "cudagraph_capture_sizes": sizes}
    return {"enforce_eager": False, "compilation_config": graphs}


def environment(model: ServedModel, longest_prompt: int) -> dict[str, str]:
    """Ours, without the caller's own kvkeep settings; what the caller says to vLLM itself goes
    before what we say."""
    ours = {"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "WARNING", "VLLM_NO_USAGE_STATS": "1"}
    if model.device == "cpu":
        kv_bytes = 4 * (longest_prompt + SPARE_TOKENS) * model.kv_token_bytes
        ours["VLLM_CPU_KVCACHE_SPACE"] = str(-(-kv_bytes // GIB))
        # Threads that spin after their work, for a second and more, would slow down the engine
        # whose turn is next.
        ours["OMP_WAIT_POLICY"], ours["KMP_BLOCKTIME"] = "PASSIVE", "0"
        # Left to itself vLLM takes a core away from an engine that has a connector, and from no
        # other.
        ours["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    theirs = {name: value for name, value in os.environ.items() if not name.startswith("KVKEEP_")}
    # On a GPU an engine says in its log when it is ready.
    return ours | theirs | ({"VLLM_LOGGING_LEVEL": "INFO"} if model.device == "cuda" else {})


# -- what connectors need


def _nothing_to_wait_for(prompt_tokens: int) -> None:
    """Of peers nothing is known but that vLLM keeps blocks until they are stored: then its cache
    can be dropped."""


@dataclass(frozen=True)
class Connector:
    """What an engine needs for it. `counting` names what vLLM returns in kv_transfer_params for
    tokens found; `settle(prompt_tokens)` returns when a prompt of that length, asked for the first
    time, is stored; `ready_when` is what the engine says in its log when its pool is as fast as it
    will be: peers are before they start."""

    arguments: dict[str, Any] = field(default_factory=dict)
    counting: str = ""
    settle: Callable[[int], None] = _nothing_to_wait_for
    ready_when: str = ""


@contextmanager
def connector(name: str, pool_bytes: int, model: ServedModel) -> Iterator[Connector]:
    """With the server that it speaks to, where it has one."""
    size_gib = -(-pool_bytes // GIB)
    match name:
        case "kvkeep":
            with ServerProcess("--pool-size", f"{pool_bytes // MIB}MiB") as server:
                config = kvkeep_arguments(server.address)
                settle = partial(Stored(server).wait, model.block_tokens)
                ready_when = POOL_REGISTERED if model.device == "cuda" else ""
                yield Connector(config, "num_kvkeep_extra_cached_tokens", settle, ready_when)
        case "lmcache":
            with _lmcache_server(size_gib) as port:
                where = {
                    "lmcache.mp.host": "tcp://127.0.0.1",
                    "lmcache.mp.port": port,
                    "lmcache.mp.mq_timeout": 20,
                }
                yield Connector(_transfer_config("LMCacheMPConnector", where, {}))
        case "native":
            yield Connector({"kv_offloading_backend": "native", "kv_offloading_size": size_gib})
        case _:
            yield Connector()


def kvkeep_arguments(address: str, extra: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """What an engine needs for our connector. `extra` are options of it."""
    options = {"kv_connector_module_path": "kvkeep.vllm"}
    return _transfer_config(
        "KVKeepConnector", {"kvkeep.address": address, **(extra or {})}, options
    )


def _transfer_config(name: str, extra: dict[str, Any], options: dict[str, str]) -> dict[str, Any]:
    config = {
        "kv_connector": name,
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
        **options,
    }
    return {"kv_transfer_config": config}


@dataclass
class Stored:
    """Waits until a server has the blocks of each prompt that was sent."""

    server: ServerProcess
    blocks: int = 0  # at the end of the last wait
    within_s: float = 60.0

    def wait(self, block_tokens: int, prompt_tokens: int) -> None:
        """The last token of a prompt is always computed, so a block that ends with it may be
        missing."""
        expected = self.blocks + (prompt_tokens - 1) // block_tokens
        until = time.monotonic() + self.within_s
        while (stored := self.count()) < expected:
            if time.monotonic() > until:
                raise Unavailable(
                    f"the server has {stored:,} of {expected:,} blocks after {self.within_s:g} s",
                    "the engine's log would say why: set VLLM_LOGGING_LEVEL=INFO",
                )
            time.sleep(0.02)
        self.blocks = stored

    def count(self) -> int:
        """0 while any is under way."""
        said = self.server.ask()
        return 0 if said["writes"] else int(said["counters"]["stored_blocks"])


@contextmanager
def _lmcache_server(size_gib: int) -> Iterator[int]:
    """LMCache's own server on a free port, which is given."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    command = [
        sys.executable,
        "-c",
        "import sys; from lmcache.cli.main import main; sys.exit(main())",
        "server",
    ]
    command += ["--host", "127.0.0.1", "--port", str(port), "--l1-size-gb", str(size_gib)]
    command += ["--eviction-policy", "LRU", "--no-l1-use-lazy"]
    with (
        tempfile.TemporaryFile("w+") as log,
        subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True) as server,
    ):
        try:
            until = time.monotonic() + _LMCACHE_WITHIN_S
            while not _listens(port):
                if server.poll() is not None or time.monotonic() > until:
                    log.seek(0)
                    raise KVKeepError(
                        f"LMCache's server does not listen. It said:\n{log.read()[-2000:]}"
                    )
                time.sleep(0.1)
            yield port
        finally:
            server.kill()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
