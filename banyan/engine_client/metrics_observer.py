"""MetricsObserver: receives the timing and outcome of each request, as its client sees them."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from banyan.base.errors import RequestError
from banyan.base.ids import RequestId
from banyan.messages.sampling_params import SamplingParams
from banyan.requests.generation import Chunks, Generator, TextChunk, Usage, observed
from banyan.requests.request_spec import RequestSpec, spec_of

CLOSED = "closed"
"""Reason: the client disconnected before the end."""


@dataclass(frozen=True)
class RequestOutcome:
    """A finished request.

    Attributes:
        usage: None if it was refused.
        reason: "stop" | "length" | "abort" | CLOSED | an error code.
        seconds: from arrival to end.
        first_s: from arrival to the first tokens (TTFT); None without tokens.
    """

    request: RequestSpec
    usage: Usage | None
    reason: str
    seconds: float
    first_s: float | None = None


class MetricsObserver(Protocol):
    """Called on the event loop. Probes and warm-up requests are left out."""

    def first_tokens(self, seconds: float) -> None:
        """First tokens, `seconds` after the request arrived."""
        ...

    def next_tokens(self, seconds: float, count: int) -> None:
        """`count` more tokens, `seconds` after the previous ones."""
        ...

    def ended(self, outcome: RequestOutcome) -> None: ...


class MetricsExporter(MetricsObserver, Protocol):
    """An observer whose figures can be exported."""

    kind: str
    """Media type of the export."""

    def export(self) -> bytes: ...


def report_refused(
    metrics_observers: Sequence[MetricsObserver], request: RequestId, code: str
) -> None:
    """Report a request that was refused before it was parsed."""
    unread = spec_of(request, [], SamplingParams(max_new_tokens=0))
    for observer in metrics_observers:
        observer.ended(RequestOutcome(unread, None, code, 0.0))


OWN = ("probe", "warm-up")
"""Routes of requests that the server makes itself."""


class ObservedGenerator:
    """A generator that reports its requests to observers."""

    def __init__(self, inner: Generator, metrics_observers: Sequence[MetricsObserver]) -> None:
        self._inner = inner
        self._metrics_observers = tuple(metrics_observers)

    def check(self, requests: Sequence[RequestSpec]) -> None:
        self._inner.check(requests)

    def generate(self, request: RequestSpec) -> Chunks[TextChunk]:
        if request.route in OWN:
            return self._inner.generate(request)
        figures = _RequestFigures(request, self._metrics_observers)
        return observed(figures, lambda: self._inner.generate(request))


class _RequestFigures:
    """Collects the figures of one request for all observers."""

    def __init__(self, request: RequestSpec, metrics_observers: Sequence[MetricsObserver]) -> None:
        self._request = request
        self._metrics_observers = metrics_observers
        self._began_s = self._last_s = time.perf_counter()
        self._usage: Usage | None = None
        self._reason = CLOSED
        self._reported_tokens = 0
        self._first_s: float | None = None

    def take(self, chunk: TextChunk) -> None:
        self._usage = chunk.usage
        if count := chunk.usage.output_tokens - self._reported_tokens:
            now_s = time.perf_counter()
            if self._first_s is None:
                self._first_s = now_s - self._began_s
                for observer in self._metrics_observers:
                    observer.first_tokens(self._first_s)
            else:
                for observer in self._metrics_observers:
                    observer.next_tokens(now_s - self._last_s, count)
            self._reported_tokens, self._last_s = chunk.usage.output_tokens, now_s
        if chunk.finish is not None:
            self._reason = chunk.finish.code if chunk.finish.status else chunk.finish.reason

    def refuse(self, error: RequestError) -> None:
        self._reason = error.code

    def end(self) -> None:
        seconds = time.perf_counter() - self._began_s
        for observer in self._metrics_observers:
            observer.ended(
                RequestOutcome(self._request, self._usage, self._reason, seconds, self._first_s)
            )
