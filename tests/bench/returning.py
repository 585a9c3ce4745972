"""More conversations than lanes that come back, against llama-server: ``python -m tests.bench.returning``.

Six conversations take turns over two lanes, one request at a time. How long does a second and a third turn wait for its
first text, compared with the first turn, whose prompt nobody has seen?
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence

from tests.bench import rounds
from tests.bench.agents_chat import Call, converse, warm_up
from tests.bench.harness import OURS, PEER, Cell, Server, check
from tests.bench.plots import Goal, goal_for
from tests.bench.prompts import Prompts
from tests.bench.rounds import Row, Scenario, by_round

MAX_RETURN = 0.15
"""Goal: first text of a second turn against that of a first."""

CONVERSATIONS, TURNS, QUESTION, REPLY = 6, 3, 20, 16


def work(server: Server, prompts: Prompts, nonce: str, quick: bool) -> tuple[dict[str, float], list[str]]:
    """Every conversation's first turn, then every second, then every third."""
    first = 300 if quick else 1000
    said = [prompts.document(f"{nonce}.{index}", first) for index in range(CONVERSATIONS)]
    ttft: list[list[float]] = []
    reused: list[float] = []
    texts = []
    for turn in range(TURNS):
        ttft.append([])
        for index, prompt in enumerate(said):
            body = {"prompt": prompt, "max_tokens": REPLY, "temperature": 0, "seed": 1, "ignore_eos": True}
            (heard,) = converse(server.port, [Call(body=body)], timeout=300.0)
            check([heard.reply], REPLY, len(prompt))
            ttft[-1].append(heard.reply.ttft)
            if turn:
                reused.append(heard.reply.cached_tokens / (len(prompt) - QUESTION))
            texts.append(heard.reply.text)
            said[index] = prompt + prompts.tokens(heard.reply.text) + prompts.document(f"{nonce}{turn}", QUESTION)
    cold, second, third = map(statistics.median, ttft)
    figures = {
        "cold_ttft_s": cold,
        "second_ttft_s": second,
        "third_ttft_s": third,
        "second_of_cold": second / cold,
        "worst_of_cold": max(*ttft[1], *ttft[2]) / cold,
        "reused": statistics.fmean(reused),
        "tokens": float(CONVERSATIONS * TURNS * REPLY),
    }
    return figures, texts


def goals(cells: Sequence[Cell]) -> list[Goal]:
    """What superfluidd is held to."""
    ratio = list(by_round(cells, SCENARIO, "ours", "second_of_cold").values())
    return [goal_for(f"second turn's first text <= {MAX_RETURN:.0%} of a first turn's", ratio, MAX_RETURN.__ge__)]


SCENARIO = Scenario(
    kind="returning",
    about=(__doc__ or "").partition("\n")[0],
    rows={
        "ours": Row(label="superfluidd", system=OURS),
        "np2": Row(label="llama-server -np 2", system=PEER, args=("--cache-ram", "8192")),
    },
    lanes=2,
    context=2048,
    work=work,
    columns={
        "first turn, s": "cold_ttft_s",
        "second, s": "second_ttft_s",
        "third, s": "third_ttft_s",
        "second ÷ first": "second_of_cold",
        "worst ÷ first": "worst_of_cold",
        "share reused": "reused",
    },
    goals=goals,
)

if __name__ == "__main__":
    sys.exit(rounds.main(SCENARIO, warm_up))
