"""Logits to a token. A draw is a function of (parameters, token history, position) and of nothing else.

So a lane that was cut anywhere, preempted, moved or replayed after a crash draws what it would have drawn. The
random number of a position is a hash of (seed, position); no generator state exists.

Order: logit_bias, end tokens (under ``ignore_eos``), penalties, temperature, top_k, top_p, min_p, draw. Ties go to the
lowest id. Log-probabilities are of the model's own distribution, before any of it.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from superfluidd.engine.port import Choice, Draw
from superfluidd.types import SamplingParams, TokenLogprob

Floats = npt.NDArray[np.float32]
Ids = npt.NDArray[np.intp]

PENALTY_WINDOW = 64
"""Latest tokens, prompt included, that ``repeat_penalty`` looks at."""

_MASK = (1 << 64) - 1
_SPAN = 18.0
"""Tokens this many natural-log units below the likeliest weigh less than 2e-8 of it: looked at only if needed."""


_NEAR = (6.0, 12.0)
"""Where the top k are looked for, natural-log units below the likeliest: usually within the first."""


_FEW = 128
"""Up to this top_k the candidates are handled one by one."""


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on (seed, position) only (two rounds of the splitmix64 finaliser)."""
    word = _mix((seed & _MASK) ^ 0x5851F42D4C957F2D)
    word = _mix((word + position * 0x9E3779B97F4A7C15) & _MASK)
    return (word >> 11) * 2.0**-53


def _mix(word: int) -> int:
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _MASK
    return word ^ (word >> 31)


def choose(logits: Floats, draw: Draw) -> Choice:
    """Draw one token.

    Args:
        logits: float32, one per vocabulary entry; as it was when this returns.
        draw: what the draw depends on.

    Raises:
        ValueError: the logits hold no finite number.
    """
    params = draw.params
    if _changes_many(params):
        token = _token(_adjust(logits, draw), draw)
    elif params.ignore_eos:
        # The common case in which only a few entries change: put them back instead of copying a vocabulary.
        ends = list(draw.end_tokens)
        before = logits[ends]
        logits[ends] = -np.inf
        try:
            token = _token(logits, draw)
        finally:
            logits[ends] = before
    else:
        token = _token(logits, draw)
    if params.logprobs is None:
        return Choice(token)
    return _with_logprobs(logits, token, params.logprobs)


def _token(scores: Floats, draw: Draw) -> int:
    params = draw.params
    if params.temperature > 0:
        return _draw(scores, params, uniform(params.seed, draw.position))
    token = int(scores.argmax())
    if not np.isfinite(scores[token]):
        raise ValueError("the model produced no finite logit")
    return token


def _changes_many(params: SamplingParams) -> bool:
    penalised = params.repeat_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
    return bool(params.logit_bias) or penalised


def _adjust(logits: Floats, draw: Draw) -> Floats:
    params = draw.params
    scores = logits.copy()
    for token, bias in params.logit_bias:
        scores[token] = -np.inf if bias <= -100 else scores[token] + bias
    if params.ignore_eos:
        scores[list(draw.end_tokens)] = -np.inf
    if params.repeat_penalty != 1.0:
        recent = np.unique(np.asarray(draw.history[-PENALTY_WINDOW:], dtype=np.intp))
        seen = scores[recent]
        scores[recent] = np.where(seen > 0, seen / params.repeat_penalty, seen * params.repeat_penalty)
    if params.presence_penalty != 0.0 or params.frequency_penalty != 0.0:
        generated, counts = np.unique(np.asarray(draw.history[draw.prompt :], dtype=np.intp), return_counts=True)
        scores[generated] -= (params.presence_penalty + params.frequency_penalty * counts).astype(np.float32)
    return scores


