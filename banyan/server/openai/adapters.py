"""Which adapter a request of the OpenAI routes, or of the APIs that are translated to them, names:
by `lora_path`, or in the place of the model.
"""

from collections.abc import Callable

from banyan.base.errors import RequestError
from banyan.server.http.state import ServerState
from banyan.server.openai.fields import check_model

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


def model_alone(name: str, state: ServerState, warn: Warn) -> str:
    """The model name to answer with, where no adapter can."""
    model, adapter = model_and_adapter(name, state, warn)
    if adapter:
        raise RequestError(
            f"The adapter {adapter!r} answers with text; vectors and scores are the base's alone",
            param="model",
            hint=f"Name {state.served_name}.",
        )
    return model


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
