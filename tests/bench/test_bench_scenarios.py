"""Arithmetic of the scheduling benchmarks: silences and gaps, requests, tables, goals. No server runs here."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest

from tests.bench import agents_chat, machine, planning, plots, stall
from tests.bench.agents_chat import Call, Heard, Sizes
from tests.bench.harness import OURS, PEER, Cell
from tests.bench.prompts import Prompts
from tests.bench.streaming import Reply

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
EVENTS = (
    b": waiting\n\n",
    b'data: {"choices":[{"text":"a: b","finish_reason":null}]}\n\n',
    b": paused\n\n",
    b'data: {"choices":[{"text":"","finish_reason":"length"}]}\n\n',
    b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":2}}\n\n',
    b"data: [DONE]\n\n",
)


class LetterPrompts:
    """Stands in for a tokenizer: a token a letter."""

    def tokens(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    def document(self, nonce: str, length: int) -> list[int]:
        return self.tokens((nonce + "." * length)[:length])


def whole(*stamps: float, started: float = 0.0, tokens: int = 2) -> Reply:
    return Reply(started=started, stamps=list(stamps), finished=stamps[-1], completion_tokens=tokens)


def heard(reply: Reply, *arrivals: float) -> Heard:
    return Heard(reply=reply, arrivals=list(arrivals) or reply.stamps, comments=0)


def cell(system: str, name: str, number: int, **figures: float) -> Cell:
    return Cell(
        name=name,
        system=system,
        round=number,
        attempts=1,
        void=False,
        window=machine.Window(10.0, {}, 0.0),
        values=figures,
        rss={},
        argv=(system,),
        versions={},
        machine={},
        at="2030-01-01T00:00:00+00:00",
    )


def test_silence_counts_every_byte_and_the_wait_for_the_first() -> None:
    one = heard(whole(4.0, 9.0), 3.0, 4.0, 6.0, 8.0, 9.0)
    assert one.silence == 3.0
    assert one.gap == 5.0
    assert agents_chat.longest([]) == agents_chat.longest([1.0]) == 0.0


def test_requests_go_out_at_their_times_and_comments_are_heard() -> None:
    came: list[bytes] = []

    def serve(listener: socket.socket) -> None:
        for _ in range(2):
            connection, _ = listener.accept()
            with connection:
                came.append(connection.recv(65536))
                connection.sendall(HEAD)
                for event in EVENTS:
                    connection.sendall(b"%x\r\n%s\r\n" % (len(event), event))
                connection.sendall(b"0\r\n\r\n")

    calls = [Call(body={"n": 1}, headers={"x-kind": "late"}, at=0.05), Call(body={"n": 0})]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = threading.Thread(target=serve, args=(listener,))
        server.start()
        late, early = agents_chat.converse(listener.getsockname()[1], calls)
        server.join()
    assert [one.reply.error for one in (late, early)] == [None, None]
    assert [one.reply.text for one in (late, early)] == ["a: b", "a: b"]
    assert [one.comments for one in (late, early)] == [2, 2]
    assert late.reply.started - early.reply.started >= 0.04
    assert b'"n":0' in came[0]
    assert b"x-kind: late\r\n" in came[1]
    assert b'"stream":true' in came[1]


def test_what_is_not_over_in_time_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        calls = [Call(body={}), Call(body={}, at=5.0)]
        slow, never = agents_chat.converse(listener.getsockname()[1], calls, timeout=0.05)
    assert slow.reply.error == "unfinished after 0.05 s"
    assert never.reply.error == "not sent within 0.05 s"


def test_chats_have_exactly_their_length_and_differ_by_nonce() -> None:
    prompts = cast("Prompts", LetterPrompts())
    bodies = [agents_chat.chat(prompts, nonce, 80, 16) for nonce in ("one", "two")]
    found = [cast("list[int]", body["prompt"]) for body in bodies]
    assert [len(prompt) for prompt in found] == [80, 80]
    assert found[0] != found[1]
    assert "ignore_eos" not in bodies[0]
    assert agents_chat.document(prompts, "one", 30, 64)["ignore_eos"] is True


def test_only_the_row_with_classes_names_them() -> None:
    named = {name: agents_chat.headers(row, "background") for name, row in agents_chat.ROWS.items()}
    assert named.pop("classed") == {"x-superfluid-qos": "background"}
    assert not any(named.values())


def test_agents_that_fell_short_are_counted_and_have_no_times() -> None:
    short = Reply(started=0.0, stamps=[90.0], finished=99.0, completion_tokens=1)
    agents = [heard(whole(3.0, 4.0)), heard(whole(5.0, 8.0, started=1.0)), heard(short)]
    idle = [heard(whole(0.25)), heard(whole(0.5)), heard(whole(0.75))]
    found = agents_chat.figures(idle, heard(whole(2.0, started=1.0)), agents, Sizes(reply=2))
    assert (found["idle_ttft_s"], found["loaded_ttft_s"]) == (0.5, 1.0)
    assert (found["agents"], found["complete"], found["agents_wall_s"]) == (3.0, 2.0, 8.0)
    assert (found["agents_ttft_median_s"], found["agents_ttft_max_s"]) == (3.5, 4.0)
    with pytest.raises(SystemExit, match="a chat failed: gone"):
        agents_chat.figures([heard(Reply(started=0.0, error="gone"), 1.0)], idle[0], agents, Sizes(reply=2))


def row(system: str, name: str, number: int, loaded: float, wall: float, silence: float = 1.0) -> Cell:
    extra = dict.fromkeys(("agents_ttft_median_s", "agents_ttft_max_s", "text_gap_s"), 1.0)
    figures = {"idle_ttft_s": 0.1, "loaded_ttft_s": loaded, "agents_wall_s": wall, "silence_s": silence, **extra}
    return cell(system, f"agents-{name}", number, agents=8.0, complete=8.0, **figures)


def test_goals_are_judged_within_rounds_and_silence_by_its_worst() -> None:
    cells = [row(OURS, "classed", number, 0.125, 10.0, silence) for number, silence in ((1, 1.0), (2, 1.0), (3, 3.0))]
    cells += [row(PEER, "np8", number, 30.0, 9.0 + number) for number in (1, 2)]
    verdicts = [goal.passed for goal in agents_chat.goals(cells, "agents")]
    assert verdicts == [True, True, True, False, True]
    assert [goal.passed for goal in agents_chat.goals(cells[:3], "agents")] == [True, None, None, False, True]
    table = agents_chat.table(cells, "agents")
    assert table.count("\n") == 3
    assert "1.25 (1.25-1.25)" in table
    assert "24 of 24" in table
    assert agents_chat.table(cells, "full") == ""


def test_gaps_belong_to_before_during_and_after() -> None:
    before, during, after = stall.gaps([0.0, 1.0, 2.0, 5.0, 8.0, 9.0], came=3.0, read=7.0)
    assert before == [1.0, 1.0]
    assert during == [3.0, 3.0]
    assert after == [1.0]


def test_texts_of_one_packet_are_one_arrival() -> None:
    talk = whole(1.0, 1.0, 2.0, 2.0, 2.0, 5.0, 5.0, 9.0, 10.0)
    found = stall.figures(talk, whole(8.0, 8.5, started=2.5))
    assert (found["before_gap_s"], found["worst_gap_s"], found["step_s"], found["steps"]) == (1.0, 4.0, 3.5, 2.0)
    with pytest.raises(SystemExit, match="in the middle of the chat"):
        stall.figures(talk, whole(12.0, started=11.0))


def test_stalls_are_measured_in_steps_of_the_longest_prompt() -> None:
    def both(length: int, ours: float, step: float, peer: float) -> list[Cell]:
        rest = {"before_gap_s": 0.01, "agent_ttft_s": 1.0}
        return [
            cell(OURS, f"stall-{length}", 1, worst_gap_s=ours, step_s=step, **rest),
            cell(PEER, f"stall-{length}", 1, worst_gap_s=peer, step_s=peer, **rest),
        ]

    cells = [*both(2000, 0.5, 0.25, 8.0), *both(250, 0.25, 0.01, 1.0)]
    assert stall.lengths(cells) == [250, 2000]
    assert stall.in_steps(cells, 250) == [1.0]
    assert [goal.passed for goal in stall.goals(cells)] == [True, True, False]
    assert "16.00 (16.00-16.00)" not in stall.table(cells)
    assert "| 16 (16-16) " in stall.table(cells)


def test_the_queue_of_a_planning_load_keeps_its_length() -> None:
    load = planning.Load(30, prompt=40)
    for _ in range(60):
        load.tick()
    assert load.seated > planning.LANES
    engine = load._scheduler
    engine.check_integrity()
    assert len(engine.seated()) + len(engine.queued()) == planning.LANES + 30


def test_planning_is_judged_by_clean_medians_and_growth() -> None:
    def sample(queued: int, seconds: float, foreign: float = 0.0) -> planning.Sample:
        times = [seconds] * 98 + [seconds * 9] * 2
        return planning.Sample(queued=queued, round=1, attempts=1, foreign=foreign, plan=times, apply=times, seated=5)

    samples = [sample(0, 1e-5), sample(10, 1e-4), sample(10_000, 2e-4), sample(10_000, 9.0, foreign=1.0)]
    assert [goal.passed for goal in planning.goals(samples)] == [True, False]
    assert planning.percentile(samples[0].plan, 0.99) == pytest.approx(9e-5)
    assert "| 200 (200-200) " in planning.table(samples)


@pytest.mark.parametrize("worst, passed", [(False, True), (True, False)])
def test_a_goal_is_for_the_median_or_the_worst(worst: bool, passed: bool) -> None:
    below: Callable[[float], bool] = lambda value: value < 2  # noqa: E731
    goal = plots.goal_for("small", [1.0, 1.5, 3.0], below, worst=worst)
    assert goal.passed is passed
    assert plots.verdicts([goal]).startswith("pass" if passed else "FAIL")
    assert plots.goal_for("small", [], below).passed is None


def test_error_bars_span_the_figures() -> None:
    assert plots.spans({20: [1.0, 2.0, 4.0], 10: [3.0], 30: []}) == ([10, 20], [3.0, 2.0], [0.0, 1.0], [0.0, 2.0])
    assert plots.spans({}) == ([], [], [], [])


def test_pictures_are_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    cells = [row(OURS, "classed", 1, 0.125, 10.0), row(PEER, "np8", 1, 30.0, 10.0)]
    agents_chat.picture(cells, "agents", tmp_path / "chat.png")
    stalls = [cell(OURS, f"stall-{length}", 1, worst_gap_s=0.5, step_s=0.2) for length in (250, 500)]
    stall.picture(stalls, tmp_path / "stall.png")
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in ("chat.png", "stall.png"))
