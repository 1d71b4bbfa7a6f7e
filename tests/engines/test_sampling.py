"""Sampling: what each parameter does, and what the choice may not depend on."""

import math
import time
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvasir_peer.engines.sampling import Sampled, sample, uniform
from kvasir_peer.errors import EngineError
from kvasir_peer.wire.sampling import GREEDY, Sampling

NO_HISTORY = np.empty(0, np.int32)


def one(logits: Any, position: int = 0, history: Any = NO_HISTORY, **params: Any) -> Sampled:
    row = np.asarray(logits, np.float32)[None]
    return sample(row, [Sampling(**params)], [position], [np.asarray(history, np.int32)])[0]


def tokens(logits: Any, count: int = 400, **params: Any) -> Counter[int]:
    """How often each token is drawn over many positions."""
    row = np.tile(np.asarray(logits, np.float32), (count, 1))
    drawn = sample(row, [Sampling(**params)] * count, range(count), [NO_HISTORY] * count)
    return Counter(one.token for one in drawn)


# ------------------------------------------------------------------------------------------- one by one


def test_greedy_takes_the_best_and_the_lower_of_two_equals() -> None:
    assert one([0, 3, 1, 3], temperature=0.0).token == 1
    assert one([0, -math.inf, -1], temperature=0.0).token == 0


def test_a_draw_follows_the_probabilities() -> None:
    p = np.array([0.5, 0.3, 0.15, 0.05])
    seen = tokens(np.log(p), 8000, seed=3)
    for token, expected in enumerate(p):
        # Five standard deviations.
        assert abs(seen[token] / 8000 - expected) < 5 * math.sqrt(expected * (1 - expected) / 8000)


def test_temperature_flattens_and_sharpens() -> None:
    logits = np.log([0.6, 0.3, 0.1])
    assert tokens(logits, temperature=0.05)[0] == 400
    hot = tokens(logits, 4000, temperature=100.0)
    assert min(hot.values()) > 1100


def test_top_k_keeps_just_k_also_among_equals() -> None:
    assert set(tokens([1, 1, 1, 1, 0], top_k=2)) == {0, 1}
    assert set(tokens([0, 1, 2, 3, 4], top_k=3, temperature=5.0)) == {2, 3, 4}
    assert set(tokens([0, 1, 2], top_k=99, temperature=9.0)) == {0, 1, 2}


def test_top_p_keeps_the_fewest_that_reach_it() -> None:
    logits = np.log([0.1, 0.5, 0.15, 0.25])
    assert set(tokens(logits, top_p=0.5)) == {1}
    assert set(tokens(logits, top_p=0.51)) == {1, 3}
    assert set(tokens(logits, top_p=0.8)) == {1, 2, 3}
    assert set(tokens(logits, 2000, top_p=1.0)) == {0, 1, 2, 3}
    assert set(tokens(logits, top_p=0.0)) == {1}


def test_a_nucleus_wider_than_the_first_candidates_is_found() -> None:
    """A flat distribution over 5,000 tokens, of which half are kept."""
    logits = np.linspace(1e-3, 0, 5000)
    seen = set(tokens(logits, 3000, top_p=0.5))
    assert max(seen) <= 2500 and max(seen) > 2400


def test_min_p_is_relative_to_the_best() -> None:
    logits = np.log([0.4, 0.3, 0.21, 0.09])
    assert set(tokens(logits, min_p=0.5)) == {0, 1, 2}
    assert set(tokens(logits, min_p=1.0)) == {0}


def test_typical_drops_the_obvious_as_well_as_the_odd() -> None:
    """With two likely and many unlikely tokens the expected surprise lies between: arXiv 2202.00666, figure 1."""
    p = np.array([0.35, *[0.65 / 64] * 64])
    kept = set(tokens(np.log(p), 600, typical_p=0.6))
    assert 0 not in kept and len(kept) > 20
    p = np.array([0.9, *[0.1 / 64] * 64])
    assert set(tokens(np.log(p), typical_p=0.6)) == {0}


