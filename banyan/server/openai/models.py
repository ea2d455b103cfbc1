"""/v1/models: what is served here, for clients of OpenAI and of Anthropic at once."""

from datetime import UTC, datetime

from banyan.lora.adapter_files import AdapterPlace
from banyan.server.http.exchange import HttpExchange
from banyan.server.openai.fields import no_such_model
from banyan.server.state import ServerState


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
    if exchange.tail == state.served_name:
        await exchange.json(_model_config(state))
        return
    for place in state.adapters.places():
        if exchange.tail == place.name:
            await exchange.json(_adapter(state, place))
            return
    raise no_such_model(exchange.tail)


def _adapter(state: ServerState, place: AdapterPlace) -> dict[str, object]:
    """An adapter as a model whose parent is the one that it is served beside."""
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
