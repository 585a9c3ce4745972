"""A chat behind eight busy agents, against llama-server: ``python -m tests.bench.agents_chat``.

Eight agents send long distinct prompts at once; a short chat comes a second later. How long does it wait for its first
text, and what do the agents pay for that? Each row is a server of its own, one alive at a time, rows alternating:

    classed   superfluidd, requests name their class
    plain     superfluidd, requests name none
    np8       llama-server, a slot for each agent
    np9       llama-server with a spare slot: tells "no slot was free" from "nobody went first"
"""

from __future__ import annotations

import argparse
import re
import selectors
import socket
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import msgspec

from tests.bench import harness, plots, report
from tests.bench.harness import OURS, PEER, Cell, Recorder, Server, Setup
from tests.bench.plots import Goal, goal_for
from tests.bench.prepare_model import bundled_model, requantized
from tests.bench.prompts import Prompts
from tests.bench.report import markdown, spread
from tests.bench.streaming import Reply, read_reply

QOS = "x-superfluid-qos"

MAX_LOADED = 1.5
"""Goal: the chat's first text behind the agents against an idle server."""
MIN_GAIN = 200.0
"""Goal: how many times sooner than llama-server's."""
MAX_WALL = 1.05
"""Goal: the agents' wall time against llama-server's: putting them aside must not cost work."""
MAX_SILENCE = 2.2
"""Goal: seconds without a byte in any agent's stream. The promise is 2; the rest is the way to the client."""

