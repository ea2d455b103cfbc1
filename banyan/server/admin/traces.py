"""Whether requests are traced, and where spans go. The library is loaded only where they are."""

from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Literal
from urllib.parse import urlsplit

from banyan.base.errors import ConfigError
from banyan.base.install import install_command
from banyan.base.log import printable
from banyan.config.schema import ObserveConfig
from banyan.server.state import Tracing

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

_SDK = ("opentelemetry", "opentelemetry.sdk")
_EXPORTERS = "opentelemetry.exporter.otlp.proto"
_PATH = "/v1/traces"


@dataclass(frozen=True)
class Endpoint:
    """Where spans go.

    Attributes:
        address: the whole URL for HTTP, host:port for gRPC.
        is_secure: gRPC over TLS; the URL says it for HTTP.
    """

    protocol: Literal["http", "grpc"]
    address: str
    is_secure: bool = False


def open_traces(observe: ObserveConfig, model: str, version: str) -> Tracing | None:
    """None where nothing is traced.

    Args:
        model: as clients call it.
    """
    if not observe.traces:
        return None
    from banyan.server.admin.spans import Spans

    exporter = _exporter(endpoint_of(observe.traces_endpoint))
    return Spans(exporter, observe.traces_service, model, version)


def check_traces(observe: ObserveConfig) -> None:
    """Raises:
    ConfigError: the packages are missing, or the endpoint is none.
    """
    if not observe.traces:
        return
    endpoint = endpoint_of(observe.traces_endpoint)
    exporter = f"{_EXPORTERS}.{endpoint.protocol}"
    if endpoint.protocol == "grpc" and not _is_there(exporter):
        raise ConfigError(
            f"--otlp-traces-endpoint {printable(observe.traces_endpoint, 80)}: spans over gRPC "
            "need the package opentelemetry-exporter-otlp-proto-grpc",
            hint=f"run: {install_command('traces-grpc')}, or give the collector's HTTP port, as "
            "http://localhost:4318",
        )
    if not all(map(_is_there, (*_SDK, exporter))):
        raise ConfigError(
            "--enable-trace needs the packages of OpenTelemetry",
            hint=f"run: {install_command('traces')}",
        )


def endpoint_of(given: str) -> Endpoint:
    """OTLP over HTTP for a URL, at its usual path where none is given; over gRPC for HOST:PORT,
    grpc://HOST:PORT and grpcs://HOST:PORT."""
    whole = given if "://" in given else f"grpc://{given}"
    try:
        parts = urlsplit(whole)
        is_there, port = bool(parts.hostname), parts.port
    except ValueError:
        is_there, port, parts = False, None, urlsplit("")
    is_bare = parts.path in ("", "/") and not parts.query
    if is_there and parts.scheme in ("http", "https"):
        return Endpoint("http", given.rstrip("/") + _PATH if is_bare else given)
    if is_there and port and is_bare and parts.scheme in ("grpc", "grpcs"):
        return Endpoint("grpc", parts.netloc, parts.scheme == "grpcs")
    raise ConfigError(
        f"--otlp-traces-endpoint {printable(given, 80)!r} is no address that spans can be sent to",
        hint="give a collector's HTTP port as http://localhost:4318, or its gRPC port as "
        "localhost:4317",
    )


def _exporter(endpoint: Endpoint) -> "SpanExporter":
    if endpoint.protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

        return OTLPSpanExporter(endpoint.address, insecure=not endpoint.is_secure)
    from opentelemetry.exporter.otlp.proto.http import trace_exporter

    return trace_exporter.OTLPSpanExporter(endpoint.address)


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False
