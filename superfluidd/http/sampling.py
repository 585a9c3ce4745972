"""Sampling fields of a request body: ranges, aliases, defaults of the operator, a seed where none was sent."""

from __future__ import annotations

import secrets

import msgspec

from superfluidd.config import Settings
from superfluidd.errors import InvalidValue
from superfluidd.http.schema import Body
from superfluidd.types import SamplingParams

MAX_STOPS = 16
"""Most stop texts of one request."""

MAX_LOGPROBS = 20
"""Most alternatives reported beside each token."""

_SEEDS = 1 << 64
_MOST_TOKENS = 1 << 31


class Range(msgspec.Struct, frozen=True):
    """Legal values of a number; ``above`` excludes the low end itself."""

    low: float
    high: float
    above: bool = False


RANGES: dict[str, Range] = {
    "temperature": Range(0, 100),
    "top_p": Range(0, 1),
    "top_k": Range(0, 1 << 31),
    "min_p": Range(0, 1),
    "repeat_penalty": Range(0, 100, above=True),
    "repetition_penalty": Range(0, 100, above=True),
    "presence_penalty": Range(-2, 2),
    "frequency_penalty": Range(-2, 2),
}


def sampling(body: Body, settings: Settings, *, logprobs: int | None, vocabulary: int) -> SamplingParams:
    """How the first choice is drawn; later choices differ in their seed (:func:`for_choice`).

    Args:
        logprobs: alternatives wanted beside each token, None for no log-probabilities.
        vocabulary: number of tokens, for the ids in ``logit_bias``.

    Raises:
        InvalidValue: a value is out of range; ``param`` names the field.
    """
    for name, legal in RANGES.items():
        _check(name, getattr(body, name), legal)
    if body.seed is not None and not -(1 << 63) <= body.seed < _SEEDS:
        raise InvalidValue(f"seed must fit 64 bits, got {body.seed}", param="seed")
    repeat = body.repeat_penalty if body.repeat_penalty is not None else body.repetition_penalty
    return SamplingParams(
        temperature=settings.temperature if body.temperature is None else body.temperature,
        top_k=settings.top_k if body.top_k is None else body.top_k,
        top_p=settings.top_p if body.top_p is None else body.top_p,
        min_p=settings.min_p if body.min_p is None else body.min_p,
        seed=secrets.randbits(64) if body.seed is None else body.seed % _SEEDS,
        repeat_penalty=1.0 if repeat is None else repeat,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        logit_bias=_bias(body.logit_bias or {}, vocabulary),
        logprobs=logprobs,
        ignore_eos=bool(body.ignore_eos),
    )


def for_choice(first: SamplingParams, index: int) -> SamplingParams:
    """The same with the seed of choice ``index``, so that choices differ and each can be repeated."""
    return first if index == 0 else msgspec.structs.replace(first, seed=(first.seed + index) % _SEEDS)


def max_tokens(body: Body, settings: Settings) -> int | None:
    """Most tokens of a reply; None fills the window. The newer of OpenAI's two names wins.

    Raises:
        InvalidValue: less than one.
    """
    for name in ("max_completion_tokens", "max_tokens"):
        value: int | None = getattr(body, name)
        if value is not None and value < 1:
            raise InvalidValue(f"{name} must be at least 1, got {value}", param=name)
    asked = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    return settings.max_tokens if asked is None else min(asked, _MOST_TOKENS)


def stops(body: Body) -> tuple[str, ...]:
    """The stop texts.

    Raises:
        InvalidValue: too many, or an empty one.
    """
    given = body.stop
    found = () if given is None else (given,) if isinstance(given, str) else tuple(given)
    if len(found) > MAX_STOPS:
        raise InvalidValue(f"stop has {len(found)} texts; at most {MAX_STOPS} are allowed", param="stop")
    if "" in found:
        raise InvalidValue("stop has an empty text, which would end every reply at once; leave it out", param="stop")
    return found


def alternatives(name: str, value: int | None) -> int | None:
    """A number of alternatives to report.

    Raises:
        InvalidValue: out of range.
    """
    _check(name, value, Range(0, MAX_LOGPROBS))
    return value


def _check(name: str, value: float | None, legal: Range) -> None:
    if value is None:
        return
    # Written so that a NaN fails it.
    if not (legal.low <= value <= legal.high) or (legal.above and value == legal.low):
        start = f"above {legal.low:g} and at most" if legal.above else f"from {legal.low:g} to"
        raise InvalidValue(f"{name} must be {start} {legal.high:g}, got {value:g}", param=name)


def _bias(given: dict[str, float], vocabulary: int) -> tuple[tuple[int, float], ...]:
    found: dict[int, float] = {}
    for key, value in given.items():
        if not (key.isascii() and key.isdecimal()) or len(key) > 10 or int(key) >= vocabulary:
            raise InvalidValue(
                f"logit_bias: {key[:40]!r} is not a token id of this model, 0 to {vocabulary - 1}", param="logit_bias"
            )
        _check("logit_bias", value, Range(-100, 100))
        found[int(key)] = value
    return tuple(sorted(found.items()))
