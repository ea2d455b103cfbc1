"""Generation: the interface between APIs and the engine, and the chunks of text that pass it.

APIs call `run` or `collect` with RequestSpecs and get TextChunks. `Generator` is implemented by
engine_client.text_generator, and wrapped by metrics, logs and traces (`observed`).

A reader of `Chunks` registers a callback (`on_more`) that runs in the call that brings more, so a
token needs no task switch. `async for` is for readers that prefer to wait.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Generic, Protocol, TypeVar

import msgspec

from banyan.base.errors import RequestError
from banyan.config.rules.cache import HOST
from banyan.messages.events import DraftReport
from banyan.requests.request_spec import RequestSpec

T = TypeVar("T")


class Chunks(ABC, Generic[T]):
    """A growing answer that its reader takes without waiting, or iterates.

    The owner closes it; closing before the end aborts the source. All calls come from one event
    loop.
    """

    @property
    @abstractmethod
    def is_over(self) -> bool:
        """Everything was taken, and nothing will arrive."""

    @property
    def is_quiet(self) -> bool:
        """Whether `take` would certainly return None, so that the call can be spared."""
        return False

    @abstractmethod
    def take(self) -> T | None:
        """The next part of what has arrived; None if there is nothing new."""

    @abstractmethod
    def on_more(self, more: Callable[[], None] | None) -> None:
        """Replace the callback that runs when there may be something to take after `take` returned
        None. It must not raise. None = no callback."""

    @abstractmethod
    def close(self) -> None:
        """Release it; a second call does nothing."""

    def __aiter__(self) -> "Chunks[T]":
        return self

    async def __anext__(self) -> T:
        while (found := self.take()) is None:
            if self.is_over:
                raise StopAsyncIteration
            more: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self.on_more(partial(_wake, more))
            try:
                await more
            finally:
                self.on_more(None)
        return found

    async def aclose(self) -> None:
        self.close()


def _wake(waiting: asyncio.Future[None]) -> None:
    if not waiting.done():
        waiting.set_result(None)


class WrappedChunks(Chunks[T]):
    """Base class of chunks that forward another stream, `inner`."""

    def __init__(self, inner: Chunks[T]) -> None:
        self.inner = inner

    @property
    def is_over(self) -> bool:
        return self.inner.is_over

    @property
    def is_quiet(self) -> bool:
        return self.inner.is_quiet

    def take(self) -> T | None:
        return self.inner.take()

    def on_more(self, more: Callable[[], None] | None) -> None:
        self.inner.on_more(more)

    def close(self) -> None:
        self.inner.close()


_SHOWN_BYTES = 32
"""Approximate JSON size of one log-probability."""


@dataclass(frozen=True)
class TokenScore:
    """Log-probability of one token at one position; None for the first token of a prompt.

    An answer may have a million scores, so alternatives are arrays of numbers and not objects.
    """

    logprob: float | None
    token: int
    top_logprobs: Sequence[float] = ()
    top_ids: Sequence[int] = ()
    picked_logprobs: Sequence[float] = ()
    picked_ids: Sequence[int] = ()

    @property
    def top(self) -> list[tuple[float, int]]:
        """(log-probability, token) of the best alternatives."""
        return list(zip(self.top_logprobs, self.top_ids, strict=True))

    @property
    def picked(self) -> list[tuple[float, int]]:
        """(log-probability, token) of the tokens that the request named."""
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
    """Token counts of one request so far.

    A struct, since every chunk has one: a frozen dataclass takes ten times as long to create.
    """

    prompt_tokens: int
    output_tokens: int
    cached_tokens: int = 0
    retractions: int = 0
    stored_tokens: int = 0
    """Cached tokens that came from a store."""
    cache_miss: str = ""
    """Why there were no more cached tokens (kv_cache/misses.py)."""
    queue_s: float = 0.0
    """Seconds in the waiting queue; set in the last chunk."""
    drafts: DraftReport | None = None
    """None before the end, and without speculative decoding."""


class TextChunk(msgspec.Struct, frozen=True):
    """Output that became final since the previous chunk. The last chunk has `finish`."""

    text: str
    """New text, cut at a stop. The texts of all chunks concatenate to the answer."""
    tokens: list[int]
    usage: Usage
    prompt_scores: list[TokenScore] = []
    output_scores: list[TokenScore] = []
    finish: Finish | None = None
    vector: bytes = b""
    """float32 little-endian: pooled vector of the prompt, in the last chunk."""
    hidden: bytes = b""
    """float32 little-endian [positions, hidden]: all hidden states, in the last chunk."""
    experts: bytes = b""
    """int32 little-endian [positions, layers, per_token]: chosen experts, in the last chunk."""


class Generator(Protocol):
    """Runs requests. Closing the chunks of one early aborts it."""

    def generate(self, request: RequestSpec) -> Chunks[TextChunk]:
        """Start the request; RequestError when it is refused."""
        ...

    def check(self, requests: Sequence[RequestSpec]) -> None:
        """RequestError when these sequences exceed the limits of one request."""
        ...


def shown_bytes(chunks: Sequence[TextChunk]) -> int:
    """Approximate JSON size of the log-probabilities of these chunks, for `off_loop`."""
    size = 0
    for chunk in chunks:
        scores = chunk.output_scores or chunk.prompt_scores
        if scores:
            width = 1 + len(scores[-1].top_ids) + len(scores[-1].picked_ids)
            size += _SHOWN_BYTES * width * (len(chunk.prompt_scores) + len(chunk.output_scores))
    return size


def join(chunks: Sequence[TextChunk]) -> TextChunk:
    """Consecutive chunks of one request as one chunk."""
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


class CoalescedChunks(WrappedChunks[TextChunk]):
    """Joins chunks until they have `interval` tokens. The first token is not held back."""

    def __init__(self, inner: Chunks[TextChunk], interval: int) -> None:
        super().__init__(inner)
        self._interval = interval
        self._held: list[TextChunk] = []
        self._missing = 1

    def take(self) -> TextChunk | None:
        while (chunk := self.inner.take()) is not None:
            self._held.append(chunk)
            self._missing -= len(chunk.tokens)
            if self._missing <= 0 or chunk.finish is not None:
                whole = join(self._held)
                self._held, self._missing = [], self._interval
                return whole
        return None


Arrival = tuple[int, TextChunk]
"""(index of the request, its chunk)."""


class _NumberedChunks(Chunks[Arrival]):
    """Chunks of one request of several. `take` raises RequestError if the request failed."""

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

    def on_more(self, more: Callable[[], None] | None) -> None:
        self._inner.on_more(more)

    def close(self) -> None:
        self._inner.close()


class _MergedChunks(Chunks[Arrival]):
    """Chunks of several requests as they arrive, taken in turns."""

    def __init__(self, parts: Sequence[Chunks[Arrival]]) -> None:
        self._parts = parts
        self._more: Callable[[], None] | None = None
        self._ready = dict.fromkeys(range(len(parts)))
        """Indices of parts that may have chunks, in the order in which they are taken."""
        self._open = set(self._ready)
        for index, part in enumerate(parts):
            part.on_more(partial(self._has_more, index))

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

    def on_more(self, more: Callable[[], None] | None) -> None:
        self._more = more

    def close(self) -> None:
        for part in self._parts:
            part.on_more(None)
            part.close()
        self._open.clear()

    def _has_more(self, index: int) -> None:
        self._ready[index] = None
        if self._more is not None:
            self._more()


def run(generator: Generator, requests: Sequence[RequestSpec]) -> Chunks[Arrival]:
    """Run requests concurrently; their chunks as they arrive. Closing the result aborts all.

    Raises:
        RequestError: a request was refused, or failed (from `take`). The others are aborted.
    """
    generator.check(requests)
    parts: list[_NumberedChunks] = []
    try:
        for index, request in enumerate(requests):
            parts.append(_NumberedChunks(index, _coalesced(generator, request)))
    except BaseException:
        for part in parts:
            part.close()
        raise
    return parts[0] if len(parts) == 1 else _MergedChunks(parts)


def unstreamed(requests: Sequence[RequestSpec]) -> list[RequestSpec]:
    """The same requests for a caller that needs nothing before the end."""
    return [request.with_message(stream_interval=0) for request in requests]


async def collect(generator: Generator, requests: Sequence[RequestSpec]) -> list[TextChunk]:
    """The complete answer of each request as one chunk, in order. Raises as `run`."""
    parts: list[list[TextChunk]] = [[] for _ in requests]
    async with aclosing(run(generator, unstreamed(requests))) as chunks:
        async for index, chunk in chunks:
            parts[index].append(chunk)
    return [join(chunks) for chunks in parts]


def _coalesced(generator: Generator, request: RequestSpec) -> Chunks[TextChunk]:
    chunks = generator.generate(request)
    interval = request.message.stream_interval
    return CoalescedChunks(chunks, interval) if interval > 1 else chunks


def cached_details(usages: Sequence[Usage], store: str) -> dict[str, object]:
    """Cached tokens of these prompts by tier, as all APIs report them.

    Args:
        store: backend of the hierarchical cache; "" = none.
    """
    cached = sum(usage.cached_tokens for usage in usages)
    stored = sum(usage.stored_tokens for usage in usages)
    details: dict[str, object] = {
        "device": cached - stored,
        "host": stored if store == HOST else 0,
    }
    if store:
        details["storage"] = 0 if store == HOST else stored
        details["storage_backend"] = store
    return details


def cache_miss(usages: Sequence[Usage]) -> dict[str, object]:
    """The field `cache_miss`: why no more of these prompts was cached (kv_cache/misses.py), each
    reason once; {} if there was nothing to miss."""
    reasons = dict.fromkeys(usage.cache_miss for usage in usages if usage.cache_miss)
    return {"cache_miss": ",".join(reasons)} if reasons else {}


class RequestObserver(Protocol):
    """Follows one request on its way to the reader, for metrics, logs and traces."""

    def take(self, chunk: TextChunk) -> None: ...

    def refuse(self, error: RequestError) -> None:
        """The request failed; `end` follows."""
        ...

    def end(self) -> None:
        """The last chunk was taken, or the reader closed. Called exactly once."""
        ...


def observed(
    observer: RequestObserver, begin: Callable[[], Chunks[TextChunk]]
) -> Chunks[TextChunk]:
    """The chunks of `begin`, reported to `observer`, as is a RequestError of `begin`."""
    try:
        return _ObservedChunks(begin(), observer)
    except RequestError as error:
        observer.refuse(error)
        observer.end()
        raise


class _ObservedChunks(WrappedChunks[TextChunk]):
    def __init__(self, inner: Chunks[TextChunk], observer: RequestObserver) -> None:
        super().__init__(inner)
        self._observer = observer
        self._has_ended = False

    def take(self) -> TextChunk | None:
        try:
            chunk = self.inner.take()
        except RequestError as error:
            self._observer.refuse(error)
            self._end()
            raise
        if chunk is not None:
            self._observer.take(chunk)
            if chunk.finish is not None:
                self._end()
        return chunk

    def close(self) -> None:
        self.inner.close()
        self._end()

    def _end(self) -> None:
        if not self._has_ended:
            self._has_ended = True
            self._observer.end()
