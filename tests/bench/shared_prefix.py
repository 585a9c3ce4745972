"""Requests at once that begin with one long prompt, against llama-server: ``python -m tests.bench.shared_prefix``.

Thirty-two requests share a prompt of 1,000 tokens and differ in a question of 30; then 32 that share nothing. How often
is the shared part computed? The engines' own counts of computed tokens are asked, not what a server says of its cache.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence

from tests.bench import report, rounds
from tests.bench.agents_chat import Call, converse, warm_up
from tests.bench.harness import OURS, PEER, Cell, Server, check
from tests.bench.plots import Goal, goal_for
from tests.bench.prompts import Prompts
from tests.bench.rounds import Row, Scenario, by_round, metric

MAX_PREFILLS = 1.1
"""Goal: times that the shared prompt is computed."""
MAX_WALL = 0.5
"""Goal: the burst's wall time against llama-server's."""

QUESTION, REPLY = 30, 32

FIRST_WORD = 5000
"""Tokens from here on are words of the bundled model, one like another."""


def computed(server: Server) -> float:
    """Prompt tokens computed so far: the engine's count of all tokens less those generated; llama-server has a count of
    prompts. The last token of a reply is never computed by either."""
    if server.name == PEER:
        return metric(server, "llamacpp:prompt_tokens_total")
    return metric(server, "superfluid_engine_tokens_total")


def question(prompts: Prompts, nonce: str, index: int) -> list[int]:
    """Tokens that differ from every other question's from the first one on: what two of them had in common would be
    shared as well, and the prompt would seem to be computed less than once."""
    return [FIRST_WORD + index, *prompts.document(f"{nonce}.{index}", QUESTION - 1)]


def work(server: Server, prompts: Prompts, nonce: str, quick: bool) -> tuple[dict[str, float], list[str]]:
    """A burst that shares its beginning, and one that shares nothing."""
    count, shared, idle = (8, 300, 8) if quick else (32, 1000, 32)
    system = prompts.document(f"{nonce}.system", shared)
    bodies = [{**_body, "prompt": [*system, *question(prompts, nonce, index)]} for index in range(count)]
    cold = [{**_body, "prompt": prompts.document(f"{nonce}.cold{index}", shared + QUESTION)} for index in range(idle)]
    before = computed(server)
    heard = [one.reply for one in converse(server.port, [Call(body=body) for body in bodies], timeout=900.0)]
    check(heard, REPLY, shared + QUESTION)
    after = computed(server)
    alone = [one.reply for one in converse(server.port, [Call(body=body) for body in cold], timeout=900.0)]
    check(alone, REPLY, shared + QUESTION)
    fed = after - before
    if server.name == OURS:
        fed -= count * (REPLY - 1)
    figures = {
        "prefills": (fed - count * QUESTION) / shared,
        "said_prefills": (sum(one.prompt_tokens - one.cached_tokens for one in heard) - count * QUESTION) / shared,
        "ttft_p50_s": statistics.median(one.ttft for one in heard),
        "ttft_max_s": max(one.ttft for one in heard),
        "wall_s": max(one.finished for one in heard) - min(one.started for one in heard),
        "cold_wall_s": max(one.finished for one in alone) - min(one.started for one in alone),
        "tokens": float(sum(one.completion_tokens for one in (*heard, *alone))),
    }
    return figures, [one.text for one in heard]


_body: dict[str, object] = {"max_tokens": REPLY, "temperature": 0, "seed": 1, "ignore_eos": True}


def goals(cells: Sequence[Cell]) -> list[Goal]:
    """What superfluidd is held to."""
    wall = report.ratios(*(by_round(cells, SCENARIO, row, "wall_s") for row in ("ours", "np8")))
    prefills = list(by_round(cells, SCENARIO, "ours", "prefills").values())
    return [
        goal_for(f"the shared prompt is computed <= {MAX_PREFILLS} times", prefills, MAX_PREFILLS.__ge__, worst=True),
        goal_for(f"wall <= {MAX_WALL} x llama-server's", wall, MAX_WALL.__ge__),
    ]


SCENARIO = Scenario(
    kind="shared-prefix",
    about=(__doc__ or "").partition("\n")[0],
    rows={
        "ours": Row(label="superfluidd", system=OURS),
        "np8": Row(label="llama-server -np 8", system=PEER, args=("--metrics",)),
        "kvu": Row(label="llama-server -np 8 -kvu", system=PEER, args=("--metrics", "-kvu")),
    },
    lanes=8,
    context=2048,
    work=work,
    columns={
        "times computed": "prefills",
        "by its own usage": "said_prefills",
        "first text p50, s": "ttft_p50_s",
        "first text last, s": "ttft_max_s",
        "wall, s": "wall_s",
        "wall sharing nothing, s": "cold_wall_s",
    },
    goals=goals,
)

if __name__ == "__main__":
    sys.exit(rounds.main(SCENARIO, warm_up))
