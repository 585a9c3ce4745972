"""llama.cpp through llama-cpp-python's low-level API: many sequences in one context, packed ``llama_decode`` calls.

Every return value is checked. After a call that failed, every sequence it fed is cut back to the length it had, so
that "nothing of the step was kept" is true. This module is imported only inside a worker process.
"""

from __future__ import annotations

import ctypes
import logging
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import llama_cpp
import numpy as np

from superfluidd.engine import sampling
from superfluidd.engine.neighbours import usable_cores
from superfluidd.engine.port import (
    Choice,
    Draw,
    EngineInfo,
    Feed,
    LoadFailed,
    OutOfCells,
    StepAbandoned,
    StepFailed,
)
from superfluidd.engine.wire import LoadSpec

log = logging.getLogger(__name__)

N_BATCH = 2048
"""Most tokens one ``llama_decode`` call may carry."""

ABANDONED = 2
"""What ``llama_decode`` returns when the abort callback made it stop."""


class _NativeLog:
    """Keeps llama.cpp's latest complaints, to explain a load that fails; the rest goes to the debug log."""

    def __init__(self) -> None:
        self.errors: list[str] = []
        self.callback = llama_cpp.llama_log_callback(self._receive)

    def _receive(self, level: int, text: bytes, _data: object) -> None:
        line = text.decode("utf-8", "replace").strip()
        if level == 4 and line:  # GGML_LOG_LEVEL_ERROR
            self.errors = [*self.errors[-7:], line]
        if line:
            log.debug("llama.cpp: %s", line)


_native_log = _NativeLog()


