"""Tokenizers of model directories."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from superfluidd.engine.port import LoadFailed
from superfluidd.engine.tokenizer_json import JsonTokenizer, byte_level_alphabet
from tests.engine import tiny_mlx
from tests.engine.tiny_mlx import SPECIALS, VOCABULARY


def made(
    path: Path, vocabulary: int = VOCABULARY, config: dict[str, Any] | None = None, **settings: Any
) -> JsonTokenizer:
    return JsonTokenizer(tiny_mlx.write(path, config, **settings), vocabulary)


def test_bytes_round_trip_and_control_tokens_have_no_text(tmp_path: Path) -> None:
    tokenizer = made(tmp_path)
    pieces = tokenizer.pieces()
    assert len(pieces) == VOCABULARY
    for text in ("Hello, world!", "Zürich 日本 😀", "", " ", "\n\n\t", "\x00\x7f", SPECIALS[1]):
        tokens = tokenizer.encode(text, add_bos=False, parse_special=False)
        assert b"".join(pieces[token] for token in tokens).decode() == text
    assert tokenizer.encode(SPECIALS[1], add_bos=False, parse_special=True) == [257]
    assert pieces[257] == b""
    assert sorted(byte_level_alphabet().values()) == list(range(256))


def test_names_and_ends(tmp_path: Path) -> None:
    tokenizer = made(tmp_path)
    assert (tokenizer.bos, tokenizer.eos, tokenizer.text(257), tokenizer.text(-1)) == (257, 258, SPECIALS[1], "")
    assert tokenizer.end_tokens == (256, 258), "its own, config.json's, and those that every family ends turns with"
    assert tokenizer.fim == (259, 260, 261)
    assert not tokenizer.add_bos
    assert tokenizer.encode("a", add_bos=True, parse_special=False) == [257, 97]
    assert tokenizer.chat_template == tiny_mlx.TEMPLATE


def test_where_the_template_is_found(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
    assert made(tmp_path / "a", chat_template=named).chat_template == "yes"
    assert made(tmp_path / "b", chat_template=None).chat_template == ""
    (tmp_path / "b" / "chat_template.jinja").write_text("a file")
    assert JsonTokenizer(tmp_path / "b", VOCABULARY).chat_template == "a file"


def test_ids_beyond_the_models_logits_do_not_exist(tmp_path: Path) -> None:
    tokenizer = made(tmp_path, vocabulary=259)
    assert tokenizer.fim == (-1, -1, -1)
    assert len(tokenizer.pieces()) == 259
    assert len(made(tmp_path, vocabulary=400).pieces()) == 400, (
        "a model may have more logits than its tokenizer has tokens"
    )


def test_a_named_token_may_be_an_object_and_eos_a_list(tmp_path: Path) -> None:
    tokenizer = made(tmp_path, config={"eos_token_id": [5, 6, "x", 10**9]}, bos_token={"content": SPECIALS[0]})
    assert tokenizer.bos == 256
    assert tokenizer.end_tokens == (5, 6, 256, 258)


def fallback(path: Path, decoders: list[dict[str, Any]]) -> None:
    vocabulary = {"<unk>": 0, "▁a": 1, "b": 2, "<0xE2>": 3, "<0xZZ>": 4, "▁": 5}
    (path / "tokenizer.json").write_text(
        json.dumps(
            {
                "version": "1.0",
                "added_tokens": [],
                "decoder": {"type": "Sequence", "decoders": decoders},
                "model": {"type": "BPE", "vocab": vocabulary, "merges": [], "byte_fallback": True},
            }
        )
    )


def test_byte_fallback(tmp_path: Path) -> None:
    tiny_mlx.write(tmp_path)
    fallback(tmp_path, [{"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}])
    assert JsonTokenizer(tmp_path, 7).pieces() == [b"<unk>", b" a", b"b", b"\xe2", b"<0xZZ>", b" ", b""]


def test_bad_tokenizers_are_refused(tmp_path: Path) -> None:
    tiny_mlx.write(tmp_path)
    fallback(tmp_path, [{"type": "Fuse"}])
    with pytest.raises(LoadFailed, match="decodes with Fuse, Sequence: only byte-level and byte-fallback"):
        JsonTokenizer(tmp_path, 7)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(LoadFailed, match="is no tokenizer"):
        JsonTokenizer(tmp_path, 7)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(LoadFailed, match=r"has no tokenizer.json"):
        JsonTokenizer(tmp_path, 7)
    tiny_mlx.write(tmp_path)
    (tmp_path / "generation_config.json").write_text("[]")
    with pytest.raises(LoadFailed, match="holds no JSON object"):
        JsonTokenizer(tmp_path, VOCABULARY)
