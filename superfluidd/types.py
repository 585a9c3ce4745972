"""Small values every room shares: request ids, QoS classes, phases, finish reasons, sampling parameters.

Nothing here imports anything of ours, and nothing here knows a clock, a socket or an engine.
"""

from __future__ import annotations

import enum

import msgspec

RequestId = int
"""A positive integer, unique for the life of the daemon, growing in order of arrival."""


class QosClass(enum.IntEnum):
    """What a request is for. Lower is served first (source: the specification, "QoS classes")."""

    INTERACTIVE = 0
    COMPLETION = 1
    AGENT = 2
    BACKGROUND = 3

    @property
    def label(self) -> str:
        """The class as it is written in headers, flags, metrics and tables."""
        return self.name.lower()


class FinishReason(enum.StrEnum):
    """Why a generation ended, in the words OpenAI clients know."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """How one request draws its tokens. A draw is a function of these, the token history and the position.

    Order of application: logit_bias, penalties, temperature, top_k, top_p, min_p, draw; ties go to the lowest id.

    Attributes:
        temperature: 0 means greedy; otherwise logits are divided by it.
        top_k: keep the k most likely tokens; 0 keeps all.
        top_p: keep the smallest set whose probability reaches this; 1 keeps all.
        min_p: drop tokens less likely than this share of the likeliest; 0 keeps all.
        seed: 64-bit key of the draws. The edge picks one at random when the client names none.
        repeat_penalty: divides (or multiplies, below zero) the logits of tokens among the last 64; 1 is off.
        presence_penalty: subtracted once from every token already generated; 0 is off.
        frequency_penalty: subtracted once per earlier occurrence among generated tokens; 0 is off.
        logit_bias: (token id, bias) pairs added to the logits; -100 and below forbids.
        logprobs: how many alternatives to report beside each token; None reports nothing, 0 only the token's own.
        ignore_eos: keep generating past end-of-generation tokens.
    """

    temperature: float = 1.0
    top_k: int = 40
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    repeat_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None
    ignore_eos: bool = False


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """One candidate token and its natural-log probability under the model's own distribution."""

    token: int
    logprob: float