def test_cuts_follow_one_another_on_what_is_left() -> None:
    # After top-k 2 the first has 0.5 / 0.8 = 0.625 of what is left, so top-p 0.6 keeps it alone.
    logits = np.log([0.5, 0.3, 0.2])
    assert set(tokens(logits, top_k=2, top_p=0.6)) == {0}
    assert set(tokens(logits, top_p=0.6)) == {0, 1}


def test_penalties_and_bias() -> None:
    history = [0, 0, 1, 2, 2, 2]
    # Repetition: positive logits are divided, negative ones multiplied, once however often a token was seen.
    assert one([2.0, 1.5, 1.2, 1.4], 0, history, temperature=0.0, repetition_penalty=2.0).token == 3
    assert one([-1.0, -1.1, -9, -1.9], 0, [0, 1], temperature=0.0, repetition_penalty=2.0).token == 3
    # Presence and frequency heed what was generated, not the prompt.
    assert one([2.0, 1.9, 1.0, 0], 0, history, temperature=0.0, presence_penalty=1.5).token == 0
    assert (
        one([2.0, 1.9, 1.0, 0], 0, history, temperature=0.0, presence_penalty=1.5, prompt_length=2).token == 0
    )
    assert one([2.0, 1.9, 1.0, 0], 0, history, temperature=0.0, frequency_penalty=0.15).token == 1
    assert (
        one([0, 1.9, 1.8, 1.7], 0, history, temperature=0.0, frequency_penalty=0.3, prompt_length=3).token
        == 1
    )
    assert (
        one([0, 1.9, 1.8, 1.7], 0, history, temperature=0.0, presence_penalty=0.3, prompt_length=1).token == 3
    )
    assert one([0, 1, 2], temperature=0.0, logit_bias={0: 2.5}).token == 0
    assert one([0, 1, 2], temperature=0.0, logit_bias={2: -100.0, 77: 100.0}).token == 1


def test_log_probabilities_are_the_models_own() -> None:
    p = np.array([0.1, 0.2, 0.3, 0.4])
    asked = {"temperature": 0.0, "logprobs": True, "top_logprobs": 3, "logit_bias": {0: 100.0}}
    answer = one(np.log(p) + 5, **asked)
    assert answer.token == 0
    assert answer.logprob == pytest.approx(math.log(0.1), abs=1e-6)
    assert [token for token, _ in answer.top] == [3, 2, 1]
    np.testing.assert_allclose([value for _, value in answer.top], np.log([0.4, 0.3, 0.2]), atol=1e-6)
    assert one(np.log(p), temperature=0.0) == Sampled(3, 0.0, ())
    assert len(one([1, 1], top_logprobs=5).top) == 2
    assert [token for token, _ in one([1, 1, 1, 1], top_logprobs=2).top] == [0, 1]


def test_draws_are_fixed_for_all_time() -> None:
    """A request that moves to a machine with another numpy must go on as it was."""
    expected = [0.014346253146488519, 0.637418806530434, 0.6001838865991941, 0.13162834228179943]
    assert [uniform(0, 0), uniform(0, 1), uniform(7, 0), uniform(2**64 - 1, 2**31 - 1)] == expected


def test_draws_of_neighbours_are_independent() -> None:
    by_position = np.array([uniform(5, i) for i in range(4000)])
    by_seed = np.array([uniform(i, 5) for i in range(4000)])
    for draws in (by_position, by_seed):
        assert abs(draws.mean() - 0.5) < 5 / math.sqrt(12 * 4000)
        assert abs(np.corrcoef(draws[:-1], draws[1:])[0, 1]) < 5 / math.sqrt(4000)


