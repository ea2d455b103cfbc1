"""Agreement: how near a served model is to another reckoning of the same one, token by token.

Both score the same tokens: the prompt's, and those that the served model chose greedily. Knows no
server and no reference, only their numbers.
"""

from collections.abc import Sequence
from dataclasses import dataclass

PROMPTS = (
    "The capital of France is",
    "Water boils at a temperature of",
    "def fibonacci(n):\n    ",
    "One, two, three, four, five,",
    "In the beginning of the nineteenth century, most people lived in villages and",
    "The quick brown fox jumps over the lazy dog. Der schnelle braune Fuchs springt über den",
)
"""Of several kinds, and short enough for any model."""


@dataclass(frozen=True)
class Scored:
    """One prompt with what was answered.

    Attributes:
        tokens: prompt and output.
        num_prompt: how many of these are the prompt.
        logprobs: of each token but the first, as it was served.
    """

    tokens: Sequence[int]
    num_prompt: int
    logprobs: Sequence[float]


@dataclass(frozen=True)
class Reckoned:
    """The same tokens by the reference, each but the first.

    Attributes:
        logprobs: of the token.
        best: the likeliest token there, and `best_logprobs` its own.
    """

    logprobs: Sequence[float]
    best: Sequence[int]
    best_logprobs: Sequence[float]


@dataclass(frozen=True)
class Flip:
    """An output token that the reference would not have chosen.

    Attributes:
        at: place in the output, from 0.
        margin: how much likelier the reference's own choice is there, as a difference of
            log-probabilities.
    """

    at: int
    served: int
    expected: int
    margin: float


@dataclass(frozen=True)
class Agreement:
    """Of one prompt: mean and largest difference of log-probabilities over all scored tokens."""

    num_tokens: int
    num_output: int
    mean: float
    worst: float
    flips: Sequence[Flip]

    @property
    def margin(self) -> float:
        """Of the worst flip."""
        return max((flip.margin for flip in self.flips), default=0.0)


def compare(scored: Scored, reckoned: Reckoned) -> Agreement:
    """How far both are from each other; a number that is none differs infinitely."""
    assert len(scored.logprobs) == len(reckoned.logprobs) == len(scored.tokens) - 1
    pairs = zip(scored.logprobs, reckoned.logprobs, strict=True)
    apart = [_distance(one, other) for one, other in pairs]
    flips = [
        Flip(at - scored.num_prompt + 1, scored.tokens[at + 1], reckoned.best[at], margin)
        for at in range(scored.num_prompt - 1, len(apart))
        if reckoned.best[at] != scored.tokens[at + 1]
        and (margin := _distance(reckoned.best_logprobs[at], reckoned.logprobs[at])) > 0
    ]
    num_output = len(scored.tokens) - scored.num_prompt
    return Agreement(len(apart), num_output, sum(apart) / len(apart), max(apart), flips)


def agrees(found: Sequence[Agreement], mean: float, margin: float) -> bool:
    """Whether the mean difference over all tokens is at most `mean`, and no token was chosen where
    another one is likelier by more than `margin`."""
    total = sum(one.mean * one.num_tokens for one in found)
    count = sum(one.num_tokens for one in found)
    return total / count <= mean and all(one.margin <= margin for one in found)


def _distance(one: float, other: float) -> float:
    apart = abs(one - other)
    return apart if apart == apart else float("inf")
