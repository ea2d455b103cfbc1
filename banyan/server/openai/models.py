"""/v1/models in the form of OpenAI and Anthropic at once; the model and adapter of a request."""

import re
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import cast

from banyan.base.errors import RequestError
from banyan.lora.adapter_files import AdapterPlace
from banyan.requests.lora_names import one_each
from banyan.requests.request_spec import RequestContext
from banyan.server.http.exchange import HttpExchange
from banyan.server.state import ServerState

_MODEL_NAME = re.compile(r"[\w./+@ -]{1,256}")


async def list_models(exchange: HttpExchange, state: ServerState) -> None:
    model_configs = [
        _model_config(state),
        *(_adapter(state, place) for place in state.adapters.places()),
    ]
    page = {
        "has_more": False,
        "first_id": model_configs[0]["id"],
        "last_id": model_configs[-1]["id"],
    }
    await exchange.json({"object": "list", "data": model_configs, **page})


async def show_model(exchange: HttpExchange, state: ServerState) -> None:
    """One model or adapter by name; names may hold slashes."""
    if exchange.request.tail == state.served_name:
        await exchange.json(_model_config(state))
        return
    for place in state.adapters.places():
        if exchange.request.tail == place.name:
            await exchange.json(_adapter(state, place))
            return
    raise no_such_model(exchange.request.tail)


def _adapter(state: ServerState, place: AdapterPlace) -> dict[str, object]:
    """A LoRA adapter as a model whose parent is the served model."""
    own = {"id": place.name, "display_name": place.name, "root": place.path}
    return {**_model_config(state), **own, "parent": state.served_name}


def _model_config(state: ServerState) -> dict[str, object]:
    name = state.served_name
    service = state.service
    length = service.limits.context_length if service else None
    return {
        "id": name,
        "object": "model",
        "created": state.created,
        "owned_by": "sglang",  # whose fields these are: gateways (smg) give pairs of these rooms
        "root": name,
        "parent": None,
        "max_model_len": length,
        "type": "model",
        "display_name": name,
        "created_at": datetime.fromtimestamp(state.created, UTC).isoformat(),
        "lifecycle": "active",
        "max_input_tokens": length,
    }


def model_and_adapter(
    name: str, state: ServerState, context: RequestContext, lora_path: object = None
) -> tuple[str, str]:
    """The model name to answer with, and the adapter that answers ("" for none). `name` may be the
    adapter's own, or BASE:ADAPTER.

    Raises:
        RequestError: 404 for an unknown model or adapter.
    """
    model, (adapter,) = _model_and_adapters(name, state, context, [lora_path])
    return model, adapter


def model_and_adapters(
    name: str, state: ServerState, context: RequestContext, lora_path: object, count: int
) -> tuple[str, tuple[str, ...]]:
    """The same for `count` prompts: the adapter of each, where `lora_path` is a list.

    Raises:
        RequestError: as there; the list does not have one entry for each prompt.
    """
    if not isinstance(lora_path, list):
        model, adapter = model_and_adapter(name, state, context, lora_path)
        return model, (adapter,) * count
    entries = one_each(cast(list[object], lora_path), count)
    if not entries:
        return model_and_adapter(name, state, context)[0], ()
    return _model_and_adapters(name, state, context, entries)


def _model_and_adapters(
    name: str, state: ServerState, context: RequestContext, paths: Sequence[object]
) -> tuple[str, tuple[str, ...]]:
    asked = ["" if path in (None, "") else state.adapters.named(path) for path in paths]
    named = _adapter_in(name, state)
    if not named:
        return check_model(name, state.served_name, context), tuple(asked)
    if any(adapter and adapter != named for adapter in asked):
        raise RequestError(
            f"model names the adapter {named!r}, lora_path another one", param="lora_path"
        )
    return name, (named,) * len(paths)


def _adapter_in(name: str, state: ServerState) -> str:
    names, served = state.adapters, state.served_name
    if name in ("", "default", served) or not names.is_enabled:
        return ""
    if name in names or names.has_left(name):
        return names.named(name, "model", 404)
    if name.startswith(f"{served}:"):
        return names.named(name.removeprefix(f"{served}:"), "model", 404)
    base, mark, adapter = name.partition(":")
    if not mark:
        return ""
    raise RequestError(
        f"The model {base[:80]!r} does not exist; {served!r} is served, and takes the adapter as "
        f"{served}:{adapter[:80]}",
        param="model",
        status=404,
        code="model_not_found",
    )


def check_model(name: str, served: str, context: RequestContext) -> str:
    """The model name to answer with; RequestError 404 for illegal or, if strict, unknown names."""
    if not name or name in (served, "default"):
        return name or served
    legal = _MODEL_NAME.fullmatch(name) is not None and ".." not in name
    if context.is_strict or not legal:
        raise no_such_model(name)
    context.warn(f"model: {name!r} is not served; {served!r} answers")
    return name


def no_such_model(name: str) -> RequestError:
    shown = name if len(name) <= 80 else name[:80] + "…"
    return RequestError(
        f"The model '{shown}' does not exist", param="model", status=404, code="model_not_found"
    )
