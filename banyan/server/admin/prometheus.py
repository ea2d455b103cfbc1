"""Metrics in SGLang's names, kept by prometheus_client.

Counters and histograms are told by requests as they end; gauges are read from the replicas'
heartbeats when somebody asks.
"""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from functools import cache

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Histogram,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from banyan.config.buckets import bounds_of
from banyan.config.schema import Config
from banyan.config.serving import VLLM, ObserveConfig
from banyan.engine_client.client import Replica
from banyan.engine_client.metrics_observer import CLOSED, Course
from banyan.messages.events import accept_length
from banyan.server.admin.histogram import QuickHistogram
from banyan.server.admin.metric_labels import CustomLabels
from banyan.server.admin.vllm_metrics import VllmView

Replicas = Callable[[], list[Replica]]

_LABELS = ("model_name", "engine_type")
_UNIFIED = "unified"
_WAITS = (0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8, 10, 20, 40, 60, 80, 100, 200, 400)
_WHOLE = (*_WAITS, 600, 1200, 1800, 2400)
_GAPS = (
    *(0.002, 0.004, 0.006, 0.008, 0.010, 0.015, 0.020, 0.025, 0.030, 0.035, 0.040, 0.060),
    *(0.080, 0.100, 0.200, 0.400, 0.600, 0.800, 1, 2, 4, 6, 8),
)
_GIB = 1 << 30
_ENDS = ("stop", "length", "abort", "error")
"""In vLLM's words."""


class PrometheusMetrics:
    """Implements Metrics.

    Args:
        name: of the model, as clients call it.
        labels: those that requests bring; None = they bring none.
    """

    kind = CONTENT_TYPE_LATEST

    def __init__(
        self, config: Config, name: str, replicas: Replicas, labels: CustomLabels | None = None
    ) -> None:
        self._registry = CollectorRegistry()
        is_vllm = config.observe.metrics_names == VLLM
        self._shown = VllmView(self._registry) if is_vllm else self._registry
        self._labels = labels
        custom = labels.names if labels else ()
        families = _Families(self._registry, config.observe, (*_LABELS, *custom))
        self._series_of = cache(lambda values: _Series(families, (name, _UNIFIED, *values)))
        self._plain = self._series_of(labels.none if labels else ())
        self._registry.register(_Gauges(config, name, replicas))

    def first_tokens(self, seconds: float) -> None:
        self._series.first_tokens(seconds)

    def next_tokens(self, seconds: float, count: int) -> None:
        series = self._plain if self._labels is None else self._series
        series.next_tokens(seconds, count)

    def ended(self, course: Course) -> None:
        self._series.ended(course)

    def show(self) -> bytes:
        return generate_latest(self._shown)

    @property
    def _series(self) -> "_Series":
        """That of the request at hand."""
        return self._plain if self._labels is None else self._series_of(self._labels.now())


class _Families:
    """Every counter and histogram, over all values of the labels."""

    def __init__(
        self, registry: CollectorRegistry, observe: ObserveConfig, labels: Sequence[str]
    ) -> None:
        self._registry = registry
        self._labels = tuple(labels)
        self.ttft = self._histogram(
            "time_to_first_token_seconds", "Time to first token", observe.ttft_buckets or _WAITS
        )
        bounds = sorted({*(observe.itl_buckets or _GAPS), math.inf})
        self.itl = QuickHistogram(
            *("sglang:inter_token_latency_seconds", "Time between tokens", self._labels, bounds)
        )
        registry.register(self.itl)
        self.e2e = self._histogram(
            "e2e_request_latency_seconds", "Time of whole requests", observe.e2e_buckets or _WHOLE
        )
        self.queue = self._histogram("queue_time_seconds", "Wait for a place", _WAITS)
        self.requests = self._counter("num_requests", "Requests that have ended")
        self.aborted = self._counter("num_aborted_requests", "Requests that did not end in order")
        self.ends: Counter | None = None
        if observe.metrics_names == VLLM:
            about = "Requests that have ended, by how"
            labels = (*self._labels, "finished_reason")
            self.ends = Counter("vllm:request_success", about, labels, registry=registry)
        self.structured = self._counter("num_so_requests", "Requests with a constrained output")
        self.prompt_tokens = self._counter("prompt_tokens", "Tokens of prompts")
        self.output_tokens = self._counter("generation_tokens", "Tokens that were generated")
        self.cached = Counter(
            "sglang:cached_tokens",
            "Tokens of prompts that came from the cache",
            (*self._labels, "cache_source"),
            registry=registry,
        )
        self.prompts = self.outputs = None
        if observe.length_histograms:
            self.prompts = self._histogram(
                "prompt_tokens_histogram", "Lengths of prompts", bounds_of(observe.prompt_buckets)
            )
            self.outputs = self._histogram(
                "generation_tokens_histogram",
                "Lengths of answers",
                bounds_of(observe.output_buckets),
            )

    def _counter(self, name: str, about: str) -> Counter:
        return Counter(f"sglang:{name}", about, self._labels, registry=self._registry)

    def _histogram(self, name: str, about: str, bounds: Sequence[float]) -> Histogram:
        return Histogram(
            f"sglang:{name}",
            about,
            self._labels,
            registry=self._registry,
            buckets=sorted({*bounds, math.inf}),
        )


