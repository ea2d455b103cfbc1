"""Metered: tells a meter what each request came to, as those who wait for it see it."""

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol

from banyan.base.errors import RequestError
from banyan.base.ids import RequestId
from banyan.frontend.requests.generation import Generator, TextChunk, TextRequest, Usage
from banyan.messages.sampling import SamplingParams

CLOSED = "closed"
"""Whoever asked went away before the end."""


@dataclass(frozen=True)
class Course:
    """One request that has ended.

    Attributes:
        usage: None when it was refused.
        reason: "stop" | "length" | "abort" | CLOSED | the code of an error.
        seconds: from its arrival to its end.
        first_s: from its arrival to its first tokens; None when it got none.
    """

    request: TextRequest
    usage: Usage | None
    reason: str
    seconds: float
    first_s: float | None = None


class Meter(Protocol):
    """Called on the event loop, and not for what the server asks itself."""

    def first_tokens(self, seconds: float) -> None:
        """The first tokens of a request came, so long after it did."""
        ...

    def next_tokens(self, seconds: float, count: int) -> None:
        """`count` more came, so long after those before."""
        ...

    def ended(self, course: Course) -> None: ...


class Metrics(Meter, Protocol):
    """A meter that tells what it was told."""

    kind: str
    """Media type of what is shown."""

    def show(self) -> bytes: ...


def tell_refused(meters: Sequence[Meter], request: RequestId, code: str) -> None:
    """One request ended before it was read."""
    unread = TextRequest(request, [], SamplingParams(max_new_tokens=0))
    for meter in meters:
        meter.ended(Course(unread, None, code, 0.0))


OWN = ("probe", "warm-up")
"""Routes of requests that nobody has sent."""


class Metered:
    """A generator whose requests are metered."""

    def __init__(self, inner: Generator, meters: Sequence[Meter]) -> None:
        self._inner = inner
        self._meters = tuple(meters)

    def check(self, requests: Sequence[TextRequest]) -> None:
        self._inner.check(requests)

    async def generate(self, request: TextRequest) -> AsyncGenerator[TextChunk, None]:
        if request.route in OWN:
            async with aclosing(self._inner.generate(request)) as chunks:
                async for chunk in chunks:
                    yield chunk
            return
        began_s = last_s = time.perf_counter()
        usage, reason, told, first_s = None, CLOSED, 0, None
        try:
            async with aclosing(self._inner.generate(request)) as chunks:
                async for chunk in chunks:
                    usage, now_s = chunk.usage, time.perf_counter()
                    if count := usage.output_tokens - told:
                        if first_s is None:
                            first_s = now_s - began_s
                            for meter in self._meters:
                                meter.first_tokens(first_s)
                        else:
                            for meter in self._meters:
                                meter.next_tokens(now_s - last_s, count)
                        told, last_s = usage.output_tokens, now_s
                    if chunk.finish is not None:
                        reason = chunk.finish.code if chunk.finish.status else chunk.finish.reason
                    yield chunk
        except RequestError as error:
            reason = error.code
            raise
        finally:
            seconds = time.perf_counter() - began_s
            for meter in self._meters:
                meter.ended(Course(request, usage, reason, seconds, first_s))
