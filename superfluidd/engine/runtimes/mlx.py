"""MLX through mlx-lm: its models and its cache classes, driven step by step.

mlx-lm's own generator keeps a queue and admits in order of arrival. Here the executor decides what a step feeds, so the
generator is not used: sequences that decode together are rows of mlx-lm's batch caches (:mod:`.mlx_kv`), prompts are
fed to the caches of their own sequence, and tokens are drawn by :mod:`superfluidd.engine.sampling` as for every engine.

One thread loads the model, computes, saves and restores: MLX binds arrays to the thread that made them. Only
:meth:`MlxRuntime.tokenize` is for any thread; it touches no array. This module is imported only inside a worker.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from superfluidd.engine import blas

blas.preload()

import mlx.core as mx  # noqa: E402  (binds to the BLAS that is there when it is loaded)
import numpy as np  # noqa: E402
import numpy.typing as npt  # noqa: E402
from mlx_lm import __version__ as mlx_lm_version  # noqa: E402
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache  # noqa: E402
from mlx_lm.utils import dequantize_model, load_model  # noqa: E402

from superfluidd.engine import sampling  # noqa: E402
from superfluidd.engine.neighbours import usable_cores  # noqa: E402
from superfluidd.engine.port import (  # noqa: E402
    Choice,
    Draw,
    EngineInfo,
    Feed,
    LoadFailed,
    OutOfCells,
    StepFailed,
)
from superfluidd.engine.runtimes.mlx_kv import Caches, Sequences, Undo  # noqa: E402
from superfluidd.engine.runtimes.mlx_state import pack, unpack  # noqa: E402
from superfluidd.engine.tokenizer_json import JsonTokenizer, read_json  # noqa: E402
from superfluidd.engine.wire import LoadSpec  # noqa: E402

log = logging.getLogger(__name__)

SHORT = 32
"""A last chunk of at most so many tokens is fed whole, with logits of all of them. Of a longer one the last token is
fed apart, so that the head, a third of a small model's work, computes one row and not hundreds."""

TOGETHER, PADDED, COPIED = 256, 1.5, 4
"""Prompts are fed in one pass if that is at most so many tokens with padding, so much more than without it, and if so
much of earlier context, in parts of what is fed, is copied for it."""

BUFFERS = 256 << 20
"""Bytes of freed buffers that MLX may keep for reuse."""

CACHE_MODES = 0o700


