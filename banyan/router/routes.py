"""The routes of a router: forwarded to workers, answered by the router, or refused.

Refused routes concern the state of one worker, and a router does not know which one.
"""

from banyan.base.errors import RequestError
from banyan.router import admin as manage
from banyan.router.config import RouterConfig
from banyan.router.forward import forward, forward_response, forward_to_any, forward_to_owner
from banyan.router.model_routes import model_routes
from banyan.router.state import RouterState
from banyan.server.http import auth
from banyan.server.http.app import App
from banyan.server.http.dialect import ANTHROPIC, OLLAMA, OPENAI, RESPONSES, Dialect
from banyan.server.http.exchange import SEND_TIMEOUT_S, HttpExchange
from banyan.server.http.route import Route

_GET = ("GET",)
_POST = ("POST",)
_BOTH = ("GET", "POST")
_PUT = ("POST", "PUT")

Routes = list[Route[RouterState]]

_GENERATED: tuple[tuple[Dialect, tuple[str, ...], tuple[str, ...]], ...] = (
    (OPENAI, _POST, ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/invocations")),
    (OPENAI, _POST, ("/v1/classify", "/v1/score", "/vertex_generate")),
    (OPENAI, _POST, ("/v1/audio/transcriptions", "/v1/audio/translations")),
    (OPENAI, _PUT, ("/generate", "/encode", "/classify", "/v1/rerank")),
    (ANTHROPIC, _POST, ("/v1/messages",)),
    (OLLAMA, _POST, ("/api/chat", "/api/generate", "/api/embed", "/api/embeddings")),
)
"""Dialect, methods and paths of requests that run the model."""

_STEPLESS: tuple[tuple[Dialect, tuple[str, ...], tuple[str, ...]], ...] = (
    (OPENAI, _POST, ("/tokenize", "/v1/tokenize", "/detokenize", "/v1/detokenize")),
    (OPENAI, _POST, ("/parse_function_call", "/separate_reasoning")),
    (OPENAI, _GET, ("/v1/models", "/v1/models/", "/model_info", "/get_model_info", "/version")),
    (OPENAI, _GET, ("/weight_version", "/get_weight_version")),
    (RESPONSES, _POST, ("/v1/responses/input_tokens",)),
    (ANTHROPIC, _POST, ("/v1/messages/count_tokens",)),
    (OLLAMA, _POST, ("/api/show",)),
    (OLLAMA, _GET, ("/api/tags", "/api/ps", "/api/version")),
)
"""Dialect, methods and paths that any worker answers without running the model."""

_ONE_KEEPS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("/v1/files", "/v1/files/", "/v1/batches", "/v1/batches/"), _BOTH),
    **dict.fromkeys(("/open_session", "/close_session"), _BOTH),
}
"""Paths about state that one worker keeps."""

_SINGLE_WORKER: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("/pause_generation", "/continue_generation", "/configure_logging"), _BOTH),
    **dict.fromkeys(("/update_weights_from_disk", "/update_weight_version"), _POST),
    **dict.fromkeys(("/release_memory_occupation", "/resume_memory_occupation"), _BOTH),
    **dict.fromkeys(("/start_profile", "/stop_profile", "/get_weights_by_name"), _BOTH),
    "/flight_recorder": _GET,
    **{f"/{verb}_expert_distribution_record": _BOTH for verb in ("start", "stop", "dump")},
}
"""Paths that inspect or change one worker."""


async def _kept_elsewhere(exchange: HttpExchange, state: RouterState) -> None:
    raise RequestError(
        "what this route is about is kept by one server, and a router does not know by which",
        status=501,
        code="not_routed",
        hint="Send it to a worker itself: GET /workers lists them",
    )


async def _for_one(exchange: HttpExchange, state: RouterState) -> None:
    raise RequestError(
        "a router does not operate its workers one by one",
        status=501,
        code="not_routed",
        hint="Send it to each worker itself: GET /workers lists them",
    )


