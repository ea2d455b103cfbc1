"""/parse_function_call and /separate_reasoning: apply the parsers of chat answers to any text."""

from itertools import groupby
from typing import TypeVar

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
from banyan.server.errors import Json
from banyan.server.http.exchange import HttpExchange
from banyan.server.openai.schema import typed
from banyan.server.state import ServerState

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
