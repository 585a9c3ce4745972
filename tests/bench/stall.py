"""How long a chat stands still while an agent's prompt is read: ``python -m tests.bench.stall``.

One interactive chat streams; a second after its request an agent comes with a prompt of N tokens. Before that the gaps
between the chat's texts are decode rounds. From then until the agent's first text each gap holds a piece of the agent's
prompt too: a step. The worst gap is to be a few steps, however long the prompt. Texts that came in one packet are one
arrival, for that is how a reader sees them.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

from tests.bench import harness, plots, report
from tests.bench.agents_chat import QOS, Call, chat, converse, document, warm_up
from tests.bench.harness import OURS, PEER, Cell, Recorder, Server, Setup
from tests.bench.plots import Goal, goal_for
from tests.bench.prepare_model import requantized
from tests.bench.prompts import Prompts
from tests.bench.report import markdown, spread
from tests.bench.streaming import Reply

LENGTHS = (250, 500, 1000, 2000)
QUICK = (120, 240)

MAX_STEPS = 3.0
"""Goal: the chat's worst gap in steps."""
MAX_GROWTH = 1.5
"""Goal: the worst gap at the longest prompt against that at the shortest. It would be 8 if gaps grew with prompts;
later steps cost somewhat more than earlier ones, because they attend to more."""

CHAT = 40
AGENT_REPLY = 8


def scenario(
    server: Server, prompts: Prompts, *, length: int, reply: int, at: float
) -> Callable[[str], tuple[dict[str, float], list[str]]]:
    """What a cell does: one chat, and one agent beside it."""
    classes = server.name == OURS

    def call(body: dict[str, object], qos: str, at: float = 0.0) -> Call:
        return Call(body=body, headers={QOS: qos} if classes else {}, at=at)

    def work(nonce: str) -> tuple[dict[str, float], list[str]]:
        chatting = {**chat(prompts, f"{nonce}.chat", CHAT, reply), "ignore_eos": True}
        agent = document(prompts, f"{nonce}.agent", length, AGENT_REPLY)
        heard = converse(server.port, [call(chatting, "interactive"), call(agent, "agent", at)])
        talk, other = (one.reply for one in heard)
        harness.check([talk], reply, CHAT)
        harness.check([other], AGENT_REPLY, length)
        return figures(talk, other), [talk.text, other.text]

    return work


def figures(talk: Reply, agent: Reply) -> dict[str, float]:
    """A cell's figures.

    Raises:
        SystemExit: the agent came before the chat spoke or after it ended, so nothing was disturbed.
    """
    arrivals = sorted(set(talk.stamps))
    before, during, after = gaps(arrivals, agent.started, agent.started + agent.ttft)
    if not before or not during:
        sys.exit("the agent did not come in the middle of the chat; try another --tokens or --at")
    return {
        "worst_gap_s": max([*during, *after]),
        "before_gap_s": statistics.median(before),
        "step_s": statistics.median(during),
        "steps": float(len(during)),
        "agent_ttft_s": agent.ttft,
        "chat_s": talk.finished - talk.started,
        "tokens": float(talk.completion_tokens + agent.completion_tokens),
    }


def gaps(arrivals: Sequence[float], came: float, read: float) -> tuple[list[float], list[float], list[float]]:
    """Stretches between arrivals: before an agent came, until its prompt had been read, and since.

    One that is cut by a boundary belongs to the time with the agent's prompt, which is what made it long.
    """
    before: list[float] = []
    during: list[float] = []
    after: list[float] = []
    for early, late in pairwise(arrivals):
        (before if late <= came else after if early >= read else during).append(late - early)
    return before, during, after


def by_round(cells: Sequence[Cell], system: str, length: int, key: str) -> dict[int, float]:
    """A figure in the rounds where its cell is clean."""
    return report.values(cells, system, f"stall-{length}", key)


def lengths(cells: Sequence[Cell]) -> list[int]:
    """What was measured."""
    return sorted({int(cell.name.partition("-")[2]) for cell in cells})


def table(cells: Sequence[Cell]) -> str:
    """Medians and ranges for every length, both servers side by side."""
    head = [
        "N",
        *(f"{name}: {what}" for name in (OURS, PEER) for what in ("worst gap, s", "step, s", "agent's TTFT, s")),
    ]
    head += [f"{OURS}: gap before, s", "worst gap ÷ step", "worst gap, times shorter", "rounds"]
    lines = []
    for length in lengths(cells):
        line = [str(length)]
        for system in (OURS, PEER):
            for key in ("worst_gap_s", "step_s", "agent_ttft_s"):
                line.append(spread(by_round(cells, system, length, key).values()))
        ours, peer = (by_round(cells, system, length, "worst_gap_s") for system in (OURS, PEER))
        line.append(spread(by_round(cells, OURS, length, "before_gap_s").values()))
        line.append(spread(in_steps(cells, length)))
        line.append(spread(report.ratios(ours, peer, lower_is_better=True)))
        lines.append([*line, str(len(ours))])
    return markdown(head, lines)


