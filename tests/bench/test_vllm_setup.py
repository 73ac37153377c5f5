"""What engines of the vLLM benchmark are made of."""

from __future__ import annotations

import json
import os
import socket
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import kvkeep
from kvkeep.bench import vllm_setup
from kvkeep.bench.vllm_setup import (
    LLAMA_8B,
    SMALL_LLAMA,
    ServedModel,
    Stored,
    arguments,
    connector,
    environment,
    given_model,
    own_model,
)
from kvkeep.errors import KVKeepError, SettingsError, Unavailable
from kvkeep.testing.process import ServerProcess

TINY = SMALL_LLAMA | {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "head_dim": 8,
    "vocab_size": 64,
}
MODEL = ServedModel("somewhere", "a model", "cpu", vocab_size=64, kv_token_bytes=1 << 20)


# -- models


def test_the_small_model_is_a_whole_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    monkeypatch.setattr(vllm_setup, "SMALL_LLAMA", TINY)
    made = own_model(tmp_path, "cpu")
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    first, second = (loaded(torch.tensor([[at, 5, 6, 7]])).logits[0, -1] for at in (1, 2))
    assert not torch.allclose(first, second), "a token changes what comes after"
    weights = sum(each.numel() for name, each in loaded.named_parameters() if "norm" not in name)
    assert made.weight_bytes == 4 * weights
    assert made.kv_token_bytes == 2 * 2 * 2 * 8 * 4 and made.block_tokens == 32 and not made.dummy
    assert (
        made.description
        == "small Llama, random weights, 2 layers, hidden size 32, 0.25 KiB of KV a token, float32"
    )


def test_on_a_gpu_only_the_geometry_is_made(tmp_path: Path) -> None:
    made = own_model(tmp_path, "cuda")
    assert [each.name for each in tmp_path.iterdir()] == ["config.json"]
    assert json.loads((tmp_path / "config.json").read_text()) == LLAMA_8B
    assert made.dummy and made.kv_token_bytes == 128 << 10 and made.block_tokens == 16
    assert "dummy weights" in made.description
    assert 2 * 8.0e9 < made.weight_bytes < 2 * 8.1e9


def test_a_given_model_is_read(tmp_path: Path) -> None:
    inner = {
        name: value
        for name, value in TINY.items()
        if name not in ("head_dim", "num_key_value_heads")
    }
    (tmp_path / "config.json").write_text(json.dumps({"text_config": inner}))
    for name, size in (
        ("a-of-2.safetensors", 100),
        ("b-of-2.safetensors", 23),
        ("tokenizer.json", 7),
    ):
        (tmp_path / name).write_bytes(bytes(size))
    made = given_model(str(tmp_path), "cuda")
    assert made.weight_bytes == 123
    (tmp_path / "pytorch_model.bin").write_bytes(bytes(1000))
    assert given_model(str(tmp_path), "cuda").weight_bytes == 123, "the same weights once more"
    for file in tmp_path.glob("*.safetensors"):
        file.unlink()
    assert given_model(str(tmp_path), "cuda").weight_bytes == 1000
    assert made.vocab_size == 64 and made.kv_token_bytes == 2 * 2 * 8 * 4 * 2 and not made.dummy


