"""How far distributions are apart, known by their likeliest tokens alone."""

import math

import pytest

from banyan.bench.divergence import TEXT, Scores, divergence


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
