"""From a request of the Messages API to the equivalent chat request.

The tables name each request field: typed, refused, or without effect.
"""

import base64
import binascii
from collections.abc import Mapping, Sequence
from typing import cast

import msgspec

from banyan.base.errors import RequestError
from banyan.chat_template.template import ChatTemplate
from banyan.server.errors import Json
from banyan.server.openai.prompts import (
    add_text,
    check_messages,
    content_of,
    json_text,
    whole_texts,
)
from banyan.server.openai.schema import Members, Report

Block = dict[str, object]


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """One message."""

    role: str
    content: str | list[Block]


class Thinking(msgspec.Struct, frozen=True, kw_only=True):
    type: str
    budget_tokens: int | None = None
    display: str | None = None


class ToolChoice(msgspec.Struct, frozen=True, kw_only=True):
    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Tool(msgspec.Struct, frozen=True, kw_only=True):
    """A function that the client runs."""

    name: str = ""
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, object] | None = None
    strict: bool | None = None


class OutputConfig(msgspec.Struct, frozen=True, kw_only=True):
    effort: str | None = None
    format: dict[str, object] | None = None


class CountRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of the prompt: the body of /v1/messages/count_tokens."""

    model: str
    messages: list[Turn]
    system: str | list[Block] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: dict[str, object] | None = None
    """The older place of `output_config.format`."""
    cache_control: dict[str, object] | None = None
    """Accepted: every shared prefix is cached without marks."""


class MessagesRequest(CountRequest, frozen=True, kw_only=True):
    """The body of /v1/messages."""

    max_tokens: int
    stop_sequences: list[str] | None = None
    stream: bool | None = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None


MEMBERS: Mapping[str, type[msgspec.Struct]] = {
    "messages": Turn,
    "tools": Tool,
    "tool_choice": ToolChoice,
    "thinking": Thinking,
    "output_config": OutputConfig,
}
"""Field -> known members of its objects; others are reported."""

_BLOCK: Mapping[str, None] = dict.fromkeys(
    (
        *("type", "text", "cache_control", "citations", "id", "name", "input", "caller"),
        *("tool_use_id", "is_error", "thinking", "signature", "data", "source", "title"),
        *("tool_name", "media_type", "url"),
    )
)
BLOCKS: Members = {
    "system": _BLOCK,
    "messages": {"role": None, "content": {**_BLOCK, "content": _BLOCK}},
}
"""Members of blocks that are read; others are reported."""

HARMLESS_MEMBERS = frozenset(("cache_control",))
"""Members without effect, since it happens anyway."""

_NONE = (None, "", [], {})

REFUSED: Mapping[str, tuple[Sequence[object], str]] = {
    "container": (_NONE, "this server runs no code, so there is no container"),
    "mcp_servers": (_NONE, "tool servers are for /v1/responses; let the client call MCP servers"),
}

HARMLESS = frozenset(
    (
        "metadata",
        "service_tier",
        "betas",
        "inference_geo",
        "speed",
        "user_profile_id",
        "workspace_id",
        "diagnostics",
    )
)
"""Fields that do not change the answer; accepted and reported."""


FIELD_NAMES: Mapping[str, str] = {
    "stop": "stop_sequences",
    "max_new_tokens": "max_tokens",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "thinking_token_budget": "thinking.budget_tokens",
}
"""Field of a chat request -> its name in the Messages API."""

_CHOICES: Mapping[str, str] = {"auto": "auto", "any": "required", "none": "none"}
_MIN_BUDGET = 1024


def chat_body(request: CountRequest, template: ChatTemplate | None, report: Report) -> Json:
    """The body of a chat request.

    Args:
        template: of the model that answers.
        report: takes (field, why it is not honoured).

    Raises:
        RequestError: a field is malformed, or asks for what this server does not have.
    """
    body: Json = {
        "model": request.model,
        "messages": chat_messages(
            request.system,
            request.messages,
            template is None or template.takes_late_system,
            report,
        ),
        "continue_final_message": continues(request.messages),
        "tools": _tools(request.tools or [], report) or None,
        **_choice(request.tool_choice),
        **_thinking(request, report),
        **_form(request),
    }
    if isinstance(request, MessagesRequest):
        body |= {
            "max_tokens": request.max_tokens,
            "stop": request.stop_sequences or None,
            "stream": request.stream,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "top_k": request.top_k,
        }
    return body


def _tools(tools: Sequence[Tool], report: Report) -> list[Json]:
    """The functions. Tools of other types run elsewhere or need a trained model; reported."""
    found: list[Json] = []
    for index, tool in enumerate(tools):
        if tool.type in (None, "custom"):
            found.append(_tool(tool, index))
        else:
            why = 'the model is not shown it: this server offers tools of type "custom"'
            report(f"tools[{index}].type {tool.type[:40]!r}", why)
    return found


def _tool(tool: Tool, index: int) -> Json:
    if tool.input_schema is None:
        raise RequestError(f"tools[{index}].input_schema must be an object", param="tools")
    function: Json = {"name": tool.name, "parameters": tool.input_schema}
    if tool.description is not None:
        function["description"] = tool.description
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function}


def _choice(choice: ToolChoice | None) -> Json:
    if choice is None:
        return {}
    body: Json = {"parallel_tool_calls": not choice.disable_parallel_tool_use}
    if choice.type in _CHOICES:
        return {**body, "tool_choice": _CHOICES[choice.type]}
    if choice.type != "tool" or choice.name is None:
        raise RequestError(
            'tool_choice must be {"type": "auto" | "any" | "none"} or {"type": "tool", "name": …}',
            param="tool_choice",
        )
    return {**body, "tool_choice": {"type": "function", "function": {"name": choice.name}}}


def _thinking(request: CountRequest, report: Report) -> Json:
    """Template switches of thinking and effort; without `thinking` the template decides."""
    thinking = request.thinking
    effort = request.output_config.effort if request.output_config else None
    if thinking is None:
        return {"reasoning_effort": effort}
    if thinking.type not in ("enabled", "disabled", "adaptive"):
        raise RequestError(
            f"thinking.type must be enabled, disabled or adaptive, got {thinking.type[:40]!r}",
            param="thinking",
        )
    budget = thinking.budget_tokens
    if thinking.type == "enabled" and (budget is None or budget < _MIN_BUDGET):
        raise RequestError(
            f"thinking.budget_tokens must be at least {_MIN_BUDGET}, got {budget}", param="thinking"
        )
    if thinking.display not in (None, "summarized", "omitted"):
        raise RequestError("thinking.display must be summarized or omitted", param="thinking")
    if thinking.display == "summarized":
        report("thinking.display", "thinking is shown as it is, not summarized")
    if thinking.type == "disabled" and effort is not None:
        report("output_config.effort", "not used while thinking is disabled")
        effort = None
    return {
        "thinking": {"type": thinking.type},
        "reasoning_effort": effort,
        "thinking_token_budget": None if thinking.type == "disabled" else budget,
    }


def _form(request: CountRequest) -> Json:
    given = request.output_config.format if request.output_config else None
    form = request.output_format if given is None else given
    if form is None:
        return {}
    schema = form.get("schema")
    if form.get("type") != "json_schema" or not isinstance(schema, dict):
        raise RequestError(
            'output_config.format must be {"type": "json_schema", "schema": …}',
            param="output_config",
        )
    return {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "output", "schema": schema},
        }
    }


_BILLING = "x-anthropic-billing-header:"
_ROLES = ("user", "assistant", "system")
_ELSEWHERE = ("_tool_use", "_tool_result", "_upload", "fallback", "compaction")
"""Ends of the types of blocks that the API's own tools write in a message of the model."""


