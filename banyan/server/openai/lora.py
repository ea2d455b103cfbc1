"""Which adapter a request of the OpenAI routes, or of the APIs that are translated to them, names:
by `lora_path`, or in the place of the model.
"""

from collections.abc import Callable
from typing import cast

from banyan.base.errors import RequestError
from banyan.requests.lora_names import one_each
from banyan.server.openai.fields import check_model
from banyan.server.state import ServerState

Warn = Callable[[str], None]


def model_and_adapter(
    name: str, state: ServerState, warn: Warn, lora_path: object = None
) -> tuple[str, str]:
    """The model name to answer with, and the adapter that answers ("" for none). `name` may be the
    adapter's own, or BASE:ADAPTER.

    Raises:
        RequestError: 404 for a model or adapter that there is not.
    """
    asked = state.adapters.named(lora_path)
    found = _adapter_in(name, state)
    if asked and found and asked != found:
        raise RequestError(
            f"model names the adapter {found!r}, lora_path another one", param="lora_path"
        )
    if found:
        return name, found
    strict = state.config.server.strict_requests
    return check_model(name, state.served_name, warn, strict), asked


def model_and_adapters(
    name: str, state: ServerState, warn: Warn, lora_path: object, count: int
) -> tuple[str, tuple[str, ...]]:
    """The same for `count` prompts: the adapter of each, where `lora_path` is a list.

    Raises:
        RequestError: as there; the list has not one entry for each prompt.
    """
    if not isinstance(lora_path, list):
        model, adapter = model_and_adapter(name, state, warn, lora_path)
        return model, (adapter,) * count
    entries = one_each(cast(list[object], lora_path), count)
    if not entries:
        return model_and_adapter(name, state, warn)[0], ()
    model, first = model_and_adapter(name, state, warn, entries[0])
    rest = [model_and_adapter(name, state, lambda _: None, entry) for entry in entries[1:]]
    return model, (first, *(adapter for _, adapter in rest))


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
