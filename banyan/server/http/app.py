"""The ASGI application: finds the route, checks origin and key, reads the body, runs the handler.

Every request ends with a response, or with a cut connection if its client has gone. The access log
has a line for each HTTP request (--log-level-http) and for each request that is refused before it
reaches the engine (--log-requests). Without these flags it has a line for the first error and
warning of each kind, so that a misconfigured client is noticed.
"""

import asyncio
import contextlib
import difflib
import logging
import re
import time
from collections.abc import Awaitable, Collection, Sequence
from typing import Generic, Protocol, TypeVar

from banyan.base.errors import RequestError
from banyan.base.fair_share import CALLER, FairShare, Turns
from banyan.base.log import logger, printable
from banyan.base.memory import give_back
from banyan.config.schema import Config, ObserveConfig
from banyan.engine_client.request_log import write_line
from banyan.requests.request_spec import TracedCall
from banyan.server.errors import internal, unavailable
from banyan.server.http import auth
from banyan.server.http.auth import Keys
from banyan.server.http.exchange import SEND_TIMEOUT_S, HttpExchange, Scope, Send
from banyan.server.http.limits import (
    ClientGone,
    Receive,
    ReceivedBody,
    deadline_of,
    read_body,
    too_late,
)
from banyan.server.http.route import WITH_BODY, Route

log = logger(__name__)

TRIM_BYTES = 1 << 20
"""After requests and answers above this size, free memory is returned to the system: parsing leaves
many times their size to the allocator."""
TRIM_AFTER_S = 0.25
"""So long after them: what they used is free by then, and several share one return."""

BODIES_IN_MEMORY = 8
"""Limit of all bodies in memory, as a number of bodies of the largest size."""

_HEADER_NAMES = re.compile(r"[A-Za-z0-9_, -]{1,1000}")
_LONGEST_GUESSED = 64
"""Longest path for which a similar route is searched."""

_PATH_CHARS = 200
_REFUSED = 400
_KIND = ("status", "reason", "field")
_ONCE = {"told": "the first of its kind"}
MAX_KINDS = 100
"""Kinds of errors and warnings that are logged. Clients could make up any number of them."""


class Shared(Protocol):
    """The part of the shared state that the application needs."""

    config: Config
    keys: Keys
    """The API keys."""

    @property
    def signer(self) -> auth.TenantSigner | None:
        """Checks the callers that a router names; None = the header is ignored."""
        ...

    def request_scopes(self, call: TracedCall) -> Sequence[contextlib.AbstractContextManager[None]]:
        """To enter around a request with a body: its trace span and its metric labels. They may
        raise RequestError."""
        ...

    def retry_after_s(self) -> int:
        """Seconds after which a request that is refused because of the load may be admitted."""
        ...

    def has_begun(self, work: asyncio.Task[None]) -> bool:
        """Whether the work of this handler has its own line in the log."""
        ...


S = TypeVar("S", bound=Shared)


