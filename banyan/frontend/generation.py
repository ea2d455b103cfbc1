"""Generation: the one path from a prompt to text, for every route and for the offline API.

Turns a TextRequest into engine messages, and engine events into TextChunks: detokenises, finds
stop strings and regexes, cuts the text, collects log-probabilities. Knows no HTTP.
"""

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Protocol

from banyan.base.ids import RequestId
from banyan.messages.requests import NO_SCORES
from banyan.messages.sampling import SamplingParams


@dataclass(frozen=True)
class TextOptions:
    """How tokens become text, and which text ends the request."""

    stop: tuple[str, ...] = ()
    stop_regex: tuple[str, ...] = ()
    no_stop_trim: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True


@dataclass(frozen=True)
class ScoreOptions:
    """Which log-probabilities are wanted. `start` is the first position; NO_SCORES = none."""

    start: int = NO_SCORES
    top: int = 0
    ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class TextRequest:
    """One sequence to generate (n > 1 is n of these)."""

    id: RequestId
    prompt: list[int]
    sampling: SamplingParams
    text: TextOptions = field(default_factory=TextOptions)
    scores: ScoreOptions = field(default_factory=ScoreOptions)
    namespace: bytes = b""
    priority: int = 0


@dataclass(frozen=True)
class TokenScore:
    """Log-probability of one token at one position. `logprob` is None for the very first token."""

    logprob: float | None
    token: int
    top: list[tuple[float, int]] = field(default_factory=list)
    picked: list[tuple[float, int]] = field(default_factory=list)


@dataclass(frozen=True)
class Finish:
    """How a request ended. `matched` is the token id, string or regex that stopped it."""

    reason: str
    """"stop" | "length" | "abort"."""
    matched: int | str | None = None
    status: int = 0
    """HTTP status of an abort by the engine; 0 when the end is in order."""
    text: str = ""
    code: str = ""


@dataclass(frozen=True)
class Usage:
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int = 0
    retractions: int = 0


@dataclass(frozen=True)
class TextChunk:
    """What became final since the chunk before. The last chunk has `finish`."""

    text: str
    """New text, already cut at a stop; deltas concatenate to the whole answer."""
    tokens: list[int]
    usage: Usage
    prompt_scores: list[TokenScore] = field(default_factory=list)
    output_scores: list[TokenScore] = field(default_factory=list)
    finish: Finish | None = None


class Generator(Protocol):
    """What routes and the offline API call. Closing the iterator early aborts the request."""

    def generate(self, request: TextRequest) -> AsyncIterator[TextChunk]: ...
