"""The simulated runtime's promises: exact costs, tokens that tell on a wrong feed, nothing kept of a failed step."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from superfluidd.engine.port import Draw, Feed, OutOfCells
from superfluidd.engine.runtimes import simulated
from superfluidd.engine.runtimes.simulated import SimulatedRuntime
from superfluidd.engine.wire import LoadSpec
from superfluidd.types import SamplingParams

GREEDY = SamplingParams(temperature=0.0)


def runtime(layout: str = "per-sequence", cells: int = 64, window: int = 32, speed: float = 1.0) -> SimulatedRuntime:
    return SimulatedRuntime(LoadSpec("simulated", "", 3, window, layout, cells, simulated_speed=speed))


def draw(params: SamplingParams = GREEDY, history: tuple[int, ...] = ()) -> Draw:
    return Draw(params, len(history), history, len(history), (simulated.EOS, simulated.END_OF_TURN))


def reply(tokens: list[int], params: SamplingParams = GREEDY) -> int:
    engine = runtime(window=4096)
    engine.step([Feed(0, 0, tokens, True)])
    return engine.choose(0, draw(params)).token


@given(tokens=st.lists(st.integers(0, 500), min_size=2, max_size=20), data=st.data())
def test_a_wrong_feed_is_told_by_what_comes_after(tokens: list[int], data: st.DataObject) -> None:
    """Several tokens in a row agree by chance only once in a long while."""

    def replies(fed: list[int]) -> list[int]:
        engine = runtime(window=4096)
        engine.step([Feed(0, 0, fed, True)])
        said: list[int] = []
        for at in range(6):
            said.append(engine.choose(0, draw()).token)
            engine.step([Feed(0, len(fed) + at, [said[-1]], True)])
        return said

    at = data.draw(st.integers(0, len(tokens) - 1))
    missing = tokens[:at] + tokens[at + 1 :]
    changed = [*tokens[:at], tokens[at] + 1, *tokens[at + 1 :]]
    said = replies(tokens)
    assert replies(list(tokens)) == said
    assert replies(changed) != said
    if missing != tokens[:-1] or len(set(tokens)) > 1:
        assert replies(missing) != said


@pytest.mark.parametrize("layout", ["per-sequence", "shared"])
def test_nothing_of_a_failed_step_is_kept(layout: str) -> None:
    engine = runtime(layout, cells=40)
    engine.step([Feed(0, 0, [1] * 10, True), Feed(1, 0, [2] * 20, True)])
    for feeds in (
        [Feed(0, 10, [1], True), Feed(1, 20, [2] * 13, True)],  # over the window, and over the pool
        [Feed(0, 10, [1], True), Feed(1, 19, [2], True)],  # not where the sequence ends
        [Feed(0, 10, [1], True), Feed(2, 1, [2], True)],
    ):
        with pytest.raises(OutOfCells):
            engine.step(feeds)
        assert [engine.length(sequence) for sequence in range(3)] == [10, 20, 0]
        assert engine.cells_used() == 30
    assert engine.cut(1, 5)
    assert engine.cells_used() == 15
    engine.free(0)
    assert engine.cells_used() == 5


def test_costs_are_exact() -> None:
    paces: list[float] = []
    spec = LoadSpec("simulated", "", 3, 512, "per-sequence", 0, simulated_speed=2.0)
    engine = SimulatedRuntime(spec, pace=paces.append)
    engine.step([Feed(0, 0, [1] * 400, True)])
    assert engine.seconds() == pytest.approx((0.002 + 1.0) / 2)
    engine.step([Feed(0, 400, [1], True), Feed(1, 0, [1], True)])
    assert engine.seconds() == pytest.approx((0.002 + 1.0 + 0.010) / 2)
    assert sum(paces) == pytest.approx(engine.seconds())


def test_the_seed_matters_unless_greedy() -> None:
    tokens = list(range(300, 310))
    assert len({reply(tokens, SamplingParams(temperature=1.0, seed=seed)) for seed in range(20)}) > 10
    assert len({reply(tokens, SamplingParams(temperature=0.0, seed=seed)) for seed in range(20)}) == 1


def test_forbidden_tokens_are_never_drawn_and_forbidding_all_is_an_error() -> None:
    drawn = sorted(simulated._DRAWN)
    tokens = [300, 301]
    keep = drawn[3]
    bias = tuple((token, -100.0) for token in drawn if token != keep)
    assert reply(tokens, SamplingParams(temperature=0.0, logit_bias=bias, logprobs=20)) == keep
    with pytest.raises(ValueError, match="forbidden"):
        reply(tokens, SamplingParams(temperature=0.0, logit_bias=(*bias, (keep, -100.0))))


def test_the_second_half_of_a_character_always_follows_the_first() -> None:
    engine = runtime()
    engine.step([Feed(0, 0, [simulated.HALF], True)])
    choice = engine.choose(0, draw(history=(simulated.HALF,)))
    assert choice.token == simulated.OTHER_HALF
    pieces = engine.pieces()
    assert (pieces[simulated.HALF] + pieces[simulated.OTHER_HALF]).decode() == "😀"


@given(text=st.text(max_size=60))
def test_tokenizing_round_trips(text: str) -> None:
    engine = runtime()
    tokens = engine.tokenize(text, add_bos=False, parse_special=False)
    pieces = engine.pieces()
    assert b"".join(pieces[token] for token in tokens).decode() == text
    assert engine.tokenize(text, add_bos=True, parse_special=False) == [simulated.BOS, *tokens]


def test_special_texts_are_tokens_only_when_asked_for() -> None:
    engine = runtime()
    marked = "<|im_start|>user la<|im_end|>"
    tokens = engine.tokenize(marked, add_bos=False, parse_special=True)
    assert tokens[0] == simulated.TURN
    assert tokens[-1] == simulated.END_OF_TURN
    plain = engine.tokenize(marked, add_bos=False, parse_special=False)
    assert not {simulated.TURN, simulated.END_OF_TURN} & set(plain)
