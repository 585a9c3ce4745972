"""OpenBLAS for MLX on a CPU.

MLX's Linux wheels bring the reference BLAS along, which multiplies matrices 27 times slower than OpenBLAS (256 x 576 by
576 x 1536 in float32: 322 ms and 12 ms). Symbols are bound to the library that was loaded globally first, so this must
run before MLX is imported.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import logging
import os
import sys
from collections.abc import Sequence

log = logging.getLogger(__name__)

NAMES = ("libopenblas.so.0", "libopenblas.so")

_loaded: ctypes.CDLL | None = None


def preload(names: Sequence[str] = NAMES) -> bool:
    """Load OpenBLAS, if this machine has it, for everything that is loaded later. Idempotent.

    Returns:
        MLX will multiply with it.
    """
    global _loaded
    if _loaded is not None:
        return True
    if sys.platform != "linux" or "mlx.core" in sys.modules:
        return False
    for name in names:
        try:
            _loaded = ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL | os.RTLD_NOW)
        except OSError:
            continue
        log.debug("matrices are multiplied by %s", name)
        return True
    return False


def installed() -> bool:
    """Whether :func:`preload` would find it. Nothing is loaded."""
    return sys.platform == "linux" and ctypes.util.find_library("openblas") is not None


def set_threads(count: int) -> None:
    """Threads of every multiplication from now on; ignored without OpenBLAS."""
    if _loaded is not None:
        _loaded.openblas_set_num_threads(ctypes.c_int(count))
