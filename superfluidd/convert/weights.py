"""Tensors of a llama GGUF under the names and in the order that mlx-lm's llama has."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx

from superfluidd.errors import ModelFileError

ONCE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
IN_LAYER = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
PARTS = ("weight", "scales", "biases", "bias")

_NAME = re.compile(r"(?:blk\.(?P<layer>\d+)\.)?(?P<name>[a-z_0-9]+)\.(?P<part>\w+)")

Arrays = dict[str, Any]
Metadata = dict[str, Any]


def load(path: Path) -> tuple[Arrays, Metadata]:
    """All tensors, and the metadata as plain values.

    Raises:
        ModelFileError: MLX cannot read the file.
    """
    try:
        found: Any = mx.load(str(path), format="gguf", return_metadata=True)
    except (RuntimeError, ValueError) as error:
        raise ModelFileError(f"{path}: MLX cannot read it: {error}") from error
    arrays, metadata = found
    return arrays, {key: plain(value) for key, value in metadata.items()}


def plain(value: Any) -> Any:
    """Metadata comes as arrays of one element, or of many."""
    return value.tolist() if isinstance(value, mx.array) else value


def convert(arrays: Arrays, metadata: Metadata, path: Path) -> tuple[Arrays, dict[str, Any]]:
    """Tensors by their new names, and ``config.json``.

    Raises:
        ModelFileError: there is something that mlx-lm's llama has no place for.
    """
    heads = int(metadata["llama.attention.head_count"])
    kv_heads = int(metadata.get("llama.attention.head_count_kv", heads))
    found: Arrays = {}
    for name, array in arrays.items():
        new, kind = _rename(name, path)
        if kind in ("attn_q", "attn_k"):
            array = unpermute(array, heads if kind == "attn_q" else kv_heads)
        found[new] = array
    return found, config(found, metadata, path)


def save(arrays: Arrays, path: Path) -> None:
    """Write them, with the mark that mlx-lm looks for."""
    mx.save_safetensors(str(path), arrays, metadata={"format": "mlx"})


def _rename(name: str, path: Path) -> tuple[str, str]:
    match = _NAME.fullmatch(name)
    if match is not None and match["part"] in PARTS:
        table = ONCE if match["layer"] is None else IN_LAYER
        if match["name"] in table:
            layer = "" if match["layer"] is None else f"model.layers.{match['layer']}."
            return f"{layer}{table[match['name']]}.{match['part']}", match["name"]
    why = "a mixture of experts" if "exps" in name or "gate_inp" in name else "a part that no plain llama has"
    raise ModelFileError(
        f"{path} has tensor {name!r}: {why} cannot be converted. Download the model in MLX's format, or serve the GGUF "
        "with llama.cpp"
    )


def unpermute(array: Any, heads: int) -> Any:
    """Rows of a query or key projection, back from llama.cpp's order of rotary pairs (halves side by side in each
    head) to that of mlx-lm (one half after the other). Rows only: packed columns stay as they are."""
    rows = array.shape[0]
    return array.reshape(heads, rows // heads // 2, 2, -1).swapaxes(1, 2).reshape(array.shape)


def config(arrays: Mapping[str, Any], metadata: Metadata, path: Path) -> dict[str, Any]:
    """``config.json``."""
    scaling = metadata.get("llama.rope.scaling.type")
    if scaling not in (None, "none", "linear"):
        raise ModelFileError(f"{path} scales its positions by {scaling!r}, which cannot be converted")
    width, heads = int(metadata["llama.embedding_length"]), int(metadata["llama.attention.head_count"])
    head = int(metadata.get("llama.attention.key_length", width // heads))
    embedding = arrays["model.embed_tokens.weight"]
    made: dict[str, Any] = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": width,
        "num_hidden_layers": int(metadata["llama.block_count"]),
        "intermediate_size": int(metadata["llama.feed_forward_length"]),
        "num_attention_heads": heads,
        "num_key_value_heads": int(metadata.get("llama.attention.head_count_kv", heads)),
        "head_dim": head,
        "rms_norm_eps": float(metadata["llama.attention.layer_norm_rms_epsilon"]),
        "vocab_size": int(embedding.shape[0]),
        "max_position_embeddings": int(metadata["llama.context_length"]),
        "rope_theta": float(metadata.get("llama.rope.freq_base", 10000.0)),
        "tie_word_embeddings": "lm_head.weight" not in arrays,
        "attention_bias": any(name.endswith("q_proj.bias") for name in arrays),
        "mlp_bias": any(name.endswith("up_proj.bias") for name in arrays),
    }
    for key in ("bos", "eos"):
        if f"tokenizer.ggml.{key}_token_id" in metadata:
            made[f"{key}_token_id"] = int(metadata[f"tokenizer.ggml.{key}_token_id"])
    if scaling == "linear":
        made["rope_scaling"] = {"type": "linear", "factor": float(metadata["llama.rope.scaling.factor"])}
    if quantization := quantized(arrays):
        made["quantization"] = quantization
    return made


def quantized(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """The commonest quantization, and by name those of the tensors that have another; empty if none is quantized."""
    found: dict[str, tuple[int, int]] = {}
    for name, scales in arrays.items():
        if name.endswith(".scales"):
            module = name.removesuffix(".scales")
            # 32 bits a word, and 32 weights a scale: what GGUF's Q4_0, Q4_1 and Q8_0 have.
            bits = arrays[f"{module}.weight"].shape[-1] * 32 // (scales.shape[-1] * 32)
            found[module] = 32, bits
    if not found:
        return {}
    (commonest, _), *_ = Counter(found.values()).most_common(1)
    others = {name: _named(*kind) for name, kind in found.items() if kind != commonest}
    return _named(*commonest) | others


def _named(group: int, bits: int) -> dict[str, int]:
    return {"group_size": group, "bits": bits}
