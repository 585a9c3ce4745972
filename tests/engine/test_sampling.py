"""Draws: against a slow reference in plain Python, and the properties that replay and retries rest on."""

from __future__ import annotations

import itertools
import math
import warnings
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from superfluidd.engine import sampling
from superfluidd.engine.port import Choice, Draw
from superfluidd.types import SamplingParams

INF = math.inf


def floats(values: Sequence[float]) -> sampling.Floats:
    return np.array(values, dtype=np.float32)


def choose(
    logits: Sequence[float], *, position: int = 0, history: Sequence[int] = (), prompt: int = 0, **params: Any
) -> Choice:
    end_tokens = params.pop("end_tokens", ())
    array = floats(logits)
    before = array.copy()
    try:
        return sampling.choose(array, Draw(SamplingParams(**params), position, history, prompt, end_tokens))
    finally:
        assert np.array_equal(array, before, equal_nan=True)


def drawn(logits: Sequence[float], draws: int = 400, **params: Any) -> Counter[int]:
    """Tokens over many positions."""
    return Counter(choose(logits, position=position, **params).token for position in range(draws))


def reference(
    scores: Sequence[float], temperature: float, top_k: int, top_p: float, min_p: float
) -> list[tuple[int, float]]:
    """The tokens that may be drawn and their weights: the definition, without regard to speed."""
    alive = [(token, score) for token, score in enumerate(scores) if score > -INF]
    best = max(score for _, score in alive)
    ranked = sorted(((math.exp((score - best) / temperature), token) for token, score in alive), key=_likeliest)
    if top_k:
        ranked = ranked[:top_k]
    whole = math.fsum(weight for weight, _ in ranked)
    if top_p < 1:
        mass = 0.0
        for kept, (weight, _) in enumerate(ranked, 1):
            mass += weight
            if mass >= top_p * whole:
                ranked = ranked[:kept]
                break
    ranked = [entry for index, entry in enumerate(ranked) if index == 0 or entry[0] >= min_p]
    return [(token, weight) for weight, token in ranked]


def _likeliest(entry: tuple[float, int]) -> tuple[float, int]:
    return -entry[0], entry[1]


# Sixteenths are exact in both precisions, so that ties are ties and differences are far above rounding.
score = st.one_of(st.integers(-320, 320).map(lambda value: value / 16), st.just(-INF))


