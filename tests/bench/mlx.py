"""superfluidd on MLX beside mlx_lm.server, on one model directory: ``python -m tests.bench.mlx``.

Short chats one, two and four at a time; a chat a second behind four long prompts; requests at once that begin alike.
Prompts go as text, for mlx_lm.server takes no token ids; what both counted is compared. Replies have a fixed length:
end tokens are forbidden by ``logit_bias``. No request is seeded, since mlx_lm.server does not batch those.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

import msgspec

from tests.bench import harness, plots, report
from tests.bench.agents_chat import Call, Heard, converse
from tests.bench.harness import MLX_PEER, OURS, Cell, Recorder, Server, Setup
from tests.bench.plots import Goal, goal_for
from tests.bench.prepare_model import dense_mlx
from tests.bench.prompts import SUBJECTS
from tests.bench.report import markdown, spread
from tests.bench.rounds import metric

MIN_SPEED = 1.0
"""Goal: tokens a second against mlx_lm.server's, at every number of streams."""
MIN_GAIN = 20.0
"""Goal: how many times sooner the chat behind agents has its first text."""

STREAMS = (1, 2, 4)
END_TOKENS = (0, 2, 4)
"""Of the bundled model."""

_WORDS = (
    "river",
    "stone",
    "house",
    "green",
    "seven",
    "paper",
    "window",
    "garden",
    "letter",
    "winter",
    "bridge",
    "candle",
)


class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    """Sentences of 12 words a prompt has, tokens of replies, counts."""

    reply: int = 64
    agents: int = 4
    document: int = 40
    agent_reply: int = 48
    chat_reply: int = 8
    delay: float = 1.0
    burst: int = 8
    shared: int = 30
    timeout: float = 900.0


QUICK = Sizes(reply=12, document=6, agent_reply=8, shared=5, burst=4, delay=0.3)


def turn(text: str) -> str:
    """One turn of ChatML."""
    return f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


def document(nonce: str, sentences: int) -> str:
    """Made-up text, the same for the same nonce and different from its first words on."""
    draw = random.Random(nonce)
    return f"Note {nonce}. " + " ".join(
        " ".join(draw.choice(_WORDS) for _ in range(12)).capitalize() + "." for _ in range(sentences)
    )


def body(prompt: str, reply: int) -> dict[str, object]:
    """A request with a reply of exactly so many tokens."""
    bias = {str(token): -100.0 for token in END_TOKENS}
    return {"prompt": prompt, "max_tokens": reply, "temperature": 0, "logit_bias": bias}


def sent(server: Server, calls: Sequence[Call], sizes: Sizes, lengths: Sequence[int]) -> list[Heard]:
    """Send them; every reply is whole.

    Raises:
        SystemExit: one is not.
    """
    heard = converse(server.port, calls, timeout=sizes.timeout)
    for one, length in zip(heard, lengths, strict=True):
        harness.check([one.reply], length)
    return heard


def wall(heard: Sequence[Heard]) -> float:
    """From the first request to the last end, seconds."""
    return max(one.reply.finished for one in heard) - min(one.reply.started for one in heard)


def streams(server: Server, nonce: str, count: int, sizes: Sizes) -> tuple[dict[str, float], list[str]]:
    """Short chats at once: tokens a second of all together."""
    prompts = [turn(f"Note {nonce}.{index}. Explain {SUBJECTS[index]}.") for index in range(count)]
    heard = sent(server, [Call(body=body(prompt, sizes.reply)) for prompt in prompts], sizes, [sizes.reply] * count)
    tokens = float(count * sizes.reply)
    figures = {"tokens_per_s": tokens / wall(heard), "tokens": tokens, **counted(heard)}
    return figures, [one.reply.text for one in heard]


def behind(server: Server, nonce: str, sizes: Sizes) -> tuple[dict[str, float], list[str]]:
    """A chat alone, and one behind agents with long prompts."""
    ours = server.name == OURS
    chats = [turn(f"Note {nonce}.{when}. Name a colour.") for when in ("alone", "behind")]
    urgent, patient = ({"x-superfluid-qos": name} if ours else {} for name in ("interactive", "agent"))
    [alone] = sent(server, [Call(body=body(chats[0], sizes.chat_reply), headers=urgent)], sizes, [sizes.chat_reply])
    calls = [
        Call(body=body(document(f"{nonce}.{index}", sizes.document), sizes.agent_reply), headers=patient)
        for index in range(sizes.agents)
    ]
    calls.append(Call(body=body(chats[1], sizes.chat_reply), headers=urgent, at=sizes.delay))
    heard = sent(server, calls, sizes, [*[sizes.agent_reply] * sizes.agents, sizes.chat_reply])
    *agents, chat = heard
    figures = {
        "idle_ttft_s": alone.reply.ttft,
        "loaded_ttft_s": chat.reply.ttft,
        "agents_wall_s": wall(agents),
        "tokens": float(sum(one.reply.completion_tokens for one in heard)),
        **counted(heard),
    }
    return figures, [one.reply.text for one in heard]


def burst(server: Server, nonce: str, sizes: Sizes) -> tuple[dict[str, float], list[str]]:
    """Requests at once that begin with one long text: the time for all, and how much was computed."""
    system = document(f"{nonce}.system", sizes.shared)
    prompts = [f"{system} {SUBJECTS[index]}: {document(f'{nonce}.{index}', 1)}" for index in range(sizes.burst)]
    before = metric(server, "superfluid_engine_tokens_total") if server.name == OURS else 0.0
    heard = sent(server, [Call(body=body(one, sizes.reply)) for one in prompts], sizes, [sizes.reply] * sizes.burst)
    figures = {
        "wall_s": wall(heard),
        "ttft_max_s": max(one.reply.ttft for one in heard),
        "tokens": float(sizes.burst * sizes.reply),
        **counted(heard),
    }
    if server.name == OURS:
        figures["computed"] = metric(server, "superfluid_engine_tokens_total") - before
    return figures, [one.reply.text for one in heard]