@pytest.mark.parametrize("text", [None, "{", "[]", "{}", '{"hidden_size": "a"}'])
def test_a_model_that_cannot_be_used_is_named(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(SettingsError, match="--model"):
        given_model(str(tmp_path), "cpu")


# -- arguments and environment


def test_engines_on_a_gpu_share_its_memory() -> None:
    on_cpu = arguments(MODEL, 2000, 2, {"kv_transfer_config": {}})
    assert (
        on_cpu["dtype"] == "float32"
        and on_cpu["block_size"] == 32
        and on_cpu["max_model_len"] > 2000
    )
    assert (
        "gpu_memory_utilization" not in on_cpu
        and "load_format" not in on_cpu
        and "kv_transfer_config" in on_cpu
    )
    on_gpu = ServedModel("somewhere", "a model", "cuda", 64, 1 << 20, dummy=True)
    assert arguments(on_gpu, 2000, 2, {})["gpu_memory_utilization"] == 0.425
    assert arguments(on_gpu, 2000, 1, {})["load_format"] == "dummy"


def test_what_the_caller_says_to_vllm_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVKEEP_POOL_SIZE", "1GiB")
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    made = environment(MODEL, 2000)
    assert "KVKEEP_POOL_SIZE" not in made and made["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert int(made["VLLM_CPU_KVCACHE_SPACE"]) == 9, "four prompts of about 2 GiB, in whole GiB"
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "ERROR")
    levels = [
        environment(replace(MODEL, device=device), 2000)["VLLM_LOGGING_LEVEL"]
        for device in ("cpu", "cuda")
    ]
    assert levels == ["ERROR", "INFO"], "on a GPU an engine says there that it is ready"


# -- connectors


def test_a_connector_of_ours_has_a_server_and_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_setup, "Stored", partial(vllm_setup.Stored, within_s=0.2))
    with connector("kvkeep", 64 << 20, replace(MODEL, device="cuda")) as way:
        config = way.arguments["kv_transfer_config"]
        assert {
            name: config[name] for name in ("kv_connector", "kv_role", "kv_connector_module_path")
        } == {
            "kv_connector": "KVKeepConnector",
            "kv_role": "kv_both",
            "kv_connector_module_path": "kvkeep.vllm",
        }
        address = config["kv_connector_extra_config"]["kvkeep.address"]
        with kvkeep.connect(
            address, model="m", revision="1", block_tokens=16, block_shape=(4,), dtype="float32"
        ) as cache:
            for turn in (1, 2):
                with pytest.raises(Unavailable, match=r"of .* blocks after 0.2 s"):
                    way.settle(65)
                cache.put([turn * 100 + at for at in range(64)], np.ones((4, 4), "float32"))
                way.settle(65)
    with connector("kvkeep", 64 << 20, MODEL) as on_a_cpu:
        assert way.ready_when and not on_a_cpu.ready_when, (
            "only a GPU's driver must be told of the pool"
        )


def test_a_server_that_is_gone_is_missed() -> None:
    with ServerProcess("--pool-size", "16MiB") as server:
        assert server.ask()["name"] == server.name
    with pytest.raises(Unavailable, match="does not answer"):
        Stored(server).wait(4, 17)


def test_without_a_connector_nothing_is_added() -> None:
    with connector("none", 1, MODEL) as way:
        assert way.arguments == {} and way.counting == ""
        way.settle(2000)


def test_native_offload_gets_as_much_memory() -> None:
    with connector("native", 5 << 30, MODEL) as way:
        assert way.arguments == {"kv_offloading_backend": "native", "kv_offloading_size": 5}


LMCACHE = """
import socket, sys, time
def main():
    words = sys.argv[1:]
    assert words[0] == "server" and words[words.index("--l1-size-gb") + 1] == "3", words
    {}
    with socket.create_server(("127.0.0.1", int(words[words.index("--port") + 1]))) as listening:
        time.sleep(600)
"""


@pytest.fixture
def lmcache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of a stub of LMCache's server."""
    (tmp_path / "lmcache" / "cli").mkdir(parents=True)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    return tmp_path / "lmcache" / "cli" / "main.py"


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_the_peer_has_its_own_server(lmcache: Path) -> None:
    lmcache.write_text(LMCACHE.format(""))
    with connector("lmcache", 3 << 30, MODEL) as way:
        config = way.arguments["kv_transfer_config"]
        port = config["kv_connector_extra_config"]["lmcache.mp.port"]
        assert config["kv_connector"] == "LMCacheMPConnector" and listens(port)
    assert not listens(port)


def test_a_peer_whose_server_ends_says_why(lmcache: Path) -> None:
    lmcache.write_text(LMCACHE.format("sys.exit('no memory')"))
    with (
        pytest.raises(KVKeepError, match=r"(?s)does not listen.*no memory"),
        connector("lmcache", 3 << 30, MODEL),
    ):
        pass