class TestFilters:
    @given(
        scores=st.lists(score, min_size=1, max_size=40).filter(lambda scores: max(scores) > -INF),
        temperature=st.sampled_from([0.25, 0.5, 1.0, 2.0]),
        top_k=st.integers(0, 45),
        top_p=st.one_of(st.just(1.0), st.floats(0.0, 1.0)),
        min_p=st.one_of(st.just(0.0), st.floats(1e-6, 1.0)),
        number=st.floats(0, 1, exclude_max=True),
    )
    @example(scores=[1.0] * 5, temperature=1.0, top_k=3, top_p=1.0, min_p=0.0, number=0.999)
    @example(scores=[1.0, 1.0, 2.0], temperature=1.0, top_k=0, top_p=0.0, min_p=0.0, number=0.0)
    @example(scores=[0.0, -19.0, -20.0], temperature=1.0, top_k=0, top_p=1.0, min_p=1e-6, number=0.5)
    @example(scores=[0.0, *[-20.0] * 39], temperature=1.0, top_k=0, top_p=0.9999999999, min_p=0.0, number=0.9)
    def test_draws_what_the_definition_draws(
        self, scores: list[float], temperature: float, top_k: int, top_p: float, min_p: float, number: float
    ) -> None:
        kept = reference(scores, temperature, top_k, top_p, min_p)
        if top_k == 0 and top_p >= 1.0 and min_p <= 0.0:
            kept.sort()
        mass = [0.0, *itertools.accumulate(weight for _, weight in kept)]
        # Where a set ends, or one token begins, is a matter of rounding within 1e-9: leave that out.
        edges = [edge / mass[-1] for edge in mass]
        assume(all(abs(edge - number) > 1e-9 for edge in edges[1:-1]))
        everything = reference(scores, temperature, top_k, 1.0, 0.0)
        running = itertools.accumulate(weight for _, weight in everything)
        whole = math.fsum(weight for _, weight in everything)
        assume(top_p >= 1 or all(abs(part / whole - top_p) > 1e-9 for part in running))
        assume(all(abs(weight - min_p) > 1e-9 for _, weight in everything[1:]))
        expected = next(
            token for (token, _), edge in zip(kept, edges[1:], strict=True) if number < edge or edge == edges[-1]
        )
        params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        assert sampling._draw(floats(scores), params, number) == expected

    def test_top_k_keeps_exactly_k_and_ties_go_to_the_lowest_ids(self) -> None:
        assert set(drawn([1, 3, 3, 3, 3, 2], top_k=3)) == {1, 2, 3}
        assert set(drawn([0.0] * 6, top_k=2)) == {0, 1}
        assert set(drawn([0.0] * 6, top_k=0)) == set(range(6))
        assert set(drawn([0.0] * 6, top_k=100)) == set(range(6))

    def test_top_p_keeps_the_smallest_set_that_reaches_it(self) -> None:
        logits = [math.log(share) for share in (0.4, 0.3, 0.2, 0.1)]
        assert set(drawn(logits, top_p=0.39)) == {0}
        assert set(drawn(logits, top_p=0.41)) == {0, 1}
        assert set(drawn(logits, top_p=0.69)) == {0, 1}
        assert set(drawn(logits, top_p=0.71)) == {0, 1, 2}
        assert set(drawn(logits, top_p=0.0)) == {0}
        assert set(drawn(logits, top_p=0.99)) == {0, 1, 2, 3}

    def test_a_set_that_reaches_top_p_exactly_needs_no_more(self) -> None:
        assert set(drawn([0.0, 0.0], top_p=0.5)) == {0}
        assert set(drawn([0.0] * 4, top_p=0.5)) == {0, 1}
        assert set(drawn([0.0] * 4, top_k=0, top_p=0.75)) == {0, 1, 2}

    def test_top_p_counts_what_top_k_left(self) -> None:
        logits = [math.log(share) for share in (0.4, 0.3, 0.2, 0.1)]
        # Of the first two, the first is 4/7.
        assert set(drawn(logits, top_k=2, top_p=0.56)) == {0}
        assert set(drawn(logits, top_k=2, top_p=0.58)) == {0, 1}

    def test_min_p_is_a_share_of_the_likeliest(self) -> None:
        logits = [math.log(share) for share in (0.5, 0.3, 0.15, 0.05)]
        assert set(drawn(logits, min_p=0.61)) == {0}
        assert set(drawn(logits, min_p=0.59)) == {0, 1}
        assert set(drawn(logits, min_p=0.29)) == {0, 1, 2}
        assert set(drawn(logits, min_p=1.0)) == {0}
        assert set(drawn([1, 1, 0], min_p=1.0)) == {0, 1}

    def test_temperature_comes_before_the_filters(self) -> None:
        logits = [math.log(share) for share in (0.5, 0.3, 0.2)]
        assert set(drawn(logits, temperature=1.0, top_p=0.55)) == {0, 1}
        assert set(drawn(logits, temperature=0.25, top_p=0.55)) == {0}
        assert set(drawn(logits, temperature=100.0, top_p=0.7)) == {0, 1, 2}

    @pytest.mark.parametrize("temperature", [1e-3, 1e-8, 1e-30, 1e-50, 5e-324])
    @pytest.mark.parametrize(
        "filters", [{"top_k": 0}, {"top_k": 0, "min_p": 0.05}, {"top_k": 0, "top_p": 0.9}, {"top_k": 2, "top_p": 0.9}]
    )
    def test_next_to_no_temperature_is_next_to_greedy(self, temperature: float, filters: dict[str, Any]) -> None:
        assert set(drawn([20.0, 21.0, 19.0, -INF], 20, temperature=temperature, **filters)) == {1}

    @pytest.mark.parametrize("temperature", [50.0, 100.0, 1e30])
    def test_much_temperature_is_next_to_uniform(self, temperature: float) -> None:
        assert set(drawn([0.0, 1.0, 2.0, 3.0], 100, temperature=temperature)) == {0, 1, 2, 3}

    def test_a_forbidden_token_is_never_drawn_whatever_the_rest(self) -> None:
        for params in ({"top_k": 0}, {"top_k": 4}, {"top_k": 0, "top_p": 0.9999}, {"top_k": 0, "min_p": 1e-9}):
            assert 2 not in drawn([0, 0, 5, 0], logit_bias=((2, -100.0),), **params)