def in_steps(cells: Sequence[Cell], length: int) -> list[float]:
    """Our worst gap as a multiple of our step, as the longest prompt of the same round shows it.

    A short prompt takes two or three steps, and then the packet of decoded tokens around them moves the median.
    """
    steps = by_round(cells, OURS, lengths(cells)[-1], "step_s")
    return report.ratios(by_round(cells, OURS, length, "worst_gap_s"), steps)


def goals(cells: Sequence[Cell]) -> list[Goal]:
    """What superfluidd is held to."""
    every = lengths(cells)
    least, most = (by_round(cells, OURS, length, "worst_gap_s") for length in (every[0], every[-1]))
    found = [
        goal_for(f"{length} tokens: worst gap < {MAX_STEPS:g} steps", in_steps(cells, length), MAX_STEPS.__gt__)
        for length in every
    ]
    text = f"worst gap at {every[-1]} tokens <= {MAX_GROWTH:g} x that at {every[0]}"
    return [*found, goal_for(text, report.ratios(most, least), MAX_GROWTH.__ge__)]


def picture(cells: Sequence[Cell], path: Path) -> None:
    """Draw the worst gap against the length of the agent's prompt."""

    def line(label: str, system: str, key: str, *, dashed: bool = False) -> plots.Line:
        points = {length: list(by_round(cells, system, length, key).values()) for length in lengths(cells)}
        return plots.Line(label=label, points=points, dashed=dashed)

    found = [line(f"{OURS}, worst gap", OURS, "worst_gap_s"), line(f"{OURS}, a step", OURS, "step_s", dashed=True)]
    found.append(line(f"{PEER}, worst gap", PEER, "worst_gap_s"))
    title = "How long a chat stands still while an agent's prompt is read"
    plots.lines(path, found, title=title, x="tokens of the agent's prompt", y="seconds", log_y=True)


def main() -> int:
    """Measure, and print table and verdict; 0 unless a goal was missed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    harness.add_common_options(parser)
    parser.add_argument("--rounds", type=int, default=3, help="rounds, each with both servers (default: %(default)s)")
    parser.add_argument("--systems", default=f"{OURS},{PEER}", help="servers to measure (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=200, help="tokens of the chat's reply (default: %(default)s)")
    parser.add_argument("--at", type=float, default=1.0, help="seconds until the agent comes (default: %(default)s)")
    parser.add_argument("--attempts", type=int, default=6, help="tries before a cell is void (default: %(default)s)")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="draw the worst gaps (needs matplotlib)")
    args = parser.parse_args()
    systems = args.systems.split(",")
    if not set(systems) <= {OURS, PEER}:
        parser.error(f"--systems knows {OURS} and {PEER}")
    plots.require(args.plot)
    if args.quick:
        args.rounds, args.attempts = 1, 1
    model: Path = args.model or requantized()
    ours, peer = harness.split_args(args.ours_args), harness.split_args(args.peer_args)
    setup = Setup(model=model, context=args.context, ours_args=ours, peer_args=peer)
    prompts = Prompts(model)
    folder = harness.results_folder(args, "stall")
    recorder = Recorder(folder, attempts=args.attempts)
    for number in range(1, args.rounds + 1):
        for system in systems if number % 2 else systems[::-1]:
            print(f"round {number} of {args.rounds}: {system}", flush=True)
            with harness.running(system, setup) as server:
                warm_up(server.port, prompts)
                for length in QUICK if args.quick else LENGTHS:
                    work = scenario(server, prompts, length=length, reply=args.tokens, at=args.at)
                    recorder.measure(server, f"stall-{length}", number, work)
    cells = report.read(folder)
    found = goals(cells)
    step = spread(by_round(cells, OURS, lengths(cells)[-1], "step_s").values())
    print(f"\n{report.tables(cells)}\n\n{table(cells)}\n\nA prefill step of superfluidd beside a chat, s: {step}")
    print(f"\n{plots.verdicts(found)}\n\nmade from {folder}")
    if args.plot:
        picture(cells, args.plot)
    return 0 if args.quick or all(goal.passed for goal in found) else 1


if __name__ == "__main__":
    sys.exit(main())
