"""The gRPC listener (--grpc-mode): keys, limits, deadlines, cancellation and errors of each call.

The service itself is in `scheduler.py`. The listener also serves `grpc.health.v1.Health/Check`.
"""

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Sequence
from http import HTTPStatus
from urllib.parse import unquote

import grpc
from google.protobuf.message import Message
from smg_grpc_proto.generated import sglang_scheduler_pb2_grpc as service

from banyan.base.errors import CapacityError, ConfigError, RequestError
from banyan.base.fair_share import CALLER
from banyan.base.log import logger, printable
from banyan.config.schema import ServerConfig
from banyan.requests.request_spec import RequestContext, TracedCall
from banyan.server.errors import internal, unavailable
from banyan.server.grpc.scheduler import SglangScheduler
from banyan.server.http import auth
from banyan.server.http.limits import deadline_of, too_late
from banyan.server.http.listen import CLOSING_S, address_of
from banyan.server.state import ServerState

log = logger(__name__)

SERVICE = "sglang.grpc.scheduler.SglangScheduler"

SEND_TIMEOUT_S = 30.0
"""A call is aborted if its client takes no message for this long."""
KEEPALIVE_S = 60
KEEPALIVE_TIMEOUT_S = 20
_MAX_TEXT = 2000
"""Characters of an error or warning; clients limit the size of metadata."""
_UNLIMITED = -1
MAX_MESSAGE_BYTES = 4 << 20
"""Size of a request, as is usual with gRPC: a million token ids. The library parses a message in
one piece, and 4 MiB take it less than 50 ms."""

STATUS_CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    408: grpc.StatusCode.DEADLINE_EXCEEDED,
    413: grpc.StatusCode.INVALID_ARGUMENT,
    422: grpc.StatusCode.INVALID_ARGUMENT,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    499: grpc.StatusCode.CANCELLED,
    501: grpc.StatusCode.UNIMPLEMENTED,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}
"""HTTP status of a RequestError -> gRPC status; INTERNAL for all others."""


def status_of(error: RequestError) -> grpc.StatusCode:
    return STATUS_CODES.get(error.status, grpc.StatusCode.INTERNAL)


class Call:
    """One open call.

    Attributes:
        context: the request without its transport.
        is_probe: a health check; draining does not wait for it.
        ending: why `stop` ended the call.
        waits_since_s: monotonic time at which a message began to wait for the client.
    """

    def __init__(self, rpc: grpc.aio.ServicerContext, context: RequestContext, is_probe: bool):
        self.context = context
        self.is_probe = is_probe
        self.ending: RequestError | None = None
        self.waits_since_s: float | None = None
        self.began_s = time.monotonic()
        self._rpc = rpc
        self._task = asyncio.current_task()

    def traced(self, method: str) -> TracedCall:
        """This call of `method`, for its trace span."""

        def status(error: RequestError | None) -> dict[str, int]:
            error = error or self.ending
            code = grpc.StatusCode.OK if error is None else status_of(error)
            return {"rpc.grpc.status_code": code.value[0]}

        facts = {"rpc.system": "grpc", "rpc.service": SERVICE, "rpc.method": method}
        return TracedCall(self.context, self.began_s, f"{SERVICE}/{method}", facts, status)

    async def write(self, message: Message) -> None:
        """Send a message of a stream. Waits while the client's window is full."""
        self.waits_since_s = time.monotonic()
        await self._rpc.write(message)
        self.waits_since_s = None

    def stop(self, why: RequestError) -> None:
        """End the call with an error. The cancellation releases what its work holds."""
        if self.ending is None and self._task is not None and not self._task.done():
            self.ending = why
            self._task.cancel()