class TestGreedy:
    def test_takes_the_likeliest_and_of_equals_the_lowest_id(self) -> None:
        assert choose([1, 5, 2], temperature=0.0).token == 1
        assert choose([1, 5, 2, 5, 5], temperature=0.0).token == 1
        assert choose([0, 0, 0], temperature=0.0).token == 0

    def test_ignores_seed_position_and_filters(self) -> None:
        chosen = {
            choose([1, 2, 3], temperature=0.0, seed=seed, position=seed * 7, top_p=0.01, min_p=1.0, top_k=1).token
            for seed in range(9)
        }
        assert chosen == {2}


class TestBroken:
    @pytest.mark.parametrize("logits", [[math.nan] * 3, [-INF] * 3, [0.0, math.nan], [0.0, INF], [INF, INF]])
    @pytest.mark.parametrize("params", [{"temperature": 0.0}, {}, {"top_k": 0}, {"top_k": 0, "top_p": 0.5}])
    def test_logits_that_are_no_numbers_are_an_error(self, logits: list[float], params: dict[str, Any]) -> None:
        with pytest.raises(ValueError, match="no finite logit"):
            choose(logits, **params)

    def test_everything_forbidden_is_an_error(self) -> None:
        with pytest.raises(ValueError, match="no finite logit"):
            choose([1, 2], temperature=0.0, logit_bias=((0, -100), (1, -100)))
        with pytest.raises(ValueError, match="no finite logit"):
            choose([1, 2], ignore_eos=True, end_tokens=(0, 1))

    def test_some_tokens_without_probability_are_not(self) -> None:
        assert set(drawn([-INF, 1, -INF, 1])) == {1, 3}
        assert choose([-INF, 1, -INF], temperature=0.0).token == 1
        assert [entry.token for entry in choose([-INF, 1, 0], temperature=0.0, logprobs=3).top] == [1, 2]