def chat_messages(
    system: str | list[Block] | None,
    turns: Sequence[Turn],
    takes_late_system: bool,
    report: Report,
) -> list[Json]:
    """The conversation in the form that chat templates read.

    Args:
        takes_late_system: the template shows system messages after others; otherwise they become
            user text, which is reported.
        report: callback (field, why it is not honoured).

    Raises:
        RequestError: a block is malformed, or of a kind that this server cannot show a model.
    """
    check_messages(len(turns))
    found: list[Json] = []
    if instructions := _system(system, report):
        found.append({"role": "system", "content": instructions})
    names: dict[str, str] = {}
    for index, turn in enumerate(turns):
        if turn.role not in _ROLES:
            raise _refusal(f"messages[{index}].role must be one of {', '.join(_ROLES)}")
        where = f"messages[{index}].content"
        if turn.role == "system" and found and not takes_late_system:
            report(where, "the chat template shows a system message first only; the user says it")
            _add_to_user(found, turn, where)
        elif isinstance(turn.content, str):
            found.append({"role": turn.role, "content": turn.content})
        elif turn.role == "assistant":
            found.append(_assistant(turn.content, where, names, report))
        else:
            found += _given(turn, where, names)
            if any(_wants_citations(block) for block in turn.content):
                report(f"{where}.citations", "answers cite nothing")
    return [whole_texts(message) for message in found]


