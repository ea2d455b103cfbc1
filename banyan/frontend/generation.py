"""Generation: the one path from a prompt to text, for every route and for the offline API.

Turns a TextRequest into engine messages, and engine events into TextChunks: detokenises, finds
stop strings and regexes, cuts the text, collects log-probabilities. Knows no HTTP.
"""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
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

    def generate(self, request: TextRequest) -> AsyncGenerator[TextChunk, None]: ...


def join(chunks: Sequence[TextChunk]) -> TextChunk:
    """The consecutive chunks of one request as one."""
    return TextChunk(
        text="".join(c.text for c in chunks),
        tokens=[t for c in chunks for t in c.tokens],
        usage=chunks[-1].usage,
        prompt_scores=[s for c in chunks for s in c.prompt_scores],
        output_scores=[s for c in chunks for s in c.output_scores],
        finish=chunks[-1].finish,
    )


async def in_strides(
    chunks: AsyncGenerator[TextChunk, None], stride: int
) -> AsyncGenerator[TextChunk, None]:
    """The same stream in chunks of at least `stride` tokens; the first token is not held back."""
    held: list[TextChunk] = []
    num_tokens, wanted = 0, 1
    async with aclosing(chunks) as stream:
        async for chunk in stream:
            held.append(chunk)
            num_tokens += len(chunk.tokens)
            if chunk.finish is None and num_tokens < wanted:
                continue
            yield join(held)
            held, num_tokens, wanted = [], 0, stride


async def whole(chunks: AsyncGenerator[TextChunk, None]) -> TextChunk:
    """The complete answer as one chunk."""
    async with aclosing(chunks) as stream:
        return join([chunk async for chunk in stream])
