"""Routes that need no engine: /tokenize and /detokenize turn text or messages to ids and back;
/parse_function_call and /separate_reasoning apply the parsers of chat answers to any text.
"""

from dataclasses import replace
from itertools import groupby
from typing import TypeVar, cast

import msgspec

from banyan.base.errors import ConfigError, RequestError
from banyan.base.table import Table
from banyan.base.thread_pool import off_loop
from banyan.parsers.answer_deltas import AnswerDelta, TextDelta, ToolCallArguments, ToolCallStart
from banyan.parsers.choice import NONE
from banyan.parsers.reasoning import REASONING_PARSERS, ReasoningParser, SegmentKind
from banyan.parsers.tool_calls import TOOL_PARSERS
from banyan.parsers.tool_calls.base import ToolParser
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


T = TypeVar("T")

MAX_TEXT_CHARS = 4 << 20
"""More than an answer has that fills the longest context."""


class ParseCallsRequest(msgspec.Struct, frozen=True, kw_only=True):
    text: str
    tools: list[object] = msgspec.field(default_factory=list)
    tool_call_parser: str | None = None


class SeparateRequest(msgspec.Struct, frozen=True, kw_only=True):
    text: str
    reasoning_parser: str
    return_blocks: bool = False


async def parse_function_call(exchange: HttpExchange, state: ServerState) -> None:
    request = typed(await exchange.request.json_object(), ParseCallsRequest)
    _check_length(request.text)
    name = request.tool_call_parser
    if name is None and state.service is not None:
        name = state.service.parsers.tool_name
    format = _load(TOOL_PARSERS, name, "tool_call_parser")
    parser = ToolParser(format, read_tools(request.tools))

    def parse() -> list[AnswerDelta]:
        return [*parser.feed(request.text), *parser.finish()]

    parts = await off_loop(len(request.text), parse)
    starts = [part for part in parts if isinstance(part, ToolCallStart)]
    written: list[list[str]] = [[] for _ in starts]
    for part in parts:
        if isinstance(part, ToolCallArguments):
            written[part.index].append(part.text)
    calls: list[Json] = [
        {"tool_index": start.index, "name": start.name, "parameters": "".join(texts)}
        for start, texts in zip(starts, written, strict=True)
    ]
    said = "".join(part.text for part in parts if isinstance(part, TextDelta))
    await exchange.json({"normal_text": said, "calls": calls})


async def separate_reasoning(exchange: HttpExchange, state: ServerState) -> None:
    request = typed(await exchange.request.json_object(), SeparateRequest)
    _check_length(request.text)
    format = _load(REASONING_PARSERS, request.reasoning_parser, "reasoning_parser")
    parser = ReasoningParser(format, format.always)

    def parse() -> list[tuple[SegmentKind, str]]:
        return [*parser.feed(request.text), *parser.finish()]

    pieces = await off_loop(len(request.text), parse)
    kept = [(kind, text) for kind, text in pieces if kind is not SegmentKind.DELIMITER]
    blocks = [
        {
            "type": "reasoning" if kind is SegmentKind.REASONING else "text",
            "text": "".join(t for _, t in own),
        }
        for kind, own in groupby(kept, key=lambda piece: piece[0])
    ]
    thoughts = [b["text"] for b in blocks if b["type"] == "reasoning"]
    texts = [b["text"] for b in blocks if b["type"] == "text"]
    body: Json = {"reasoning_text": "".join(thoughts), "text": "".join(texts)}
    if request.return_blocks:
        body |= {"reasoning_blocks": thoughts, "text_blocks": texts, "blocks": blocks}
    await exchange.json(body)


def _load(table: Table[T], name: str | None, param: str) -> T:
    if name is None or name == NONE:
        raise RequestError(f"{param} must be one of: {', '.join(table)}", param=param)
    try:
        return table.load(name)
    except ConfigError as error:
        raise RequestError(str(error), param=param) from None


def _check_length(text: str) -> None:
    if len(text) > MAX_TEXT_CHARS:
        raise RequestError(
            f"text has {len(text):,} characters, limit {MAX_TEXT_CHARS:,}", param="text"
        )
