"""Comparison of two models on the same tokens: agreement and divergence."""

import math

import pytest

from banyan.bench.fidelity import (
    TEXT,
    ReferenceScores,
    Scores,
    ServedScores,
    agrees,
    compare,
    divergence,
)

TOKENS = (5, 6, 7, 8, 9)
SERVED = (-1.0, -2.0, -0.5, -0.25)


def test_what_is_the_same_agrees_to_the_last_digit() -> None:
    found = compare(ServedScores(TOKENS, 3, SERVED), ReferenceScores(SERVED, TOKENS[1:], SERVED))
    assert (found.num_tokens, found.num_output, found.mean, found.worst) == (4, 2, 0.0, 0.0)
    assert not found.flips and agrees([found], 0.0, 0.0)


def test_differences_are_of_all_tokens_and_flips_of_the_output_alone() -> None:
    reckoned = ReferenceScores((-1.5, -2.0, -0.5, -1.25), (1, 6, 8, 3), (-0.1, -1.0, -0.5, -0.75))
    found = compare(ServedScores(TOKENS, 3, SERVED), reckoned)
    assert found.mean == pytest.approx(0.375) and found.worst == 1.0
    (flip,) = found.flips
    assert (flip.at, flip.served, flip.expected) == (1, 9, 3)
    assert found.margin == pytest.approx(0.5)
    assert agrees([found], 0.375, 0.5)
    assert not agrees([found], 0.37, 0.5) and not agrees([found], 0.375, 0.49)


def test_two_tokens_that_are_as_likely_are_no_flip() -> None:
    reckoned = ReferenceScores(SERVED, (6, 7, 1, 2), SERVED)
    assert not compare(ServedScores(TOKENS, 3, SERVED), reckoned).flips


def test_a_number_that_is_none_never_agrees() -> None:
    served = (*SERVED[:3], float("nan"))
    found = compare(ServedScores(TOKENS, 3, served), ReferenceScores(SERVED, TOKENS[1:], SERVED))
    assert not agrees([found], 1e9, 1e9)


def test_longer_prompts_weigh_more_in_the_mean() -> None:
    near = compare(ServedScores(TOKENS, 3, SERVED), ReferenceScores(SERVED, TOKENS[1:], SERVED))
    far = compare(ServedScores((1, 2), 1, (-1.0,)), ReferenceScores((-1.5,), (2,), (-1.5,)))
    assert agrees([near, far], 0.1, 0.0) and not agrees([near, far], 0.09, 0.0)


def scores(*places: dict[int, float], logprobs: tuple[float, ...] = (-1.0,)) -> Scores:
    return Scores(logprobs, [{t: math.log(p) for t, p in place.items()} for place in places])


def test_the_same_distributions_are_not_apart() -> None:
    one = scores({3: 0.5, 7: 0.3}, {1: 1.0})
    found = divergence(one, one)
    assert (found.num_tokens, found.mean, found.worst, found.same_top) == (2, 0.0, 0.0, 1.0)


def test_listed_tokens_and_the_rest_as_one_are_compared() -> None:
    found = divergence(scores({3: 0.5, 7: 0.25}), scores({3: 0.25, 7: 0.5}))
    expected = 0.5 * math.log(2) - 0.25 * math.log(2)
    assert found.mean == pytest.approx(expected) and found.same_top == 0.0


def test_a_token_that_one_does_not_list_counts_among_the_rest() -> None:
    found = divergence(scores({3: 0.5, 7: 0.25}), scores({3: 0.5, 9: 0.25}))
    assert found.mean == pytest.approx(0.0)
    found = divergence(scores({3: 0.8}), scores({5: 0.9}))
    assert found.mean == pytest.approx(0.0) and found.same_top == 0.0
    assert divergence(scores({3: 1.0}), scores({3: 0.5})).worst == pytest.approx(math.log(2))


def test_perplexities_are_those_of_the_tokens_themselves() -> None:
    one = Scores([-1.0, -3.0], [{1: 0.0}, {1: 0.0}])
    two = Scores([-math.inf, -1.0], [{1: 0.0}, {1: 0.0}])
    found = divergence(one, two)
    assert found.reference_perplexity == pytest.approx(math.e**2)
    assert found.perplexity == math.exp(700.0) and len(TEXT) > 1000
