"""What agreement is: numbers of two reckonings, and nothing else."""

import pytest

from banyan.bench.agreement import Reckoned, Scored, agrees, compare

TOKENS = (5, 6, 7, 8, 9)
SERVED = (-1.0, -2.0, -0.5, -0.25)


def test_what_is_the_same_agrees_to_the_last_digit() -> None:
    found = compare(Scored(TOKENS, 3, SERVED), Reckoned(SERVED, TOKENS[1:], SERVED))
    assert (found.num_tokens, found.num_output, found.mean, found.worst) == (4, 2, 0.0, 0.0)
    assert not found.flips and agrees([found], 0.0, 0.0)


def test_differences_are_of_all_tokens_and_flips_of_the_output_alone() -> None:
    reckoned = Reckoned((-1.5, -2.0, -0.5, -1.25), (1, 6, 8, 3), (-0.1, -1.0, -0.5, -0.75))
    found = compare(Scored(TOKENS, 3, SERVED), reckoned)
    assert found.mean == pytest.approx(0.375) and found.worst == 1.0
    (flip,) = found.flips
    assert (flip.at, flip.served, flip.expected) == (1, 9, 3)
    assert found.margin == pytest.approx(0.5)
    assert agrees([found], 0.375, 0.5)
    assert not agrees([found], 0.37, 0.5) and not agrees([found], 0.375, 0.49)


def test_two_tokens_that_are_as_likely_are_no_flip() -> None:
    reckoned = Reckoned(SERVED, (6, 7, 1, 2), SERVED)
    assert not compare(Scored(TOKENS, 3, SERVED), reckoned).flips


def test_a_number_that_is_none_never_agrees() -> None:
    served = (*SERVED[:3], float("nan"))
    found = compare(Scored(TOKENS, 3, served), Reckoned(SERVED, TOKENS[1:], SERVED))
    assert not agrees([found], 1e9, 1e9)


def test_longer_prompts_weigh_more_in_the_mean() -> None:
    near = compare(Scored(TOKENS, 3, SERVED), Reckoned(SERVED, TOKENS[1:], SERVED))
    far = compare(Scored((1, 2), 1, (-1.0,)), Reckoned((-1.5,), (2,), (-1.5,)))
    assert agrees([near, far], 0.1, 0.0) and not agrees([near, far], 0.09, 0.0)
