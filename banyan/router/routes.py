"""The routes of a router: forwarded to workers, answered by the router, or refused.

Refused routes concern the state of one worker, and a router does not know which one. The lists of
models are in the form of OpenAI and of Ollama. With models in several places (--enable-igw) there
is the list alone.
"""

import hashlib
import time
from datetime import UTC, datetime, timedelta

from banyan.base.errors import RequestError
from banyan.router import admin as manage
from banyan.router.config import RouterConfig
from banyan.router.forward import forward, forward_response, forward_to_any, forward_to_owner
from banyan.router.models import ModelServer, ModelServers, State, model_not_found
from banyan.router.state import RouterState
from banyan.server.errors import Json
from banyan.server.http import auth
from banyan.server.http.app import App
from banyan.server.http.dialect import ANTHROPIC, OLLAMA, OLLAMA_VERSION, OPENAI, RESPONSES, Dialect
from banyan.server.http.exchange import SEND_TIMEOUT_S, HttpExchange
from banyan.server.http.route import Route

_GET = ("GET",)
_POST = ("POST",)
_BOTH = ("GET", "POST")
_PUT = ("POST", "PUT")

Routes = list[Route[RouterState]]

_GENERATED: tuple[tuple[Dialect, tuple[str, ...], tuple[str, ...]], ...] = (
    (OPENAI, _POST, ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/invocations")),
    (OPENAI, _POST, ("/v1/classify", "/v1/score", "/v2/rerank", "/rerank", "/vertex_generate")),
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


_NEVER_S = 36500 * 86400.0


def model_routes(is_local: bool) -> list[Route[RouterState]]:
    """The routes of a router that knows its models.

    Args:
        is_local: the router starts the servers itself.
    """
    get, post, adm = ("GET",), ("POST",), auth.ADMIN
    listing = [
        Route("/v1/models", get, list_models, about="the models, with their state"),
        Route("/v1/models/", get, show_model, about="one of them"),
    ]
    if not is_local:
        return listing
    own = [
        Route("/models/load", post, load, adm, about="start the server of a model"),
        Route("/models/unload", post, unload, adm, about="stop the server of a model"),
    ]
    ollama = [
        Route("/api/tags", get, tags, dialect=OLLAMA, about="the models"),
        Route("/api/ps", get, running, dialect=OLLAMA, about="the loaded models"),
        Route("/api/version", get, version, dialect=OLLAMA, about="of Ollama's API"),
        Route("/api/pull", post, pull, adm, OLLAMA, about="download a model"),
        Route("/api/delete", ("DELETE",), delete, adm, OLLAMA, about="delete a model"),
    ]
    return [*listing, *own, *ollama]


async def list_models(exchange: HttpExchange, state: RouterState) -> None:
    found = [_entry(model) for model in await _all(state.models)] if state.models else _of(state)
    ids = [entry["id"] for entry in found]
    page: Json = {"first_id": ids[0], "last_id": ids[-1]} if ids else {}
    await exchange.json({"object": "list", "data": found, "has_more": False, **page})


async def show_model(exchange: HttpExchange, state: RouterState) -> None:
    name = exchange.request.tail
    found = [_entry(model) for model in await _all(state.models)] if state.models else _of(state)
    one = next((entry for entry in found if entry["id"] == name), None)
    if one is None:
        raise model_not_found(name, [str(entry["id"]) for entry in found])
    await exchange.json(one)


async def load(exchange: HttpExchange, state: RouterState) -> None:
    """llama-server's form: {"model": NAME}; answers when the model can be asked."""
    model = await _named(exchange, state)
    await _models(state).load(model)
    await exchange.json({"success": True, "model": model.name})


async def unload(exchange: HttpExchange, state: RouterState) -> None:
    model = await _named(exchange, state)
    await _models(state).unload(model)
    await exchange.json({"success": True, "model": model.name})


async def tags(exchange: HttpExchange, state: RouterState) -> None:
    await exchange.json({"models": [_tag(m) for m in await _all(state.models)]})


async def running(exchange: HttpExchange, state: RouterState) -> None:
    loaded = [m for m in await _all(state.models) if m.state is State.LOADED]
    await exchange.json(
        {
            "models": [
                {**_tag(m), "expires_at": _expiry(m), "size_vram": 0, "size": m.size_bytes}
                for m in loaded
            ]
        }
    )


async def version(exchange: HttpExchange, state: RouterState) -> None:
    await exchange.json({"version": OLLAMA_VERSION})


async def pull(exchange: HttpExchange, state: RouterState) -> None:
    """Download a model by the name that `banyan pull` takes; it is served at once."""
    fields = await exchange.request.json_object()
    name = _name_in(fields)
    if fields.get("stream") is False:
        trouble = await _hub(state, "pull", name)
        if trouble:
            raise RequestError(trouble, status=502, code="pull_failed")
        await exchange.json({"status": "success"})
        return
    await exchange.begin_events()
    await exchange.event({"status": f"pulling {name}"})
    trouble = await _hub(state, "pull", name)
    await exchange.event({"error": trouble} if trouble else {"status": "success"})
    await exchange.end_events()


async def delete(exchange: HttpExchange, state: RouterState) -> None:
    """Unload a model and delete its files from the hub's cache."""
    model = await _named(exchange, state)
    await _models(state).unload(model)
    if trouble := await _hub(state, "rm", model.source.words[0]):
        raise RequestError(trouble, status=400, code="not_deleted")
    await exchange.whole(b"", 200, "text/plain")


async def _hub(state: RouterState, verb: str, name: str) -> str:
    models = _models(state)
    trouble = await models.host.change_hub(verb, name)
    await models.refresh()
    return trouble


def _models(state: RouterState) -> ModelServers:
    assert state.models is not None, "these routes are there with models alone"
    return state.models


async def _all(models: ModelServers | None) -> list[ModelServer]:
    if models is None:
        return []
    await models.refresh_sometimes()
    return models.all


async def _named(exchange: HttpExchange, state: RouterState) -> ModelServer:
    """The model that the body names; 404 if there is none of this name."""
    models = _models(state)
    name = _name_in(await exchange.request.json_object())
    model = await models.find(name)
    if not models.is_name_of(model, name):  # the default model
        raise model_not_found(name, [m.name for m in models.all])
    return model


def _name_in(fields: Json) -> str:
    name = fields.get("model") or fields.get("name")
    if not isinstance(name, str) or not name or name.startswith("-") or len(name) > 400:
        raise RequestError("model must be the name of a model", param="model")
    return name


def _entry(model: ModelServer) -> Json:
    status: Json = {"value": model.state.value}
    if model.trouble:
        status |= {"failed": True, "reason": model.trouble}
    return {
        "id": model.name,
        "object": "model",
        "type": "model",
        "display_name": model.name,
        "created": int(time.time()),
        "owned_by": "banyan",
        "status": status,
    }


def _of(state: RouterState) -> list[Json]:
    """The models of workers that others have started."""
    names = sorted({name for worker in state.pool.workers for name in worker.models})
    return [
        {"id": name, "object": "model", "created": int(time.time()), "owned_by": "banyan"}
        for name in names
    ]


def _tag(model: ModelServer) -> Json:
    return {
        "name": model.name,
        "model": model.name,
        "modified_at": datetime.now(UTC).isoformat(),
        "size": model.source.size_bytes,
        "digest": hashlib.sha256("\0".join((model.name, *model.source.words)).encode()).hexdigest(),
        "details": {"parent_model": "", "format": "", "family": "", "families": []},
    }


def _expiry(model: ModelServer) -> str:
    left_s = _NEVER_S if model.expires_s is None else max(0.0, model.expires_s - time.monotonic())
    return (datetime.now(UTC) + timedelta(seconds=left_s)).isoformat()
