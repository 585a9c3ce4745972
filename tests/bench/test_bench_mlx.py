"""Arithmetic of the MLX benchmark. No server runs here."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.bench import mlx
from tests.bench.agents_chat import Call, Heard
from tests.bench.harness import MLX_PEER, OURS
from tests.bench.mlx import QUICK
from tests.bench.streaming import Reply
from tests.bench.test_bench_kv import server
from tests.bench.test_bench_scenarios import cell


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """Every request, answered whole: first text a second after it was sent, the end after two."""
    calls_seen: list[Call] = []

    def converse(port: int, calls: Sequence[Call], timeout: float) -> list[Heard]:
        calls_seen.extend(calls)
        heard = []
        for call in calls:
            said = Reply(started=call.at, stamps=[call.at + 1], finished=call.at + 2, finish_reason="length")
            said.completion_tokens = int(str(call.body["max_tokens"]))
            said.prompt_tokens, said.cached_tokens = 100, 40
            heard.append(Heard(reply=said, arrivals=[], comments=0))
        return heard

    monkeypatch.setattr(mlx, "converse", converse)
    return calls_seen


def test_streams_are_short_chats_of_a_fixed_length(asked: list[Call]) -> None:
    figures, _ = mlx.streams(server(OURS), "n", 4, QUICK)
    assert figures["tokens_per_s"] == 4 * 12 / 2
    assert (figures["prompt_tokens"], figures["cached_tokens"]) == (400, 160)
    assert len({str(call.body["prompt"]) for call in asked}) == 4
    assert all("seed" not in call.body for call in asked), "mlx_lm.server does not batch what is seeded"
    assert all(call.body["logit_bias"] == {"0": -100.0, "2": -100.0, "4": -100.0} for call in asked)


@pytest.mark.parametrize(("name", "classes"), [(OURS, 6), (MLX_PEER, 0)])
def test_the_chat_comes_after_the_agents_and_only_ours_is_told_classes(
    asked: list[Call], name: str, classes: int
) -> None:
    figures, texts = mlx.behind(server(name), "n", QUICK)
    assert (figures["idle_ttft_s"], figures["loaded_ttft_s"], figures["agents_wall_s"]) == (1.0, 1.0, 2.0)
    assert [call.at for call in asked] == [0.0] * 5 + [QUICK.delay]
    assert sum(bool(call.headers) for call in asked) == classes
    assert len(texts) == 5


def test_a_burst_begins_alike_and_counts_what_was_computed(asked: list[Call], monkeypatch: pytest.MonkeyPatch) -> None:
    counts = iter([100.0, 350.0])
    monkeypatch.setattr(mlx, "metric", lambda server, name: next(counts))
    figures, _ = mlx.burst(server(OURS), "n", QUICK)
    assert figures["computed"] == 250.0
    system = mlx.document("n.system", QUICK.shared)
    assert all(str(call.body["prompt"]).startswith(system) for call in asked)
    assert "computed" not in mlx.burst(server(MLX_PEER), "n", QUICK)[0]


def test_a_short_reply_ends_the_measurement(asked: list[Call]) -> None:
    with pytest.raises(SystemExit, match="a reply has 12 tokens instead of 13"):
        mlx.sent(server(OURS), [Call(body=mlx.body("x", 12))], QUICK, [13])


def test_goals_and_table() -> None:
    found = [
        cell(OURS, "streams-1", 1, tokens_per_s=11.0),
        cell(MLX_PEER, "streams-1", 1, tokens_per_s=10.0),
        cell(OURS, "streams-2", 1, tokens_per_s=9.0),
        cell(MLX_PEER, "streams-2", 1, tokens_per_s=10.0),
        cell(OURS, "chat", 1, loaded_ttft_s=0.5, idle_ttft_s=0.2, agents_wall_s=4.0),
        cell(MLX_PEER, "chat", 1, loaded_ttft_s=11.0, idle_ttft_s=0.3, agents_wall_s=3.0),
    ]
    assert [goal.passed for goal in mlx.goals(found)] == [True, False, None, True]
    lines = mlx.table(found).splitlines()
    assert [line.split("|")[4].split()[0] for line in lines[2:]] == ["1.10", "0.90", "1.50", "22.00", "0.75"]