class Calls:
    """The open calls of a listener. Each call is checked as over HTTP, and ends in order."""

    def __init__(self, state: ServerState) -> None:
        server = state.config.server
        self.open: dict[Call, None] = {}
        self._state = state
        self._ended = asyncio.Event()
        self._guard = auth.Guard(state.keys, server.admin_api_key, server.host)
        self._logs_calls = state.config.observe.http_level in ("debug", "info")

    @contextlib.asynccontextmanager
    async def enter(
        self, rpc: grpc.aio.ServicerContext, method: str, guard: str = auth.KEY
    ) -> AsyncIterator[Call]:
        """Run the body of a call: a RequestError in it becomes the status of the call.

        Args:
            method: its name, for the log.
            guard: who may call it, as for routes.
        """
        context = RequestContext(is_strict=self._state.config.server.strict_requests)
        call = Call(rpc, context, is_probe=guard == auth.OPEN)
        status = 200
        self.open[call] = None
        timer: asyncio.TimerHandle | None = None
        held = contextlib.ExitStack()
        try:
            self._admit(rpc, call, guard, held)
            with contextlib.ExitStack() as within:
                traced = call.traced(method)
                for scope in [] if call.is_probe else self._state.request_scopes(traced):
                    within.enter_context(scope)
                trace = (("traceresponse", traced.trace),) if traced.trace else ()
                await rpc.send_initial_metadata((("x-request-id", context.id), *trace))
                left_s = context.time_left_s()
                if left_s is not None:
                    timer = asyncio.get_running_loop().call_later(left_s, call.stop, too_late())
                yield call
            if context.warnings:
                text = printable("; ".join(context.warnings), _MAX_TEXT)
                rpc.set_trailing_metadata((("x-banyan-warnings", _ascii(text)),))
        except RequestError as error:
            status = error.status
            await _fail(rpc, error, self._state)
        except asyncio.CancelledError:
            status = 499  # the client has gone, or its deadline has passed
            if call.ending is None:
                raise
            status = call.ending.status
            await _fail(rpc, call.ending, self._state)
        except grpc.aio.AbortError:
            raise
        except Exception:
            status = 500
            log.exception("call failed id=%s method=%s", context.id, method)
            await _fail(rpc, internal(context.id), self._state)
        finally:
            if timer is not None:
                timer.cancel()
            del self.open[call]
            held.close()
            self._ended.set()
            if self._logs_calls:
                seconds = time.monotonic() - call.began_s
                peer = printable(_host_of(rpc.peer()), 100)
                log.info(
                    "grpc method=%s status=%d seconds=%.3f peer=%s id=%s",
                    method,
                    status,
                    seconds,
                    peer,
                    context.id,
                )

    async def wait_idle(self) -> None:
        """Return when only health checks are open."""
        while any(not call.is_probe for call in self.open):
            self._ended.clear()
            await self._ended.wait()

    def end_all(self, text: str) -> None:
        for call in list(self.open):
            call.stop(unavailable(text, "shutting_down"))

    async def stop_slow_clients(self) -> None:
        """Abort calls whose client takes no messages. One task looks at all calls, so that a
        message needs no timer."""
        while True:
            await asyncio.sleep(SEND_TIMEOUT_S / 10)
            latest_s = time.monotonic() - SEND_TIMEOUT_S
            for call in list(self.open):
                if call.waits_since_s is not None and call.waits_since_s < latest_s:
                    call.stop(
                        RequestError("the client takes no messages", status=408, code="slow_client")
                    )

    def _admit(
        self,
        rpc: grpc.aio.ServicerContext,
        call: Call,
        guard: str,
        held: contextlib.ExitStack,
    ) -> None:
        """Fill in the caller and the deadline; RequestError if the call is refused."""
        context = call.context
        metadata = rpc.invocation_metadata() or ()
        context.headers = {key: value for key, value in metadata if isinstance(value, str)}
        given = context.headers.get("authorization", "")
        key = context.headers.get("x-api-key", "")
        authorization = (f"Bearer {key}" if key and not given else given).encode()
        verdict = self._guard.judge(guard, authorization, _host_of(rpc.peer()), "")
        if verdict.status == auth.UNAUTHORIZED:
            raise RequestError(
                "the key is missing or wrong",
                status=verdict.status,
                code="unauthorized",
                hint="send the metadata authorization: Bearer KEY",
            )
        if verdict.status != HTTPStatus.OK:
            raise RequestError(verdict.text, status=verdict.status, code="forbidden")
        context.tenant, context.is_admin = verdict.caller.tenant, verdict.is_admin
        context.key_name = self._state.keys.name_of(verdict.caller.tenant)
        CALLER.set(verdict.caller.tenant)
        held.enter_context(self._state.keys.counted(verdict.caller))
        raw = {key.encode(): value.encode() for key, value in context.headers.items()}
        context.deadline_s = deadline_of(raw, call.began_s)


