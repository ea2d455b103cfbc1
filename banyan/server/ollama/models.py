"""Facts about models for Ollama's clients: /api/tags, /api/show, /api/ps and /api/version.

There is one model, and it stays loaded as long as the server runs.
"""

import hashlib
from datetime import UTC, datetime, timedelta
from pathlib import Path

from banyan.base.errors import RequestError
from banyan.server.errors import Json
from banyan.server.http.dialect import OLLAMA_VERSION
from banyan.server.http.exchange import HttpExchange
from banyan.server.ollama.translate import (
    SAMPLING,
    ShowRequest,
    model_and_adapter_of,
    read,
    reporter,
)
from banyan.server.openai.schema import SAMPLING as NATIVE
from banyan.server.state import ServerState, Service

NO_LIBRARY = "this server has one model, given at its start; it pulls, makes and deletes none"

_NEVER = timedelta(days=36500)


async def tags(exchange: HttpExchange, state: ServerState) -> None:
    model = _model(state, state.admit())
    model |= {"modified_at": _loaded_at(state).isoformat()}
    details = {"details": {**_details(state.admit()), "parent_model": state.served_name}}
    names = [place.name for place in state.adapters.places()]
    adapters = [{**model, **details, "name": name, "model": name} for name in names]
    await exchange.json({"models": [model, *adapters]})


async def running(exchange: HttpExchange, state: ServerState) -> None:
    service = state.admit()
    model = _model(state, service)
    expires = (_loaded_at(state) + _NEVER).isoformat()
    length = service.limits.context_length
    await exchange.json({"models": [{**model, "expires_at": expires, "context_length": length}]})


async def show(exchange: HttpExchange, state: ServerState) -> None:
    service = state.admit()
    request = await read(exchange, ShowRequest, reporter(exchange.context))
    name, _ = model_and_adapter_of(request.model or request.name, exchange.context, state)
    await exchange.json(
        {
            "modelfile": f"FROM {state.served_name}\n",
            "parameters": _parameters(service),
            "template": service.chat.template.source if service.chat else "{{ .Prompt }}",
            "details": _details(service),
            "model_info": _facts(service, name),
            "capabilities": _capabilities(service),
            "modified_at": _loaded_at(state).isoformat(),
        }
    )


async def version(exchange: HttpExchange, state: ServerState) -> None:
    await exchange.json({"version": OLLAMA_VERSION})


async def no_library(exchange: HttpExchange, state: ServerState) -> None:
    raise RequestError(
        NO_LIBRARY,
        status=501,
        code="not_available",
        hint="banyan serve --models-dir hub serves every model of this machine, and pulls more",
    )


def _loaded_at(state: ServerState) -> datetime:
    return datetime.fromtimestamp(state.created, UTC)


def _model(state: ServerState, service: Service) -> Json:
    name = state.served_name
    path = service.model_config.path
    identity = f"{path}\0{state.config.model.weight_version}"
    return {
        "name": name,
        "model": name,
        "size": _size_bytes(Path(path)),
        "digest": hashlib.sha256(identity.encode()).hexdigest(),
        "details": _details(service),
    }


def _size_bytes(path: Path) -> int:
    """Size of the weights on disk; 0 if the files are gone."""
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())


def _parameters(service: Service) -> str:
    """Defaults of the options by name, as in a Modelfile."""
    native = {**NATIVE, "max_tokens": "max_new_tokens"}
    values = {
        option: service.chat_defaults.get(native[field]) for option, field in SAMPLING.items()
    }
    return "\n".join(f"{option} {value}" for option, value in values.items() if value is not None)


def _details(service: Service) -> Json:
    model_config = service.model_config
    return {
        "parent_model": "",
        "format": model_config.format,
        "family": model_config.model_type,
        "families": [model_config.model_type],
        "parameter_size": "",
        "quantization_level": model_config.dtype,
    }


def _facts(service: Service, name: str) -> Json:
    model_config = service.model_config
    kind = model_config.model_type
    return {
        "general.architecture": kind,
        "general.basename": name,
        f"{kind}.context_length": service.limits.context_length,
        f"{kind}.embedding_length": model_config.hidden_size,
        f"{kind}.feed_forward_length": model_config.intermediate_size,
        f"{kind}.block_count": model_config.num_layers,
        f"{kind}.attention.head_count": model_config.num_heads,
        f"{kind}.attention.head_count_kv": model_config.num_kv_heads,
        f"{kind}.vocab_size": model_config.vocab_size,
    }


def _capabilities(service: Service) -> list[str]:
    if service.limits.is_embedding:
        return ["embedding"]
    shows_tools = service.chat is not None and service.chat.template.takes_tools
    has_tools = service.parsers.tools is not None and shows_tools
    found = {
        "completion": True,
        "tools": has_tools or service.tool_tag is not None,
        "thinking": service.parsers.reasoning is not None,
        "insert": service.fill_in is not None,
    }
    return [name for name, has in found.items() if has]