def counted(heard: Sequence[Heard]) -> dict[str, float]:
    """Prompt tokens, and how many of them were cached, by the server's own usage."""
    return {
        "prompt_tokens": float(sum(one.reply.prompt_tokens for one in heard)),
        "cached_tokens": float(sum(one.reply.cached_tokens for one in heard)),
    }


Work = Callable[[Server, str], tuple[dict[str, float], list[str]]]


def cells(sizes: Sizes) -> dict[str, Work]:
    """What is measured, by name."""

    def at(count: int) -> Work:
        return lambda server, nonce: streams(server, nonce, count, sizes)

    return {f"streams-{count}": at(count) for count in STREAMS} | {
        "chat": lambda server, nonce: behind(server, nonce, sizes),
        "shared": lambda server, nonce: burst(server, nonce, sizes),
    }


FIGURES: Mapping[str, tuple[tuple[str, str, bool], ...]] = {
    **{f"streams-{count}": ((f"{count} at once, tokens/s", "tokens_per_s", False),) for count in STREAMS},
    "chat": (
        ("chat alone, first text, s", "idle_ttft_s", True),
        ("chat behind four agents, first text, s", "loaded_ttft_s", True),
        ("the agents' wall, s", "agents_wall_s", True),
    ),
    "shared": (("alike beginnings, wall, s", "wall_s", True), ("last first text, s", "ttft_max_s", True)),
}
"""Rows of the table: of which cell, title, figure, whether less is better."""


def compared(found: Sequence[Cell], name: str, key: str, *, less: bool) -> list[float]:
    """Ours against mlx_lm.server's of the same round, more is better."""
    ours, peer = (report.values(found, system, name, key) for system in (OURS, MLX_PEER))
    return report.ratios(ours, peer, lower_is_better=less)


def table(found: Sequence[Cell]) -> str:
    """Medians and ranges."""
    lines = []
    for name, rows in FIGURES.items():
        for title, key, less in rows:
            both = [report.values(found, system, name, key) for system in (OURS, MLX_PEER)]
            ratios = compared(found, name, key, less=less)
            if ratios:
                lines.append([title, *(spread(one.values(), 3) for one in both), spread(ratios, 2), str(len(ratios))])
    return markdown(["", OURS, MLX_PEER, "ratio, more is better", "rounds"], lines)


def goals(found: Sequence[Cell]) -> list[Goal]:
    """What superfluidd is held to."""
    speeds = [
        goal_for(
            f"{count} at once: tokens/s >= {MIN_SPEED} x mlx_lm.server's",
            compared(found, f"streams-{count}", "tokens_per_s", less=False),
            MIN_SPEED.__le__,
        )
        for count in STREAMS
    ]
    gain = compared(found, "chat", "loaded_ttft_s", less=True)
    return [*speeds, goal_for(f"chat behind agents >= {MIN_GAIN:.0f} times sooner", gain, MIN_GAIN.__le__)]


def main() -> int:
    """Measure, and print table and verdict; 0 unless a goal was missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    harness.add_common_options(parser)
    parser.set_defaults(context=2048)
    parser.add_argument("--rounds", type=int, default=3, help="rounds, each with both servers (default: %(default)s)")
    parser.add_argument("--only", help="cells (default: all)")
    parser.add_argument("--attempts", type=int, default=4, help="tries before a cell is void (default: %(default)s)")
    args = parser.parse_args()
    rounds, attempts, sizes = (1, 1, QUICK) if args.quick else (args.rounds, args.attempts, Sizes())
    work = cells(sizes)
    names = args.only.split(",") if args.only else list(work)
    if not set(names) <= set(work):
        parser.error(f"--only knows {', '.join(work)}")
    model: Path = args.model or dense_mlx()
    folder = harness.results_folder(args, "mlx")
    recorder = Recorder(folder, attempts=attempts, peer={name: version(name) for name in ("mlx-lm", "mlx")})
    # A lane more than agents, as mlx_lm.server has room for 32: who goes first is compared, not who has a seat.
    setup = Setup(
        model=model,
        lanes=max(sizes.agents, max(STREAMS)) + 1,
        context=args.context,
        ours_args=harness.split_args(args.ours_args),
        peer_args=harness.split_args(args.peer_args),
    )
    for number in range(1, rounds + 1):
        for system in (OURS, MLX_PEER) if number % 2 else (MLX_PEER, OURS):
            print(f"round {number} of {rounds}: {system}", flush=True)
            with harness.running(system, setup) as server:
                for index in range(2):
                    converse(server.port, [Call(body=body(turn(f"Warm {number}.{index}."), 8))])
                for name in names:

                    def measured(
                        nonce: str, server: Server = server, name: str = name
                    ) -> tuple[dict[str, float], list[str]]:
                        return work[name](server, nonce)

                    recorder.measure(server, name, number, measured)
    found = report.read(folder)
    verdicts = goals(found)
    print(f"\n{table(found)}\n\n{plots.verdicts(verdicts)}\n\nmade from {folder}")
    return 0 if args.quick or all(goal.passed for goal in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
