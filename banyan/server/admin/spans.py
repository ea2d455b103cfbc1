"""Spans by OpenTelemetry's SDK, sent by a thread of its own.

A span is made when its request ends, of times that are known then, so that a request which is not
sampled costs next to nothing, and one that is costs nothing per token. What is sampled, and how
spans are batched, is the SDK's to know (OTEL_TRACES_SAMPLER, OTEL_BSP_…).
"""

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from opentelemetry import trace
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from banyan.base.errors import RequestError
from banyan.engine_client.metrics_observer import CLOSED, OWN
from banyan.requests.generation import Chunks, Generator, TextChunk, Usage, observed
from banyan.requests.request_spec import RequestSpec, TracedCall

_NS = 1_000_000_000
_CONTEXT = ("traceparent", "tracestate")


class Spans:
    """Implements Tracing.

    Args:
        exporter: what sends them.
        service: how this server is called there.
        model: as clients call it.
    """

    def __init__(self, exporter: SpanExporter, service: str, model: str, version: str) -> None:
        words = logging.getLogger("opentelemetry")
        words.handlers, words.propagate = logging.getLogger("banyan").handlers, False
        named = Resource.create({SERVICE_NAME: service, SERVICE_VERSION: version})
        self._provider = TracerProvider(resource=named, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("banyan", version)
        self._headers = TraceContextTextMapPropagator()
        self._model = model

    @contextlib.contextmanager
    def context(self, call: TracedCall) -> Iterator[None]:
        given = {name: call.context.headers.get(name, "") for name in _CONTEXT}
        clock = _SpanClock()
        came_ns = clock.began_ns - int((time.monotonic() - call.began_s) * _NS)
        span = self._tracer.start_span(
            call.name,
            self._headers.extract({name: text for name, text in given.items() if text}),
            SpanKind.SERVER,
            {**call.attributes, "banyan.exchange.context.id": call.context.id},
            start_time=came_ns,
        )
        own = span.get_span_context()
        call.trace = f"00-{own.trace_id:032x}-{own.span_id:016x}-{own.trace_flags:02x}"
        ended: RequestError | None = None
        try:
            with trace.use_span(span, record_exception=False, set_status_on_exception=False):
                yield
        except RequestError as error:
            ended = error
            span.set_attribute("error.type", error.code)
            if error.status >= 500:
                span.set_status(Status(StatusCode.ERROR, error.code))
            raise
        finally:
            span.set_attributes(call.status(ended))
            span.end(clock.now_ns())

    def watch(self, generator: Generator) -> Generator:
        return _TracedGenerator(generator, self._tracer, self._model)

    def close(self) -> None:
        self._provider.shutdown()


class _SpanClock:
    """Wall time when a span begins; goes on with the monotonic clock, so that no span ends before
    it began when the system's clock is set."""

    def __init__(self) -> None:
        self.began_ns = time.time_ns()
        self._offset_ns = self.began_ns - time.monotonic_ns()

    def now_ns(self) -> int:
        return self._offset_ns + time.monotonic_ns()


@dataclass
class _SequenceState:
    """State of one sequence for its span; times in nanoseconds, 0 = not yet."""

    clock: "_SpanClock"
    on_end: Callable[["_SequenceState"], None]
    first_ns: int = 0
    usage: Usage | None = None
    reason: str = CLOSED
    is_error: bool = False
    has_ended: bool = False

    def take(self, chunk: TextChunk) -> None:
        if not self.first_ns and chunk.usage.output_tokens:
            self.first_ns = self.clock.now_ns()
        if chunk.finish is not None:
            finish, self.has_ended = chunk.finish, True
            self.is_error = finish.status >= 500
            self.reason = finish.code if finish.status else finish.reason
        self.usage = chunk.usage

    def refuse(self, error: RequestError) -> None:
        self.reason, self.is_error = error.code, error.status >= 500

    def end(self) -> None:
        self.on_end(self)


class _TracedGenerator:
    """A generator whose sequences have spans."""

    def __init__(self, inner: Generator, tracer: Tracer, model: str) -> None:
        self._inner = inner
        self._tracer = tracer
        self._model = model

    def check(self, requests: Sequence[RequestSpec]) -> None:
        self._inner.check(requests)

    def generate(self, request: RequestSpec) -> Chunks[TextChunk]:
        if request.route in OWN:
            return self._inner.generate(request)
        clock = _SpanClock()
        span = self._tracer.start_span("generate", start_time=clock.began_ns)
        if not span.is_recording():  # not even a step for each token
            return self._inner.generate(request)
        outcome = _SequenceState(clock, partial(self._end_span, span, request))
        return observed(outcome, lambda: self._inner.generate(request))

    def _end_span(self, span: Span, request: RequestSpec, outcome: _SequenceState) -> None:
        """End the span with its final attributes, and create the spans of its phases."""
        now_ns, began_ns, usage = outcome.clock.now_ns(), outcome.clock.began_ns, outcome.usage
        span.set_attributes(_request_attributes(request, self._model))
        span.set_attribute("gen_ai.response.finish_reasons", [outcome.reason])
        if outcome.is_error:
            span.set_status(Status(StatusCode.ERROR, outcome.reason))
        if usage is not None:
            span.set_attributes(_usage_attributes(usage))
            queued_ns = int(usage.queue_s * _NS) if outcome.has_ended else 0
            admitted_ns = min(began_ns + queued_ns, outcome.first_ns or now_ns)
            phases = [("prefill", admitted_ns, outcome.first_ns or now_ns)]
            if outcome.has_ended:
                phases.insert(0, ("queue", began_ns, admitted_ns))
            if outcome.first_ns:
                phases.append(("decode", outcome.first_ns, now_ns))
            within = trace.set_span_in_context(span)
            for name, begin_ns, end_ns in phases:
                self._tracer.start_span(name, within, start_time=begin_ns).end(end_ns)
        span.end(now_ns)


def _request_attributes(request: RequestSpec, model: str) -> dict[str, str | int | float]:
    sampling = request.sampling
    return {
        "gen_ai.operation.name": request.route,
        "gen_ai.request.model": model,
        "gen_ai.request.max_tokens": sampling.max_new_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "banyan.request.id": request.id,
    }


def _usage_attributes(usage: Usage) -> dict[str, int | float]:
    return {
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "gen_ai.usage.output_tokens": usage.output_tokens,
        "banyan.cached_tokens": usage.cached_tokens,
        "banyan.stored_tokens": usage.stored_tokens,
        "banyan.retractions": usage.retractions,
    }
