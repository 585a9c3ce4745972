"""``superfluidd convert``: the bundled model for MLX, beside llama.cpp on the same file; what cannot be converted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from superfluidd import cli
from superfluidd.convert import tokenizer, weights
from superfluidd.engine.mlx_directory import read_header
from superfluidd.engine.port import Draw, Feed, Runtime
from superfluidd.engine.runtimes.llamacpp import LlamaCppRuntime
from superfluidd.engine.runtimes.mlx import MlxRuntime
from superfluidd.engine.tokenizer_json import JsonTokenizer
from superfluidd.engine.wire import LoadSpec
from superfluidd.errors import ModelFileError
from superfluidd.types import SamplingParams
from tests.engine import gguf_writer

import mlx.core as mx  # isort: skip

TEXTS = (
    "Hello, world!",
    "In 1989 there were 12345 of them, 3.14 % more.",
    "Zürich 日本 😀 naïve",
    "def f(x):\n\treturn x ** 2  # two  spaces",
    "<|im_start|>user\nHi<|im_end|>\n",
    "   leading and trailing   ",
    "I'll, you've, HE'S",
)
CHATS = ("What is the capital of France?", "What is two plus two?", "Name a colour.")


@pytest.fixture(scope="module")
def converted(bundled_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("converted") / "deeper" / "model"
    assert cli.main(["convert", str(bundled_model), str(target)]) == 0
    return target


@pytest.fixture(scope="module")
def llama(bundled_model: Path) -> Iterator[Runtime]:
    spec = LoadSpec("llamacpp", str(bundled_model), 1, 256, "per-sequence", 256, threads=1)
    runtime = LlamaCppRuntime(spec, lambda share: None)
    yield runtime
    runtime.close()


def test_a_whole_directory_appears(converted: Path) -> None:
    assert sorted(path.name for path in converted.iterdir()) == [
        "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"
    ]  # fmt: skip
    assert not [path for path in converted.parent.iterdir() if path.name.startswith(".")], "nothing unfinished is left"
    header = read_header(converted)
    assert (header.architecture, header.quantization, header.context_length) == ("llama", "4-bit", 8192)
    assert header.parameters == pytest.approx(134.5e6, rel=0.01)
    config = json.loads((converted / "config.json").read_text())
    assert config["quantization"]["model.embed_tokens"] == {"group_size": 32, "bits": 8}, "its embedding is Q8_0"
    assert config["tie_word_embeddings"]


@pytest.mark.engine_llamacpp
def test_both_engines_make_the_same_tokens_of_a_text(converted: Path, llama: Runtime) -> None:
    mine = JsonTokenizer(converted, llama.info.vocabulary)
    for text in TEXTS:
        for special in (False, True):
            expected = llama.tokenize(text, add_bos=False, parse_special=special)
            assert mine.encode(text, add_bos=False, parse_special=special) == expected, text
    assert mine.pieces() == llama.pieces()
    info = llama.info
    assert (mine.bos, mine.eos, mine.add_bos) == (info.bos, info.eos, info.add_bos)
    assert set(info.end_tokens) == set(mine.end_tokens)
    assert mine.chat_template == info.chat_template


def reply(runtime: Runtime, question: str) -> str:
    text = f"<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n"
    tokens = runtime.tokenize(f"{text}<|im_start|>assistant\n", add_bos=False, parse_special=True)
    prompt, at = len(tokens), 0
    while len(tokens) < prompt + 30:
        runtime.step([Feed(0, at, tokens[at:], True)])
        at = len(tokens)
        draw = Draw(SamplingParams(temperature=0.0), at, tokens, prompt, runtime.info.end_tokens)
        tokens.append(runtime.choose(0, draw).token)
        if tokens[-1] in runtime.info.end_tokens:
            break
    runtime.free(0)
    pieces = runtime.pieces()
    return b"".join(pieces[token] for token in tokens[prompt:]).decode()


@pytest.mark.engine_llamacpp
@pytest.mark.engine_mlx
def test_both_engines_answer_chats_alike(bundled_mlx: Path, llama: Runtime) -> None:
    """Whole replies: chats lead by clear margins. llama.cpp rounds activations to 8 bits, so long raw text may part."""
    spec = LoadSpec("mlx", str(bundled_mlx), 1, 256, "per-sequence", 256, dense=True)
    mlx = MlxRuntime(spec, lambda share: None)
    replies = {question: (reply(llama, question), reply(mlx, question)) for question in CHATS}
    mlx.close()
    assert replies[CHATS[0]] == ("The capital of France is Paris.",) * 2
    assert sum(one == other for one, other in replies.values()) >= 2, replies


# -- weights ------------------------------------------------------------------------------------------------------

METADATA: dict[str, Any] = {
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.embedding_length": 32,
    "llama.block_count": 1,
    "llama.feed_forward_length": 64,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.context_length": 512,
}


def permuted(array: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """What llama.cpp's converter does to query and key rows."""
    return array.reshape(heads, 2, array.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(array.shape)


def test_rows_of_queries_and_keys_come_back_in_order_and_columns_stay() -> None:
    plain = np.arange(32 * 5).reshape(32, 5)
    assert np.array_equal(np.array(weights.unpermute(mx.array(permuted(plain, 4)), 4)), plain)
    arrays = {
        "token_embd.weight": mx.zeros((7, 32)),
        "output_norm.weight": mx.zeros((32,)),
        "output.weight": mx.zeros((7, 32)),
        "blk.0.attn_q.weight": mx.array(permuted(plain, 4)),
        "blk.0.attn_k.weight": mx.array(permuted(plain[:16], 2)),
        "blk.0.attn_q.bias": mx.array(permuted(plain[:, :1], 4).reshape(-1)),
        "blk.0.ffn_gate.weight": mx.array(plain),
    }
    found, config = weights.convert(arrays, METADATA, Path("x.gguf"))
    at = "model.layers.0."
    assert np.array_equal(np.array(found[f"{at}self_attn.q_proj.weight"]), plain)
    assert np.array_equal(np.array(found[f"{at}self_attn.k_proj.weight"]), plain[:16])
    assert np.array_equal(np.array(found[f"{at}self_attn.q_proj.bias"]), plain[:, 0])
    assert np.array_equal(np.array(found[f"{at}mlp.gate_proj.weight"]), plain), "what has no rotation is as it was"
    assert set(found) >= {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
    assert (config["tie_word_embeddings"], config["attention_bias"], config["vocab_size"]) == (False, True, 7)
    assert "quantization" not in config
    linear = METADATA | {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    assert weights.config(found, linear, Path("x"))["rope_scaling"] == {"type": "linear", "factor": 4.0}
    with pytest.raises(ModelFileError, match="scales its positions by 'yarn'"):
        weights.config(found, METADATA | {"llama.rope.scaling.type": "yarn"}, Path("x"))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("blk.0.ffn_gate_exps.weight", "a mixture of experts cannot be converted"),
        ("blk.0.ffn_gate_inp.weight", "a mixture of experts"),
        ("rope_freqs.weight", "a part that no plain llama has"),
        ("blk.x.attn_q.weight", "a part that no plain llama has"),
        ("blk.0.attn_q.lora", "a part that no plain llama has"),
    ],
)
def test_a_tensor_that_has_no_place_is_named(name: str, words: str) -> None:
    with pytest.raises(ModelFileError, match=f"has tensor '{name}': {words}"):
        weights.convert({name: mx.zeros((2, 2))}, METADATA, Path("x.gguf"))


# -- tokenizers and the command -----------------------------------------------------------------------------------


def test_a_bos_is_put_in_front_where_the_model_wants_one(tmp_path: Path) -> None:
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "llama-bpe",
        "tokenizer.ggml.tokens": ["a", "b", "ab", "<s>", "mine"],
        "tokenizer.ggml.token_type": [1, 1, 1, 3, 4],
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.bos_token_id": 3,
        "tokenizer.ggml.add_bos_token": True,
    }
    for name, content in tokenizer.convert(metadata, Path("x")).items():
        (tmp_path / name).write_text(json.dumps(content))
    made = JsonTokenizer(tmp_path, 5)
    assert (made.bos, made.add_bos) == (3, True)
    assert made.encode("abminea", add_bos=True, parse_special=False) == [3, 2, 4, 0]
    assert [made.pieces()[token] for token in (2, 3, 4)] == [b"ab", b"", b"mine"]
    with pytest.raises(
        ModelFileError, match="has a tokenizer of kind 'llama', 'default'; known are 'gpt2' with 'gpt-2'"
    ):
        tokenizer.convert({"tokenizer.ggml.model": "llama", "tokenizer.ggml.pre": "default"}, Path("x"))


def test_what_cannot_be_converted_leaves_nothing_behind(
    bundled_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "out"
    (tmp_path / "there").mkdir()
    (tmp_path / "file").touch()
    for argv, status, words in (
        ([str(tmp_path / "none.gguf"), str(target)], 3, "no such file"),
        ([str(bundled_model), str(tmp_path / "there")], 2, "exists already"),
        ([str(bundled_model), str(tmp_path / "file" / "x")], 2, "cannot be made"),
    ):
        assert cli.main(["convert", *argv]) == status
        assert words in capsys.readouterr().err
    other = tmp_path / "other.gguf"
    metadata = {key.replace("llama.", "qwen2."): value for key, value in gguf_writer.LLAMA.items()}
    metadata["general.architecture"] = gguf_writer.Value(gguf_writer.STRING, "qwen2")
    gguf_writer.write(other, gguf_writer.model(metadata))
    assert cli.main(["convert", str(other), str(target)]) == 3
    assert "of architecture 'qwen2'; only llama can be converted" in capsys.readouterr().err

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(weights, "save", full)
    assert cli.main(["convert", str(bundled_model), str(target)]) == 1
    assert "No space left on device" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "other.gguf", "there"]
