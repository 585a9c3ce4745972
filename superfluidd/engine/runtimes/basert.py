"""baseRT through its public C interface: sequences in a paged pool, one fused call a step, draws on the host.

The engine is *native*: a running tick is not ended early. It has no way to shorten, copy or save a sequence. But it has
a cache of prefixes, in blocks: a sequence is published there, and another one begins from its blocks; the few tokens
after the last whole block are fed again. Cutting, copying and restoring are that. If the engine has given the blocks
away, they fail, and the tokens are fed again by plan.

A handle may be used by one thread at a time, its tokenizer included: a lock keeps texts and steps apart.
"""

from __future__ import annotations

import ctypes
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from superfluidd.engine import sampling
from superfluidd.engine.port import Choice, Draw, EngineError, EngineInfo, Feed, LoadFailed, OutOfCells, StepFailed
from superfluidd.engine.runtimes.basert_library import UNSUPPORTED, Library, find, tokens_of
from superfluidd.engine.tokenizer_json import TURN_ENDS
from superfluidd.engine.wire import LoadSpec

log = logging.getLogger(__name__)

FEW = 64
"""Most tokens that are fed again to cut, copy or restore: more than a block has, less than would hold others up."""

_MARKER = re.compile(r"<[^<>\s]{1,40}>|\[[A-Z_/]{2,30}\]")
"""What a control token looks like. The library does not say which tokens are."""

LEAST_PAGE, MOST_PAGE = 8, 16
"""Tokens of a block, by model."""

KV_BITS = 16
"""Full precision: a shared prefix is to say what it said alone."""


class _Sequence:
    """A sequence of the engine, the tokens it was fed, and the lock on the blocks it began from."""

    def __init__(self, handle: int) -> None:
        self.handle = handle
        self.tokens: list[int] = []
        self.lock = 0


