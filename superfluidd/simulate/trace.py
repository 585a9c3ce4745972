"""Traces: arrivals in order of time, one JSON object a line. There is no text of any prompt or reply in them."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from typing import TextIO

import msgspec

from superfluidd.errors import InvalidValue, UsageError
from superfluidd.scheduling.qos import parse_class
from superfluidd.types import QosClass


class Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A line as it is written.

    Attributes:
        t: seconds from the trace's beginning.
        qos: the class, by any of its names; written as ``class``.
        prompt, output: tokens of the prompt, and tokens that are generated.
        prefix: what names a text that several prompts begin with, and ``prefix_tokens`` how much of it this one does.
    """

    t: float
    qos: str = msgspec.field(name="class")
    prompt: int
    output: int
    prefix: str | None = None
    prefix_tokens: int = 0


class Arrival(msgspec.Struct, frozen=True):
    """One request of a trace, checked."""

    t: float
    qos: QosClass
    prompt: int
    output: int
    prefix: str = ""
    prefix_tokens: int = 0


_decoder = msgspec.json.Decoder(Line)
_encoder = msgspec.json.Encoder()


def read(lines: Iterable[str], window: int) -> Iterator[Arrival]:
    """The arrivals of a trace, one at a time; empty lines are passed over.

    Args:
        lines: of the file.
        window: longest context, tokens.

    Raises:
        UsageError: a line is wrong; the message has its number and what is legal.
    """
    last = 0.0
    for number, text in enumerate(lines, start=1):
        if not text.strip():
            continue
        try:
            line = _decoder.decode(text)
            arrival = Arrival(
                line.t, parse_class(line.qos), line.prompt, line.output, line.prefix or "", line.prefix_tokens
            )
        except (msgspec.DecodeError, UnicodeEncodeError) as error:
            raise UsageError(
                f"line {number} is not an arrival: {error}; write "
                '{"t": 0.5, "class": "agent", "prompt": 800, "output": 60}'
            ) from None
        except InvalidValue as error:
            raise UsageError(f"line {number}: {error.message}") from None
        if not arrival.t >= last or arrival.t > 1e9:
            raise UsageError(f"line {number}: t is {arrival.t:g} after {last:g}; times must not go back: sort the file")
        if arrival.prompt < 1 or arrival.output < 1 or not 0 <= line.prefix_tokens <= arrival.prompt:
            raise UsageError(
                f"line {number}: prompt and output are at least 1, and no prefix is longer than its prompt"
            )
        if arrival.prefix_tokens and not arrival.prefix:
            raise UsageError(f"line {number}: prefix_tokens without prefix; name what they are of")
        if arrival.prompt > window:
            raise UsageError(f"line {number}: a prompt of {arrival.prompt} tokens does not fit the window of {window}")
        last = arrival.t
        yield arrival


def write(lines: Iterable[Line], file: TextIO) -> int:
    """Write a trace; how many lines there were."""
    count = 0
    for line in lines:
        file.write(_encoder.encode(line).decode() + "\n")
        count += 1
    return count


def generate(requests: int, seed: int) -> Iterator[Line]:
    """A made-up day: chats and completions all day with a lunch dip, agents in sessions that share a prefix and whose
    prompts grow, and batches of background work at night. About 30 tokens a reply.

    Args:
        requests: how many arrivals.
        seed: the same seed makes the same day.
    """
    chance = random.Random(seed)
    rate = requests / 86_400.0
    now, session, turn = 0.0, 0, 0
    for _ in range(requests):
        hour = now / 3600.0 % 24
        busy = 0.35 if hour < 7 or hour > 20 else 0.8 if 12 <= hour < 13 else 1.45
        now += chance.expovariate(rate * busy)
        draw = chance.random()
        at = round(now, 3)
        if draw < 0.35:
            yield Line(at, "interactive", chance.randint(20, 300), 1 + int(chance.expovariate(1 / 40)))
        elif draw < 0.6:
            yield Line(at, "completion", chance.randint(30, 200), 1 + int(chance.expovariate(1 / 12)))
        elif draw < 0.9:
            turn = 0 if chance.random() < 0.15 else turn + 1
            session += turn == 0
            prefix = 300 + 40 * min(turn, 20)
            reply = 1 + int(chance.expovariate(1 / 30))
            yield Line(at, "agent", prefix + chance.randint(20, 120), reply, f"s{session}", prefix)
        else:
            yield Line(at, "background", chance.randint(100, 1200), 1 + int(chance.expovariate(1 / 60)))
