"""Generation: the one path from a prompt to text, for every route and for the offline API.

Turns a RequestSpec into engine messages, and engine events into TextChunks: detokenises, finds
stop strings and regexes, cuts the text, collects log-probabilities. Knows no HTTP.
"""

from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import msgspec

from banyan.base.errors import RequestError
from banyan.messages.events import DraftReport
from banyan.requests.chunks import Chunks, Through
from banyan.requests.request_spec import RequestSpec

_SHOWN_BYTES = 32
"""Of one log-probability as JSON."""


@dataclass(frozen=True)
class TokenScore:
    """Log-probability of one token at one position. `logprob` is None for the very first token.

    There may be a million of them in an answer, so they are kept as numbers, not as objects.
    """

    logprob: float | None
    token: int
    top_logprobs: Sequence[float] = ()
    top_ids: Sequence[int] = ()
    picked_logprobs: Sequence[float] = ()
    picked_ids: Sequence[int] = ()

    @property
    def top(self) -> list[tuple[float, int]]:
        """The best tokens of the position."""
        return list(zip(self.top_logprobs, self.top_ids, strict=True))

    @property
    def picked(self) -> list[tuple[float, int]]:
        """The tokens that were named."""
        return list(zip(self.picked_logprobs, self.picked_ids, strict=False))


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


class Usage(msgspec.Struct, frozen=True, gc=False):
    """Made for every chunk, like that: a frozen dataclass takes ten times as long to make."""

    prompt_tokens: int
    output_tokens: int
    cached_tokens: int = 0
    retractions: int = 0
    stored_tokens: int = 0
    """How many of the cached tokens came from a store."""
    cache_miss: str = ""
    """Why there were no more cached tokens (kv_cache/misses.py)."""
    queue_s: float = 0.0
    """How long it waited for a place among those that run; known in the last chunk."""
    drafts: DraftReport | None = None
    """None before the end, and when nothing drafts."""


class TextChunk(msgspec.Struct, frozen=True):
    """What became final since the chunk before. The last chunk has `finish`."""

    text: str
    """New text, already cut at a stop; deltas concatenate to the whole answer."""
    tokens: list[int]
    usage: Usage
    prompt_scores: list[TokenScore] = []
    output_scores: list[TokenScore] = []
    finish: Finish | None = None
    vector: bytes = b""
    """float32 little-endian: the prompt's vector, in the last chunk of a request for it."""
    hidden: bytes = b""
    """float32 little-endian [positions, hidden]: all hidden states, in the last chunk."""
    experts: bytes = b""
    """int32 little-endian [positions, layers, per_token]: what they chose, in the last chunk."""


class Generator(Protocol):
    """What routes and the offline API call. Closing the chunks early aborts the request."""

    def generate(self, request: RequestSpec) -> Chunks[TextChunk]:
        """Begin it; RequestError when it is refused."""
        ...

    def check(self, requests: Sequence[RequestSpec]) -> None:
        """RequestError when these sequences together ask for more than one request may."""
        ...


def shown_bytes(chunks: Sequence[TextChunk]) -> int:
    """About how large the log-probabilities of these chunks are in an answer, for `off_loop`."""
    size = 0
    for chunk in chunks:
        scores = chunk.output_scores or chunk.prompt_scores
        if scores:
            width = 1 + len(scores[-1].top_ids) + len(scores[-1].picked_ids)
            size += _SHOWN_BYTES * width * (len(chunk.prompt_scores) + len(chunk.output_scores))
    return size


def join(chunks: Sequence[TextChunk]) -> TextChunk:
    """The consecutive chunks of one request as one."""
    if len(chunks) == 1:
        return chunks[0]
    return TextChunk(
        text="".join(c.text for c in chunks),
        tokens=[t for c in chunks for t in c.tokens],
        usage=chunks[-1].usage,
        prompt_scores=[s for c in chunks for s in c.prompt_scores],
        output_scores=[s for c in chunks for s in c.output_scores],
        finish=chunks[-1].finish,
        vector=b"".join(c.vector for c in chunks),
        hidden=b"".join(c.hidden for c in chunks),
        experts=b"".join(c.experts for c in chunks),
    )