class LlamaCppRuntime:
    """A loaded GGUF model.

    Args:
        spec: what to load and how.
        progress: told the share loaded, 0 to 1.

    Raises:
        LoadFailed: with llama.cpp's own words.
    """

    info: EngineInfo

    def __init__(self, spec: LoadSpec, progress: Callable[[float], None]) -> None:
        self._batch: Any = None
        self._context: Any = None
        self._model: Any = None
        self._flag = (ctypes.c_ubyte * 2)()
        self._wanted = False
        self._abandonable = False
        llama_cpp.llama_log_set(_native_log.callback, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        self._load_model(spec, progress)
        try:
            self._open_context(spec)
        except LoadFailed:
            self.close()
            raise
        self._rows: list[int] = []

    def _load_model(self, spec: LoadSpec, progress: Callable[[float], None]) -> None:
        params = llama_cpp.llama_model_default_params()
        params.n_gpu_layers = 999 if llama_cpp.llama_supports_gpu_offload() else 0

        def report(fraction: float, _data: object) -> bool:
            progress(fraction)
            return True

        callback = llama_cpp.llama_progress_callback(report)  # kept alive until loading is over
        params.progress_callback = callback
        _native_log.errors.clear()
        self._model = llama_cpp.llama_model_load_from_file(os.fsencode(spec.path), params)
        if not self._model:
            raise LoadFailed(_explain("llama.cpp cannot load the model"))
        self._vocab = llama_cpp.llama_model_get_vocab(self._model)
        self._n_vocab = llama_cpp.llama_vocab_n_tokens(self._vocab)

    def _open_context(self, spec: LoadSpec) -> None:
        shared = spec.layout == "shared"
        most = llama_cpp.llama_max_parallel_sequences()
        sequences = spec.lanes + spec.spare
        if sequences > most:
            raise LoadFailed(f"this llama.cpp runs at most {most} sequences; lower --max-batch from {spec.lanes}")
        threads = spec.threads or usable_cores()
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = spec.cells if shared else spec.window * sequences
        params.n_batch = N_BATCH
        params.n_ubatch = min(spec.micro_batch, N_BATCH)
        params.n_seq_max = sequences
        params.n_threads = params.n_threads_batch = threads
        params.kv_unified = shared
        params.no_perf = True
        _native_log.errors.clear()
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        if not self._context:
            raise LoadFailed(_explain("llama.cpp cannot allocate the context"))
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._lengths = [0] * sequences
        self._threads = threads
        self._batch = _Batch(N_BATCH)
        self.info = self._describe(spec, shared, threads)

    def _describe(self, spec: LoadSpec, shared: bool, threads: int) -> EngineInfo:
        model, vocab = self._model, self._vocab
        layout: Literal["shared", "per-sequence"] = "shared" if shared else "per-sequence"
        cells = min(spec.cells, llama_cpp.llama_n_ctx(self._context)) if shared else 0
        window = min(spec.window, cells if shared else llama_cpp.llama_n_ctx_seq(self._context))
        self._swa = llama_cpp.llama_model_n_swa(model)
        recurrent = llama_cpp.llama_model_is_recurrent(model) or llama_cpp.llama_model_is_hybrid(model)
        template = llama_cpp.llama_model_chat_template(model, None)
        bos, eos = llama_cpp.llama_vocab_bos(vocab), llama_cpp.llama_vocab_eos(vocab)
        cut: Literal["anywhere", "window", "head"] = "head" if recurrent else "window" if self._swa else "anywhere"
        return EngineInfo(
            runtime="llamacpp",
            version=llama_cpp.__version__,
            architecture=self._meta("general.architecture"),
            description=_text_of(lambda buffer, size: llama_cpp.llama_model_desc(model, buffer, size)),
            layout=layout,
            cells=cells if shared else window * (spec.lanes + spec.spare),
            lanes=spec.lanes,
            sequences=spec.lanes + spec.spare,
            window=window,
            trained_context=llama_cpp.llama_model_n_ctx_train(model),
            bytes_per_cell=0,
            weights_bytes=llama_cpp.llama_model_size(model),
            cut=cut,
            round_granular=True,
            abandons=self._abandons(cut),
            packs_prefill_with_decode=False,
            max_step=min(spec.micro_batch, N_BATCH),
            threads=threads,
            vocabulary=self._n_vocab,
            add_bos=bool(llama_cpp.llama_vocab_get_add_bos(vocab)),
            bos=bos,
            eos=eos,
            end_tokens=tuple(t for t in range(self._n_vocab) if llama_cpp.llama_vocab_is_eog(vocab, t)),
            fim=(
                llama_cpp.llama_vocab_fim_pre(vocab),
                llama_cpp.llama_vocab_fim_suf(vocab),
                llama_cpp.llama_vocab_fim_mid(vocab),
            ),
            chat_template=template.decode("utf-8", "replace") if template else "",
            bos_text=self._token_text(bos),
            eos_text=self._token_text(eos),
        )

    def _abandons(self, cut: str) -> bool:
        """Let ``llama_decode`` ask a flag whether to go on, where that is sound.

        llama.cpp's CPU backend asks between the nodes of a graph, a thousand times a step: the callback must be native.
        The C library's ``strlen`` over a flag byte and a zero is one: its result, read as a bool, is the flag. A model
        whose state cannot be cut anywhere could not go back to where it was before a step.
        """
        if llama_cpp.llama_supports_gpu_offload() or cut != "anywhere":
            return False
        strlen = ctypes.CDLL(None).strlen
        self._callback = ctypes.cast(strlen, llama_cpp.ggml_abort_callback)
        llama_cpp.llama_set_abort_callback(self._context, self._callback, ctypes.addressof(self._flag))
        return True

    def _meta(self, key: str) -> str:
        name = key.encode()
        return _text_of(lambda buffer, size: llama_cpp.llama_model_meta_val_str(self._model, name, buffer, size))

    def _token_text(self, token: int) -> str:
        if token < 0:
            return ""
        text = llama_cpp.llama_vocab_get_text(self._vocab, token)
        return text.decode("utf-8", "replace") if text else ""

    # -- sequences ------------------------------------------------------------------------------------------------

    def length(self, sequence: int) -> int:
        """llama.cpp's own count."""
        return int(llama_cpp.llama_memory_seq_pos_max(self._memory, sequence)) + 1

    def cells_used(self) -> int:
        """The sum of llama.cpp's own counts; a sliding window keeps fewer cells than positions."""
        used = 0
        for sequence in range(self.info.sequences):
            last = llama_cpp.llama_memory_seq_pos_max(self._memory, sequence)
            if last >= 0:
                used += last + 1 - llama_cpp.llama_memory_seq_pos_min(self._memory, sequence)
        return used

    def computed(self) -> int:
        """llama.cpp counts one token alone and several together apart, and says 1 where it has none; so this is two
        short of the sum."""
        found = llama_cpp.llama_perf_context(self._context)
        return int(found.n_p_eval + found.n_eval) - 2

    def free(self, sequence: int) -> None:
        """Empty the sequence."""
        llama_cpp.llama_memory_seq_rm(self._memory, sequence, -1, -1)
        self._lengths[sequence] = 0

    def cut(self, sequence: int, length: int) -> bool:
        """Shorten, where the state that is left can still compute the next token.

        A sliding window that has moved past the cut has lost the context the next token needs, though llama.cpp
        removes the tail without complaint: the cut is sound only if the oldest position kept is old enough.
        """
        if length <= 0:
            self.free(sequence)
            return True
        if length >= self._lengths[sequence]:
            return length == self._lengths[sequence]
        if self.info.cut == "head":
            return False
        if self._swa:
            oldest = llama_cpp.llama_memory_seq_pos_min(self._memory, sequence)
            if oldest < 0 or oldest > max(0, length - self._swa):
                return False
        if not llama_cpp.llama_memory_seq_rm(self._memory, sequence, length, -1):
            return False
        self._lengths[sequence] = length
        return True

    def copy(self, source: int, sequence: int, length: int) -> None:
        """In a shared pool the cells are shared. Where every sequence has a window of its own, the state is exported
        and brought back: llama.cpp's own copy between windows waits for the next decode and cannot be cut before."""
        if self.info.layout == "per-sequence":
            self.restore(sequence, self.export(source), length)
            return
        if length > self._lengths[source] or (length < self._lengths[source] and self.info.cut != "anywhere"):
            raise StepFailed(f"{length} tokens of a sequence of {self._lengths[source]} cannot be copied")
        llama_cpp.llama_memory_seq_cp(self._memory, source, sequence, 0, length)
        self._lengths[sequence] = length

    def export(self, sequence: int) -> bytes:
        """llama.cpp's own form."""
        size = llama_cpp.llama_state_seq_get_size(self._context, sequence)
        buffer = (ctypes.c_uint8 * size)()
        written = llama_cpp.llama_state_seq_get_data(self._context, buffer, size, sequence)
        if not size or written != size:
            raise StepFailed(f"llama.cpp saved {written} bytes of {size}")
        return bytes(buffer)

    def restore(self, sequence: int, state: bytes, length: int) -> None:
        """llama.cpp checks the form of what it is given; how many tokens there are is checked here."""
        buffer = (ctypes.c_uint8 * len(state)).from_buffer_copy(state)
        read = llama_cpp.llama_state_seq_set_data(self._context, buffer, len(state), sequence)
        self._lengths[sequence] = self.length(sequence)
        if read != len(state) or not self.cut(sequence, length):
            self.free(sequence)
            raise StepFailed(f"llama.cpp cannot bring {length} tokens back from {len(state)} bytes")

    # -- computing ------------------------------------------------------------------------------------------------

    def step(self, feeds: Sequence[Feed], *, abandonable: bool = False) -> None:
        """One ``llama_decode``."""
        total = sum(len(feed.tokens) for feed in feeds)
        if total > N_BATCH:
            raise StepFailed(f"a step of {total} tokens is larger than {N_BATCH}")
        self._rows = self._batch.fill(feeds)
        if abandonable:
            self._abandonable = True
            if self._wanted:  # asked before this step had begun
                self._flag[0] = 1
        result = llama_cpp.llama_decode(self._context, self._batch.native)
        self._abandonable = False
        self._flag[0] = 0
        if result == 0:
            llama_cpp.llama_synchronize(self._context)
            for feed in feeds:
                self._lengths[feed.sequence] = feed.start + len(feed.tokens)
            return
        for feed in feeds:
            self._undo(feed)
        if result == 1:
            raise OutOfCells(f"llama.cpp found no room for {total} tokens")
        if result == ABANDONED:
            raise StepAbandoned("the step was given up")
        raise StepFailed(f"llama_decode returned {result}")

    def abandon(self, wanted: bool) -> None:
        """Raise the flag that the running ``llama_decode`` looks at, if it may be given up."""
        self._wanted = wanted
        if wanted and self._abandonable:
            self._flag[0] = 1

    def _undo(self, feed: Feed) -> None:
        """Cut a sequence back to what it held before a failed call; if that cannot be done, empty it."""
        if feed.start == 0 or not llama_cpp.llama_memory_seq_rm(self._memory, feed.sequence, feed.start, -1):
            self.free(feed.sequence)

    def choose(self, feed: int, draw: Draw) -> Choice:
        """Draw from the logits of the feed's last token."""
        pointer = llama_cpp.llama_get_logits_ith(self._context, self._rows[feed])
        if not pointer:
            raise StepFailed("llama.cpp kept no logits for this lane")
        address = ctypes.cast(pointer, ctypes.c_void_p).value
        assert address is not None
        view = (ctypes.c_float * self._n_vocab).from_address(address)
        return sampling.choose(np.frombuffer(view, dtype=np.float32), draw)

    def seconds(self) -> float:
        """The process's monotonic clock."""
        return time.perf_counter()

    def set_threads(self, decode: int, prefill: int) -> None:
        """From the next step on."""
        llama_cpp.llama_set_n_threads(self._context, decode, prefill)

    # -- text -----------------------------------------------------------------------------------------------------

    def tokenize(self, text: str, *, add_bos: bool, parse_special: bool) -> list[int]:
        """Token ids. The vocabulary is constant, so any thread may ask."""
        data = text.encode("utf-8", "surrogatepass")
        size = len(data) + 8
        while True:
            buffer = (llama_cpp.llama_token * size)()
            count = llama_cpp.llama_tokenize(self._vocab, data, len(data), buffer, size, add_bos, parse_special)
            if count >= 0:
                return list(buffer[:count])
            if -count <= size:
                raise StepFailed("the text cannot be tokenized")
            size = -count

    def pieces(self) -> list[bytes]:
        """Text of every token; control tokens are empty."""
        size = 64
        buffer = ctypes.create_string_buffer(size)
        pieces: list[bytes] = []
        for token in range(self._n_vocab):
            count = llama_cpp.llama_token_to_piece(self._vocab, token, buffer, size, 0, False)
            if count < 0:
                size = -count
                buffer = ctypes.create_string_buffer(size)
                count = llama_cpp.llama_token_to_piece(self._vocab, token, buffer, size, 0, False)
            pieces.append(buffer.raw[: max(count, 0)])
        return pieces

    def close(self) -> None:
        """Free context and model."""
        if self._context:
            llama_cpp.llama_free(self._context)
            self._context = None
        if self._model:
            llama_cpp.llama_model_free(self._model)
            self._model = None


class _Batch:
    """A ``llama_batch`` over numpy arrays, filled in bulk."""

    def __init__(self, size: int) -> None:
        self._tokens = np.zeros(size, dtype=np.int32)
        self._positions = np.zeros(size, dtype=np.int32)
        self._sequences = np.zeros(size, dtype=np.int32)
        self._counts = np.ones(size, dtype=np.int32)
        self._logits = np.zeros(size, dtype=np.int8)
        first = self._sequences.ctypes.data
        self._pointers = np.array([first + 4 * index for index in range(size)], dtype=np.uintp)
        self.native = llama_cpp.llama_batch()
        fields = dict(llama_cpp.llama_batch._fields_)
        for name, array in (
            ("token", self._tokens),
            ("pos", self._positions),
            ("n_seq_id", self._counts),
            ("seq_id", self._pointers),
            ("logits", self._logits),
        ):
            setattr(self.native, name, ctypes.cast(array.ctypes.data, fields[name]))

    def fill(self, feeds: Sequence[Feed]) -> list[int]:
        """Load the feeds; the row of each feed's last token comes back."""
        at = 0
        rows = []
        for feed in feeds:
            end = at + len(feed.tokens)
            self._tokens[at:end] = feed.tokens
            self._positions[at:end] = np.arange(feed.start, feed.start + len(feed.tokens), dtype=np.int32)
            self._sequences[at:end] = feed.sequence
            self._logits[at:end] = 0
            self._logits[end - 1] = feed.sample
            rows.append(end - 1)
            at = end
        self.native.n_tokens = at
        return rows


def _text_of(read: Callable[[Any, int], int]) -> str:
    """A string that llama.cpp writes into a buffer."""
    buffer = ctypes.create_string_buffer(512)
    count = read(buffer, 512)
    return buffer.value.decode("utf-8", "replace") if count >= 0 else ""


def _explain(what: str) -> str:
    return what + (": " + "; ".join(_native_log.errors[-3:]) if _native_log.errors else "")
