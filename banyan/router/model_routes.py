"""Routes about the models of a router: list, load, unload, download and delete them.

Lists are in the form of OpenAI and of Ollama. With models in several places (--enable-igw) there is
the list alone.
"""

import hashlib
import time
from datetime import UTC, datetime, timedelta

from banyan.base.errors import RequestError
from banyan.router.models import ModelServer, ModelServers, State, model_not_found
from banyan.router.state import RouterState
from banyan.server.errors import Json
from banyan.server.http import auth
from banyan.server.http.dialect import OLLAMA, OLLAMA_VERSION
from banyan.server.http.exchange import HttpExchange
from banyan.server.http.route import Route

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