def _draw(scores: Floats, params: SamplingParams, number: float) -> int:
    best = float(scores.max())
    if not np.isfinite(best):
        raise ValueError("the model produced no finite logit")
    if 0 < params.top_k <= _FEW:
        return _draw_few(scores, best, params, number)
    if params.top_k == 0 and params.top_p >= 1.0 and params.min_p <= 0.0:
        return _pick(np.arange(len(scores)), _weights(scores, best, params.temperature), number)
    kept = _candidates(scores, best, params)
    weights = _weights(scores[kept], best, params.temperature)
    if params.top_p < 1.0:
        mass = np.cumsum(weights)
        whole = mass[-1] if params.top_k else _weights(scores, best, params.temperature).sum()
        keep = int(np.searchsorted(mass, params.top_p * whole, side="left")) + 1
        kept, weights = kept[:keep], weights[:keep]
    if params.min_p > 0.0:
        keep = max(1, int(np.count_nonzero(weights >= params.min_p)))
        kept, weights = kept[:keep], weights[:keep]
    return _pick(kept, weights, number)


def _candidates(scores: Floats, best: float, params: SamplingParams) -> Ids:
    """Ids that may be drawn, likeliest first, ties by id: the top k, or all that could reach top_p."""
    if params.top_k:
        near = _near(scores, best, params.top_k)
        return near[np.argsort(-scores[near], kind="stable")][: params.top_k]
    near = np.flatnonzero(scores >= best - _SPAN * params.temperature)
    if params.top_p < 1.0:
        reached = _weights(scores[near], best, params.temperature).sum()
        if reached < params.top_p * _weights(scores, best, params.temperature).sum():
            near = np.flatnonzero(np.isfinite(scores))
    return near[np.argsort(-scores[near], kind="stable")]


def _near(scores: Floats, best: float, wanted: int) -> Ids:
    """Ids, in order, among which are the top ``wanted`` with all that tie with the last of them."""
    for span in _NEAR:
        near = np.flatnonzero(scores >= best - span)
        if len(near) >= wanted:
            break
    else:
        near = np.flatnonzero(np.isfinite(scores))
    if len(near) > 2 * wanted:
        floor = np.partition(scores[near], len(near) - wanted)[len(near) - wanted]
        near = near[scores[near] >= floor]
    return near


def _draw_few(scores: Floats, best: float, params: SamplingParams, number: float) -> int:
    """The same draw for a small top_k, where a call of numpy costs more than its arithmetic."""
    near = _near(scores, best, params.top_k)
    negatives: list[float] = (-scores[near]).tolist()
    tokens: list[int] = near.tolist()
    ranked = sorted(zip(negatives, tokens, strict=True))[: params.top_k]
    weights = [math.exp((-negative - best) / params.temperature) for negative, _ in ranked]
    if params.top_p < 1.0:
        goal = params.top_p * sum(weights)
        mass = 0.0
        for count, weight in enumerate(weights, 1):
            mass += weight
            if mass >= goal:
                del weights[count:]
                break
    if params.min_p > 0.0:
        weights = [weight for weight in weights if weight >= params.min_p] or weights[:1]
    goal = number * sum(weights)
    mass = 0.0
    for (_, token), weight in zip(ranked, weights, strict=False):
        mass += weight
        if mass > goal:
            return token
    return ranked[len(weights) - 1][1]


def _weights(scores: Floats, best: float, temperature: float) -> npt.NDArray[np.float64]:
    """Probabilities as shares of the likeliest token's. In double precision, where no legal temperature is zero."""
    with np.errstate(over="ignore"):
        return np.exp(np.subtract(scores, best, dtype=np.float64) / temperature)


def _pick(ids: Ids, weights: npt.NDArray[np.float64], number: float) -> int:
    mass = np.cumsum(weights)
    index = int(np.searchsorted(mass, number * mass[-1], side="right"))
    return int(ids[min(index, len(ids) - 1)])


def _with_logprobs(logits: Floats, token: int, alternatives: int) -> Choice:
    best = float(logits.max())
    log_mass = best + float(np.log(np.exp(logits - best, dtype=np.float64).sum()))
    top: tuple[TokenLogprob, ...] = ()
    if alternatives:
        likeliest = _candidates(logits, best, SamplingParams(top_k=alternatives))
        top = tuple(TokenLogprob(int(each), float(logits[each]) - log_mass) for each in likeliest)
    return Choice(token, float(logits[token]) - log_mass, top)