_COMMENT = re.compile(rb"^:", re.MULTILINE)
_END = b"0\r\n\r\n"


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One server to measure."""

    label: str
    system: str
    classes: bool = False
    spare: int = 0


ROWS = {
    "classed": Row(label="superfluidd, classes named", system=OURS, classes=True),
    "plain": Row(label="superfluidd, no classes", system=OURS),
    "np8": Row(label="llama-server -np 8", system=PEER),
    "np9": Row(label="llama-server -np 9", system=PEER, spare=1),
}


class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    """How much is asked for: tokens of prompts and replies, seconds, counts."""

    agents: int = 8
    document: int = 1000
    reply: int = 64
    chat: int = 40
    chat_reply: int = 16
    delay: float = 1.0
    idle: int = 5
    timeout: float = 600.0


QUICK = Sizes(document=120, reply=12, delay=0.3, idle=2)
FULL = Sizes(document=3000, reply=128, timeout=1800.0)


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """A request, sent ``at`` so many seconds after the first."""

    body: dict[str, object]
    headers: Mapping[str, str] = {}
    at: float = 0.0

    def encoded(self, port: int) -> bytes:
        """As it goes over the wire; the reply is streamed."""
        body = {**self.body, "stream": True, "stream_options": {"include_usage": True}}
        data = msgspec.json.encode(body)
        lines = [f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}", "Content-Type: application/json"]
        lines += [f"{name}: {value}" for name, value in self.headers.items()]
        return "\r\n".join([*lines, f"Content-Length: {len(data)}", "Connection: close", "", ""]).encode() + data


class Heard(msgspec.Struct, frozen=True, kw_only=True):
    """A reply with what came over the wire: ``arrivals`` of bytes of any kind, and how many SSE comments."""

    reply: Reply
    arrivals: list[float]
    comments: int

    @property
    def silence(self) -> float:
        """The longest time without a byte, from the request to the end."""
        return longest([self.reply.started, *self.arrivals])

    @property
    def gap(self) -> float:
        """The longest time from one text to the next."""
        return longest(self.reply.stamps)


def longest(times: Sequence[float]) -> float:
    """The longest stretch between neighbours."""
    return max((late - early for early, late in pairwise(times)), default=0.0)


class _Wire:
    """A connection that only stamps what arrives; nothing is read until all replies have ended."""

    def __init__(self, port: int, request: bytes) -> None:
        self.sock = socket.create_connection(("127.0.0.1", port), timeout=30.0)
        self.started = time.monotonic()
        self.sock.sendall(request)
        self.sock.setblocking(False)
        self.arrived: list[tuple[float, bytes]] = []
        self.error: str | None = None
        self._tail = b""

    def receive(self) -> bool:
        """Take what there is; False once there will be no more."""
        try:
            data = self.sock.recv(65536)
        except OSError as error:
            self.error = f"the connection broke: {error}"
            return False
        if data:
            self.arrived.append((time.monotonic(), data))
        self._tail = (self._tail + data)[-len(_END) :]
        return bool(data) and self._tail != _END

    def heard(self) -> Heard:
        reply = read_reply(self.started, self.arrived, self.error)
        comments = len(_COMMENT.findall(b"".join(data for _, data in self.arrived)))
        return Heard(reply=reply, arrivals=[when for when, _ in self.arrived], comments=comments)


def converse(port: int, calls: Sequence[Call], *, timeout: float = 600.0) -> list[Heard]:
    """Send every request at its time, and listen until all replies have ended or the time is up."""
    queue = deque(sorted((call.at, index, call.encoded(port)) for index, call in enumerate(calls)))
    wires: dict[int, _Wire] = {}
    begun = time.monotonic()
    with selectors.DefaultSelector() as selector:
        while queue or selector.get_map():
            now = time.monotonic() - begun
            if now >= timeout:
                break
            while queue and queue[0][0] <= now:
                _, index, request = queue.popleft()
                wires[index] = _Wire(port, request)
                selector.register(wires[index].sock, selectors.EVENT_READ, wires[index])
            for key, _ in selector.select(min(queue[0][0] if queue else timeout, timeout) - now):
                wire: _Wire = key.data
                if not wire.receive():
                    selector.unregister(wire.sock)
                    wire.sock.close()
        for key in list(selector.get_map().values()):
            key.data.error = f"unfinished after {timeout:g} s"
            key.data.sock.close()
    never = Heard(reply=Reply(started=begun, error=f"not sent within {timeout:g} s"), arrivals=[], comments=0)
    return [wires[index].heard() if index in wires else never for index in range(len(calls))]


def document(prompts: Prompts, nonce: str, length: int, reply: int) -> dict[str, object]:
    """A long prompt and a reply of a fixed length."""
    prompt = prompts.document(nonce, length)
    return {"prompt": prompt, "max_tokens": reply, "temperature": 0, "seed": 1, "ignore_eos": True}


def chat(prompts: Prompts, nonce: str, length: int, reply: int) -> dict[str, object]:
    """A turn of exactly so many tokens; its reply ends when the model ends it."""
    before, after = prompts.tokens("<|im_start|>user\n"), prompts.tokens("<|im_end|>\n<|im_start|>assistant\n")
    prompt = [*before, *prompts.document(nonce, length - len(before) - len(after)), *after]
    return {"prompt": prompt, "max_tokens": reply, "temperature": 0, "seed": 1}


def headers(row: Row, qos: str) -> dict[str, str]:
    """A request's class, where the row names classes."""
    return {QOS: qos} if row.classes else {}


def scenario(
    server: Server, row: Row, name: str, prompts: Prompts, sizes: Sizes
) -> Callable[[str], tuple[dict[str, float], list[str]]]:
    """What a cell does: chats alone, then a chat behind the agents."""

    def chat_call(nonce: str, at: float) -> Call:
        body = chat(prompts, nonce, sizes.chat, sizes.chat_reply)
        return Call(body=body, headers=headers(row, "interactive"), at=at)

    def work(nonce: str) -> tuple[dict[str, float], list[str]]:
        # Rows are cells of different names, and are to compute the same prompts.
        nonce = "chat" + nonce.removeprefix(name)
        idle = [converse(server.port, [chat_call(f"{nonce}.idle{index}", 0.0)])[0] for index in range(sizes.idle)]
        calls = [
            Call(
                body=document(prompts, f"{nonce}.agent{index}", sizes.document, sizes.reply),
                headers=headers(row, "background"),
            )
            for index in range(sizes.agents)
        ]
        *agents, chatting = converse(
            server.port, [*calls, chat_call(f"{nonce}.loaded", sizes.delay)], timeout=sizes.timeout
        )
        return figures(idle, chatting, agents, sizes), [one.reply.text for one in agents]

    return work


