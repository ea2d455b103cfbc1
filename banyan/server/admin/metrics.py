"""/metrics: what this server has done, for Prometheus. No figure carries anything of a request's
text, and labels that come from one are those that the operator has listed.
"""

from collections.abc import Callable

from banyan.base.errors import RequestError
from banyan.config.schema import Config
from banyan.engine_client.client import Replica
from banyan.engine_client.metrics_observer import MetricsExporter
from banyan.server.admin.metric_labels import CustomLabels
from banyan.server.http.exchange import HttpExchange
from banyan.server.state import ServerState


async def show_metrics(exchange: HttpExchange, state: ServerState) -> None:
    if state.metrics is None:
        raise RequestError(
            "This server counts nothing for Prometheus",
            status=404,
            code="not_enabled",
            hint="Start it with --enable-metrics.",
        )
    await exchange.whole(state.metrics.export(), 200, state.metrics.kind)


def open_metrics(
    config: Config,
    name: str,
    replicas: Callable[[], list[Replica]],
    labels: CustomLabels | None = None,
) -> MetricsExporter | None:
    """None where none are wanted. The library is loaded only where they are."""
    if not config.observe.metrics:
        return None
    from banyan.server.admin.prometheus import PrometheusMetrics

    return PrometheusMetrics(config, name, replicas, labels)