class App(Generic[S]):
    """The application over a table of routes."""

    def __init__(
        self, state: S, routes: list[Route[S]], send_timeout_s: float = SEND_TIMEOUT_S
    ) -> None:
        server = state.config.server
        self.state = state
        self.routes = {route.path: route for route in routes}
        assert len(self.routes) == len(routes), "two routes share a path"
        self.open_requests: dict[HttpExchange, None] = {}
        self._ended = asyncio.Event()
        self._guard = auth.Guard(
            state.keys,
            server.admin_api_key,
            server.host,
            server.allowed_hosts,
            server.allowed_origins,
        )
        self._max_body = server.max_body_bytes
        self._memory = FairShare(BODIES_IN_MEMORY * server.max_body_bytes)
        self._large = Turns(FairShare(1, reserved=0))
        """Large bodies are parsed one after the other."""
        self._root = server.root_path.rstrip("/")
        self._send_timeout_s = send_timeout_s
        self._tokenizer_waits, self._is_strict = server.tokenizer_waits, server.strict_requests
        self._access = AccessLog(state.config.observe.http_level)
        self._trims_soon = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            exchange = HttpExchange(
                scope, send, self._send_timeout_s, self._tokenizer_waits, self._is_strict
            )
            await self._answer(exchange, receive)
        elif scope["type"] == "lifespan":
            await _lifespan(receive, send)
        else:
            await receive()
            await send({"type": "websocket.close", "code": 1008})

    async def wait_idle(self) -> None:
        """Wait until only health checks are open."""
        while any(not exchange.is_probe for exchange in self.open_requests):
            self._ended.clear()
            await self._ended.wait()

    def end_all(self, text: str) -> None:
        """End all open requests with `text`: a 503, or the last event of a stream."""
        for exchange in list(self.open_requests):
            exchange.stop(unavailable(text, "shutting_down"))

    async def _answer(self, exchange: HttpExchange, receive: Receive) -> None:
        self.open_requests[exchange] = None
        body = ReceivedBody(self._memory)
        exchange.request.release_body = body.release
        exchange.request.large = self._large
        exchange.retry_after_s = self.state.retry_after_s
        held = contextlib.ExitStack()
        try:
            route = await self._admit(exchange, held)
            if route is None:
                return
            body.caller = exchange.context.tenant
            declared = exchange.request.headers.get(b"content-length")
            most = self._most_body(route, exchange)
            exchange.request.body = await read_body(receive, declared, most, body)
            with contextlib.ExitStack() as within:
                if exchange.request.method in WITH_BODY:
                    call = _traced(exchange)
                    for scope in self.state.request_scopes(call):
                        within.enter_context(scope)
                        exchange.trace = call.trace
                await self._run(route, exchange, receive)
        except RequestError as error:
            await _quietly(exchange.fail(error))
            _clear_traceback(error)
        except ClientGone:
            pass
        except Exception:
            log.exception(
                "request failed id=%s path=%s",
                exchange.context.id,
                printable(exchange.request.path, 100),
            )
            await _quietly(exchange.fail(internal(exchange.context.id)))
        finally:
            del self.open_requests[exchange]
            held.close()
            exchange.request.drop_body()
            self._ended.set()
            has_begun = exchange.work is not None and self.state.has_begun(exchange.work)
            self._access.log_end(exchange, has_begun, self.state.config.observe)
            if body.size + exchange.num_sent > TRIM_BYTES and not self._trims_soon:
                self._trims_soon = True
                asyncio.get_running_loop().call_later(TRIM_AFTER_S, self._trim)

    def _trim(self) -> None:
        self._trims_soon = False
        with contextlib.suppress(RuntimeError):  # the server is ending
            asyncio.get_running_loop().run_in_executor(None, give_back)

    def _most_body(self, route: Route[S], exchange: HttpExchange) -> int:
        """Largest body; 0 if the route reads none or is open to everybody."""
        has_none = route.guard == auth.OPEN or exchange.request.method in ("GET", "HEAD")
        return 0 if has_none else self._max_body

    async def _admit(self, exchange: HttpExchange, held: contextlib.ExitStack) -> Route[S] | None:
        """The route; None if a response was sent.

        The key is checked before the path, so that strangers do not learn which paths exist.

        Args:
            held: counts the request for its caller until it is closed.
        """
        route = self._find(exchange)
        if route is not None:
            exchange.dialect, exchange.route = route.dialect, route.path
        host = exchange.request.header(b"host")
        exchange.page = self._guard.check_origin(
            host, exchange.request.header(b"origin"), exchange.request.header(b"sec-fetch-site")
        )
        if exchange.request.method == "OPTIONS":
            await exchange.whole(b"", 204, "text/plain", _options(route, exchange))
            return None
        verdict = self._guard.judge(
            route.guard if route else auth.KEY,
            _credentials(exchange),
            exchange.request.peer,
            host,
            exchange.page,
        )
        if verdict.status == auth.UNAUTHORIZED and route is not None and route.locked is not None:
            await route.locked(exchange, self.state)
            return None
        if verdict.status == auth.UNAUTHORIZED:
            await exchange.json(exchange.dialect.unauthorized, 401, {"www-authenticate": "Bearer"})
            return None
        if verdict.status != 200:
            raise RequestError(verdict.text, status=verdict.status, code="forbidden")
        if route is None:
            raise no_route(exchange.request.path, self.routes)
        named = exchange.request.headers.get(auth.TENANT.encode())
        if self.state.signer is not None and named and route.guard != auth.OPEN:
            method, path = exchange.request.method, exchange.request.path
            verdict = self.state.signer.read(named.decode("latin-1"), verdict, method, path)
        held.enter_context(self.state.keys.counted(verdict.caller))
        exchange.context.tenant, exchange.context.is_admin = verdict.caller.tenant, verdict.is_admin
        exchange.context.key_name = self.state.keys.name_of(verdict.caller.tenant)
        CALLER.set(verdict.caller.tenant)
        exchange.is_probe = route.guard == auth.OPEN
        if not await self._accepts(route, exchange):
            return None
        return route

    def _find(self, exchange: HttpExchange) -> Route[S] | None:
        path = exchange.request.path
        if self._root and path.startswith(self._root + "/"):
            path = path[len(self._root) :]
        if route := self.routes.get(path):
            return route
        for prefix, route in self.routes.items():
            if prefix.endswith("/") and prefix != "/" and path.startswith(prefix):
                exchange.request.tail = path[len(prefix) :]
                return route
        return None

    async def _accepts(self, route: Route[S], exchange: HttpExchange) -> bool:
        """Whether the route accepts the method and encoding; if not, a response was sent."""
        method = "GET" if exchange.request.method == "HEAD" else exchange.request.method
        if method not in route.methods:
            error = RequestError(
                f"{route.path} answers {', '.join(route.methods)} only, not "
                f"{exchange.request.method}",
                status=405,
                code="method_not_allowed",
            )
            await exchange.json(
                exchange.dialect.error_body(error), 405, {"allow": ", ".join(route.methods)}
            )
            return False
        if exchange.request.headers.get(b"content-encoding", b"identity") != b"identity":
            raise RequestError("compressed bodies are not accepted", code="unsupported_encoding")
        return True

    async def _run(self, route: Route[S], exchange: HttpExchange, receive: Receive) -> None:
        """Run the handler until it ends, the client leaves, time is up or `stop` is called."""
        exchange.context.deadline_s = deadline_of(exchange.request.headers, exchange.began_s)
        exchange.work = asyncio.create_task(route.handler(exchange, self.state))
        watch = asyncio.create_task(_watch(exchange, receive))
        loop = asyncio.get_running_loop()
        left_s = exchange.context.time_left_s()
        timer = None if left_s is None else loop.call_later(left_s, exchange.stop, too_late())
        try:
            await exchange.work
        except asyncio.CancelledError:
            if exchange.ending is None:
                raise
            if isinstance(exchange.ending, RequestError):
                await _quietly(exchange.fail(exchange.ending))
        finally:
            watch.cancel()
            if timer is not None:
                timer.cancel()


