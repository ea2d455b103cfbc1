"""Which adapter a request of the OpenAI routes, or of the APIs that are translated to them, names:
by `lora_path`, or in the place of the model.
"""

from collections.abc import Sequence
from typing import cast

from banyan.base.errors import RequestError
from banyan.requests.context import RequestContext
from banyan.requests.lora_names import one_each
from banyan.server.openai.fields import check_model
from banyan.server.state import ServerState


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
    asked = [state.adapters.named(path) for path in paths]
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
