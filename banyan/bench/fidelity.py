"""Compare the probabilities of two models on the same tokens.

`compare` and `agrees` compare a served model with a reference on a prompt and the tokens that the
served model chose greedily. `divergence` computes the Kullback-Leibler divergence of two models on
a fixed text, and how often both have the same most likely token. It sees only the most likely
tokens of each position and counts all others as one outcome, so it is a lower bound of the
divergence over the whole vocabulary.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

PROMPTS = (
    "The capital of France is",
    "Water boils at a temperature of",
    "def fibonacci(n):\n    ",
    "One, two, three, four, five,",
    "In the beginning of the nineteenth century, most people lived in villages and",
    "The quick brown fox jumps over the lazy dog. Der schnelle braune Fuchs springt über den",
)
"""Prompts of several kinds, short enough for any model."""


@dataclass(frozen=True)
class ServedScores:
    """A prompt with its answer, scored by the served model.

    Attributes:
        tokens: prompt and output.
        num_prompt: number of prompt tokens.
        logprobs: log-probability of each token but the first.
    """

    tokens: Sequence[int]
    num_prompt: int
    logprobs: Sequence[float]


@dataclass(frozen=True)
class ReferenceScores:
    """The same tokens scored by the reference, each but the first.

    Attributes:
        logprobs: log-probability of the token.
        best: the most likely token at this position.
        best_logprobs: log-probability of `best`.
    """

    logprobs: Sequence[float]
    best: Sequence[int]
    best_logprobs: Sequence[float]


@dataclass(frozen=True)
class Flip:
    """An output token that the reference would not have chosen.

    Attributes:
        at: position in the output, from 0.
        margin: log-probability of the reference's choice minus the log-probability of
            the served token.
    """

    at: int
    served: int
    expected: int
    margin: float


@dataclass(frozen=True)
class Agreement:
    """Mean and largest difference of log-probabilities over the scored tokens of a prompt."""

    num_tokens: int
    num_output: int
    mean: float
    worst: float
    flips: Sequence[Flip]

    @property
    def margin(self) -> float:
        """Margin of the worst flip."""
        return max((flip.margin for flip in self.flips), default=0.0)


def compare(scored: ServedScores, reference: ReferenceScores) -> Agreement:
    """Compare two scorings of the same tokens; NaN counts as an infinite difference."""
    assert len(scored.logprobs) == len(reference.logprobs) == len(scored.tokens) - 1
    pairs = zip(scored.logprobs, reference.logprobs, strict=True)
    apart = [_distance(one, other) for one, other in pairs]
    flips = [
        Flip(at - scored.num_prompt + 1, scored.tokens[at + 1], reference.best[at], margin)
        for at in range(scored.num_prompt - 1, len(apart))
        if reference.best[at] != scored.tokens[at + 1]
        and (margin := _distance(reference.best_logprobs[at], reference.logprobs[at])) > 0
    ]
    num_output = len(scored.tokens) - scored.num_prompt
    return Agreement(len(apart), num_output, sum(apart) / len(apart), max(apart), flips)


def agrees(found: Sequence[Agreement], mean: float, margin: float) -> bool:
    """Whether the mean difference is at most `mean` and no margin is above `margin`."""
    total = sum(one.mean * one.num_tokens for one in found)
    count = sum(one.num_tokens for one in found)
    return total / count <= mean and all(one.margin <= margin for one in found)


def _distance(one: float, other: float) -> float:
    apart = abs(one - other)
    return apart if apart == apart else float("inf")


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
"""Text of several kinds: a tale, a program, a recipe, numbers, speech, an invitation, a fact."""
_LEAST = 1e-9

Likeliest = Mapping[int, float]
"""Token -> its log-probability."""


@dataclass(frozen=True)
class Scores:
    """Scores of one model.

    Attributes:
        logprobs: log-probability of each token given the tokens before it.
        likeliest: the most likely tokens at each of these positions.
    """

    logprobs: Sequence[float]
    likeliest: Sequence[Likeliest]


@dataclass(frozen=True)
class Divergence:
    """Divergence of a model from a reference.

    Attributes:
        num_tokens: positions that were compared.
        mean, worst: Kullback-Leibler divergence from the reference, in nats.
        same_top: share of positions where both have the same most likely token.
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
        num_tokens=len(found),
        mean=sum(found) / len(found),
        worst=max(found),
        same_top=same / len(found),
        reference_perplexity=_perplexity(reference.logprobs),
        perplexity=_perplexity(other.logprobs),
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
