"""A model directory of 100,000 random weights, always the same: llama architecture, byte-level tokenizer, ChatML."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from superfluidd.engine.tokenizer_json import byte_level_alphabet

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
VOCABULARY = 256 + len(SPECIALS)
WIDTH, LAYERS, HEADS, KV_HEADS, INNER = 64, 2, 4, 2, 128
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 2048,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "eos_token_id": 256,
}


def tokenizer() -> dict[str, Any]:
    """The contents of its ``tokenizer.json``."""
    names = {byte: char for char, byte in byte_level_alphabet().items()}
    vocabulary = {names[byte]: byte for byte in range(256)}
    added = [
        {"id": 256 + index, "content": text, "special": True}
        | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        for index, text in enumerate(SPECIALS)
    ]
    return {
        "version": "1.0",
        "added_tokens": added,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "vocab": vocabulary | {one["content"]: one["id"] for one in added}, "merges": []},
    }


def weights(seed: int = 1) -> dict[str, np.ndarray[Any, np.dtype[np.float32]]]:
    """Random weights, float32: large enough that no two tokens are nearly as likely as each other."""
    chance = np.random.default_rng(seed)

    def matrix(rows: int, columns: int, scale: float) -> np.ndarray[Any, np.dtype[np.float32]]:
        return (chance.standard_normal((rows, columns)) * scale).astype(np.float32)

    ones = np.ones(WIDTH, dtype=np.float32)
    embedding = matrix(VOCABULARY, WIDTH, 1.0)
    embedding[256:] *= 0.05  # so that it never ends on its own
    found = {"model.embed_tokens.weight": embedding, "model.norm.weight": ones}
    narrow = WIDTH // HEADS * KV_HEADS
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        for name, rows, columns in (
            ("self_attn.q_proj", WIDTH, WIDTH),
            ("self_attn.k_proj", narrow, WIDTH),
            ("self_attn.v_proj", narrow, WIDTH),
            ("self_attn.o_proj", WIDTH, WIDTH),
            ("mlp.gate_proj", INNER, WIDTH),
            ("mlp.up_proj", INNER, WIDTH),
            ("mlp.down_proj", WIDTH, INNER),
        ):
            found[f"{at}{name}.weight"] = matrix(rows, columns, 0.35)
        found[f"{at}input_layernorm.weight"] = found[f"{at}post_attention_layernorm.weight"] = ones
    return found


def write(directory: Path, config: dict[str, Any] | None = None, **settings: Any) -> Path:
    """Write the model.

    Args:
        directory: made if missing.
        config: changes of ``config.json``.
        settings: changes of ``tokenizer_config.json``.
    """
    from safetensors.numpy import save_file

    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(CONFIG | (config or {})))
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer()))
    chosen = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "chat_template": TEMPLATE} | settings
    (directory / "tokenizer_config.json").write_text(json.dumps(chosen))
    save_file(weights(), directory / "model.safetensors", metadata={"format": "mlx"})
    return directory


GEMMA: dict[str, Any] = {
    "model_type": "gemma3_text",
    "hidden_size": WIDTH,
    "num_hidden_layers": 4,
    "intermediate_size": INNER,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "query_pre_attn_scalar": 16,
    "vocab_size": VOCABULARY,
    "sliding_window": 16,
    "sliding_window_pattern": 2,
    "max_position_embeddings": 2048,
}
"""Every other layer looks back at 16 tokens."""

MAMBA: dict[str, Any] = {
    "model_type": "mamba",
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "state_size": 8,
    "num_hidden_layers": 2,
    "conv_kernel": 4,
    "use_bias": False,
    "use_conv_bias": True,
    "time_step_rank": 4,
}
"""No layer has keys and values: all keep a state."""


def build(directory: Path, config: dict[str, Any], *, bits: int = 0, half: bool = False) -> Path:
    """Write a model of any architecture that mlx-lm has, with random weights that are always the same.

    Args:
        directory: made if missing.
        config: its ``config.json``.
        bits: quantize to so many, in groups of 32.
        half: numbers are bfloat16.
    """
    import mlx.core as mx
    import mlx.nn as nn
    from mlx.utils import tree_flatten, tree_map
    from mlx_lm.utils import _get_classes

    from superfluidd.engine.runtimes import mlx as _  # noqa: F401  (chooses the BLAS)

    write(directory)
    model_class, arguments = _get_classes(config)
    mx.random.seed(7)
    model = model_class(arguments.from_dict(config))
    # As they are made, random weights say the same thing for ever.
    model.update(tree_map(lambda array: array * (3.0 if array.ndim > 1 else 1.0), model.parameters()))
    if half:
        model.set_dtype(mx.bfloat16)
    config = dict(config)
    if bits:
        config["quantization"] = {"group_size": 32, "bits": bits}
        nn.quantize(model, group_size=32, bits=bits)
    mx.save_safetensors(str(directory / "model.safetensors"), dict(tree_flatten(model.parameters())))
    (directory / "config.json").write_text(json.dumps(config))
    return directory