def all_routes(settings: RouterConfig | None = None) -> Routes:
    table = [*_own(), *_answered(), *_refused(), _index()]
    if settings is None or not settings.pool.by_model:
        return table
    own = model_routes(settings.models.is_on)
    paths = {route.path for route in own}
    return [*own, *(route for route in table if route.path not in paths)]


def _own() -> Routes:
    adm, open_ = auth.ADMIN, auth.OPEN
    return [
        Route("/livez", _GET, manage.livez, open_, about="the router answers"),
        Route("/liveness", _GET, manage.livez, open_, about="as /livez"),
        Route("/readyz", _GET, manage.readyz, open_, about="a worker would take a request"),
        Route("/readiness", _GET, manage.readyz, open_, about="as /readyz"),
        Route("/ready", _GET, manage.readyz, open_, about="as /readyz"),
        Route("/health", _GET, manage.health, open_, about="a worker can be asked"),
        Route("/ping", _GET, manage.health, about="as /health"),
        Route("/health_generate", _GET, manage.health_generate, about="each makes a token"),
        Route("/metrics", _GET, manage.show_metrics, open_, about="figures for Prometheus"),
        Route("/server_info", _GET, manage.server_info, about="of the workers and the router"),
        Route("/get_server_info", _GET, manage.server_info, about="as /server_info"),
        Route("/get_load", _GET, manage.loads, about="load of each worker"),
        Route("/get_loads", _GET, manage.loads, about="as /get_load"),
        Route("/v1/loads", _GET, manage.loads, about="load of each worker, in full"),
        Route("/workers", _BOTH, manage.workers, adm, about="list the workers, or add one"),
        Route("/workers/", ("GET", "DELETE"), manage.worker, adm, about="one of them"),
        Route("/list_workers", _GET, manage.list_workers, adm, about="their addresses"),
        Route("/add_worker", _POST, manage.add_worker, adm, about="add ?url="),
        Route("/remove_worker", _POST, manage.remove_worker, adm, about="remove ?url="),
        Route("/flush_cache", _BOTH, manage.broadcast, adm, about="empty all caches"),
        Route("/pin_prefix", _POST, manage.pin_prefix, adm, about="keep a prompt at all"),
        Route("/unpin_prefix", _POST, manage.unpin_prefix, adm, about="let it go at all"),
        Route("/pinned_prefixes", _GET, manage.pinned_prefixes, adm, about="what each keeps"),
        Route("/requests", _GET, manage.broadcast, auth.OWN, about="what runs at each worker"),
        Route("/abort_request", _POST, manage.broadcast, auth.OWN, about="end requests"),
    ]


def _answered() -> Routes:
    kept = ("GET", "POST", "DELETE")
    return [
        *(
            Route(path, methods, handler, dialect=dialect, about="answered by a worker")
            for handler, table in ((forward, _GENERATED), (forward_to_any, _STEPLESS))
            for dialect, methods, paths in table
            for path in paths
        ),
        Route(
            "/v1/responses",
            _POST,
            forward_response,
            dialect=RESPONSES,
            about="answered by a worker",
        ),
        Route(
            "/v1/responses/",
            kept,
            forward_to_owner,
            dialect=RESPONSES,
            about="by the one that kept it",
        ),
    ]


def _refused() -> Routes:
    kept = ("GET", "POST", "DELETE")
    return [
        *(
            Route(path, kept if path.endswith("/") else methods, _kept_elsewhere, about="refused")
            for path, methods in _ONE_KEEPS.items()
        ),
        *(
            Route(path, methods, _for_one, auth.ADMIN, about="refused")
            for path, methods in _SINGLE_WORKER.items()
        ),
    ]


def _index() -> Route[RouterState]:
    async def index(exchange: HttpExchange, state: RouterState) -> None:
        routes = all_routes(state.settings)
        await exchange.json({route.path: route.about for route in routes})

    return Route("/", _GET, index, about="these routes")


def create_app(state: RouterState, send_timeout_s: float = SEND_TIMEOUT_S) -> App[RouterState]:
    """The ASGI application of a router; health routes answer before any worker is ready."""
    return App(state, all_routes(state.settings), send_timeout_s)