def _options(route: Route | None, exchange: HttpExchange) -> dict[str, str]:
    """Headers of the answer to OPTIONS, with CORS headers for a permitted page."""
    allowed = ", ".join((*route.methods, "OPTIONS")) if route else "OPTIONS"
    if not exchange.page:
        return {"allow": allowed}
    wanted = exchange.request.header(b"access-control-request-headers")
    return {
        "allow": allowed,
        "access-control-allow-methods": allowed,
        "access-control-allow-headers": wanted if _HEADER_NAMES.fullmatch(wanted) else "",
        "access-control-max-age": "600",
    }


def no_route(path: str, routes: Collection[str]) -> RequestError:
    """404 with a suggestion of the nearest path."""
    near = _nearest(path, [known for known in routes if not known.endswith("/")])
    hint = f"Did you mean {near}?" if near else "GET /openapi.json lists the routes"
    return RequestError(f"no route {printable(path, 100)}", status=404, code="not_found", hint=hint)


def _nearest(path: str, known: Sequence[str]) -> str:
    """A known path that contains this one, is contained in it, or is similar; "" = none."""
    path = path.lower().rstrip("/")
    if not 1 < len(path) <= _LONGEST_GUESSED:
        return ""
    if longer := [one for one in known if one.endswith(path)]:
        return min(longer, key=len)
    if shorter := [one for one in known if path.endswith(one)]:
        return max(shorter, key=len)
    return next(iter(difflib.get_close_matches(path, known, n=1, cutoff=0.75)), "")


