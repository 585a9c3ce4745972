"""Many short chats one after the other: does it slow down or grow? ``python -m tests.bench.soak``

The first and the last window of chats are compared; a window that a foreign process disturbed is done again, so the
run may take more chats than asked for. Memory is sampled after every window.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from tests.bench import harness, machine
from tests.bench.harness import OURS, Server, Setup
from tests.bench.prepare_model import requantized
from tests.bench.prompts import SUBJECTS
from tests.bench.streaming import run

WINDOW = 50
"""Chats a window."""

MIN_SPEED = 0.95
"""The last window against the first."""

MAX_GROWTH = 0.03
"""Resident memory at the end against after the first window; allocators need some room to settle."""


class Sample(msgspec.Struct, frozen=True):
    """One window: chats done by its end, speed, foreign cores, resident bytes."""

    chats: int
    tokens_per_s: float
    foreign: float
    rss: dict[str, int]

    @property
    def clean(self) -> bool:
        """Nobody else was busy."""
        return self.foreign < machine.MAX_FOREIGN


class Verdict(msgspec.Struct, frozen=True):
    """What the samples say."""

    speed: float
    growth: dict[str, float]

    @property
    def passed(self) -> bool:
        """As fast at the end as at the start, and no larger."""
        return self.speed >= MIN_SPEED and max(self.growth.values()) <= MAX_GROWTH


def judge(samples: Sequence[Sample]) -> Verdict:
    """First clean window against the last clean one.

    Raises:
        ValueError: fewer than two windows are clean.
    """
    clean = [sample for sample in samples if sample.clean]
    if len(clean) < 2:
        raise ValueError("fewer than two windows were undisturbed; run it on a quieter machine")
    first, last = clean[0], clean[-1]
    growth = {name: samples[-1].rss[name] / samples[0].rss[name] - 1 for name in samples[0].rss}
    return Verdict(last.tokens_per_s / first.tokens_per_s, growth)


def window(server: Server, start: int, count: int, tokens: int) -> Sample:
    """So many chats, one at a time."""
    bodies: list[dict[str, object]] = []
    for number in range(start, start + count):
        question = f"Note {number}: tell me in a sentence {SUBJECTS[number % len(SUBJECTS)]}."
        bodies.append(
            {
                "messages": [{"role": "user", "content": question}],
                "max_tokens": tokens,
                "ignore_eos": True,
                "temperature": 0,
            }
        )
    meter = machine.Meter(server.groups())
    replies = run(server.port, "/v1/chat/completions", bodies, at_once=1)
    foreign = meter.stop().foreign
    harness.check(replies, tokens)
    span = replies[-1].finished - replies[0].started
    return Sample(start + count, count * tokens / span, foreign, server.rss())


def main() -> int:
    """Run it; 0 if nothing slowed down or grew."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    harness.add_common_options(parser)
    parser.add_argument("--chats", type=int, default=1000, help="chats at least (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=24, help="tokens a reply (default: %(default)s)")
    parser.add_argument("--again", type=int, default=10, help="disturbed windows done again (default: %(default)s)")
    args = parser.parse_args()
    size = 5 if args.quick else WINDOW
    chats = 4 * size if args.quick else args.chats
    model: Path = args.model or requantized()
    setup = Setup(model=model, context=args.context, ours_args=harness.split_args(args.ours_args))
    samples: list[Sample] = []
    again: int = args.again
    with harness.running(OURS, setup) as server:
        window(server, 0, 10, args.tokens)
        done = 10
        while True:
            sample = window(server, done, size, args.tokens)
            done += size
            note = "" if sample.clean else f", void: {sample.foreign:.2f} foreign cores"
            memory = ", ".join(f"{name} {size_of / 1e6:.1f} MB" for name, size_of in sample.rss.items())
            print(f"{sample.chats:5} chats: {sample.tokens_per_s:6.1f} tokens/s, {memory}{note}", flush=True)
            samples.append(sample)
            early = not samples[0].clean
            if early and again:
                samples, again = [], again - 1
            elif len(samples) * size >= chats:
                if sample.clean or not again:
                    break
                again -= 1
    folder = harness.results_folder(args, "soak")
    folder.mkdir(parents=True, exist_ok=True)
    record = {"argv": server.argv, "versions": harness.versions(), "machine": machine.describe(), "samples": samples}
    (folder / "soak.json").write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=1))
    try:
        verdict = judge(samples)
    except ValueError as error:
        sys.exit(str(error))
    growth = ", ".join(f"{name} {100 * share:+.1f} %" for name, share in verdict.growth.items())
    middle = statistics.median(sample.tokens_per_s for sample in samples if sample.clean)
    print(
        f"{'pass' if verdict.passed else 'FAIL'}: last {size} chats at {100 * verdict.speed:.1f} % of the first {size} "
        f"(median {middle:.1f} tokens/s); resident memory {growth}; kept in {folder}"
    )
    return 0 if verdict.passed else 1


if __name__ == "__main__":
    sys.exit(main())
