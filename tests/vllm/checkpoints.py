"""Tiny models that vLLM runs on a CPU, with weights that are random but real.

python checkpoints.py DIRECTORY      saves them all, each in a directory of its name

Dummy weights are no oracle: with them garbage in the KV cache gives the same tokens. These are
drawn wide enough that a block of zeros changes the answer, which test_connector_equality shows."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

VOCAB = 768
_SHARED: dict[str, Any] = {
    "vocab_size": VOCAB,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "max_position_embeddings": 4096,
    "initializer_range": 0.15,
    "dtype": "float32",
}
_SLIDING, _FULL, _CONV = "sliding_attention", "full_attention", "conv"

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {  # grouped queries; two KV heads, so that two ranks have one each
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 192,
        "intermediate_size": 320,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "num_hidden_layers": 3,
        "head_dim": 32,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    },
    "mla": {  # all layers are dense: none reaches an expert
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "hidden_size": 192,
        "intermediate_size": 320,
        "moe_intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "num_hidden_layers": 2,
        "first_k_dense_replace": 2,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "q_lora_rank": None,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 64,
        "v_head_dim": 64,
        "topk_method": "greedy",
        "n_group": 1,
        "topk_group": 1,
        "tie_word_embeddings": False,
    },
    "gemma3": {  # windows of two blocks, in two groups that share their memory with the full one
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_size": 192,
        "intermediate_size": 320,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 6,
        "head_dim": 32,
        "query_pre_attn_scalar": 32,
        "sliding_window": 64,
        "layer_types": [_SLIDING, _SLIDING, _FULL, _SLIDING, _SLIDING, _FULL],
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
    },
    "lfm2": {  # short convolutions keep a state instead of KV
        "architectures": ["Lfm2ForCausalLM"],
        "model_type": "lfm2",
        "hidden_size": 192,
        "intermediate_size": 384,
        "block_ff_dim": 384,
        "block_multiple_of": 64,
        "block_auto_adjust_ff_dim": False,
        "conv_dim": 192,
        "conv_dim_out": 192,
        "block_dim": 192,
        "block_ffn_dim_multiplier": 1.0,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "num_hidden_layers": 4,
        "layer_types": [_CONV, _FULL, _CONV, _FULL],
        "conv_L_cache": 4,
        "conv_bias": False,
        "norm_eps": 1e-5,
        "tie_word_embeddings": True,
    },
    "gptoss": {  # windows in every other layer, attention sinks, experts
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "hidden_size": 128,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 4,
        "head_dim": 64,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 64,
        "layer_types": [_SLIDING, _FULL, _SLIDING, _FULL],
        "initial_context_length": 4096,
        "tie_word_embeddings": False,
    },
}


def save(name: str, directory: Path, seed: int = 7) -> Path:
    """A checkpoint of this model in this directory: config and weights, always the same for a
    seed."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps({**_SHARED, **CONFIGS[name]}))
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.from_pretrained(directory), dtype=torch.float32
    )
    if (
        name == "gemma3"
    ):  # otherwise the embedding of the last token, which is also the head, drowns everything before it
        for weights_name, weights in model.named_parameters():
            if (
                "post_attention_layernorm" in weights_name
                or "post_feedforward_layernorm" in weights_name
            ):
                torch.nn.init.constant_(weights, 20.0)
    model.save_pretrained(directory)
    return directory


def main(directory: str) -> None:
    for name in CONFIGS:
        save(name, Path(directory) / name)


if __name__ == "__main__":
    main(*sys.argv[1:])