class TestAdjustments:
    def test_bias_is_added_and_minus_100_forbids(self) -> None:
        assert choose([0, 1], temperature=0.0, logit_bias=((0, 1.5),)).token == 0
        assert choose([0, 1], temperature=0.0, logit_bias=((1, -99.0),)).token == 0
        assert choose([-300, 1], temperature=0.0, logit_bias=((1, -99.0),)).token == 1
        assert choose([-300, 1], temperature=0.0, logit_bias=((1, -100.0),)).token == 0

    def test_end_tokens_are_out_of_the_draw_only_when_ignored(self) -> None:
        assert choose([1, 9, 5], temperature=0.0, end_tokens=(1,)).token == 1
        assert choose([1, 9, 5], temperature=0.0, end_tokens=(1,), ignore_eos=True).token == 2
        assert choose([1, 9, 5], temperature=0.0, end_tokens=(), ignore_eos=True).token == 1

    def test_repeat_penalty_divides_above_and_multiplies_below_zero(self) -> None:
        assert choose([4, 3], temperature=0.0, history=[0], prompt=1, repeat_penalty=1.3).token == 0
        assert choose([4, 3], temperature=0.0, history=[0], prompt=1, repeat_penalty=1.4).token == 1
        assert choose([-3, -4], temperature=0.0, history=[0], repeat_penalty=1.3).token == 0
        assert choose([-3, -4], temperature=0.0, history=[0], repeat_penalty=1.4).token == 1
        assert choose([4, 3], temperature=0.0, history=[0] * 9, repeat_penalty=1.3).token == 0, "once, however often"
        assert choose([3, 4], temperature=0.0, history=[0], repeat_penalty=0.5).token == 0, "below 1 it encourages"

    def test_repeat_penalty_sees_the_last_64_prompt_included(self) -> None:
        for gap, token in ((62, 1), (63, 1), (64, 0), (65, 0)):
            assert (
                choose([4, 3, 0], temperature=0.0, history=[0] + [2] * gap, prompt=1, repeat_penalty=2.0).token == token
            ), gap

    def test_presence_counts_once_and_frequency_every_time(self) -> None:
        assert choose([2, 1], temperature=0.0, history=[0, 0, 0], presence_penalty=0.9).token == 0
        assert choose([2, 1], temperature=0.0, history=[0], presence_penalty=1.1).token == 1
        assert choose([2, 1], temperature=0.0, history=[0, 0], frequency_penalty=0.4).token == 0
        assert choose([2, 1], temperature=0.0, history=[0, 0, 0], frequency_penalty=0.4).token == 1
        assert choose([2, 1], temperature=0.0, history=[1], presence_penalty=-1.1).token == 1

    def test_presence_and_frequency_look_at_generated_tokens_only(self) -> None:
        penalties: tuple[dict[str, Any], ...] = ({"presence_penalty": 2.0}, {"frequency_penalty": 2.0})
        for penalty in penalties:
            assert choose([2, 1], temperature=0.0, history=[0, 0], prompt=2, **penalty).token == 0
            assert choose([2, 1], temperature=0.0, history=[0, 0], prompt=1, **penalty).token == 1

    def test_generated_tokens_count_however_long_ago(self) -> None:
        assert choose([2, 1, 0], temperature=0.0, history=[0] + [2] * 500, presence_penalty=1.5).token == 1


class TestUniform:
    def test_is_in_the_half_open_unit_interval_and_flat(self) -> None:
        numbers = [sampling.uniform(seed, position) for seed in range(50) for position in range(400)]
        assert all(0 <= number < 1 for number in numbers)
        counts = Counter(int(number * 64) for number in numbers)
        expected = len(numbers) / 64
        chi_square = sum((counts[cell] - expected) ** 2 / expected for cell in range(64))
        assert 30 < chi_square < 110, chi_square  # 63 degrees of freedom; the numbers are fixed, so this cannot flake

    def test_neighbours_are_independent(self) -> None:
        """Pairs along positions, along seeds, and along the diagonal fill the square evenly."""
        for step in ((0, 1), (1, 0), (1, 1), (1, -1)):
            counts: Counter[tuple[int, int]] = Counter()
            for seed, position in itertools.product(range(100), range(1, 100)):
                one = sampling.uniform(seed, position)
                two = sampling.uniform(seed + step[0], position + step[1])
                counts[int(one * 8), int(two * 8)] += 1
            expected = 9900 / 64
            chi_square = sum(
                (counts[row, column] - expected) ** 2 / expected for row in range(8) for column in range(8)
            )
            assert chi_square < 110, (step, chi_square)

    @given(seed=st.integers(-(1 << 63), (1 << 64) - 1), position=st.integers(0, 1 << 40))
    def test_is_a_function_of_its_arguments(self, seed: int, position: int) -> None:
        number = sampling.uniform(seed, position)
        sampling.uniform(seed + 1, position)
        assert sampling.uniform(seed, position) == number
        assert 0 <= number < 1
        assert sampling.uniform(seed, position + 1) != number

    def test_stays_the_same_over_versions(self) -> None:
        """A seed repeats a reply after an upgrade too: changing these numbers is a change to announce."""
        assert [sampling.uniform(*key) for key in ((0, 0), (0, 1), (1, 0), (2**64 - 1, 123456))] == PINNED


PINNED = [0.2891262243009808, 0.09624007410338042, 0.09167815645715016, 0.34057522638104576]