def continues(turns: Sequence[Turn]) -> bool:
    """Whether the last message begins the answer."""
    return bool(turns) and turns[-1].role == "assistant"


def _system(system: str | list[Block] | None, report: Report) -> str:
    if system is None or isinstance(system, str):
        return system or ""
    texts = [_text(block, f"system[{i}]") for i, block in enumerate(system)]
    shown = [text for text in texts if not text.startswith(_BILLING)]
    if len(shown) < len(texts):
        # It differs from request to request, so that no prompt would begin like another.
        report("system", f"the block {_BILLING!r} is not shown to the model")
    return "\n".join(shown)


def _assistant(blocks: list[Block], where: str, names: dict[str, str], report: Report) -> Json:
    """A message of the model; notes the names of its calls under their ids."""
    said: list[str] = []
    thought: list[str] = []
    calls: list[Json] = []
    for i, block in enumerate(blocks):
        place = f"{where}[{i}]"
        match block.get("type"):
            case "thinking":
                shown = _member(block, "thinking", place)
                thought.append(shown or hidden_in(block.get("signature")))
            case "redacted_thinking":
                report(place, "thinking that is encrypted cannot be shown to the model")
            case "tool_use":
                id, name = _member(block, "id", place), _member(block, "name", place)
                names[id] = name
                given = block.get("input")
                given = json_text(given, "messages") if isinstance(given, dict) else given
                function = {"name": name, "arguments": given}
                calls.append({"id": id, "type": "function", "function": function})
            case str(kind) if kind.endswith(_ELSEWHERE):
                report(f"{place}.type {kind[:40]!r}", "the model is not shown blocks of this type")
            case _:
                said.append(_text(block, place))
    message: Json = {"role": "assistant", "content": "\n".join(said)}
    if any(thought):
        message["reasoning_content"] = "\n".join(thought)
    if calls:
        message["tool_calls"] = calls
    return message


def _given(turn: Turn, where: str, names: dict[str, str]) -> list[Json]:
    """Messages for one message of the user: tool results, and the texts around them."""
    found: list[Json] = []
    parts: list[str | Json] = []

    def end_text() -> None:
        if parts:
            found.append({"role": turn.role, "content": content_of(parts)})
            parts.clear()

    for i, block in enumerate(cast(list[Block], turn.content)):
        place = f"{where}[{i}]"
        if block.get("type") == "tool_result" and turn.role == "user":
            end_text()
            found.append(_result(block, place, names))
        else:
            parts += _parts(block, place)
    end_text()
    return found


def _wants_citations(block: Block) -> bool:
    wanted = block.get("citations")
    return isinstance(wanted, dict) and wanted.get("enabled") is True


def _add_to_user(found: list[Json], turn: Turn, where: str) -> None:
    """Append the text of a system message to the last user message, or add it as a message."""
    blocks = [] if isinstance(turn.content, str) else turn.content
    texts = [_text(block, f"{where}[{i}]") for i, block in enumerate(blocks)]
    text = turn.content if isinstance(turn.content, str) else "\n".join(texts)
    if found[-1]["role"] == "user":
        add_text(found[-1], "content", text, "\n")
    else:
        found.append({"role": "user", "content": text})


