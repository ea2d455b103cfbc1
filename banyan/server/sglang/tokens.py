"""/tokenize and /detokenize: text or messages to ids and back."""

from dataclasses import replace
from typing import cast

import msgspec

from banyan.base.errors import RequestError
from banyan.parsers.tool_calls.definitions import read_tools
from banyan.requests.prompts import encode_texts
from banyan.requests.request_spec import RequestContext
from banyan.server.errors import Json
from banyan.server.http.exchange import HttpExchange, read_prompt
from banyan.server.openai.prompts import Conversation, chat_ids, check_count, ids_text
from banyan.server.openai.schema import Message, typed
from banyan.server.state import ServerState, Service

MAX_TOKENIZED = 1 << 17
"""Tokens of one text that /tokenize counts, where the context is shorter than that."""
MAX_IN_ALL = 4 * MAX_TOKENIZED
"""Tokens of all texts of one request."""


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


async def tokenize(exchange: HttpExchange, state: ServerState) -> None:
    service = state.admit()
    context = exchange.context
    found, is_list = await read_prompt(
        exchange, lambda raw: _tokenized(context, service, raw), service.media
    )
    await exchange.json(
        {
            "tokens": found if is_list else found[0],
            "count": [len(f) for f in found] if is_list else len(found[0]),
            "max_model_len": service.limits.context_length,
        }
    )


def _tokenized(
    context: RequestContext, service: Service, raw: Json
) -> tuple[list[list[int]], bool]:
    """Token ids of each prompt, and whether they are answered as a list."""
    request = typed(raw, TokenizeRequest)
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
        return [chat_ids(context, service, chat).ids], False
    texts = [request.prompt] if isinstance(request.prompt, str) else request.prompt or []
    check_count(len(texts), service, "prompt")
    # A text that is too long for the model may be counted all the same, to be cut by the caller.
    limits = service.limits
    most = replace(limits, context_length=max(limits.context_length, MAX_TOKENIZED))
    most = replace(most, max_request_tokens=0, auto_truncate=False)
    most = replace(most, max_prompt_tokens=min(most.max_prompt_tokens, MAX_IN_ALL))
    found = encode_texts(service.required_tokenizer(), texts, most, request.add_special_tokens)
    return found, isinstance(request.prompt, list)


async def detokenize(exchange: HttpExchange, state: ServerState) -> None:
    service = state.admit()
    texts, is_list = await exchange.request.read(lambda raw: _detokenized(service, raw))
    await exchange.json({"text": texts if is_list else texts[0]})


def _detokenized(service: Service, raw: Json) -> tuple[list[str], bool]:
    """The text of each list of ids, and whether they are answered as a list."""
    request = typed(raw, DetokenizeRequest)
    tokens = request.tokens
    is_list = bool(tokens) and all(isinstance(t, list) for t in tokens)
    given = cast(list[list[int]], tokens if is_list else [tokens])  # `ids_text` checks the ids
    check_count(len(given), service, "tokens")
    return [ids_text(service, ids, request.skip_special_tokens) for ids in given], is_list