class TestDistribution:
    @pytest.mark.parametrize("params", [{"top_k": 0}, {"top_k": 4}, {"top_k": 0, "top_p": 0.99999}])
    def test_frequencies_match_probabilities(self, params: dict[str, Any]) -> None:
        shares = (0.5, 0.25, 0.15, 0.1)
        counts = drawn([math.log(share) for share in shares], 4000, seed=3, **params)
        chi_square = sum((counts[token] - 4000 * share) ** 2 / (4000 * share) for token, share in enumerate(shares))
        assert chi_square < 16.3, counts  # 3 degrees of freedom, 0.1 %

    def test_temperature_sharpens_and_flattens(self) -> None:
        logits = [math.log(share) for share in (0.6, 0.4)]
        sharp = 0.6**2 / (0.6**2 + 0.4**2)
        flat = 0.6**0.5 / (0.6**0.5 + 0.4**0.5)
        for temperature, share in ((0.5, sharp), (1.0, 0.6), (2.0, flat)):
            assert drawn(logits, 4000, temperature=temperature)[0] / 4000 == pytest.approx(share, abs=0.03)

    def test_a_draw_depends_on_nothing_that_came_before(self) -> None:
        logits = [0.1 * token for token in range(30)]
        forward = [choose(logits, seed=9, position=position).token for position in range(50)]
        backward = [choose(logits, seed=9, position=position).token for position in reversed(range(50))]
        assert forward == backward[::-1]


class TestLogprobs:
    def test_are_the_models_own_before_any_adjustment(self) -> None:
        shares = (0.5, 0.3, 0.2)
        logits = [3 + math.log(share) for share in shares]
        choice = choose(logits, temperature=0.0, logprobs=2, logit_bias=((0, -100.0),), presence_penalty=2, history=[2])
        assert choice.token == 1
        assert choice.logprob == pytest.approx(math.log(0.3), abs=1e-6)
        assert [entry.token for entry in choice.top] == [0, 1]
        assert [entry.logprob for entry in choice.top] == pytest.approx([math.log(0.5), math.log(0.3)], abs=1e-6)

    def test_zero_reports_the_tokens_own_and_none_reports_nothing(self) -> None:
        assert choose([0, 0], logprobs=0, seed=1).top == ()
        assert choose([0, 0], logprobs=0, seed=1).logprob == pytest.approx(math.log(0.5))
        assert choose([0, 0], seed=1) == Choice(choose([0, 0], seed=1).token)

    def test_more_than_there_are_gives_all_likeliest_first(self) -> None:
        choice = choose([1, 3, 2, 3], temperature=0.0, logprobs=20)
        assert [entry.token for entry in choice.top] == [1, 3, 2, 0]
        assert sum(math.exp(entry.logprob) for entry in choice.top) == pytest.approx(1)

    @given(logits=st.lists(st.floats(-50, 50, width=32), min_size=1, max_size=30), wanted=st.integers(0, 20))
    def test_entries_agree_with_a_plain_softmax(self, logits: list[float], wanted: int) -> None:
        choice = choose(logits, logprobs=wanted, top_k=0)
        whole = math.log(math.fsum(math.exp(logit - 50) for logit in logits)) + 50
        assert choice.logprob == pytest.approx(logits[choice.token] - whole, abs=1e-4)
        assert len(choice.top) == min(wanted, len(logits))
        for entry in choice.top:
            assert entry.logprob == pytest.approx(logits[entry.token] - whole, abs=1e-4)


@given(
    logits=st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=20),
    temperature=st.floats(0, 100),
    top_k=st.integers(0, 30),
    top_p=st.floats(0, 1),
    min_p=st.floats(0, 1),
    seed=st.integers(0, (1 << 64) - 1),
    position=st.integers(0, 1 << 20),
    repeat=st.floats(0.01, 100),
)
def test_any_legal_parameters_draw_some_token_without_a_warning(
    logits: list[float],
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    seed: int,
    position: int,
    repeat: float,
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        choice = choose(
            logits,
            position=position,
            history=[0],
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            seed=seed,
            repeat_penalty=repeat,
            logprobs=3,
        )
    assert 0 <= choice.token < len(logits)
