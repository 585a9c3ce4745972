"""The stand-in for libbaseRT, compiled, and a bundle that it and our reader accept."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
from pathlib import Path
from typing import Any

from superfluidd.engine.base_bundle import BOUNDARY

SOURCE = Path(__file__).with_name("basert_standin.c")

HEADER: dict[str, Any] = {
    "arch": "toy",
    "quant_scheme": "base_q4",
    "config": {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 1024,
    },
    "tensors": [{"name": "embed", "shape": [4, 8], "offset": 0, "length": 100}],
}


def compiled(directory: Path) -> Path:
    """The library."""
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    assert compiler, "a C compiler is needed, as for the engine itself"
    target = directory / "libbaseRT.so"
    command = [*compiler.split(), "-std=gnu11", "-Wall", "-Wextra", "-Werror", "-O1", "-shared", "-fPIC", "-pthread"]
    subprocess.run([*command, "-o", str(target), str(SOURCE)], check=True, timeout=60)
    return target


def bundle(path: Path, header: object = HEADER, *, data: int = 100, version: int = 1) -> Path:
    """A bundle with so many bytes of tensor data."""
    raw = json.dumps(header).encode()
    head = b"BASE" + struct.pack("<IQ", version, len(raw)) + raw
    path.write_bytes(head + bytes(-len(head) % BOUNDARY + data))
    return path