class MlxRuntime:
    """A loaded model directory.

    Args:
        spec: what to load and how; the path is that of the directory.
        progress: told the share loaded, 0 to 1.

    Raises:
        LoadFailed: with the reason.
    """

    info: EngineInfo

    def __init__(self, spec: LoadSpec, progress: Callable[[float], None]) -> None:
        directory = Path(spec.path)
        self._gpu = mx.default_device() != mx.Device(mx.cpu)
        if not self._gpu:
            _private_compiler_cache()
        threads = spec.threads or usable_cores()
        blas.set_threads(threads)
        mx.set_cache_limit(BUFFERS)
        try:
            self._model: Any = self._load(directory, spec, progress)
            kinds = self._examine()
        except LoadFailed:
            raise
        except Exception as error:  # mlx-lm raises whatever its models raise
            raise LoadFailed(f"MLX cannot load {directory}: {type(error).__name__}: {error}") from error
        self._tokenizer = JsonTokenizer(directory, self._vocabulary)
        self._kv = Sequences(lambda: make_prompt_cache(self._model), spec.lanes + spec.spare)
        self._rows: dict[int, npt.NDArray[np.float32]] = {}
        self._computed = 0
        self.info = self._describe(spec, directory, kinds)
        progress(1.0)

    def _load(self, directory: Path, spec: LoadSpec, progress: Callable[[float], None]) -> Any:
        model, _ = load_model(directory, lazy=True, trust_remote_code=spec.trust_code)
        if spec.dense:
            model = dequantize_model(model)
        if not self._gpu:
            # Half floats have no instructions on most CPUs: MLX takes 64 ms for what 1-3 ms do in float32.
            model.set_dtype(mx.float32)
        parameters = [array for _, array in _flat(model.parameters())]
        total, done = sum(array.nbytes for array in parameters) or 1, 0
        for array in parameters:
            mx.eval(array)
            done += array.nbytes
            progress(0.98 * done / total)
        self._weights_bytes = total
        mx.clear_cache()
        return model

    def _examine(self) -> list[type[Any]]:
        """What a token leaves in the caches and how many logits there are: by computing one."""
        caches = make_prompt_cache(self._model)
        batches = [type(cache).__name__ for cache in caches if not hasattr(cache, "merge")]
        if batches:
            raise LoadFailed(f"its KV is kept in {batches[0]}, which MLX cannot batch; serve its GGUF with llama.cpp")
        if any(getattr(cache, "keep", 0) for cache in caches):
            raise LoadFailed("its window keeps first tokens, which MLX drops in a batch; serve its GGUF with llama.cpp")
        logits = self._model(mx.array([[0]]), cache=caches)
        mx.eval(logits)
        self._vocabulary = int(logits.shape[-1])
        self._dtype = next((str(one.keys.dtype) for one in caches if hasattr(one, "keys")), "float32")
        # Room is reserved in steps; what one token takes is a part of it.
        self._cell_bytes = sum(one.nbytes // one.keys.shape[2] for one in caches if isinstance(one, KVCache))
        return [type(cache) for cache in caches]

    def _describe(self, spec: LoadSpec, directory: Path, kinds: Sequence[type[Any]]) -> EngineInfo:
        config = read_json(directory / "config.json")
        text = config.get("text_config") if isinstance(config.get("text_config"), dict) else {}
        cut: Literal["anywhere", "window", "head"] = "head"
        if all(kind in (KVCache, RotatingKVCache) for kind in kinds):
            cut = "window" if RotatingKVCache in kinds else "anywhere"
        tokenizer, sequences = self._tokenizer, spec.lanes + spec.spare
        stored = config.get("quantization") or {}
        bits = (
            f"{stored.get('bits')}-bit" if stored and not spec.dense else "float32" if not self._gpu else "unquantized"
        )
        return EngineInfo(
            runtime="mlx",
            version=f"{mlx_lm_version} (mlx {version('mlx')})",
            architecture=str(config.get("model_type", "unknown")),
            description=f"{config.get('model_type', 'unknown')} {bits}",
            layout="per-sequence",
            cells=spec.window * sequences,
            lanes=spec.lanes,
            sequences=sequences,
            window=spec.window,
            trained_context=int(
                (text or {}).get("max_position_embeddings") or config.get("max_position_embeddings") or 0
            )
            or spec.window,
            bytes_per_cell=self._cell_bytes,
            weights_bytes=self._weights_bytes,
            cut=cut,
            round_granular=True,
            abandons=False,
            packs_prefill_with_decode=False,
            max_step=spec.micro_batch,
            threads=0,
            vocabulary=self._vocabulary,
            add_bos=tokenizer.add_bos,
            bos=tokenizer.bos,
            eos=tokenizer.eos,
            end_tokens=tokenizer.end_tokens,
            fim=tokenizer.fim,
            chat_template=tokenizer.chat_template,
            bos_text=tokenizer.text(tokenizer.bos),
            eos_text=tokenizer.text(tokenizer.eos),
            device="gpu (Metal)" if mx.metal.is_available() else "gpu" if self._gpu else "cpu",
            reserves=False,
            kv_type=self._dtype.removeprefix("mlx.core."),
        )

    # -- sequences ------------------------------------------------------------------------------------------------

    def length(self, sequence: int) -> int:
        """Tokens fed and not cut."""
        return self._kv.lengths[sequence]

    def cells_used(self) -> int:
        """One cell a token. What is reserved beyond that is MLX's and is given back with the sequence."""
        return sum(self._kv.lengths)

    def computed(self) -> int:
        """Tokens that went through the model."""
        return self._computed

    def free(self, sequence: int) -> None:
        """Empty the sequence."""
        self._kv.reset(sequence)

    def cut(self, sequence: int, length: int) -> bool:
        """Shorten, where every layer's cache can: a sliding window only until it has been full, a state never."""
        return self._kv.cut(sequence, length)

    def copy(self, source: int, sequence: int, length: int) -> None:
        """Arrays are shared until one of the two goes on."""
        self._kv.copy(source, sequence, length)

    def export(self, sequence: int) -> bytes:
        """The arrays and numbers of its caches."""
        try:
            return pack([self._kv.lengths[sequence], *self._kv.state(sequence)])
        except (TypeError, ValueError, RuntimeError) as error:
            raise StepFailed(f"MLX cannot save the sequence: {error}") from error

    def restore(self, sequence: int, state: bytes, length: int) -> None:
        """What was exported."""
        try:
            held, *layers = unpack(state)
            if not isinstance(held, int) or not 0 < length <= held:
                raise ValueError(f"{length} tokens are wanted of {held}")
        except (ValueError, TypeError, RuntimeError) as error:
            self._kv.reset(sequence)
            raise StepFailed(f"MLX cannot bring {length} tokens back from {len(state)} bytes: {error}") from error
        self._kv.adopt(sequence, layers, held, length)

    # -- computing ------------------------------------------------------------------------------------------------

    def step(self, feeds: Sequence[Feed], *, abandonable: bool = False) -> None:
        """Those that feed one token each decode as one batch, the others one after the other."""
        del abandonable
        for feed in feeds:
            self._check(feed)
        self._rows = {}
        single = [index for index, feed in enumerate(feeds) if len(feed.tokens) == 1]
        undo: list[tuple[Sequence[int], Undo]] = []
        try:
            if len(single) > 1:
                self._decode(feeds, single, undo)
            prompts = [index for index, feed in enumerate(feeds) if len(feed.tokens) > 1 or len(single) == 1]
            if len(prompts) > 1 and _alike([feeds[index] for index in prompts], padding=self.info.cut != "head"):
                self._feed_together(feeds, prompts)
            else:
                for index in prompts:
                    self._feed(index, feeds[index], undo)
        except Exception as error:  # models raise whatever they like; nothing of the step is kept
            for sequences, one in undo:
                if not one.back():
                    for sequence in sequences:
                        self._kv.reset(sequence)
            if isinstance(error, StepFailed):
                raise
            raise StepFailed(f"MLX failed: {type(error).__name__}: {error}") from error
        for feed in feeds:
            self._kv.lengths[feed.sequence] = feed.start + len(feed.tokens)
            self._computed += len(feed.tokens)

    def _check(self, feed: Feed) -> None:
        held = self._kv.lengths[feed.sequence]
        if held != feed.start:
            raise StepFailed(f"sequence {feed.sequence} holds {held} tokens, not {feed.start}")
        if feed.start + len(feed.tokens) > self.info.window:
            raise OutOfCells(f"no room: sequence {feed.sequence} holds {held} of {self.info.window} tokens")
        # MLX does not look: it would read memory that is not the table's.
        if not all(0 <= token < self._vocabulary for token in feed.tokens):
            raise StepFailed(f"a token is outside the vocabulary of {self._vocabulary}")

    def _decode(self, feeds: Sequence[Feed], single: Sequence[int], undo: list[tuple[Sequence[int], Undo]]) -> None:
        by_sequence = {feeds[index].sequence: index for index in single}
        caches, rows = self._kv.together(list(by_sequence))
        undo.append((rows, Undo(caches)))
        logits = self._forward([[feeds[by_sequence[row]].tokens[0]] for row in rows], caches)
        wanted = [number for number, row in enumerate(rows) if feeds[by_sequence[row]].sample]
        if wanted:
            found = _floats(logits[:, -1, :])
            for number in wanted:
                self._rows[by_sequence[rows[number]]] = found[number]
        self._evaluate(caches)

    def _feed(self, index: int, feed: Feed, undo: list[tuple[Sequence[int], Undo]]) -> None:
        caches = self._kv.alone(feed.sequence)
        undo.append(((feed.sequence,), Undo(caches)))
        tokens = list(feed.tokens)
        if feed.sample and len(tokens) > SHORT:
            self._forward([tokens[:-1]], caches)
            self._evaluate(caches)
            tokens = tokens[-1:]
        logits = self._forward([tokens], caches)
        if feed.sample:
            self._rows[index] = _floats(logits[:, -1, :])[0]
        self._evaluate(caches)

    def _feed_together(self, feeds: Sequence[Feed], prompts: Sequence[int]) -> None:
        """Short prompts in one pass, which reads the weights once. Their own caches change only when it is over."""
        sequences = [feeds[index].sequence for index in prompts]
        chunks = [list(feeds[index].tokens) for index in prompts]
        lengths = [len(chunk) for chunk in chunks]
        caches = self._kv.merged(sequences, lengths)
        longest = max(lengths)
        logits = self._forward([chunk + [0] * (longest - len(chunk)) for chunk in chunks], caches)
        wanted = [number for number, index in enumerate(prompts) if feeds[index].sample]
        if wanted:
            last = mx.array([lengths[number] - 1 for number in wanted])
            found = _floats(logits[mx.array(wanted), last])
            for row, number in enumerate(wanted):
                self._rows[prompts[number]] = found[row]
        self._kv.separate(caches, sequences, lengths)

    def _forward(self, tokens: list[list[int]], caches: Caches) -> Any:
        return self._model(mx.array(tokens), cache=caches)

    @staticmethod
    def _evaluate(caches: Caches) -> None:
        mx.eval([cache.state for cache in caches])

    def abandon(self, wanted: bool) -> None:
        """A step of MLX ends when it ends."""

    def choose(self, feed: int, draw: Draw) -> Choice:
        """Draw from the logits of the feed's last token."""
        try:
            logits = self._rows[feed]
        except KeyError:
            raise StepFailed("MLX kept no logits for this lane") from None
        return sampling.choose(logits, draw)

    def seconds(self) -> float:
        """The process's monotonic clock."""
        return time.perf_counter()

    def set_threads(self, decode: int, prefill: int) -> None:
        """MLX has one thread a stream; OpenBLAS's were set when the model was loaded."""

    # -- text -----------------------------------------------------------------------------------------------------

    def tokenize(self, text: str, *, add_bos: bool, parse_special: bool) -> list[int]:
        """Token ids; of the tokenizer's own arrays, none of MLX's."""
        return self._tokenizer.encode(text, add_bos=add_bos, parse_special=parse_special)

    def pieces(self) -> list[bytes]:
        """The bytes of every token."""
        return self._tokenizer.pieces()

    def close(self) -> None:
        """Let go of the weights and of all KV."""
        if self._model is not None:
            self._model = None
            self._kv = Sequences(list, self.info.sequences)
            self._rows = {}
            mx.clear_cache()


def _alike(feeds: Sequence[Feed], *, padding: bool) -> bool:
    """Whether one pass over all of them is less work than one each: little padding, few tokens, and no long context
    that would be copied for it. Not every model keeps ``padding`` out of a recurrent state."""
    lengths = [len(feed.tokens) for feed in feeds]
    if not padding and len(set(lengths)) > 1:
        return False
    padded, copied = max(lengths) * len(lengths), sum(feed.start for feed in feeds)
    return padded <= min(TOGETHER, PADDED * sum(lengths)) and copied <= COPIED * sum(lengths)


def _floats(array: Any) -> npt.NDArray[np.float32]:
    """Evaluated, as numpy's. A copy: MLX reuses its buffers."""
    found = array.astype(mx.float32)
    mx.eval(found)
    return np.array(found, dtype=np.float32)


def _flat(tree: Any, name: str = "") -> list[tuple[str, Any]]:
    if isinstance(tree, dict):
        return [pair for key, value in tree.items() for pair in _flat(value, f"{name}.{key}")]
    if isinstance(tree, list):
        return [pair for index, value in enumerate(tree) for pair in _flat(value, f"{name}.{index}")]
    return [(name, tree)]


def compiler_cache(environ: dict[str, str]) -> Path | None:
    """Where MLX may keep what it compiles for a CPU; None if nothing says."""
    for value in (environ.get("CACHE_DIRECTORY", "").split(":")[0], environ.get("XDG_CACHE_HOME", "")):
        if os.path.isabs(value):
            return Path(value) / "superfluidd"
    home = environ.get("HOME", "")
    return Path(home) / ".cache" / "superfluidd" if os.path.isabs(home) else None


def _private_compiler_cache() -> None:
    """MLX compiles fused operations with g++ and loads the result from a predictable name below TMPDIR, where anybody
    could have put one: it gets a directory that is this user's alone, or does without."""
    if os.environ.get("MLX_DISABLE_COMPILE"):
        return
    directory = compiler_cache(dict(os.environ))
    try:
        if directory is None:
            raise PermissionError("no directory for it")
        directory.mkdir(mode=CACHE_MODES, parents=True, exist_ok=True)
        status = directory.stat()
        if status.st_uid != os.geteuid() or status.st_mode & 0o022:
            raise PermissionError(f"{directory} is not this user's alone")
        os.environ["TMPDIR"] = str(directory)
    except OSError as error:
        log.info("MLX does not compile: %s", error)
        mx.disable_compile()


if sys.platform not in ("linux", "darwin"):
    raise ImportError("MLX runs on Linux and macOS")