def _credentials(exchange: HttpExchange) -> bytes:
    """The Authorization header, or the key of the header x-api-key in that form."""
    given = exchange.request.headers.get(b"authorization", b"")
    key = exchange.request.headers.get(b"x-api-key", b"")
    return b"Bearer " + key if key and not given else given


async def _watch(exchange: HttpExchange, receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    exchange.stop(ClientGone())


def _clear_traceback(error: BaseException | None) -> None:
    """Clear the traceback of a refusal: its frames keep the whole body in memory."""
    while error is not None:
        context = error.__context__
        error.__traceback__ = error.__context__ = None
        error = context


async def _quietly(answer: Awaitable[None]) -> None:
    """Send an error to a client that may have gone."""
    try:
        await answer
    except (ClientGone, OSError):
        log.debug("client left before its error was sent")


async def _lifespan(receive: Receive, send: Send) -> None:
    while True:
        kind = (await receive())["type"]
        await send({"type": f"{kind}.complete"})
        if kind == "lifespan.shutdown":
            return


class AccessLog:
    """Logs HTTP requests at their end.

    Args:
        level: "info" and "debug" log every request, whatever --log-level is.
    """

    def __init__(self, level: str) -> None:
        self._logged: set[tuple[object, ...]] = set()
        self._shows = level in ("debug", "info")
        if self._shows:
            log.setLevel(logging.INFO)

    def log_end(self, exchange: HttpExchange, has_begun: bool, observe: ObserveConfig) -> None:
        """Log the end of an HTTP request.

        Args:
            has_begun: it sent requests to the engine, which logs their end.
            observe: the current settings; operators may change them.
        """
        is_refusal = not (exchange.status < _REFUSED or has_begun or exchange.is_probe)
        if not (is_refusal or exchange.context.warnings or self._shows):
            return
        path = printable(exchange.request.path, _PATH_CHARS)
        if self._shows:
            log.info(
                "http method=%s path=%s status=%d seconds=%.3f peer=%s id=%s",
                printable(exchange.request.method, 20),
                path,
                exchange.status,
                time.monotonic() - exchange.began_s,
                exchange.request.peer,
                exchange.context.id,
            )
        as_json = observe.logs_requests_json if observe.log_requests else observe.logs_json
        place = printable(exchange.route, _PATH_CHARS) or path
        for text in exchange.context.warnings:
            if self._is_new("warning", place, text.partition(":")[0]):
                what = printable(text, _PATH_CHARS)
                write_line("not honoured in full", {"route": place, "what": what, **_ONCE}, as_json)
        if not is_refusal:
            return
        facts = {
            "id": exchange.context.id,
            "route": path,
            "status": exchange.status,
            "reason": exchange.refusal or None,
            "field": printable(exchange.at_fault, _PATH_CHARS) or None,
            "peer": exchange.request.peer,
            "key": exchange.context.key_name or None,
        }
        if observe.log_requests:
            write_line("request refused", facts, as_json)
        elif self._is_new("refusal", place, *(facts[name] for name in _KIND)):
            write_line("request refused", {**facts, **_ONCE}, as_json)

    def _is_new(self, *kind: object) -> bool:
        """Whether this kind was not logged before, and is among the first MAX_KINDS."""
        if kind in self._logged or len(self._logged) > MAX_KINDS:
            return False
        self._logged.add(kind)
        if len(self._logged) > MAX_KINDS:
            write_line("too many kinds of refusals and warnings", {"told": MAX_KINDS}, False)
            return False
        return True


def _traced(exchange: HttpExchange) -> TracedCall:
    method, route = exchange.request.method, exchange.route

    def status(error: RequestError | None) -> dict[str, int]:
        found = exchange.status if exchange.started or error is None else error.status
        return {"http.response.status_code": found} if found else {}

    facts = {"http.request.method": method, "http.route": route}
    return TracedCall(exchange.context, exchange.began_s, f"{method} {route}", facts, status)
