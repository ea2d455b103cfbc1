"""Metered: tells a meter what each request came to, as those who wait for it see it."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from banyan.base.errors import RequestError
from banyan.base.ids import RequestId
from banyan.messages.sampling_params import SamplingParams
from banyan.requests.chunks import Chunks
from banyan.requests.generation import Generator, TextChunk, Usage, observed
from banyan.requests.request_spec import RequestSpec, spec_of

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

    request: RequestSpec
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
    unread = spec_of(request, [], SamplingParams(max_new_tokens=0))
    for meter in meters:
        meter.ended(Course(unread, None, code, 0.0))


OWN = ("probe", "warm-up")
"""Routes of requests that nobody has sent."""


class Metered:
    """A generator whose requests are metered."""

    def __init__(self, inner: Generator, meters: Sequence[Meter]) -> None:
        self._inner = inner
        self._meters = tuple(meters)

    def check(self, requests: Sequence[RequestSpec]) -> None:
        self._inner.check(requests)

    def generate(self, request: RequestSpec) -> Chunks[TextChunk]:
        if request.route in OWN:
            return self._inner.generate(request)
        tally = _Tally(request, self._meters)
        return observed(tally, lambda: self._inner.generate(request))


class _Tally:
    """RequestObserver of one request for all meters."""

    def __init__(self, request: RequestSpec, meters: Sequence[Meter]) -> None:
        self._request = request
        self._meters = meters
        self._began_s = self._last_s = time.perf_counter()
        self._usage: Usage | None = None
        self._reason = CLOSED
        self._told = 0
        self._first_s: float | None = None

    def take(self, chunk: TextChunk) -> None:
        self._usage = chunk.usage
        if count := chunk.usage.output_tokens - self._told:
            now_s = time.perf_counter()
            if self._first_s is None:
                self._first_s = now_s - self._began_s
                for meter in self._meters:
                    meter.first_tokens(self._first_s)
            else:
                for meter in self._meters:
                    meter.next_tokens(now_s - self._last_s, count)
            self._told, self._last_s = chunk.usage.output_tokens, now_s
        if chunk.finish is not None:
            self._reason = chunk.finish.code if chunk.finish.status else chunk.finish.reason

    def refuse(self, error: RequestError) -> None:
        self._reason = error.code

    def end(self) -> None:
        seconds = time.perf_counter() - self._began_s
        for meter in self._meters:
            meter.ended(Course(self._request, self._usage, self._reason, seconds, self._first_s))
