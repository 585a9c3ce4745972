"""Twice as much work as the KV pool holds, and then twice that, against llama-server: ``python -m tests.bench.pool``.

Thirty-two requests of 700 tokens, 200 more to generate, at once over eight lanes of 1,024. Does everybody get what was
asked for, and what does that cost?
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from tests.bench import report, rounds
from tests.bench.agents_chat import Call, converse, warm_up
from tests.bench.harness import OURS, PEER, Cell, Server
from tests.bench.plots import Goal, goal_for
from tests.bench.prompts import Prompts
from tests.bench.rounds import Row, Scenario, by_round

MAX_WALL = 1.1
"""Goal: wall time against llama-server's."""


def work(server: Server, prompts: Prompts, nonce: str, quick: bool) -> tuple[dict[str, float], list[str]]:
    """Everything at once."""
    count, prompt, reply = (12, 150, 20) if quick else (32, 700, 200)
    body = {"max_tokens": reply, "temperature": 0, "seed": 1, "ignore_eos": True}
    calls = [Call(body={**body, "prompt": prompts.document(f"{nonce}.{index}", prompt)}) for index in range(count)]
    heard = [one.reply for one in converse(server.port, calls, timeout=1800.0)]
    whole = [one for one in heard if not one.error and one.completion_tokens == reply and one.finish_reason == "length"]
    if not whole:
        sys.exit(f"no request got a whole reply; one of them: {heard[0].error}")
    figures = {
        "asked": float(count),
        "whole": float(len(whole)),
        "wall_s": max(one.finished for one in whole) - min(one.started for one in whole),
        "ttft_max_s": max(one.ttft for one in whole),
        "tokens": float(sum(one.completion_tokens for one in heard)),
    }
    return figures, [one.text for one in heard]


def goals(cells: Sequence[Cell]) -> list[Goal]:
    """What superfluidd is held to."""
    found = []
    for row in ("ours", "shared"):
        asked, whole = (by_round(cells, SCENARIO, row, key) for key in ("asked", "whole"))
        short = [asked[number] - whole[number] for number in asked]
        label = SCENARIO.rows[row].label
        found.append(goal_for(f"{label}: requests without a whole reply: none", short, (0.0).__ge__, worst=True))
    wall = report.ratios(*(by_round(cells, SCENARIO, row, "wall_s") for row in ("ours", "np8")))
    return [*found, goal_for(f"wall <= {MAX_WALL} x llama-server's", wall, MAX_WALL.__ge__)]


SCENARIO = Scenario(
    kind="pool",
    about=(__doc__ or "").partition("\n")[0],
    rows={
        "ours": Row(label="superfluidd, a window per lane", system=OURS),
        "shared": Row(label="superfluidd, one pool", system=OURS, layout="shared", args=("--pool-tokens", "8192")),
        "np8": Row(label="llama-server -np 8", system=PEER),
    },
    lanes=8,
    context=1024,
    work=work,
    columns={
        "asked": "asked",
        "whole replies": "whole",
        "last first text, s": "ttft_max_s",
        "wall, s": "wall_s",
    },
    goals=goals,
)

if __name__ == "__main__":
    sys.exit(rounds.main(SCENARIO, warm_up))