class GrpcListener:
    """Serves SGLang's scheduler protocol over gRPC.

    gRPC binds the port itself, so the bound socket only reserves it until `start`.

    Raises:
        ConfigError: from the constructor, if the TLS files or flags cannot be used.
    """

    def __init__(self, state: ServerState, listener: socket.socket) -> None:
        server = state.config.server
        self.url = address_of(listener, server.host, "grpcs" if server.ssl_cert else "grpc")
        self._state = state
        self._socket = listener
        self._credentials = server_credentials(server)
        self._calls: Calls | None = None
        self._server: grpc.aio.Server | None = None
        self._watch: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._calls = calls = Calls(self._state)
        self._server = server = grpc.aio.server(options=_options(self._state.config.server))
        service.add_SglangSchedulerServicer_to_server(SglangScheduler(self._state, calls), server)
        server.add_generic_rpc_handlers((_health_handler(self._state),))
        address = self.url.partition("://")[2]
        self._socket.close()
        try:
            if self._credentials is None:
                server.add_insecure_port(address)
            else:
                server.add_secure_port(address, self._credentials)
        except RuntimeError as error:
            raise CapacityError(f"gRPC cannot listen on {address}: {error}") from None
        await server.start()
        self._watch = asyncio.create_task(calls.stop_slow_clients())

    async def drain(self) -> None:
        if self._calls is not None:
            await self._calls.wait_idle()

    def end_all(self, text: str) -> None:
        if self._calls is not None:
            self._calls.end_all(text)

    async def stop(self, is_now: bool) -> None:
        if self._watch is not None:
            self._watch.cancel()
        if self._server is not None:
            await self._server.stop(0 if is_now else CLOSING_S)


def server_credentials(server: ServerConfig) -> grpc.ServerCredentials | None:
    """TLS of the listener; None = no TLS.

    Raises:
        ConfigError: a file cannot be read, or a flag has no counterpart in gRPC.
    """
    if not server.ssl_cert:
        return None
    for flag, value in (
        ("--ssl-keyfile-password", server.ssl_password),
        ("--enable-ssl-refresh", server.ssl_refresh),
    ):
        if value:
            raise ConfigError(f"{flag} is not available with --grpc-mode", hint="leave it out")
    try:
        with open(server.ssl_key or server.ssl_cert, "rb") as file:
            key = file.read()
        with open(server.ssl_cert, "rb") as file:
            certificate = file.read()
        authority = None
        if server.ssl_ca:
            with open(server.ssl_ca, "rb") as file:
                authority = file.read()
    except OSError as error:
        raise ConfigError(f"TLS file {error.filename}: {error.strerror}") from None
    return grpc.ssl_server_credentials(
        [(key, certificate)], authority, require_client_auth=authority is not None
    )


def _options(server: ServerConfig) -> Sequence[tuple[str, int]]:
    return (
        ("grpc.so_reuseport", 0),
        ("grpc.max_receive_message_length", min(server.max_body_bytes, MAX_MESSAGE_BYTES)),
        ("grpc.max_send_message_length", _UNLIMITED),
        ("grpc.keepalive_time_ms", KEEPALIVE_S * 1000),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_S * 1000),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 5000),
    )


async def _fail(rpc: grpc.aio.ServicerContext, error: RequestError, state: ServerState) -> None:
    """End the call with a gRPC status; always raises AbortError."""
    trailing = [("x-banyan-code", error.code)]
    if error.param:
        trailing.append(("x-banyan-param", _ascii(error.param[:200])))
    if error.status in (429, 503):
        trailing.append(("retry-after", str(state.retry_after_s())))
    await rpc.abort(status_of(error), str(error)[:_MAX_TEXT], tuple(trailing))


def _health_handler(state: ServerState) -> grpc.GenericRpcHandler:
    """grpc.health.v1.Health/Check, for probes of Kubernetes and load balancers.

    Its answer has one field, a number: 1 = SERVING, 2 = NOT_SERVING.
    """

    async def check(request: bytes, rpc: grpc.aio.ServicerContext) -> bytes:
        is_serving = not (state.not_ready_reason() if not state.draining or state.dead else "")
        return b"\x08\x01" if is_serving else b"\x08\x02"

    return grpc.method_handlers_generic_handler(
        "grpc.health.v1.Health", {"Check": grpc.unary_unary_rpc_method_handler(check)}
    )


def _host_of(peer: str) -> str:
    """The address in gRPC's name of a peer: ipv4:127.0.0.1:4242, ipv6:%5B::1%5D:4242."""
    return unquote(peer).partition(":")[2].rpartition(":")[0].strip("[]")


def _ascii(text: str) -> str:
    return text.encode("ascii", "backslashreplace").decode()