def test_logits_that_are_not_numbers_are_refused() -> None:
    for bad in ([1, math.nan], [-math.inf, -math.inf]):
        with pytest.raises(EngineError, match="position 12"):
            one(bad, 12)
    with pytest.raises(EngineError, match="2 rows"):
        sample(np.zeros((2, 3), np.float32), [GREEDY], [0], [NO_HISTORY])
    assert sample(np.zeros((0, 3), np.float32), [], [], []) == []


def test_a_large_vocabulary_is_quick() -> None:
    """Sixteen rows over 150,000 tokens: a small part of what computing them costs."""
    logits = np.random.default_rng(0).standard_normal((16, 150_000)).astype(np.float32) * 3
    params = [Sampling(temperature=0.8, top_k=40, top_p=0.95, min_p=0.05, seed=i) for i in range(16)]
    times = []
    for _ in range(3):
        begin = time.process_time()
        sample(logits, params, range(16), [NO_HISTORY] * 16)
        times.append(time.process_time() - begin)
    assert min(times) < 1.0  # seconds; about 0.07 on an idle machine


# ------------------------------------------------------------------------------------------- properties

rows = st.lists(st.floats(-30, 30, allow_nan=False, width=32), min_size=1, max_size=40)
parameters = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.1, 0.7, 1.0, 3.0]),
    top_k=st.integers(0, 50),
    top_p=st.floats(0.0, 1.0),
    min_p=st.floats(0.0, 1.0),
    typical_p=st.floats(0.0, 1.0),
    repetition_penalty=st.floats(0.5, 2.0),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    logit_bias=st.dictionaries(st.integers(0, 60), st.floats(-100, 100), max_size=3),
    seed=st.integers(0, 2**64 - 1),
    logprobs=st.booleans(),
    top_logprobs=st.integers(0, 20),
    prompt_length=st.integers(0, 10),
)


@settings(deadline=None, max_examples=150)
@given(
    st.lists(
        st.tuples(rows, parameters, st.integers(0, 1 << 30), st.lists(st.integers(0, 45), max_size=20)),
        min_size=1,
        max_size=5,
    )
)
def test_a_row_does_not_depend_on_its_batch(cases: list[Any]) -> None:
    width = max(len(row) for row, *_ in cases)
    logits = np.full((len(cases), width), -1e4, np.float32)
    for i, (row, *_) in enumerate(cases):
        logits[i, : len(row)] = row
    params = [case[1] for case in cases]
    positions = [case[2] for case in cases]
    histories = [np.array(case[3], np.int32) for case in cases]
    together = sample(logits, params, positions, histories)
    for i in range(len(cases)):
        alone = sample(logits[i : i + 1], [params[i]], [positions[i]], [histories[i]])
        assert alone == [together[i]]
        assert 0 <= together[i].token < width
        assert len(together[i].top) == min(params[i].top_logprobs, width)


@settings(deadline=None, max_examples=150)
@given(rows, st.integers(0, 1000), st.integers(1, 50), st.floats(0.01, 1.0), st.floats(0.0, 1.0))
def test_what_is_drawn_is_within_every_cut(
    row: list[float], seed: int, k: int, p: float, min_p: float
) -> None:
    drawn = one(row, top_k=k, top_p=p, min_p=min_p, seed=seed).token
    logits = np.array(row, np.float32).astype(np.float64)
    better = logits > logits[drawn]
    assert better.sum() < k
    weights = np.exp(logits - logits.max())
    assert weights[drawn] >= min_p * weights.max()
    kept = np.sort(weights)[::-1][:k]
    assert weights[better].sum() <= p * kept.sum() * (1 + 1e-9)


@settings(deadline=None, max_examples=60)
@given(rows, st.integers(0, 2**64 - 1), st.integers(0, 10_000))
def test_a_shift_of_all_logits_changes_nothing(row: list[float], seed: int, position: int) -> None:
    exact = np.round(np.array(row) * 8) / 8  # so that the shift rounds nothing
    first = one(exact, position, seed=seed, top_p=0.9)
    assert one(exact + 64, position, seed=seed, top_p=0.9) == first
