"""Speed against llama-server: ``python -m tests.bench.throughput``, or ``make bench``.

Rounds alternate between the two servers, one alive at a time, and which goes first alternates too. Within a round a
server is started, warmed up and measured cell by cell; a cell that a foreign process disturbed is measured again.
After every change of circumstances (start, neighbour comes, neighbour goes) a discarded warm-up runs first.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import psutil

from tests.bench import harness, machine, report
from tests.bench.harness import OURS, PEER, Recorder, Server, Setup
from tests.bench.prepare_model import requantized
from tests.bench.prompts import Prompts
from tests.bench.streaming import Reply, run

GROUPS = ("greedy", "sampled", "prefill", "idle", "busy")
AT_ONCE = (1, 2, 4, 8)

GREEDY: dict[str, object] = {"temperature": 0}
SAMPLED: dict[str, object] = {"temperature": 0.7, "top_p": 0.95, "top_k": 40, "min_p": 0.0}

Work = Callable[[str], tuple[dict[str, float], list[str]]]


class Sizes(msgspec.Struct, frozen=True):
    """How much is measured.

    Attributes:
        reply: tokens of a reply.
        replies: at least so many replies a cell.
        document: tokens of the prompt whose prefill is timed.
        documents: such prompts a cell.
        idle: seconds of doing nothing.
    """

    reply: int = 128
    replies: int = 4
    document: int = 1000
    documents: int = 2
    idle: float = 10.0


QUICK = Sizes(reply=24, replies=2, document=200, documents=1, idle=2.0)
BUSY = Sizes(reply=32, replies=2, documents=1)
"""Beside a busy process llama-server makes about one token a second here; full sizes would take hours."""


class Workloads:
    """What a cell makes a server do."""

    def __init__(self, prompts: Prompts, sizes: Sizes) -> None:
        self._prompts = prompts
        self._sizes = sizes

    def replies(self, server: Server, at_once: int, sampling: dict[str, object], *, tokens: int | None = None) -> Work:
        """Short prompts, so many at once, replies of a fixed length."""
        length = tokens or self._sizes.reply

        def work(nonce: str) -> tuple[dict[str, float], list[str]]:
            bodies: list[dict[str, object]] = []
            for index in range(max(at_once, self._sizes.replies)):
                prompt = self._prompts.short(nonce, index)
                bodies.append({**_body(prompt, length), **sampling, "seed": index + 1})
            replies = run(server.port, "/v1/completions", bodies, at_once=at_once)
            harness.check(replies, length)
            first = [reply.ttft for reply in replies[:at_once]]
            values = {
                "tokens_per_s": len(replies) * length / _span(replies),
                "tokens": float(len(replies) * length),
                "ttft_median_s": statistics.median(first),
                "ttft_max_s": max(first),
                "longest_gap_s": max(_longest_gap(reply) for reply in replies),
            }
            return values, [reply.text for reply in replies] if sampling is GREEDY else []

        return work

    def prefill(self, server: Server) -> Work:
        """Long prompts one after the other, one token of reply each."""
        length = self._sizes.document

        def work(nonce: str) -> tuple[dict[str, float], list[str]]:
            documents = [self._prompts.document(f"{nonce}.{index}", length) for index in range(self._sizes.documents)]
            replies = run(server.port, "/v1/completions", [{**_body(one, 1), **GREEDY} for one in documents], at_once=1)
            harness.check(replies, 1, length)
            seconds = statistics.median(reply.finished - reply.started for reply in replies)
            return {"prefill_tokens_per_s": length / seconds, "tokens": float(length * len(documents))}, []

        return work

    def idle(self, server: Server) -> Work:
        """Nothing."""

        def work(nonce: str) -> tuple[dict[str, float], list[str]]:
            before = {name: machine.cpu_seconds(found) for name, found in server.groups().items()}
            time.sleep(self._sizes.idle)
            after = {name: machine.cpu_seconds(found) for name, found in server.groups().items()}
            return {f"{name}_cores": (after[name] - before[name]) / self._sizes.idle for name in after}, []

        return work


def _body(prompt: list[int], tokens: int) -> dict[str, object]:
    return {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True}


def _span(replies: Sequence[Reply]) -> float:
    return max(reply.finished for reply in replies) - min(reply.started for reply in replies)


def _longest_gap(reply: Reply) -> float:
    return max((late - early for early, late in zip(reply.stamps, reply.stamps[1:], strict=False)), default=0.0)


def one_round(
    number: int, server: Server, recorder: Recorder, loads: Workloads, busy: Workloads, groups: Sequence[str]
) -> None:
    """Every cell of one server's turn; ``busy`` makes the work of the cells beside a busy process."""

    def warm_up(name: str) -> None:
        loads.replies(server, 8, GREEDY, tokens=16)(f"warm-{name}-{number}-{time.monotonic_ns()}")

    def cells(loads: Workloads, prefix: str = "", neighbours: Sequence[psutil.Process] = ()) -> None:
        for kind, sampling in (("greedy", GREEDY), ("sampled", SAMPLED)):
            if kind in groups or prefix:
                for at_once in AT_ONCE:
                    work = loads.replies(server, at_once, sampling)
                    recorder.measure(server, f"{prefix}{kind}-{at_once}", number, work, neighbours)
        if "prefill" in groups or prefix:
            recorder.measure(server, f"{prefix}prefill", number, loads.prefill(server), neighbours)

    warm_up("start")
    cells(loads)
    if "idle" in groups:
        recorder.measure(server, "idle", number, loads.idle(server))
    if "busy" in groups:
        with machine.busy_neighbour() as neighbour:
            warm_up("busy")
            cells(busy, "busy-", [neighbour])
        warm_up("after")
        recorder.measure(server, "after-greedy-8", number, loads.replies(server, 8, GREEDY))


