"""Metrics under SGLang's names, with prometheus_client; also under vLLM's names.

Requests update counters and histograms. Gauges are read from the latest statistics of the replicas
when /metrics is called.
"""

import json
import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from functools import cache

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Histogram,
    generate_latest,
)
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from banyan.config.observability import bounds_of
from banyan.config.schema import VLLM, Config, ObserveConfig
from banyan.engine_client.client import Replica
from banyan.engine_client.metrics_observer import CLOSED, RequestOutcome
from banyan.messages.events import accept_length
from banyan.requests.generation import Usage
from banyan.server.admin.metrics import OTHER, CustomLabels

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
"""Finish reasons under vLLM's names."""

VLLM_PREFIX = "vllm:"
"""Prefix of metrics that have their vLLM name already."""
_PREFIX = "sglang:"
_OWN_PREFIX = "banyan:"
"""Prefix of metrics that neither SGLang nor vLLM has."""
_BILL_LABELS = ("model_name", "key_name")
_MOST_KEYS = 1000
"""Named keys with figures of their own; later ones count as OTHER."""
_NOTHING = Usage(0, 0)
_VLLM_NAMES: dict[str, tuple[str, ...]] = {
    "num_running_reqs": ("num_requests_running",),
    "num_queue_reqs": ("num_requests_waiting",),
    "token_usage": ("kv_cache_usage_perc",),
    "num_retracted_requests": ("num_preemptions",),
    "prompt_tokens": ("prompt_tokens", "prefix_cache_queries"),
    "cached_tokens": ("prefix_cache_hits",),
    "generation_tokens": ("generation_tokens",),
    "time_to_first_token_seconds": ("time_to_first_token_seconds",),
    "inter_token_latency_seconds": ("inter_token_latency_seconds",),
    "e2e_request_latency_seconds": ("e2e_request_latency_seconds",),
    "queue_time_seconds": ("request_queue_time_seconds",),
    "prompt_tokens_histogram": ("request_prompt_tokens",),
    "generation_tokens_histogram": ("request_generation_tokens",),
}
_NO_VLLM_LABELS = frozenset({"engine_type", "tp_rank", "pp_rank", "cache_source"})
_VLLM_LABELS = {"dp_rank": "engine"}


