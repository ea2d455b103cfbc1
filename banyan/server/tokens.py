"""/tokenize and /detokenize: text or messages to ids and back."""

import msgspec

from banyan.base.errors import RequestError
from banyan.frontend.tools.definitions import read_tools
from banyan.server.exchange import Exchange
from banyan.server.openai.fields import typed
from banyan.server.openai.schema import Message
from banyan.server.prompts import Conversation, chat_ids, ids_text, text_ids
from banyan.server.state import ServerState


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    model: str = ""
    prompt: str | list[str] | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, object] | None = None
    tools: list[object] | None = None


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    tokens: list[object]
    model: str = ""
    skip_special_tokens: bool = True


async def tokenize(exchange: Exchange, state: ServerState) -> None:
    service = state.admit()
    request = typed(await exchange.json_object(), TokenizeRequest)
    if (request.prompt is None) == (request.messages is None):
        raise RequestError("exactly one of prompt and messages must be given", param="prompt")
    if request.messages is not None:
        with_prompt = request.add_generation_prompt
        chat = Conversation(
            request.messages,
            request.chat_template_kwargs or {},
            request.continue_final_message,
            True if with_prompt is None else with_prompt,
            list(read_tools(request.tools or []).definitions.values()) or None,
        )
        found = [await chat_ids(service, chat)]
    else:
        texts = [request.prompt] if isinstance(request.prompt, str) else request.prompt or []
        found = [await text_ids(service, t, request.add_special_tokens) for t in texts]
    is_list = isinstance(request.prompt, list)
    await exchange.json(
        {
            "tokens": found if is_list else found[0],
            "count": [len(f) for f in found] if is_list else len(found[0]),
            "max_model_len": service.limits.context_length,
        }
    )


async def detokenize(exchange: Exchange, state: ServerState) -> None:
    service = state.admit()
    request = typed(await exchange.json_object(), DetokenizeRequest)
    tokens = request.tokens
    is_list = bool(tokens) and all(isinstance(t, list) for t in tokens)
    texts = [
        await ids_text(service, ids, request.skip_special_tokens)
        for ids in (tokens if is_list else [tokens])
    ]
    await exchange.json({"text": texts if is_list else texts[0]})