class _Series:
    """The figures of requests with the same labels. Implements Meter."""

    def __init__(self, families: _Families, values: Sequence[str]) -> None:
        self._itl = families.itl.labels(*values)
        self._ttft, self._e2e, self._queue = (
            each.labels(*values) for each in (families.ttft, families.e2e, families.queue)
        )
        self._requests, self._aborted, self._structured = (
            each.labels(*values)
            for each in (families.requests, families.aborted, families.structured)
        )
        self._prompt_tokens = families.prompt_tokens.labels(*values)
        self._output_tokens = families.output_tokens.labels(*values)
        self._from_device, self._from_store = (
            families.cached.labels(*values, source) for source in ("device", "storage")
        )
        self._ends: dict[str, Counter] = {}
        if families.ends is not None:
            self._ends = {end: families.ends.labels(*values, end) for end in _ENDS}
        self._prompts = self._outputs = None
        if families.prompts is not None and families.outputs is not None:
            self._prompts = families.prompts.labels(*values)
            self._outputs = families.outputs.labels(*values)

    def first_tokens(self, seconds: float) -> None:
        self._ttft.observe(seconds)

    def next_tokens(self, seconds: float, count: int) -> None:
        self._itl.observe(seconds / count, count)

    def ended(self, course: Course) -> None:
        self._requests.inc()
        if course.reason not in ("stop", "length"):
            self._aborted.inc()
        if self._ends:
            reason = "abort" if course.reason == CLOSED else course.reason
            self._ends[reason if reason in _ENDS else "error"].inc()
        if course.request.message.grammar:
            self._structured.inc()
        if course.reason != CLOSED:
            self._e2e.observe(course.seconds)
        usage = course.usage
        if usage is None:
            return
        self._queue.observe(usage.queue_s)
        self._prompt_tokens.inc(usage.prompt_tokens)
        self._output_tokens.inc(usage.output_tokens)
        self._from_device.inc(usage.cached_tokens - usage.stored_tokens)
        self._from_store.inc(usage.stored_tokens)
        if self._prompts is not None and self._outputs is not None:
            self._prompts.observe(usage.prompt_tokens)
            self._outputs.observe(usage.output_tokens)


class _Gauges(Collector):
    """What the replicas said last."""

    def __init__(self, config: Config, name: str, replicas: Replicas) -> None:
        self._page_size = config.cache.page_size
        self._name = name
        self._replicas = replicas

    def describe(self) -> list[Metric]:
        return []  # asked when nothing runs yet

    def collect(self) -> Iterator[Metric]:
        gauges: dict[str, GaugeMetricFamily] = {}
        retracted = CounterMetricFamily(
            "sglang:num_retracted_requests",
            "Requests whose pages were taken back",
            labels=(*_LABELS, "tp_rank", "pp_rank", "dp_rank"),
        )
        for replica in self._replicas():
            if replica.ready is None:
                continue
            labels = (self._name, _UNIFIED, "0", "0", str(replica.rank))
            for name, (about, value) in self._of(replica).items():
                if name not in gauges:
                    gauges[name] = GaugeMetricFamily(
                        f"sglang:{name}", about, labels=(*_LABELS, "tp_rank", "pp_rank", "dp_rank")
                    )
                gauges[name].add_metric(labels, value)
            retracted.add_metric(labels, replica.stats.retractions)
        yield from gauges.values()
        yield retracted

    def _of(self, replica: Replica) -> dict[str, tuple[str, float]]:
        """Name -> what it means, and its value."""
        stats, ready = replica.stats, replica.ready
        assert ready is not None
        size, most = self._page_size, ready.max_total_tokens
        used = (stats.held_pages + stats.in_flight_pages) * size
        memory = json.loads(ready.facts).get("memory", {})
        found = {
            "num_running_reqs": ("Requests that run", stats.running),
            "num_queue_reqs": ("Requests that wait", stats.waiting),
            "token_usage": ("Share of the cache that requests hold", used / most if most else 0.0),
            "num_used_tokens": ("Tokens of the cache that requests hold", used),
            "kv_used_tokens": ("Tokens of the cache that requests hold", used),
            "kv_evictable_tokens": ("Tokens kept for prompts to come", stats.cached_pages * size),
            "kv_pinned_tokens": ("Tokens of prompts that stay", stats.pinned_pages * size),
            "kv_available_tokens": ("Tokens of the cache that are free", stats.free_pages * size),
            "max_total_num_tokens": ("Tokens that the cache holds", most),
            "cache_hit_rate": (
                "Share of all prompts' tokens that came from the cache",
                stats.cached_tokens / max(1, stats.prompt_tokens),
            ),
            "utilization": ("Share of places taken", stats.running / max(1, ready.max_running)),
            "page_size": ("Tokens per page", size),
            "weight_memory_usage_gb": ("GiB of weights", memory.get("weight_bytes", 0) / _GIB),
            "kv_cache_memory_usage_gb": ("GiB of cache", memory.get("cache_bytes", 0) / _GIB),
        }
        if (rules := json.loads(ready.facts).get("adapters")) is not None:
            found["num_loaded_adapters"] = ("Adapters in memory", stats.adapters)
            found["adapter_used_bytes"] = ("Memory that adapters take", stats.adapter_bytes)
            if rules["max_bytes"]:  # else each has its place from the start on
                found["adapter_max_bytes"] = ("Memory that they may take", rules["max_bytes"])
        if (length := accept_length(stats)) is not None:
            found["spec_accept_length"] = ("Tokens that each verified row gave", length)
        return found