class PrometheusMetrics:
    """Implements MetricsExporter.

    Args:
        name: the served model name.
        labels: labels from requests; None = none.
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
        self._bills = _Bills(self._registry, name)
        self._registry.register(_Gauges(config, name, replicas))

    def first_tokens(self, seconds: float) -> None:
        self._series.first_tokens(seconds)

    def next_tokens(self, seconds: float, count: int) -> None:
        series = self._plain if self._labels is None else self._series
        series.next_tokens(seconds, count)

    def ended(self, outcome: RequestOutcome) -> None:
        self._series.ended(outcome)
        self._bills.ended(outcome)

    def export(self) -> bytes:
        return generate_latest(self._shown)

    @property
    def _series(self) -> "_Series":
        """The series of the current request."""
        return self._plain if self._labels is None else self._series_of(self._labels.now())


class _Families:
    """Every counter and histogram, for all label values."""

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
            "sglang:inter_token_latency_seconds", "Time between tokens", self._labels, bounds
        )
        registry.register(self.itl)
        self.e2e = self._histogram(
            "e2e_request_latency_seconds",
            "End-to-end latency",
            observe.e2e_buckets or _WHOLE,
        )
        self.queue = self._histogram("queue_time_seconds", "Time in the waiting queue", _WAITS)
        self.requests = self._counter("num_requests", "Finished requests")
        self.aborted = self._counter("num_aborted_requests", "Aborted requests")
        self.ends: Counter | None = None
        if observe.metrics_names == VLLM:
            about = "Finished requests by finish reason"
            labels = (*self._labels, "finished_reason")
            self.ends = Counter("vllm:request_success", about, labels, registry=registry)
        self.structured = self._counter("num_so_requests", "Requests with structured output")
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens")
        self.output_tokens = self._counter("generation_tokens", "Generated tokens")
        self.cached = Counter(
            "sglang:cached_tokens",
            "Prompt tokens from the cache",
            (*self._labels, "cache_source"),
            registry=registry,
        )
        self.prompts = self.outputs = None
        if observe.length_histograms:
            self.prompts = self._histogram(
                "prompt_tokens_histogram", "Prompt lengths", bounds_of(observe.prompt_buckets)
            )
            self.outputs = self._histogram(
                "generation_tokens_histogram",
                "Output lengths",
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
    """The metrics of requests with the same labels. Implements MetricsObserver."""

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

    def ended(self, outcome: RequestOutcome) -> None:
        self._requests.inc()
        if outcome.reason not in ("stop", "length"):
            self._aborted.inc()
        if self._ends:
            reason = "abort" if outcome.reason == CLOSED else outcome.reason
            self._ends[reason if reason in _ENDS else "error"].inc()
        if outcome.request.message.grammar:
            self._structured.inc()
        if outcome.reason != CLOSED:
            self._e2e.observe(outcome.seconds)
        usage = outcome.usage
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


class _Bills:
    """What each named key has used: requests and tokens. Requests without a named key are left out.

    Args:
        name: the served model name.
    """

    def __init__(self, registry: CollectorRegistry, name: str) -> None:
        self._name = name
        self._counters = [
            Counter(f"{_OWN_PREFIX}key_{what}", about, _BILL_LABELS, registry=registry)
            for what, about in (
                ("requests", "Finished requests of a named key"),
                ("prompt_tokens", "Prompt tokens of a named key"),
                ("cached_tokens", "Prompt tokens of a named key that came from the cache"),
                ("generation_tokens", "Generated tokens of a named key"),
            )
        ]
        self._names: set[str] = set()

    def ended(self, outcome: RequestOutcome) -> None:
        key = outcome.request.key_name
        if not key:
            return
        if key not in self._names:
            if len(self._names) < _MOST_KEYS:
                self._names.add(key)
            else:
                key = OTHER
        usage = outcome.usage or _NOTHING
        used = (1, usage.prompt_tokens, usage.cached_tokens, usage.output_tokens)
        for counter, amount in zip(self._counters, used, strict=True):
            counter.labels(self._name, key).inc(amount)


class _Gauges(Collector):
    """The latest statistics of the replicas."""

    def __init__(self, config: Config, name: str, replicas: Replicas) -> None:
        self._page_size = config.cache.page_size
        self._parallel = config.parallel
        self._has_all_ranks = config.observe.metrics_of_ranks
        self._name = name
        self._replicas = replicas

    def describe(self) -> list[Metric]:
        return []  # called before there are replicas

    def collect(self) -> Iterator[Metric]:
        gauges: dict[str, GaugeMetricFamily] = {}
        retracted = CounterMetricFamily(
            "sglang:num_retracted_requests",
            "Requests that were retracted",
            labels=(*_LABELS, "tp_rank", "pp_rank", "dp_rank"),
        )
        for replica in self._replicas():
            if replica.ready is None:
                continue
            labels = self._labels_of(replica)
            for name, (about, value) in self._of(replica).items():
                if name not in gauges:
                    gauges[name] = GaugeMetricFamily(
                        f"sglang:{name}", about, labels=(*_LABELS, "tp_rank", "pp_rank", "dp_rank")
                    )
                for each in labels:
                    gauges[name].add_metric(each, value)
            for each in labels:
                retracted.add_metric(each, replica.stats.retractions)
        yield from gauges.values()
        yield retracted

    def _labels_of(self, replica: Replica) -> list[tuple[str, ...]]:
        """Of the first rank, or of every rank; all of them follow the same plans."""
        dp_rank, first = str(replica.rank), 0
        stages, ranks = 1, 1
        if self._has_all_ranks:
            stages, ranks = self._parallel.pp, self._parallel.attention_ranks
            first = replica.rank * ranks if self._parallel.uses_dp_attention else 0
        return [
            (self._name, _UNIFIED, str(first + tp_rank), str(pp_rank), dp_rank)
            for pp_rank in range(stages)
            for tp_rank in range(ranks)
        ]

    def _of(self, replica: Replica) -> dict[str, tuple[str, float]]:
        """Name -> (help text, value)."""
        stats, ready = replica.stats, replica.ready
        assert ready is not None
        size, most = self._page_size, ready.max_total_tokens
        used = (stats.held_pages + stats.in_flight_pages) * size
        memory = json.loads(ready.facts).get("memory", {})
        found = {
            "num_running_reqs": ("Running requests", stats.running),
            "num_queue_reqs": ("Queued requests", stats.waiting),
            "token_usage": ("Share of the KV cache in use", used / most if most else 0.0),
            "num_used_tokens": ("Tokens of the KV cache in use", used),
            "kv_used_tokens": ("Tokens of the KV cache in use", used),
            "kv_evictable_tokens": ("Cached tokens that can be evicted", stats.cached_pages * size),
            "kv_pinned_tokens": ("Tokens of pinned prompts", stats.pinned_pages * size),
            "kv_available_tokens": ("Free tokens of the KV cache", stats.free_pages * size),
            "max_total_num_tokens": ("Capacity of the KV cache in tokens", most),
            "cache_hit_rate": (
                "Share of prompt tokens from the cache",
                stats.cached_tokens / max(1, stats.prompt_tokens),
            ),
            "utilization": (
                "Running requests as a share of the limit",
                stats.running / max(1, ready.max_running),
            ),
            "page_size": ("Tokens per page", size),
            "weight_memory_usage_gb": (
                "Memory of the weights in GiB",
                memory.get("weight_bytes", 0) / _GIB,
            ),
            "kv_cache_memory_usage_gb": (
                "Memory of the KV cache in GiB",
                memory.get("cache_bytes", 0) / _GIB,
            ),
        }
        if (rules := json.loads(ready.facts).get("adapters")) is not None:
            found["num_loaded_adapters"] = ("Loaded LoRA adapters", stats.adapters)
            found["adapter_used_bytes"] = ("Memory of LoRA adapters in bytes", stats.adapter_bytes)
            if rules["max_bytes"]:  # 0 = reserved at the start
                found["adapter_max_bytes"] = (
                    "Memory limit of LoRA adapters in bytes",
                    rules["max_bytes"],
                )
        if (length := accept_length(stats)) is not None:
            found["spec_accept_length"] = ("Tokens per verification step", length)
        return found


class QuickHistogram(Collector):
    """A histogram that is observed for every token: one observation is a search and two additions.

    The histogram of prometheus_client compares each bound in turn and takes two locks. With one
    observation per token that was most of the cost of metrics. Used on the event loop only.

    Args:
        bounds: upper bounds, ascending; the last is infinite.
    """

    def __init__(
        self, name: str, about: str, labels: Sequence[str], bounds: Sequence[float]
    ) -> None:
        self._name = name
        self._about = about
        self._labels = tuple(labels)
        self._bounds = tuple(bounds)
        self._series: dict[tuple[str, ...], QuickSeries] = {}

    def labels(self, *values: str) -> "QuickSeries":
        """The series with these label values."""
        return self._series.setdefault(values, QuickSeries(self._bounds))

    def describe(self) -> list[Metric]:
        return [HistogramMetricFamily(self._name, self._about, labels=self._labels)]

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(self._name, self._about, labels=self._labels)
        for values, series in self._series.items():
            family.add_metric(values, series.buckets(), series.sum)
        yield family


class QuickSeries:
    """The observations with the same labels."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.sum = 0.0
        self._bounds = bounds
        self._counts = [0] * len(bounds)

    def observe(self, value: float, count: int = 1) -> None:
        """Observe `value` `count` times."""
        self._counts[bisect_left(self._bounds, value)] += count
        self.sum += value * count

    def buckets(self) -> list[tuple[str, float]]:
        """(upper bound, number of observations up to it)."""
        found: list[tuple[str, float]] = []
        total = 0
        for bound, count in zip(self._bounds, self._counts, strict=True):
            total += count
            found.append((floatToGoString(bound), total))
        return found


