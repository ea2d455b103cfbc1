"""Whether requests are traced, and where spans go. The library is loaded only where they are."""

from importlib.util import find_spec
from urllib.parse import urlsplit

from banyan.base.errors import ConfigError
from banyan.base.log import printable
from banyan.config.schema import ObserveConfig
from banyan.server.http.tracing import Tracing

_MODULES = ("opentelemetry", "opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")
_PATH = "/v1/traces"


def open_traces(observe: ObserveConfig, model: str, version: str) -> Tracing | None:
    """None where nothing is traced.

    Args:
        model: as clients call it.
    """
    if not observe.traces:
        return None
    from banyan.server.admin.spans import Spans

    return Spans(endpoint_of(observe.traces_endpoint), observe.traces_service, model, version)


def check_traces(observe: ObserveConfig) -> None:
    """Raises:
    ConfigError: the packages are missing, or the endpoint is none.
    """
    if not observe.traces:
        return
    endpoint_of(observe.traces_endpoint)
    if not all(map(_is_there, _MODULES)):
        raise ConfigError(
            "--enable-trace needs the packages of OpenTelemetry",
            hint="run: pip install 'banyan[traces]'",
        )


def endpoint_of(given: str) -> str:
    """The address that spans are sent to: OTLP over HTTP, at its usual path where none is given."""
    try:
        parts = urlsplit(given)
        is_web = parts.scheme in ("http", "https") and bool(parts.hostname)
    except ValueError:
        is_web = False
    if not is_web:
        raise ConfigError(
            f"--otlp-traces-endpoint {printable(given, 80)!r} is no http:// or https:// address; "
            "spans are sent as OTLP over HTTP, and not over gRPC",
            hint="give the collector's HTTP port, as http://localhost:4318",
        )
    return given.rstrip("/") + _PATH if parts.path in ("", "/") else given


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False