def _result(block: Block, place: str, names: dict[str, str]) -> Json:
    id = _member(block, "tool_use_id", place)
    content = block.get("content")
    if isinstance(content, list):
        blocks = cast(list[object], content)
        found = [p for i, b in enumerate(blocks) for p in _parts(b, f"{place}.content[{i}]")]
        content = content_of(found)
    elif not isinstance(content, str | None):
        raise _refusal(f"{place}.content must be a text or a list of blocks")
    content = content or ""
    if block.get("is_error") is True:
        is_text = isinstance(content, str)
        content = f"Error: {content}" if is_text else [{"type": "text", "text": "Error:"}, *content]
    message: Json = {"role": "tool", "tool_call_id": id, "content": content}
    if id in names:
        message["name"] = names[id]
    return message


def _parts(block: object, place: str) -> list[str | Json]:
    """The texts and pictures of a block."""
    kind = block.get("type") if isinstance(block, dict) else None
    if not isinstance(block, dict) or kind not in ("image", "document"):
        return [_text(block, place)]
    source = block.get("source")
    if not isinstance(source, dict):
        raise _refusal(f"{place}.source must be an object")
    form = source.get("type")
    if kind == "document":
        content = source.get("content")
        if form != "content" or not isinstance(content, list):
            return [_text(block, place)]
        blocks = cast(list[object], content)
        found = [p for i, b in enumerate(blocks) for p in _parts(b, f"{place}.source.content[{i}]")]
        title = block.get("title")
        return [title, *found] if isinstance(title, str) else found
    if form == "base64":
        media_type = _member(source, "media_type", f"{place}.source")
        url = f"data:{media_type};base64,{_member(source, 'data', f'{place}.source')}"
    elif form == "url":
        url = _member(source, "url", f"{place}.source")
    else:
        raise _refusal(
            f"{place}.source.type must be base64 or url, got {str(form)[:40]!r}: a picture is sent "
            "with the message"
        )
    return [{"type": "image_url", "image_url": {"url": url}}]


def _text(block: object, place: str) -> str:
    """The text of a block of type text."""
    kind = block.get("type") if isinstance(block, dict) else None
    if not isinstance(block, dict) or not isinstance(kind, str):
        raise _refusal(f"{place} must be a block with a type")
    if kind == "text":
        return _member(block, "text", place)
    if kind == "search_result":
        content = block.get("content")
        parts = cast(list[object], content) if isinstance(content, list) else []
        texts = [_text(part, f"{place}.content[{i}]") for i, part in enumerate(parts)]
        head = f"{_member(block, 'title', place)} ({_member(block, 'source', place)})"
        return "\n".join([head, *texts])
    if kind == "tool_reference":
        return f"The tool {_member(block, 'tool_name', place)} is available."
    source = block.get("source")
    if kind == "document" and isinstance(source, dict) and source.get("type") == "text":
        title = block.get("title")
        text = _member(source, "data", f"{place}.source")
        return f"{title}\n{text}" if isinstance(title, str) else text
    hint = ""
    if kind == "document":
        hint = "Send a document as text, or its pages as pictures"
    raise RequestError(
        f"{place}: a block of type {kind[:40]!r} is not taken here",
        param="messages",
        code="unsupported_content",
        hint=hint,
    )


def _member(block: Block, name: str, place: str) -> str:
    found = block.get(name)
    if not isinstance(found, str):
        raise _refusal(f"{place}.{name} must be a text")
    return found


def _refusal(text: str) -> RequestError:
    return RequestError(text, param="messages")


_MARK = "banyan:"


def signature(hidden: str = "") -> str:
    """The signature of a thinking block; it carries `hidden` if the thinking is not shown."""
    return _MARK + base64.b64encode(hidden.encode()).decode()


def hidden_in(given: object) -> str:
    """The thinking in a signature; "" for signatures of other servers.

    Raises:
        RequestError: it begins as ours and goes on as nothing of ours.
    """
    if not isinstance(given, str) or not given.startswith(_MARK):
        return ""
    try:
        return base64.b64decode(given.removeprefix(_MARK), validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        raise RequestError(
            "the signature of a block of thinking has been changed", param="messages"
        ) from None
