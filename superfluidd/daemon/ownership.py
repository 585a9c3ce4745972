"""Who holds how much memory: ``sfctl mem``."""

from __future__ import annotations

import os
from collections.abc import Iterable

import psutil

from superfluidd.control.protocol import MemoryOwner, MemResult
from superfluidd.daemon.model import Model
from superfluidd.engine.memory import available_memory, total_memory


def resident(pid: int) -> int:
    """Bytes a process holds by the operating system's count, pages of mapped files included; 0 if it is gone."""
    try:
        held: int = psutil.Process(pid).memory_info().rss
    except psutil.Error:
        return 0
    return held


def outstanding(model: Model) -> int:
    """Bytes that a model has been promised and that the operating system still counts as available: its weights, if
    they are mapped, and what of its pool was never written."""
    view, footprint = model.view(), model.footprint
    own = 0
    if view.worker_pid and view.worker_pid != os.getpid():
        try:
            held = psutil.Process(view.worker_pid).memory_info()
            own = held.rss - getattr(held, "shared", 0)
        except psutil.Error:
            own = 0
    if not footprint.mapped:
        return max(0, footprint.weights + footprint.pool - own)
    return footprint.weights + max(0, footprint.pool - own)


def memory(models: Iterable[Model]) -> MemResult:
    """Every owner. What a worker holds beyond its weights, its pool and what is saved are buffers and libraries."""
    owners: list[MemoryOwner] = []
    held = resident(os.getpid())
    for model in models:
        view, worker = model.view(), 0
        if view.worker_pid and view.worker_pid != os.getpid():
            worker = resident(view.worker_pid)
            held += worker
        owners += _of_model(model, worker)
    daemon = MemoryOwner("", "daemon", resident(os.getpid()))
    return MemResult((*owners, daemon), held, available_memory(), total_memory())


def _of_model(model: Model, worker: int) -> list[MemoryOwner]:
    view, footprint = model.view(), model.footprint
    parts = [
        MemoryOwner(view.name, "weights", footprint.weights, footprint.weights),
        MemoryOwner(view.name, "pool", footprint.taken, footprint.pool),
        MemoryOwner(view.name, "host tier", view.host_bytes, view.host_limit_bytes),
    ]
    # Weights are mapped, and pages of them that were not used lately may not be in memory: never less than nothing.
    rest = max(0, worker - sum(part.size for part in parts))
    parked = MemoryOwner(view.name, "parked", view.parked_bytes, view.parked_limit_bytes, disk=True)
    return [*parts, MemoryOwner(view.name, "worker", rest), *([parked] if view.parked_limit_bytes else [])]
