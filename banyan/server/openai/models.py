"""/v1/models: what is served here, for clients of OpenAI and of Anthropic at once."""

from datetime import UTC, datetime

from banyan.server.http.exchange import Exchange
from banyan.server.http.state import ServerState
from banyan.server.openai.fields import no_such_model


async def list_models(exchange: Exchange, state: ServerState) -> None:
    name = state.served_name
    page = {"has_more": False, "first_id": name, "last_id": name}
    await exchange.json({"object": "list", "data": [_card(state)], **page})


async def show_model(exchange: Exchange, state: ServerState) -> None:
    """One model by name; names may hold slashes."""
    if exchange.tail != state.served_name:
        raise no_such_model(exchange.tail)
    await exchange.json(_card(state))


def _card(state: ServerState) -> dict[str, object]:
    name = state.served_name
    service = state.service
    length = service.limits.context_length if service else None
    return {
        "id": name,
        "object": "model",
        "created": state.created,
        "owned_by": "banyan",
        "root": name,
        "parent": None,
        "max_model_len": length,
        "type": "model",
        "display_name": name,
        "created_at": datetime.fromtimestamp(state.created, UTC).isoformat(),
        "lifecycle": "active",
        "max_input_tokens": length,
    }
