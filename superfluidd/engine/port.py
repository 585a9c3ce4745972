"""The narrow port between the executor and a runtime, and the record of what a runtime affords.

A runtime owns weights and KV and computes. It keeps no queue and no policy, and it knows nothing of requests: it
sees sequences, tokens and positions. What it can or cannot do is a *field* of :class:`EngineInfo`; there is no
method that exists only to refuse.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

import msgspec

from superfluidd.types import SamplingParams, TokenLogprob


class EngineInfo(msgspec.Struct, frozen=True):
    """What a loaded runtime affords. It travels to the daemon once, in the worker's hello.

    Attributes:
        runtime: ``llamacpp``, ``simulated``, ...; ``version``: of that runtime.
        architecture: the model's architecture; ``description``: one line for people.
        layout: ``per-sequence`` (every sequence has a window of its own) or ``shared`` (one pool of cells).
        cells: KV cells in all, tokens.
        lanes: sequences that may run at once; ``sequences``: that may exist at once.
        window: the longest context of one sequence, tokens; ``trained_context``: what the model was trained for.
        bytes_per_cell: KV bytes a token takes.
        weights_bytes: size of the weights in memory.
        cut: where a sequence can be shortened: ``anywhere``, ``window`` (only within the sliding window) or ``head``
            (only to nothing).
        round_granular: a decode round costs the same however rounds are cut into ticks, and a running tick can be
            ended at the next step; ``False`` for native engines whose tick is one call.
        abandons: a step can be given up in its middle (:meth:`Runtime.abandon`).
        packs_prefill_with_decode: one call with both is cheaper than two.
        max_step: the largest useful prefill micro-batch, tokens.
        threads: compute threads it may use.
        vocabulary: number of tokens.
        add_bos: the tokenizer puts ``bos`` in front of a text on its own; ``bos``/``eos``: ids or -1.
        end_tokens: ids that end a generation.
        fim: ids of the prefix, suffix and middle tokens, -1 where the model has none.
        chat_template: the model's own Jinja source, or empty.
        bos_text, eos_text: what those tokens look like inside a template.
        device: what computes, for people; ``kv_type``: type of the numbers in KV.
        reserves: memory for all cells is taken when the model is loaded, and weights are pages of their file; otherwise
            weights are copied, and KV grows with the sequences.
        saves: what :meth:`Runtime.export` gives is KV; otherwise it only leads to what the runtime itself keeps, and is
            of no use to another process.
    """

    runtime: str
    version: str
    architecture: str
    description: str
    layout: Literal["per-sequence", "shared"]
    cells: int
    lanes: int
    sequences: int
    window: int
    trained_context: int
    bytes_per_cell: int
    weights_bytes: int
    cut: Literal["anywhere", "window", "head"]
    round_granular: bool
    abandons: bool
    packs_prefill_with_decode: bool
    max_step: int
    threads: int
    vocabulary: int
    add_bos: bool
    bos: int
    eos: int
    end_tokens: tuple[int, ...]
    fim: tuple[int, int, int] = (-1, -1, -1)
    chat_template: str = ""
    bos_text: str = ""
    eos_text: str = ""
    device: str = "cpu"
    kv_type: str = "f16"
    reserves: bool = True
    saves: bool = True


class Feed(msgspec.Struct, frozen=True):
    """Tokens to compute for one sequence in one step.

    Attributes:
        sequence: the sequence they extend.
        start: position of the first token; it must equal the sequence's present length.
        tokens: the token ids, at least one.
        sample: the last token's logits are wanted.
    """

    sequence: int
    start: int
    tokens: Sequence[int]
    sample: bool


class Draw(msgspec.Struct, frozen=True):
    """Everything a draw depends on.

    Attributes:
        params: the request's sampling parameters.
        position: absolute position of the token to be drawn: with ``params.seed`` the key of the draw.
        history: the lane's tokens so far, oldest first (a live view: read only).
        prompt: how many of them are the prompt.
        end_tokens: ids that end a generation.
    """

    params: SamplingParams
    position: int
    history: Sequence[int]
    prompt: int
    end_tokens: tuple[int, ...]


class Choice(msgspec.Struct, frozen=True):
    """A drawn token; ``logprob`` and ``top`` only where the request asked for them (natural logarithms)."""

    token: int
    logprob: float | None = None
    top: tuple[TokenLogprob, ...] = ()


class EngineError(Exception):
    """Root of what a runtime raises. Nothing of it crosses the wire but the message."""


class OutOfCells(EngineError):
    """The KV pool cannot hold the step. Nothing of the step was kept."""


class StepFailed(EngineError):
    """The runtime failed the step. Nothing of the step was kept; the sequences hold what they held before."""


class StepAbandoned(EngineError):
    """The step was given up because somebody asked for it. Nothing of the step was kept."""


class LoadFailed(EngineError):
    """The model cannot be loaded; the message says why."""


class Runtime(Protocol):
    """What an executor drives. One thread calls everything but :meth:`tokenize` and :meth:`abandon`, which any
    thread may call."""

    info: EngineInfo

    def length(self, sequence: int) -> int:
        """Tokens the sequence holds, by the runtime's own count."""

    def cells_used(self) -> int:
        """KV cells in use, by the runtime's own count."""

    def computed(self) -> int:
        """Tokens computed since it was loaded, by the runtime's own count."""

    def free(self, sequence: int) -> None:
        """Empty the sequence."""

    def cut(self, sequence: int, length: int) -> bool:
        """Shorten the sequence to ``length`` tokens; ``False`` if its state cannot be cut there (nothing changes)."""

    def copy(self, source: int, sequence: int, length: int) -> None:
        """Make an empty sequence hold the first ``length`` tokens of another.

        Raises:
            EngineError: it cannot be done; the sequence is empty.
        """

    def export(self, sequence: int) -> bytes:
        """Everything a sequence holds, in a form that :meth:`restore` of the same model and settings understands.

        Raises:
            EngineError: it cannot be done.
        """

    def restore(self, sequence: int, state: bytes, length: int) -> None:
        """Make an empty sequence hold the first ``length`` tokens of what was exported.

        Raises:
            EngineError: it cannot be done; the sequence is empty.
        """

    def step(self, feeds: Sequence[Feed], *, abandonable: bool = False) -> None:
        """Compute all feeds in one packed call.

        Args:
            feeds: what to compute.
            abandonable: the step may be given up in its middle.

        Raises:
            OutOfCells, StepFailed: it could not be computed.
            StepAbandoned: :meth:`abandon` was called before it was done.
        """

    def abandon(self, wanted: bool) -> None:
        """Give up the abandonable step that runs, or the next one (``True``); or forget about that (``False``).
        Thread-safe. It means nothing to a runtime whose info says that it does not abandon."""

    def choose(self, feed: int, draw: Draw) -> Choice:
        """Draw the next token of the last step's ``feed``-th feed, which asked for logits."""

    def seconds(self) -> float:
        """A monotonic clock in the runtime's own time (a simulated runtime keeps a virtual one)."""

    def set_threads(self, decode: int, prefill: int) -> None:
        """Use that many compute threads from the next step on; ignored where it has no meaning."""

    def tokenize(self, text: str, *, add_bos: bool, parse_special: bool) -> list[int]:
        """Token ids of a text. Thread-safe, and never waits for a step."""

    def pieces(self) -> list[bytes]:
        """The text of every token in id order, as bytes; control tokens are empty."""

    def close(self) -> None:
        """Release everything. Idempotent."""