def figures(idle: Sequence[Heard], chatting: Heard, agents: Sequence[Heard], sizes: Sizes) -> dict[str, float]:
    """A cell's figures. Agents that failed or fell short are counted as such and have no times.

    Raises:
        SystemExit: a chat failed, or every agent.
    """
    for one in (*idle, chatting):
        if one.reply.error:
            sys.exit(f"a chat failed: {one.reply.error}")
    whole = [one for one in agents if not one.reply.error and one.reply.completion_tokens == sizes.reply]
    for reply in [one.reply for one in agents if one not in whole]:
        print(f"  an agent got {reply.completion_tokens} tokens: {reply.error or 'no error'}", flush=True)
    if not whole:
        sys.exit("no agent got a whole reply")
    first = [one.reply.ttft for one in whole]
    return {
        "idle_ttft_s": statistics.median(one.reply.ttft for one in idle),
        "loaded_ttft_s": chatting.reply.ttft,
        "agents_ttft_median_s": statistics.median(first),
        "agents_ttft_max_s": max(first),
        "agents_wall_s": max(one.reply.finished for one in whole) - min(one.reply.started for one in whole),
        "silence_s": max(one.silence for one in agents),
        "text_gap_s": max(one.gap for one in agents),
        "comments": float(sum(one.comments for one in agents)),
        "agents": float(len(agents)),
        "complete": float(len(whole)),
        "tokens": float(sum(one.reply.completion_tokens for one in agents)),
    }


def by_round(cells: Sequence[Cell], kind: str, row: str, key: str) -> dict[int, float]:
    """A row's figure in the rounds where it is clean."""
    return report.values(cells, ROWS[row].system, f"{kind}-{row}", key)


def against(cells: Sequence[Cell], kind: str, row: str, key: str) -> list[float]:
    """A row's figure as a multiple of llama-server's of the same round."""
    return report.ratios(by_round(cells, kind, row, key), by_round(cells, kind, "np8", key))


def slowdown(cells: Sequence[Cell], kind: str, row: str) -> list[float]:
    """A row's first text behind the agents as a multiple of that without them."""
    return report.ratios(by_round(cells, kind, row, "loaded_ttft_s"), by_round(cells, kind, row, "idle_ttft_s"))


def table(cells: Sequence[Cell], kind: str) -> str:
    """Medians and ranges of every row."""
    keys = {
        "chat alone, s": "idle_ttft_s",
        "chat behind agents, s": "loaded_ttft_s",
        "agents' first text, s": "agents_ttft_median_s",
        "last agent's, s": "agents_ttft_max_s",
        "no byte for, s": "silence_s",
        "no text for, s": "text_gap_s",
        "agents' wall, s": "agents_wall_s",
    }
    head = ["server", *keys, "behind ÷ alone", "behind ÷ np8's", "wall ÷ np8's", "whole replies", "rounds"]
    lines = []
    for name, row in ROWS.items():
        clean = by_round(cells, kind, name, "agents")
        if clean:
            line = [row.label, *(spread(by_round(cells, kind, name, key).values()) for key in keys.values())]
            line += [spread(slowdown(cells, kind, name))]
            line += [spread(against(cells, kind, name, key)) for key in ("loaded_ttft_s", "agents_wall_s")]
            whole = sum(by_round(cells, kind, name, "complete").values())
            lines.append([*line, f"{whole:.0f} of {sum(clean.values()):.0f}", str(len(clean))])
    return markdown(head, lines) if lines else ""


def goals(cells: Sequence[Cell], kind: str) -> list[Goal]:
    """What superfluidd with classes is held to."""
    gain = [1 / ratio for ratio in against(cells, kind, "classed", "loaded_ttft_s")]
    wall = against(cells, kind, "classed", "agents_wall_s")
    silence = list(by_round(cells, kind, "classed", "silence_s").values())
    complete, agents = (by_round(cells, kind, "classed", key) for key in ("complete", "agents"))
    short = [agents[number] - complete[number] for number in agents]
    return [
        goal_for(f"chat behind agents <= {MAX_LOADED} x alone", slowdown(cells, kind, "classed"), MAX_LOADED.__ge__),
        goal_for(f"and >= {MIN_GAIN:.0f} times sooner than llama-server's", gain, MIN_GAIN.__le__),
        goal_for(f"agents' wall <= {MAX_WALL} x llama-server's", wall, MAX_WALL.__ge__),
        goal_for(f"no agent without a byte for > {MAX_SILENCE} s", silence, MAX_SILENCE.__ge__, worst=True),
        goal_for("agents without a whole reply: none", short, (0.0).__ge__, worst=True),
    ]


