"""What ``superfluidd convert`` does."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
from pathlib import Path

from superfluidd.daemon.loading import bundled
from superfluidd.engine import gguf
from superfluidd.errors import ModelFileError, StartupError, UsageError


def run(args: argparse.Namespace) -> int:
    """Run the command.

    Raises:
        StartupError: the file cannot be converted, or the directory cannot be made.
    """
    source = bundled() if args.model == "-" else Path(args.model)
    header = gguf.read_header(source)
    if header.architecture != "llama":
        raise ModelFileError(
            f"{source} is of architecture {header.architecture!r}; only llama can be converted. Download the model in "
            "MLX's format, or serve the GGUF with llama.cpp"
        )
    target = Path(args.directory)
    if target.exists() or target.is_symlink():
        raise UsageError(f"{target} exists already; name a directory that does not, or remove it")
    try:
        from superfluidd.convert import tokenizer, weights
    except ImportError as error:
        raise StartupError(f"MLX cannot be loaded ({error}); pip install 'superfluidd[mlx]'") from error
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    except OSError as error:
        raise UsageError(f"{target} cannot be made: {error.strerror}") from error
    try:
        arrays, metadata = weights.load(source)
        converted, config = weights.convert(arrays, metadata, source)
        files = tokenizer.convert(metadata, source) | {"config.json": config}
        for name, content in files.items():
            (unfinished / name).write_text(json.dumps(content, ensure_ascii=False, indent=1), encoding="utf-8")
        weights.save(converted, unfinished / "model.safetensors")
        os.chmod(unfinished, 0o755)
        os.rename(unfinished, target)
    except OSError as error:
        raise StartupError(f"{target} cannot be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    size = sum(path.stat().st_size for path in target.iterdir())
    print(f"{target}: {len(converted)} tensors, {size / (1 << 20):.0f} MiB; superfluidd serve {target}")
    return 0
