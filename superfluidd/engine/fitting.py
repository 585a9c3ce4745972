"""How much context a model gets: arithmetic over its header, the settings and the memory there is. Pure.

KV is counted in every layer. For sliding-window and recurrent models that is more than the runtime takes, so
what is promised here holds.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from superfluidd.engine.header import ModelHeader
from superfluidd.errors import ModelFileError, UsageError

MIB = 1 << 20

SHARE = 0.60
"""Part of the memory beside weights and reserve that an automatic window takes; the rest is for everybody else."""

STEP = 256
"""Automatic windows are multiples of this, as llama.cpp's buffers are."""

LEAST_WINDOW = 512
"""An automatic window is not shorter while it fits at all; less is no use to a chat."""

LEAST_RESERVE = 512 * MIB
RESERVED_PART = 8
"""The reserve for compute buffers and for the daemon itself: that part of the budget, at least LEAST_RESERVE."""

Layout = Literal["per-sequence", "shared"]


class Fit(msgspec.Struct, frozen=True):
    """How a model is to be loaded.

    Attributes:
        window: the longest context of one request, tokens.
        cells: KV cells in all, tokens.
        layout: ``per-sequence`` or ``shared``.
        bytes_per_cell: KV bytes of one token.
        kv_bytes: of all cells; ``weights_bytes``: of all tensors.
        why: one line that explains the window.
    """

    window: int
    cells: int
    layout: Layout
    bytes_per_cell: int
    kv_bytes: int
    weights_bytes: int
    why: str


def bytes_per_token(header: ModelHeader) -> int:
    """KV bytes that one token takes in all layers; 0 for a model without attention."""
    return sum(header.head_count_kv) * (header.key_length + header.value_length) * header.element_bytes


def choose_layout(header: ModelHeader, kv_layout: str, pool_tokens: int | None) -> Layout:
    """The KV layout to use.

    A window of its own per sequence is the faster one by far; sliding windows and recurrent states gain nothing from
    it. Asking for a pool is asking for the layout that has one.

    Raises:
        UsageError: a pool was asked for together with the layout that has none.
    """
    if kv_layout == "per-sequence":
        if pool_tokens is not None:
            raise UsageError(
                "--pool-tokens has no meaning with --kv-layout per-sequence; use --kv-layout shared, or leave it out",
                param="pool-tokens",
            )
        return "per-sequence"
    plain = not header.sliding_window and not header.recurrent
    return "per-sequence" if kv_layout == "auto" and plain and pool_tokens is None else "shared"


def fit(
    header: ModelHeader,
    *,
    lanes: int,
    max_context: int | None,
    kv_layout: str,
    pool_tokens: int | None,
    available: int,
    sharing: int = 1,
    spare: int = 0,
) -> Fit:
    """Fit a model to the memory there is.

    Args:
        header: of the model file.
        lanes: requests that run at once.
        max_context: the window asked for, tokens; None chooses it.
        kv_layout: ``auto``, ``per-sequence`` or ``shared``.
        pool_tokens: cells asked for; None means lanes times window.
        available: bytes of memory there are, for all models.
        sharing: how many models there are; each gets an equal part.
        spare: sequences beside those of the lanes; in the per-sequence layout each has a window of its own, too.

    Raises:
        ModelFileError: the model cannot do what is asked, or memory does not hold it; the message has the sums.
        UsageError: the settings contradict each other.
    """
    layout = choose_layout(header, kv_layout, pool_tokens)
    trained = header.context_length
    if max_context is not None and max_context > trained:
        raise ModelFileError(
            f"{header.path} was trained for {trained} tokens of context, but --max-context asks for {max_context}; "
            f"ask for {trained} at most"
        )
    cell, weights, budget = bytes_per_token(header), header.tensor_bytes, available // sharing
    sequences = lanes + spare if layout == "per-sequence" else lanes
    window, reason = _window(header, max_context, pool_tokens, sequences, budget)
    if pool_tokens is not None and pool_tokens < window:
        window, reason = pool_tokens, "all of the pool"
    cells = pool_tokens if pool_tokens is not None else window * sequences
    spares = f", {sequences - lanes} spare windows among them" if sequences > lanes else ""
    memory = (
        f"weights {_mib(weights)} MiB + KV {_mib(cells * cell)} MiB ({cells} cells of {cell} bytes{spares}) "
        f"= {_mib(weights + cells * cell)} MiB of {_mib(budget)} MiB"
    )
    if sharing > 1:
        memory += f" (one of {sharing} parts of {_mib(available)} MiB)"
    if weights + cells * cell > budget:
        raise ModelFileError(f"{header.path} does not fit into memory: {memory}; {_remedy(weights, budget, sharing)}")
    return Fit(
        window=window,
        cells=cells,
        layout=layout,
        bytes_per_cell=cell,
        kv_bytes=cells * cell,
        weights_bytes=weights,
        why=f"{memory}; the window is {reason}",
    )


def _window(
    header: ModelHeader, max_context: int | None, pool_tokens: int | None, sequences: int, budget: int
) -> tuple[int, str]:
    """The window, and in words where it comes from."""
    trained, cell = header.context_length, bytes_per_token(header)
    if max_context is not None:
        return max_context, "what was asked for"
    # The memory of a pool is settled already; a longer window in it costs nothing.
    if pool_tokens is not None or not cell:
        return trained, "what the model was trained for"
    reserve = max(LEAST_RESERVE, budget // RESERVED_PART)
    window = int(SHARE * (budget - header.tensor_bytes - reserve) / (cell * sequences)) // STEP * STEP
    if window >= trained:
        return trained, "what the model was trained for"
    least = min(LEAST_WINDOW, trained)
    if window < least:
        return least, "the shortest that is of use"
    return window, f"what {SHARE:.0%} of the memory left after weights and a reserve of {_mib(reserve)} MiB holds"


def _remedy(weights: int, budget: int, sharing: int) -> str:
    if weights > budget:
        return "free memory, serve " + ("fewer models" if sharing > 1 else "a smaller model or a smaller quantization")
    return "lower --max-context, --max-batch or --pool-tokens, or free memory"


def _mib(count: int) -> str:
    return f"{count / MIB:.0f}"