def picture(cells: Sequence[Cell], kind: str, path: Path) -> None:
    """Draw the rows of a table, a dot for each round."""

    def panel(title: str, series: Mapping[str, str], *, log: bool = False, limit: float | None = None) -> plots.Dots:
        rows = {
            row.label: {label: list(by_round(cells, kind, name, key).values()) for label, key in series.items()}
            for name, row in ROWS.items()
        }
        return plots.Dots(title=title, unit="seconds", rows=rows, log=log, limit=limit)

    chatting = {"alone": "idle_ttft_s", "behind eight agents": "loaded_ttft_s"}
    panels = [panel("the chat's first text", chatting, log=True)]
    panels.append(panel("eight agents", {"last one's first text": "agents_ttft_max_s", "all done": "agents_wall_s"}))
    panels.append(panel("longest silence of an agent's stream", {"no byte": "silence_s"}, limit=MAX_SILENCE))
    plots.dots(path, panels, title="A short chat one second behind eight agents")


def main() -> int:
    """Measure, and print table and verdict; 0 unless a goal was missed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    harness.add_common_options(parser)
    parser.set_defaults(context=2048)
    parser.add_argument("--rounds", type=int, default=3, help="rounds, each with every row (default: %(default)s)")
    parser.add_argument("--only", help=f"rows of {','.join(ROWS)} (default: all; for --full classed,np8)")
    parser.add_argument("--full", action="store_true", help="once, 3,000 tokens and 128 out, on the bundled Q4_1 model")
    parser.add_argument("--attempts", type=int, default=4, help="tries before a cell is void (default: %(default)s)")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="draw the table (needs matplotlib)")
    args = parser.parse_args()
    names = (args.only or ("classed,np8" if args.full else ",".join(ROWS))).split(",")
    if not set(names) <= set(ROWS):
        parser.error(f"--only knows {', '.join(ROWS)}")
    if args.full and args.quick:
        parser.error("--full and --quick exclude each other")
    plots.require(args.plot)
    sizes, kind, rounds, attempts = Sizes(), "agents", args.rounds, args.attempts
    if args.full:
        sizes, kind, rounds, args.context = FULL, "full", 1, max(args.context, 4096)
    elif args.quick:
        sizes, rounds, attempts = QUICK, 1, 1
    model: Path = args.model or (bundled_model() if args.full else requantized())
    ours, peer = harness.split_args(args.ours_args), harness.split_args(args.peer_args)
    setup = Setup(model=model, lanes=sizes.agents, context=args.context, ours_args=ours, peer_args=peer)
    prompts = Prompts(model)
    folder = harness.results_folder(args, "agents-chat")
    recorder = Recorder(folder, attempts=attempts)
    for number in range(1, rounds + 1):
        for name in names if number % 2 else names[::-1]:
            row = ROWS[name]
            print(f"round {number} of {rounds}: {row.label}", flush=True)
            lanes = setup.lanes + row.spare
            with harness.running(row.system, msgspec.structs.replace(setup, lanes=lanes)) as server:
                warm_up(server.port, prompts)
                cell = f"{kind}-{name}"
                recorder.measure(server, cell, number, scenario(server, row, cell, prompts, sizes))
    cells = report.read(folder)
    found = goals(cells, kind)
    print(f"\n{report.tables(cells)}\n\n{table(cells, kind)}\n\n{plots.verdicts(found)}\n\nmade from {folder}")
    if args.plot:
        picture(cells, kind, args.plot)
    return 0 if args.quick or all(goal.passed for goal in found) else 1


def warm_up(port: int, prompts: Prompts) -> None:
    """What every start is followed by, thrown away: a long prompt, and short ones at once."""
    nonce = f"warm{time.monotonic_ns()}"
    converse(port, [Call(body=document(prompts, nonce, 500, 4))])
    converse(port, [Call(body=chat(prompts, f"{nonce}.{index}", 40, 16)) for index in range(8)])


if __name__ == "__main__":
    sys.exit(main())
