"""``tokenizer.json`` and ``tokenizer_config.json`` from a GGUF's metadata: byte-level BPE."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from superfluidd.errors import ModelFileError

CONTROL, USER_DEFINED = 3, 4
"""Types of tokens, as llama.cpp numbers them."""

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _byte_level(use_regex: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def _in_turn(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "pretokenizers": list(parts)}


PRE: dict[str, dict[str, Any]] = {
    "gpt-2": _byte_level(True),
    "smollm": _in_turn({"type": "Digits", "individual_digits": True}, _byte_level(True)),
    "llama-bpe": _in_turn(
        {"type": "Split", "pattern": {"Regex": LLAMA3}, "behavior": "Isolated", "invert": False}, _byte_level(False)
    ),
}
"""How a text is divided before it is encoded, by the name that the GGUF gives."""


def convert(metadata: dict[str, Any], path: Path) -> dict[str, Any]:
    """The contents of both files, by name.

    Raises:
        ModelFileError: the tokenizer is of a kind that is not known here.
    """
    model, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre", "gpt-2")
    if model != "gpt2" or pre not in PRE:
        raise ModelFileError(
            f"{path} has a tokenizer of kind {model!r}, {pre!r}; known are 'gpt2' with {', '.join(map(repr, PRE))}. "
            "Download the model in MLX's format, or serve the GGUF with llama.cpp"
        )
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    types: list[int] = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    added = [
        {"id": token, "content": text, "special": kind == CONTROL}
        | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        for token, (text, kind) in enumerate(zip(tokens, types, strict=True))
        if kind in (CONTROL, USER_DEFINED)
    ]
    made: dict[str, Any] = {
        "version": "1.0",
        "added_tokens": added,
        "pre_tokenizer": PRE[pre],
        "decoder": _byte_level(True),
        "model": {
            "type": "BPE",
            "vocab": {text: token for token, text in enumerate(tokens)},
            "merges": [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]],
            "ignore_merges": pre == "llama-bpe",
        },
    }
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    for key in ("bos", "eos"):
        token = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if token is not None and 0 <= token < len(tokens):
            settings[f"{key}_token"] = tokens[token]
    if metadata.get("tokenizer.ggml.add_bos_token") and "bos_token" in settings:
        made["post_processor"] = _with_bos(settings["bos_token"], metadata["tokenizer.ggml.bos_token_id"])
    if template := metadata.get("tokenizer.chat_template"):
        settings["chat_template"] = template
    return {"tokenizer.json": made, "tokenizer_config.json": settings}


def _with_bos(text: str, token: int) -> dict[str, Any]:
    bos, one, two = (
        {"SpecialToken": {"id": text, "type_id": 0}},
        *({"Sequence": {"id": name, "type_id": 0}} for name in "AB"),
    )
    return {
        "type": "TemplateProcessing",
        "single": [bos, one],
        "pair": [bos, one, two],
        "special_tokens": {text: {"id": text, "ids": [token], "tokens": [text]}},
    }
