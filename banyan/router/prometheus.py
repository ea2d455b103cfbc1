"""Router metrics for Prometheus, with SGLang's names, kept by prometheus_client."""

import math
import time
from collections.abc import Callable, Iterator, Sequence

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Histogram,
    generate_latest,
    start_http_server,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from banyan.base.errors import ConfigError
from banyan.router.worker import Worker

_SECONDS = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class PrometheusRouterMetrics:
    """Implements RouterMetrics.

    Args:
        buckets: upper bounds of durations in seconds; () = the defaults.
    """

    kind = CONTENT_TYPE_LATEST

    def __init__(self, buckets: Sequence[float], workers: Callable[[], Sequence[Worker]]) -> None:
        self.registry = CollectorRegistry()
        self._requests = self._counter("requests", "Requests that have ended")
        self._errors = self._counter("request_errors", "Requests that were refused or failed")
        self._retries = self._counter("retries", "Requests that were sent once more")
        self._broken = self._counter("broken_streams", "Answers that broke off with their worker")
        self._seconds = Histogram(
            "sgl_router_request_duration_seconds",
            "Time of whole requests",
            ("route",),
            registry=self.registry,
            buckets=sorted({*(buckets or _SECONDS), math.inf}),
        )
        self.registry.register(_WorkerCollector(workers))

    def ended(self, route: str, status: int, seconds: float) -> None:
        self._requests.labels(route).inc()
        self._seconds.labels(route).observe(seconds)
        if not 200 <= status < 400:
            self._errors.labels(route).inc()

    def retried(self, route: str) -> None:
        self._retries.labels(route).inc()

    def broke_off(self, route: str) -> None:
        self._broken.labels(route).inc()

    def show(self) -> bytes:
        return generate_latest(self.registry)

    def show_at(self, host: str, port: int) -> None:
        """Serve the metrics on a separate port; ConfigError if it cannot be listened on."""
        try:
            start_http_server(port, host, self.registry)
        except OSError as error:
            raise ConfigError(
                f"--prometheus-port {port} cannot be listened on: {error}",
                hint="choose another one, or leave it out: /metrics shows them too",
            ) from None

    def _counter(self, name: str, about: str) -> Counter:
        return Counter(f"sgl_router_{name}", about, ("route",), registry=self.registry)


class _WorkerCollector(Collector):
    """Collects the current state of each worker."""

    def __init__(self, workers: Callable[[], Sequence[Worker]]) -> None:
        self._workers = workers

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        def gauge(name: str, about: str, *labels: str) -> GaugeMetricFamily:
            return GaugeMetricFamily(f"sgl_router_{name}", about, labels=labels)

        some = list(self._workers())
        active = gauge("active_workers", "Workers that can be sent requests")
        active.add_metric((), sum(w.takes() for w in some))
        yield active
        well = gauge("worker_health", "Whether a worker is well", "worker")
        running = gauge("running_requests", "Requests that a worker has now", "worker")
        circuit = gauge("cb_state", "0 = asked, 1 = left alone, 2 = tried again", "worker")
        taken = CounterMetricFamily(
            "sgl_router_processed_requests", "Requests sent to a worker", labels=("worker",)
        )
        now = time.monotonic()
        for w in some:
            well.add_metric((w.url,), w.is_well)
            running.add_metric((w.url,), w.open)
            circuit.add_metric((w.url,), w.breaker.state(now).value)
            taken.add_metric((w.url,), w.taken)
        yield from (well, running, circuit, taken)
