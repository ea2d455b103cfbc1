"""The figures of /metrics under vLLM's names, for dashboards, scalers and gateways that are made
for it (docs.vllm.ai, "Production Metrics").

A view: what has no counterpart there is left out, and nothing is counted twice.
"""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric

OWN = "vllm:"
"""What begins so has its name already."""
_OURS = "sglang:"
_NAMES: dict[str, tuple[str, ...]] = {
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
_LEFT_OUT = frozenset({"engine_type", "tp_rank", "pp_rank", "cache_source"})
_RENAMED = {"dp_rank": "engine"}


class VllmView(CollectorRegistry):
    """Shows another registry."""

    def __init__(self, inner: CollectorRegistry) -> None:
        super().__init__()
        self._inner = inner

    def collect(self) -> Iterator[Metric]:
        for metric in self._inner.collect():
            if metric.name.startswith(OWN):
                yield _shown(metric, metric.name)
            for name in _NAMES.get(metric.name.removeprefix(_OURS), ()):
                yield _shown(metric, OWN + name)


def _shown(metric: Metric, name: str) -> Metric:
    """The same under another name; samples that differ only in a label that is left out are one."""
    found = Metric(name, metric.documentation, metric.type)
    sums: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
    for sample in metric.samples:
        kept = {
            _RENAMED.get(label, label): value
            for label, value in sample.labels.items()
            if label not in _LEFT_OUT
        }
        of = name + sample.name.removeprefix(metric.name), tuple(kept.items())
        sums[of] = sums.get(of, 0.0) + sample.value
    for (full, labels), value in sums.items():
        found.add_sample(full, dict(labels), value)
    return found