def main() -> None:
    """Measure, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    harness.add_common_options(parser)
    parser.add_argument("--rounds", type=int, default=5, help="rounds, each with both servers (default: %(default)s)")
    parser.add_argument(
        "--only", default=",".join(GROUPS), help="groups of cells, separated by commas (default: %(default)s)"
    )
    parser.add_argument("--systems", default=f"{OURS},{PEER}", help="servers to measure (default: %(default)s)")
    parser.add_argument("--attempts", type=int, default=6, help="tries before a cell is void (default: %(default)s)")
    parser.add_argument(
        "--busy-tokens",
        type=int,
        default=BUSY.reply,
        help="tokens of a reply beside a busy process (default: %(default)s)",
    )
    parser.add_argument("--threads", type=int, help="llama-server's threads (default: every core)")
    args = parser.parse_args()
    groups = args.only.split(",")
    unknown = set(groups) - set(GROUPS)
    if unknown:
        parser.error(f"--only knows {', '.join(GROUPS)}, not {', '.join(sorted(unknown))}")
    systems = args.systems.split(",")
    if not set(systems) <= {OURS, PEER}:
        parser.error(f"--systems knows {OURS} and {PEER}")
    if args.quick:
        args.rounds, args.attempts = 1, 1

    model: Path = args.model or requantized()
    setup = Setup(
        model=model,
        context=args.context,
        ours_args=harness.split_args(args.ours_args),
        peer_args=harness.split_args(args.peer_args),
    )
    if args.threads:
        setup = msgspec.structs.replace(setup, threads=args.threads)
    prompts = Prompts(model)
    loads = Workloads(prompts, QUICK if args.quick else Sizes())
    busy = QUICK if args.quick else msgspec.structs.replace(BUSY, reply=args.busy_tokens)
    folder = harness.results_folder(args, "throughput")
    recorder = Recorder(folder, attempts=args.attempts)
    for number in range(1, args.rounds + 1):
        for system in systems if number % 2 else systems[::-1]:
            print(f"round {number} of {args.rounds}: {system}", flush=True)
            with harness.running(system, setup) as server:
                one_round(number, server, recorder, loads, Workloads(prompts, busy), groups)
    print(f"\n{report.tables(report.read(folder))}\nmade from {folder}")


if __name__ == "__main__":
    main()