class InStrides(Through[TextChunk]):
    """The same chunks in pieces of at least `stride` tokens; the first token is not held back."""

    def __init__(self, inner: Chunks[TextChunk], stride: int) -> None:
        super().__init__(inner)
        self._stride = stride
        self._held: list[TextChunk] = []
        self._missing = 1

    def take(self) -> TextChunk | None:
        while (chunk := self.inner.take()) is not None:
            self._held.append(chunk)
            self._missing -= len(chunk.tokens)
            if self._missing <= 0 or chunk.finish is not None:
                whole = join(self._held)
                self._held, self._missing = [], self._stride
                return whole
        return None


Arrival = tuple[int, TextChunk]
"""A chunk of the request with that index."""


class _Numbered(Chunks[Arrival]):
    """The chunks of one request of several; `take` raises RequestError when it has failed."""

    def __init__(self, index: int, inner: Chunks[TextChunk]) -> None:
        self._index = index
        self._inner = inner

    @property
    def is_over(self) -> bool:
        return self._inner.is_over

    @property
    def is_quiet(self) -> bool:
        return self._inner.is_quiet

    def take(self) -> Arrival | None:
        chunk = self._inner.take()
        if chunk is None:
            return None
        finish = chunk.finish
        if finish is not None and finish.status:
            raise RequestError(finish.text, status=finish.status, code=finish.code)
        return self._index, chunk

    def tell(self, more: Callable[[], None] | None) -> None:
        self._inner.tell(more)

    def close(self) -> None:
        self._inner.close()


class _SideBySide(Chunks[Arrival]):
    """Those of several requests as they come. A reader who is slow holds all of them back."""

    def __init__(self, parts: Sequence[Chunks[Arrival]]) -> None:
        self._parts = parts
        self._more: Callable[[], None] | None = None
        self._ready = dict.fromkeys(range(len(parts)))
        """Those which may have something; of several that do, each has its turn."""
        self._open = set(self._ready)
        for index, part in enumerate(parts):
            part.tell(partial(self._has_more, index))

    @property
    def is_over(self) -> bool:
        return not self._open

    def take(self) -> Arrival | None:
        ready = self._ready
        while ready:
            index = next(iter(ready))
            del ready[index]
            part = self._parts[index]
            arrival = part.take()
            if arrival is not None:
                ready[index] = None
                return arrival
            if part.is_over:
                self._open.discard(index)
        return None

    def tell(self, more: Callable[[], None] | None) -> None:
        self._more = more

    def close(self) -> None:
        for part in self._parts:
            part.tell(None)
            part.close()
        self._open.clear()

    def _has_more(self, index: int) -> None:
        self._ready[index] = None
        if self._more is not None:
            self._more()


def run(generator: Generator, requests: Sequence[RequestSpec]) -> Chunks[Arrival]:
    """What requests that run side by side bring, as it comes, each at its stride. Closing it ends
    all of them.

    Raises:
        RequestError: a request was refused, or fails (from `take`); the others are ended.
    """
    generator.check(requests)
    parts: list[_Numbered] = []
    try:
        for index, request in enumerate(requests):
            parts.append(_Numbered(index, _in_pieces(generator, request)))
    except BaseException:
        for part in parts:
            part.close()
        raise
    return parts[0] if len(parts) == 1 else _SideBySide(parts)


def at_once(requests: Sequence[RequestSpec]) -> list[RequestSpec]:
    """The same requests for a reader who takes nothing before the end."""
    return [request.with_message(stream_interval=0) for request in requests]


async def collect(generator: Generator, requests: Sequence[RequestSpec]) -> list[TextChunk]:
    """The complete answer of each request as one chunk, in order; errors as of `run`."""
    parts: list[list[TextChunk]] = [[] for _ in requests]
    async with aclosing(run(generator, at_once(requests))) as chunks:
        async for index, chunk in chunks:
            parts[index].append(chunk)
    return [join(chunks) for chunks in parts]


def _in_pieces(generator: Generator, request: RequestSpec) -> Chunks[TextChunk]:
    """Chunks of one request at its stride."""
    chunks = generator.generate(request)
    stride = request.message.stream_interval
    return InStrides(chunks, stride) if stride > 1 else chunks
