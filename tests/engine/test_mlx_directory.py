"""Model directories: what they say, and every bad one with its own message."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from superfluidd.engine.fitting import bytes_per_token
from superfluidd.engine.mlx_directory import MlxHeader, read_header
from superfluidd.errors import ModelFileError
from tests.engine import tiny_mlx

Break = Callable[[Path], object]


def change(**values: object) -> Break:
    def apply(path: Path) -> None:
        file = path / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | values))

    return apply


def put(name: str, content: bytes) -> Break:
    return lambda path: (path / name).write_bytes(content)


def tensors(header: object, data: bytes = b"") -> Break:
    raw = json.dumps(header).encode()
    return put("model.safetensors", struct.pack("<Q", len(raw)) + raw + data)


def cut_off(path: Path) -> None:
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def one(dtype: str, shape: list[int], offsets: list[int]) -> dict[str, object]:
    return {"a.weight": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


def test_what_a_directory_says(tmp_path: Path) -> None:
    header = read_header(tiny_mlx.write(tmp_path), gpu=False)
    parameters = sum(array.size for array in tiny_mlx.weights().values())
    assert (header.architecture, header.quantization, header.bits) == ("llama", "F32", 0)
    assert (header.parameters, header.tensor_bytes, header.dense_bytes) == (parameters, parameters * 4, parameters * 4)
    assert (header.context_length, header.block_count, header.sliding_window, header.recurrent) == (2048, 2, 0, False)
    assert header.chat_template == tiny_mlx.TEMPLATE
    assert header.file_bytes == (tmp_path / "model.safetensors").stat().st_size
    # Keys and values of 2 layers, 2 heads, 16 numbers of 4 bytes.
    assert bytes_per_token(header) == 2 * 2 * 2 * 16 * 4


@pytest.mark.parametrize(
    ("gpu", "kept", "cell"), [(False, (4 + 4 + 2) * 4 + 4 * 4, 4), (True, (4 + 4) * 2 + 4 * 4 + 4, 2)]
)
def test_halves_are_kept_as_they_are_on_a_gpu_and_are_floats_on_a_cpu(
    tmp_path: Path, gpu: bool, kept: int, cell: int
) -> None:
    """Four packed words of 8 numbers each with 4 scales and 4 biases, and a norm of 2 numbers."""
    tiny_mlx.write(tmp_path, {"quantization": {"group_size": 8, "bits": 4}})
    half = {"dtype": "BF16", "shape": [4, 1]}
    header = {
        "__metadata__": {"format": "mlx"},
        "a.weight": {"dtype": "U32", "shape": [4, 1], "data_offsets": [0, 16]},
        "a.scales": {**half, "data_offsets": [16, 24]},
        "a.biases": {**half, "data_offsets": [24, 32]},
        "norm.weight": {"dtype": "BF16", "shape": [2], "data_offsets": [32, 36]},
    }
    tensors(header, bytes(36))(tmp_path)
    found = read_header(tmp_path, gpu=gpu)
    assert (found.parameters, found.dense_bytes) == (4 * 8 + 2, (4 * 8 + 2) * 4)
    assert (found.tensor_bytes, found.element_bytes, found.quantization) == (kept, cell, "4-bit")


@pytest.mark.parametrize(
    ("change_it", "words"),
    [
        (lambda path: (path / "config.json").unlink(), "without config.json; give the path of an MLX model or"),
        (put("config.json", b"[1]"), "config.json is damaged: it is no JSON object"),
        (put("config.json", b"[" * 100_000), "config.json is damaged"),
        (put("config.json", b"{}"), "does not say model_type"),
        (change(num_hidden_layers=None), "does not say num_hidden_layers"),
        (change(num_hidden_layers=-1), "its num_hidden_layers cannot be right"),
        (change(hidden_size="wide"), "its hidden_size cannot be right"),
        (change(num_hidden_layers=10**9), "its num_hidden_layers cannot be right"),
        (change(model_file="evil.py"), r"brings Python code along \(evil.py\).*--trust-model-code"),
        (lambda path: (path / "model.safetensors").unlink(), r"has no model\*.safetensors"),
        (put("model.safetensors", b""), "no safetensors file, or damaged"),
        (put("model.safetensors", b"version https://git-lfs.github.com/spec/v1"), "a Git LFS pointer; .*git lfs pull"),
        (put("model.safetensors", struct.pack("<Q", 1 << 60)), "no safetensors file, or damaged"),
        (put("model.safetensors", struct.pack("<Q", 500) + b"{}"), "truncated: it has only 10 bytes"),
        (cut_off, "truncated: its tensors end at byte"),
        (tensors([1]), "its header cannot be read"),
        (tensors({"a.weight": 3}), "its header cannot be read"),
        (tensors(one("F32", [2, 2], [0, 15]), bytes(16)), "tensor 'a.weight' cannot be right"),
        (tensors(one("F32", [-2, -2], [0, 16]), bytes(16)), "tensor 'a.weight' cannot be right"),
        (tensors(one("Q9", [2], [0, 2]), bytes(2)), "of type Q9, which is not known"),
        (
            put("model.safetensors.index.json", b'{"weight_map": {"a": "model-00001-of-00002.safetensors"}}'),
            "lacks 1 of 1 files, model-00001-of-00002.safetensors first",
        ),
    ],
)
def test_a_bad_directory_is_refused_with_what_to_do(tmp_path: Path, change_it: Break, words: str) -> None:
    change_it(tiny_mlx.write(tmp_path))
    with pytest.raises(ModelFileError, match=words):
        read_header(tmp_path)


def test_a_directory_of_gguf_files_is_told_apart(tmp_path: Path) -> None:
    (tmp_path / "b.gguf").touch()
    with pytest.raises(ModelFileError, match=r"give the path of b.gguf in it"):
        read_header(tmp_path)


def test_code_is_allowed_if_it_is_trusted(tmp_path: Path) -> None:
    assert isinstance(read_header(tiny_mlx.write(tmp_path, {"model_file": "mine.py"}), trust_code=True), MlxHeader)


def test_models_in_parts_are_read_as_one(tmp_path: Path) -> None:
    whole = read_header(tiny_mlx.write(tmp_path))
    (tmp_path / "model.safetensors").rename(tmp_path / "model-00001-of-00002.safetensors")
    raw = json.dumps({"b": {"dtype": "F32", "shape": [3], "data_offsets": [0, 12]}}).encode()
    (tmp_path / "model-00002-of-00002.safetensors").write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(12))
    assert read_header(tmp_path).parameters == whole.parameters + 3


def test_states_and_windows_are_seen(tmp_path: Path) -> None:
    tiny_mlx.write(tmp_path)
    for values, expected in (
        ({"model_type": "mamba2"}, (True, 0)),
        ({"model_type": "x", "layer_types": ["linear_attention", "full_attention"]}, (True, 0)),
        ({"model_type": "gemma3", "layer_types": None, "text_config": {"sliding_window": 512}}, (False, 512)),
    ):
        change(**values)(tmp_path)
        header = read_header(tmp_path)
        assert (header.recurrent, header.sliding_window) == expected