class VllmView(CollectorRegistry):
    """Shows another registry under vLLM's metric names (docs.vllm.ai, "Production Metrics").

    Dashboards, autoscalers and gateways for vLLM use them. Metrics without a counterpart there are
    left out.
    """

    def __init__(self, inner: CollectorRegistry) -> None:
        super().__init__()
        self._inner = inner

    def collect(self) -> Iterator[Metric]:
        for metric in self._inner.collect():
            if metric.name.startswith((VLLM_PREFIX, _OWN_PREFIX)):
                yield _shown(metric, metric.name)
            for name in _VLLM_NAMES.get(metric.name.removeprefix(_PREFIX), ()):
                yield _shown(metric, VLLM_PREFIX + name)


def _shown(metric: Metric, name: str) -> Metric:
    """The metric under another name. Samples that differ only in a removed label are added up."""
    found = Metric(name, metric.documentation, metric.type)
    sums: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
    for sample in metric.samples:
        kept = {
            _VLLM_LABELS.get(label, label): value
            for label, value in sample.labels.items()
            if label not in _NO_VLLM_LABELS
        }
        of = name + sample.name.removeprefix(metric.name), tuple(kept.items())
        sums[of] = sums.get(of, 0.0) + sample.value
    for (full, labels), value in sums.items():
        found.add_sample(full, dict(labels), value)
    return found
