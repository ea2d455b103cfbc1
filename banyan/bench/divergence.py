"""How far one model's distributions are from another's on the same tokens: Kullback-Leibler
divergence, and how often both find the same token likeliest.

Both are known by their likeliest tokens at every place. What lies beyond these is one more outcome,
so the divergence is a little less than that of whole vocabularies, and equal where all of one is
listed. Knows no engine.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

TEXT = """The river rises in the hills above the old town, and for the first few miles it is little
more than a stream between stones. Farmers used to say that whoever could cross it in March without
wet feet would have a good harvest. In 1854 a bridge was built, 120 metres long, with five arches of
grey granite; it cost more than the town hall, the school and the church together. What did people
think of it? Some wrote letters to the newspaper and asked why the money had not been spent on
drains. Others came on Sundays, stood in the middle, and looked down at the water.

def mean(values):
    total = 0.0
    for value in values:
        total += value
    return total / len(values)

To make the soup, peel two onions and three large potatoes, cut them into small cubes, and fry them
in butter until they are soft. Add a litre of water, salt, pepper and a bay leaf, bring it to the
boil, and let it simmer for twenty minutes. If x + 3 = 10, then x = 7, and 2 * x = 14. "That is not
what I meant," she said, "and you know it." The committee will meet again on Tuesday, 4 June, at
half past nine; the minutes of the last meeting are attached. Light travels about 300,000 kilometres
in a second, so it needs a little more than eight minutes from the sun to the earth.
"""
"""Of several kinds: a tale, a program, a recipe, numbers, speech, an invitation, a fact."""
_LEAST = 1e-9

Likeliest = Mapping[int, float]
"""Token -> its log-probability."""


@dataclass(frozen=True)
class Scores:
    """What one model says of some tokens.

    Attributes:
        logprobs: of each token behind those before it.
        likeliest: at each of these places.
    """

    logprobs: Sequence[float]
    likeliest: Sequence[Likeliest]


@dataclass(frozen=True)
class Divergence:
    """
    Attributes:
        num_tokens: places that were compared.
        mean, worst: Kullback-Leibler divergence from the reference, in nats.
        same_top: share of places where both have the same likeliest token.
        reference_perplexity, perplexity: of the tokens themselves.
    """

    num_tokens: int
    mean: float
    worst: float
    same_top: float
    reference_perplexity: float
    perplexity: float


def divergence(reference: Scores, other: Scores) -> Divergence:
    pairs = list(zip(reference.likeliest, other.likeliest, strict=True))
    assert pairs, "there is a place to compare"
    found = [_at(one, two) for one, two in pairs]
    same = sum(_best(one) == _best(two) for one, two in pairs)
    return Divergence(
        *(len(found), sum(found) / len(found), max(found), same / len(found)),
        *(_perplexity(scores.logprobs) for scores in (reference, other)),
    )


def _at(reference: Likeliest, other: Likeliest) -> float:
    shared = [token for token in reference if token in other]
    here = [math.exp(reference[token]) for token in shared]
    there = [math.exp(other[token]) for token in shared]
    rests = [max(1 - sum(each), _LEAST) for each in (here, there)]
    listed = sum(p * (reference[t] - other[t]) for p, t in zip(here, shared, strict=True))
    return max(0.0, listed + rests[0] * math.log(rests[0] / rests[1]))


def _best(likeliest: Likeliest) -> int:
    return max(likeliest, key=lambda token: likeliest[token])


def _perplexity(logprobs: Sequence[float]) -> float:
    return math.exp(min(-sum(logprobs) / len(logprobs), 700.0))