class BasertRuntime:
    """A loaded ``.base`` bundle.

    Args:
        spec: what to load and how.
        progress: told the share loaded, 0 to 1.

    Raises:
        LoadFailed: with the library's own words.
    """

    info: EngineInfo

    def __init__(self, spec: LoadSpec, progress: Callable[[float], None]) -> None:
        self._model = 0
        self._native = threading.RLock()
        self._library = library = Library(find(spec.library))
        library.set_kv_bits(KV_BITS)
        library.set_paged_kv(1)
        library.set_prefix_cache(1)
        library.set_max_batch_size(spec.lanes)
        self._model = library.load_model(os.fsencode(spec.path), None, spec.window) or 0
        if not self._model:
            raise LoadFailed(f"baseRT cannot load {spec.path}: {library.message()}")
        self._config = library.config(self._model)
        self._sequences: list[_Sequence | None] = [None] * (spec.lanes + spec.spare)
        self._logits: npt.NDArray[np.float16] | None = None
        self._rows: dict[int, int] = {}
        self._computed = 0
        try:
            self._pieces, self._specials = self._read_vocabulary()
            self._probe()
        except LoadFailed:
            self.close()
            raise
        self.info = self._describe(spec)
        progress(1.0)

    def _read_vocabulary(self) -> tuple[list[bytes], dict[str, int]]:
        """The text of every token, and control tokens by their names."""
        texts = [
            self._library.decode_token_static(self._model, token) or b"" for token in range(self._config.vocab_size)
        ]
        specials: dict[str, int] = {}
        for token, piece in enumerate(texts):
            name = piece.decode("utf-8", "replace")
            if _MARKER.fullmatch(name) and self._encode(piece) == [token]:
                specials[name] = token
        for text in (self._library.bos_token(self._model), self._library.eos_token(self._model)):
            encoded = self._encode(text) if text else []
            if len(encoded) == 1:
                specials[text.decode("utf-8", "replace")] = encoded[0]
        for token in specials.values():
            texts[token] = b""
        return texts, specials

    def _probe(self) -> None:
        """Whether this architecture has a fused step with logits at all."""
        try:
            self.step_tokens(0, [0])
        except EngineError as error:
            if self._library.get_error_code() == UNSUPPORTED:
                raise LoadFailed(
                    f"baseRT has no batched step for architecture {self._architecture!r} ({error}); serve the model's "
                    "GGUF with llama.cpp"
                ) from error
            raise LoadFailed(f"baseRT cannot compute: {error}") from error
        finally:
            self.free(0)
        self._computed = 0

    @property
    def _architecture(self) -> str:
        return bytes(self._config.architecture).decode("ascii", "replace")

    def _describe(self, spec: LoadSpec) -> EngineInfo:
        config, library, model = self._config, self._library, self._model
        window = min(spec.window, config.max_seq_len)
        bos = (library.bos_token(model) or b"").decode("utf-8", "replace")
        eos = (library.eos_token(model) or b"").decode("utf-8", "replace")
        end = int(library.eos_token_id(model))
        ends = {end, *(self._specials[name] for name in TURN_ENDS if name in self._specials)}
        return EngineInfo(
            runtime="basert",
            version=library.version,
            architecture=self._architecture,
            description=f"{self._architecture}, {library.model_memory(model) / (1 << 20):.0f} MiB",
            layout="shared",
            # The pool is handed out in pages, and every sequence may leave most of its last one empty.
            cells=min(spec.cells, window * spec.lanes) - (spec.lanes + spec.spare) * (MOST_PAGE - 1),
            lanes=spec.lanes,
            sequences=spec.lanes + spec.spare,
            window=window,
            trained_context=config.max_seq_len,
            bytes_per_cell=2 * config.n_layers * config.kv_dim * KV_BITS // 8,
            weights_bytes=library.model_memory(model),
            cut="head" if config.sliding_window else "anywhere",
            round_granular=False,
            abandons=False,
            packs_prefill_with_decode=True,
            max_step=spec.micro_batch,
            threads=0,
            vocabulary=config.vocab_size,
            add_bos=False,
            bos=self._specials.get(bos, -1),
            eos=end,
            end_tokens=tuple(sorted(ends)),
            chat_template=(library.chat_template_jinja(model) or b"").decode("utf-8", "replace"),
            bos_text=bos,
            eos_text=eos,
            device="gpu (Metal)",
            saves=False,
        )

    # -- sequences ------------------------------------------------------------------------------------------------

    def length(self, sequence: int) -> int:
        """Tokens fed and not cut."""
        found = self._sequences[sequence]
        return len(found.tokens) if found is not None else 0

    def cells_used(self) -> int:
        """A cell a token; what the engine's own prefix cache holds beside that is given up as soon as it is needed."""
        return sum(len(one.tokens) for one in self._sequences if one is not None)

    def computed(self) -> int:
        """Tokens that went through a step."""
        return self._computed

    def free(self, sequence: int) -> None:
        """Empty the sequence; its blocks go back to the pool."""
        found = self._sequences[sequence]
        self._sequences[sequence] = None
        if found is not None:
            self._release(found)

    def _release(self, one: _Sequence) -> None:
        with self._native:
            self._library.sequence_free(one.handle)
            self._library.prefix_unlock(self._model, one.lock)

    def _create(self) -> _Sequence:
        with self._native:
            handle = self._library.sequence_create(self._model)
        if not handle:
            raise StepFailed(f"baseRT has no more sequences: {self._library.message()}")
        return _Sequence(handle)

    def cut(self, sequence: int, length: int) -> bool:
        """Begin another sequence from the blocks of this one, and let this one go."""
        held = self.length(sequence)
        if length <= 0:
            self.free(sequence)
            return True
        if length >= held:
            return length == held
        if self.info.cut == "head":
            return False
        found = self._sequences[sequence]
        assert found is not None
        try:
            shorter = self._begin(found.tokens[:length], found)
        except EngineError as error:
            log.info("a sequence could not be cut: %s", error)
            return False
        self._release(found)
        self._sequences[sequence] = shorter
        return True

    def copy(self, source: int, sequence: int, length: int) -> None:
        """Begin from the blocks of the source."""
        found = self._sequences[source]
        if found is None or length > len(found.tokens) or (length < len(found.tokens) and self.info.cut == "head"):
            raise StepFailed(f"{length} tokens of a sequence of {self.length(source)} cannot be copied")
        self._sequences[sequence] = self._begin(found.tokens[:length], found)

    def export(self, sequence: int) -> bytes:
        """The token ids; their KV is in the engine's prefix cache from now on, for as long as that has room."""
        found = self._sequences[sequence]
        if found is None:
            raise StepFailed("there is nothing to save")
        self._publish(found)
        return msgspec.msgpack.encode(found.tokens)

    def restore(self, sequence: int, state: bytes, length: int) -> None:
        """Begin from what the engine's prefix cache still has of those tokens."""
        try:
            tokens = msgspec.msgpack.decode(state, type=list[int])
        except msgspec.DecodeError as error:
            raise StepFailed(f"a state of {len(state)} bytes is not whole") from error
        if not 0 < length <= len(tokens):
            raise StepFailed(f"{length} tokens are wanted of {len(tokens)}")
        self._sequences[sequence] = self._begin(tokens[:length])

    def _publish(self, one: _Sequence) -> None:
        with self._native:
            code = self._library.prefix_insert(self._model, tokens_of(one.tokens), len(one.tokens), one.handle)
        self._library.check(code, "publishing a prefix")

    def _begin(self, tokens: list[int], source: _Sequence | None = None) -> _Sequence:
        """A new sequence that holds these tokens, from blocks that are there and a few tokens fed again.

        Args:
            tokens: what it is to hold.
            source: a sequence that begins with them: it is published first.

        Raises:
            EngineError: too little of it is cached, or it cannot be fed.
        """
        if source is not None:
            self._publish(source)
        with self._native:
            # A match always leaves a token to feed; all of these are wanted, and whatever comes after them does.
            match = self._library.prefix_match(self._model, tokens_of([*tokens, 0]), len(tokens) + 1)
        one = self._create()
        one.lock = match.handle
        try:
            if match.matched_tokens:
                with self._native:
                    code = self._library.sequence_seed_prefix(
                        one.handle, match.blocks, match.n_blocks, match.matched_tokens
                    )
                self._library.check(code, "beginning from a prefix")
                one.tokens = tokens[: match.matched_tokens]
            rest = tokens[match.matched_tokens :]
            if len(rest) > FEW:
                raise StepFailed(f"only {match.matched_tokens} of {len(tokens)} tokens are cached")
            if rest:
                self._run([one], [rest])
        except EngineError:
            self._release(one)
            raise
        return one

    # -- computing ------------------------------------------------------------------------------------------------

    def step(self, feeds: Sequence[Feed], *, abandonable: bool = False) -> None:
        """One fused call. If it fails, every sequence of it is begun again from its own prefix."""
        del abandonable
        for feed in feeds:
            held = self.length(feed.sequence)
            if held != feed.start:
                raise StepFailed(f"sequence {feed.sequence} holds {held} tokens, not {feed.start}")
            if feed.start + len(feed.tokens) > self.info.window:
                raise OutOfCells(f"no room: sequence {feed.sequence} holds {held} of {self.info.window} tokens")
            if not all(0 <= token < self._config.vocab_size for token in feed.tokens):
                raise StepFailed(f"a token is outside the vocabulary of {self._config.vocab_size}")
        self._rows = {}
        try:
            self._run_feeds(feeds)
        except OutOfCells:
            # What the engine's cache holds beyond need is given up for it, once.
            if not self._evict(sum(-(-len(feed.tokens) // LEAST_PAGE) + 1 for feed in feeds)):
                raise
            self._run_feeds(feeds)
        with self._native:
            self._logits = self._read_logits(len(feeds))
        self._rows = {index: index for index, feed in enumerate(feeds) if feed.sample}

    def _run_feeds(self, feeds: Sequence[Feed]) -> None:
        sequences = [self._ready(feed.sequence) for feed in feeds]
        try:
            self._run(sequences, [list(feed.tokens) for feed in feeds])
        except EngineError:
            self._recover(feeds)
            if any(self.length(feed.sequence) != feed.start for feed in feeds):
                raise StepFailed("a sequence was lost with a step") from None
            raise

    def _evict(self, blocks: int) -> int:
        with self._native:
            return int(self._library.prefix_evict(self._model, blocks))

    def step_tokens(self, sequence: int, tokens: list[int]) -> None:
        """Feed one sequence."""
        self._run([self._ready(sequence)], [tokens])

    def _ready(self, sequence: int) -> _Sequence:
        found = self._sequences[sequence]
        if found is None:
            found = self._sequences[sequence] = self._create()
        return found

    def _run(self, sequences: Sequence[_Sequence], chunks: Sequence[list[int]]) -> None:
        """One call for all. If it fails, how far each sequence got is not known."""
        flat = tokens_of([token for chunk in chunks for token in chunk])
        counts = (ctypes.c_int * len(chunks))(*map(len, chunks))
        handles = (ctypes.c_void_p * len(sequences))(*(one.handle for one in sequences))
        with self._native:
            code = self._library.batch_step_fused_logits(self._model, handles, len(sequences), flat, counts)
            self._library.check(code, "a step")
        for one, chunk in zip(sequences, chunks, strict=True):
            one.tokens += chunk
            self._computed += len(chunk)

    def _recover(self, feeds: Iterable[Feed]) -> None:
        """After a call that failed, what its sequences hold is not known: begin them anew, or leave them empty."""
        for feed in feeds:
            found = self._sequences[feed.sequence]
            assert found is not None
            if not found.tokens:
                self.free(feed.sequence)
                continue
            try:
                self._publish(found)
                # Before another one begins: what it took for the step that failed is needed for that.
                self.free(feed.sequence)
                self._sequences[feed.sequence] = self._begin(found.tokens)
            except EngineError as error:
                log.warning("sequence %d was lost with a step: %s", feed.sequence, error)
                self.free(feed.sequence)

    def _read_logits(self, rows: int) -> npt.NDArray[np.float16]:
        found = np.empty((rows, self._config.vocab_size), dtype=np.float16)
        if self._library.read_batch_logits(self._model, rows, found.ctypes.data) != self._config.vocab_size:
            raise StepFailed(f"baseRT gave no logits: {self._library.message()}")
        return found

    def abandon(self, wanted: bool) -> None:
        """A call ends when it ends."""

    def choose(self, feed: int, draw: Draw) -> Choice:
        """Draw from the logits of the feed's last token."""
        if self._logits is None or feed not in self._rows:
            raise StepFailed("baseRT kept no logits for this lane")
        return sampling.choose(self._logits[self._rows[feed]].astype(np.float32), draw)

    def seconds(self) -> float:
        """The process's monotonic clock."""
        return time.perf_counter()

    def set_threads(self, decode: int, prefill: int) -> None:
        """A GPU computes."""

    # -- text -----------------------------------------------------------------------------------------------------

    def tokenize(self, text: str, *, add_bos: bool, parse_special: bool) -> list[int]:
        """Token ids. The library takes every marker it knows for a control token: where that is not wanted, the text
        is divided inside of each. Waits for a step that runs."""
        tokens = [self.info.bos] if add_bos and self.info.bos >= 0 else []
        parts = [text] if parse_special or not self._specials else self._divided(text)
        with self._native:
            for part in parts:
                tokens += self._encode(part.encode("utf-8", "replace"))
        return tokens

    def _divided(self, text: str) -> list[str]:
        """The text in parts of which none has a marker in it."""
        parts, at = [], 0
        pattern = re.compile("|".join(re.escape(name) for name in sorted(self._specials, key=len, reverse=True)))
        for marker in pattern.finditer(text):
            parts.append(text[at : marker.start() + 1])
            at = marker.start() + 1
        return [part for part in (*parts, text[at:]) if part]

    def _encode(self, text: bytes) -> list[int]:
        # The library's texts end at a zero byte.
        if b"\0" in text:
            raise StepFailed("a text with a zero byte cannot be tokenized by baseRT")
        room = len(text) + 8
        found = (ctypes.c_uint32 * room)()
        count = self._library.encode(self._model, text, found, room)
        if count < 0 or count > room:
            raise StepFailed(f"baseRT could not tokenize: {self._library.message()}")
        return list(found[:count])

    def pieces(self) -> list[bytes]:
        """The bytes of every token; control tokens are empty."""
        return list(self._pieces)

    def close(self) -> None:
        """Release everything. Idempotent."""
        if self._model:
            for sequence in range(len(self._sequences)):
                self.free(sequence)
            self._library.free_model(self._model)
            self._model = 0
