"""Arithmetic of the benchmarks of kept KV: counts, shares, goals. No server runs here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import pytest

from tests.bench import pool, returning, shared_prefix
from tests.bench.agents_chat import Call, Heard
from tests.bench.harness import OURS, PEER, Cell, Server
from tests.bench.prompts import Prompts
from tests.bench.streaming import Reply
from tests.bench.test_bench_scenarios import LetterPrompts, cell

PROMPTS = cast("Prompts", LetterPrompts())


class FakeServer:
    """Answers nothing: what it would say is put in its place."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.port = 0


def server(name: str) -> Server:
    return cast("Server", FakeServer(name))


def reply(call: Call, completion: int, *, cached: int = 0, ttft: float = 1.0) -> Heard:
    prompt = cast("Sequence[int]", call.body["prompt"])
    said = Reply(started=0.0, stamps=[ttft, 2.0], finished=2.0, completion_tokens=completion)
    said.prompt_tokens, said.cached_tokens, said.text, said.finish_reason = len(prompt), cached, "ab", "length"
    return Heard(reply=said, arrivals=[1.0, 2.0], comments=0)


def test_questions_share_nothing_from_their_first_token_on() -> None:
    firsts = [shared_prefix.question(PROMPTS, "n", index) for index in range(32)]
    assert len({tokens[0] for tokens in firsts}) == 32
    assert {len(tokens) for tokens in firsts} == {shared_prefix.QUESTION}


@pytest.mark.parametrize(("name", "per_request"), [(OURS, 30 + 31), (PEER, 30)])
def test_times_a_prompt_is_computed(name: str, per_request: int, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = iter([100.0, 100.0 + 8 * per_request + 2 * 300])
    asked: list[int] = []

    def converse(port: int, calls: Sequence[Call], timeout: float) -> list[Heard]:
        asked.append(len(calls))
        return [reply(call, 32, cached=300 if index else 0) for index, call in enumerate(calls)]

    monkeypatch.setattr(shared_prefix, "computed", lambda _: next(counted))
    monkeypatch.setattr(shared_prefix, "converse", converse)
    figures, texts = shared_prefix.work(server(name), PROMPTS, "n", quick=True)
    assert asked == [8, 8]
    assert figures["prefills"] == pytest.approx(2.0), "by the engine"
    assert figures["said_prefills"] == pytest.approx(1.0), "by what it says of its cache"
    assert (figures["wall_s"], figures["tokens"], len(texts)) == (2.0, 16 * 32.0, 8)


def test_a_conversation_returns_with_what_was_said(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def converse(port: int, calls: Sequence[Call], timeout: float) -> list[Heard]:
        (call,) = calls
        length = len(cast("Sequence[int]", call.body["prompt"]))
        first = length == 300
        seen.append(length)
        return [reply(call, 16, cached=0 if first else length - returning.QUESTION - 1, ttft=1.0 if first else 0.1)]

    monkeypatch.setattr(returning, "converse", converse)
    figures, texts = returning.work(server(OURS), PROMPTS, "n", quick=True)
    assert seen == [300] * 6 + [322] * 6 + [344] * 6
    assert figures["second_of_cold"] == pytest.approx(0.1)
    assert figures["worst_of_cold"] == pytest.approx(0.1)
    assert 0.99 < figures["reused"] < 1.0
    assert len(texts) == 18


def test_only_whole_replies_count_and_none_is_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    ends: list[dict[str, object]] = [{}, {"finish_reason": "stop"}, {"error": "out of room"}, {"completion_tokens": 3}]

    def converse(port: int, calls: Sequence[Call], timeout: float) -> list[Heard]:
        heard = [reply(call, 20) for call in calls]
        for index, one in enumerate(heard):
            for name, value in ends[index % 4].items():
                setattr(one.reply, name, value)
        return heard

    monkeypatch.setattr(pool, "converse", converse)
    figures, _ = pool.work(server(OURS), PROMPTS, "n", quick=True)
    assert (figures["asked"], figures["whole"]) == (12, 3)
    ends[0] = {"error": "out of room"}
    with pytest.raises(SystemExit, match="no request got a whole reply; one of them: out of room"):
        pool.work(server(OURS), PROMPTS, "n", quick=True)


def cells(kind: str, **rows: dict[str, float]) -> list[Cell]:
    return [cell(PEER if row == "np8" else OURS, f"{kind}-{row}", 1, **figures) for row, figures in rows.items()]


def test_goals_are_met_and_missed() -> None:
    shared = cells("shared-prefix", ours={"prefills": 1.05, "wall_s": 5.0}, np8={"prefills": 8.0, "wall_s": 9.0})
    assert [goal.passed for goal in shared_prefix.goals(shared)] == [True, False]
    back = [cell(OURS, "returning-ours", 1, second_of_cold=0.16)]
    assert [goal.passed for goal in returning.goals(back)] == [False]
    whole = {"asked": 32.0, "whole": 32.0, "wall_s": 11.0}
    one_short = {"asked": 32.0, "whole": 31.0, "wall_s": 30.0}
    pools = cells("pool", ours=whole, shared=one_short, np8={**whole, "wall_s": 10.0})
    assert [goal.passed for goal in pool.goals(pools)] == [True, False, True]
