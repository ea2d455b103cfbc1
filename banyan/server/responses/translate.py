"""From a request of the Responses API, its fields and items, to the equivalent chat request."""

from collections.abc import Mapping, Sequence

import msgspec

from banyan.base.errors import RequestError
from banyan.base.ids import fresh_id
from banyan.base.json_types import is_object
from banyan.chat_template.template import ChatTemplate
from banyan.media.parts import MEDIA_TYPES, PART_MEMBERS
from banyan.server.errors import Json
from banyan.server.openai.prompts import add_text, content_of, json_text, whole_texts
from banyan.server.openai.schema import Members, Refused, Report
from banyan.server.responses.tools import Offered, chat_choice

_ROLES = ("user", "assistant", "system", "developer")
_PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "reasoning": "rs",
    "mcp_call": "mcp",
    "mcp_list_tools": "mcpl",
}
MAX_ITEMS = 16384
_FORMAT = ("type", "name", "schema", "strict", "description")
_MEDIA = ("input_image", "input_file", "input_audio")
_PART: Members = {
    **dict.fromkeys(("type", "text", "annotations", "logprobs", "refusal", *PART_MEMBERS)),
    **{name: dict.fromkeys(PART_MEMBERS) for kind in _MEDIA for name in MEDIA_TYPES[kind][1]},
}
MEMBERS: Members = {
    "input": {
        **dict.fromkeys(("type", "role", "id", "status", "call_id", "name", "arguments", "input")),
        **dict.fromkeys(("summary", "encrypted_content", "server_label", "tools", "error")),
        **dict.fromkeys(("approval_request_id", "action", "phase")),
        "content": _PART,
        "output": _PART,
    },
    "text": {"verbosity": None, "format": dict.fromkeys(_FORMAT)},
}
"""Members that are read, and those that this server writes itself; others are reported."""
_CUSTOM = {
    "custom_tool_call": "function_call",
    "custom_tool_call_output": "function_call_output",
}
"""Calls of tools that take a text. The model is shown them as calls with the member `input`."""
_ELSEWHERE = ("_call", "_call_output", "_output", "_request", "_response", "compaction")
"""Ends of the types of items that other servers and clients write. The model is not shown them."""


def given_items(given: str | list[Json]) -> list[Json]:
    """The `input` of a request as items, each whole: with type, id and status.

    Raises:
        RequestError: an item is malformed, or of a kind that this server cannot show a model.
    """
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    if not 0 < len(given) <= MAX_ITEMS:
        raise RequestError(f"input must have 1 to {MAX_ITEMS} items", param="input")
    return [_whole(item, f"input[{i}]") for i, item in enumerate(given)]


def _whole(item: Json, where: str) -> Json:
    kind = item.get("type", "message" if "role" in item else None)
    if kind == "item_reference":
        raise _refusal(f"{where}: send the item itself, or use previous_response_id")
    if not isinstance(kind, str) or not (
        kind in _PREFIXES or kind in _CUSTOM or kind.endswith(_ELSEWHERE)
    ):
        raise _refusal(
            f"{where}.type must be one of {', '.join(_PREFIXES)}, got {str(kind)[:40]!r}"
        )
    id = item.get("id")
    whole = {**item, "type": kind, "id": id if isinstance(id, str) and id else new_id(kind)}
    match _CUSTOM.get(kind, kind):
        case "message":
            whole["content"] = _content(item, where)
            whole["status"] = item.get("status") or "completed"
        case "function_call":
            for name in ("call_id", "name"):
                _text(item, name, where)
            whole["status"] = item.get("status") or "completed"
        case "function_call_output":
            _text(item, "call_id", where)
            _output(item, where)
            whole["status"] = item.get("status") or "completed"
        case "reasoning":
            whole["summary"] = item.get("summary") or []
            thought(whole, where)
        case "mcp_call":
            for name in ("server_label", "name", "arguments"):
                _text(item, name, where)
            call_result(item, where)
        case "mcp_list_tools":
            _text(item, "server_label", where)
            whole["tools"] = _list(item.get("tools"), "tools", where)
    return whole


def _content(item: Json, where: str) -> list[Json]:
    """Content of a message as parts."""
    role, content = item.get("role"), item.get("content")
    if role not in _ROLES:
        raise _refusal(f"{where}.role must be one of {', '.join(_ROLES)}")
    kind = "output_text" if role == "assistant" else "input_text"
    if isinstance(content, str):
        content = [{"type": kind, "text": content}]
    if content is None:
        content = []
    if not isinstance(content, list):
        raise _refusal(f"{where}.content must be a text or a list of parts")
    return [_part(part, kind, where) for part in content]


def _part(part: object, kind: str, where: str) -> Json:
    given: Json = part if is_object(part) else {}
    found, text = given.get("type"), given.get("text")
    if found == "refusal" and isinstance(given.get("refusal"), str):
        return given
    if found in _MEDIA and kind == "input_text":
        return given
    if found not in ("input_text", "output_text", "text") or not isinstance(text, str):
        raise RequestError(
            f"{where} has a part of type {str(found)[:40]!r}, which is not taken there",
            param="input",
            code="unsupported_content",
        )
    extra = {"annotations": given.get("annotations") or []} if kind == "output_text" else {}
    return {"type": kind, "text": text, **extra}


def _shown(parts: Sequence[object]) -> str | list[Json]:
    """The content of a message from checked parts: texts, and parts that are not text."""
    given = [part for part in parts if is_object(part)]
    return content_of(
        part if part.get("type") in _MEDIA else str(part.get("text", part.get("refusal")))
        for part in given
    )


def _output(item: Json, where: str) -> str | list[Json]:
    """A tool's result."""
    output = item.get("output")
    if isinstance(output, str | None):
        return output or ""
    if not isinstance(output, list):
        raise _refusal(f"{where}.output must be a text or a list of parts")
    return _shown([_part(part, "input_text", where) for part in output])


def thought(item: Json, where: str) -> str:
    """Text of a reasoning item: its content, or else its summary; "" when it is encrypted."""
    for name in ("content", "summary"):
        parts = item.get(name) or []
        texts = [p.get("text") if isinstance(p, dict) else None for p in _list(parts, name, where)]
        if not all(isinstance(text, str) for text in texts):
            raise _refusal(f"{where}.{name} must be parts of text")
        if texts:
            return "\n".join(str(t) for t in texts)
    return ""


def call_result(item: Json, where: str) -> str:
    """The tool message for a call to a tool server."""
    output, error = item.get("output"), item.get("error")
    if output is not None:
        return _text(item, "output", where)
    if error is None:
        return "Error: the call was not made"
    if not isinstance(error, dict):
        raise _refusal(f"{where}.error must be an object")
    why = error.get("content", error.get("message"))
    return f"Error: {why if isinstance(why, str) else json_text(why, where)}"


def chat_messages(
    instructions: str, items: Sequence[Json], takes_late_system: bool, report: Report
) -> list[Json]:
    """Items as the messages of a chat. The model's output of one turn is one message.

    Args:
        takes_late_system: the template shows system messages after others; otherwise they become
            user text, which is reported.
        report: callback (field, why it is not honoured).
    """
    found: list[Json] = [{"role": "system", "content": instructions}] if instructions else []
    names: dict[str, str] = {}
    for item in items:
        kind = str(item["type"])
        match _CUSTOM.get(kind, kind):
            case "message":
                if _say(found, item, takes_late_system):
                    why = "the chat template shows a system message first only; the user says it"
                    report("input", why)
            case "reasoning":
                if text := thought(item, "input"):
                    add_text(_turn(found), "reasoning_content", text, "\n")
                elif item.get("encrypted_content"):
                    report("input", "reasoning that is encrypted cannot be shown to the model")
            case "function_call":
                names[str(item["call_id"])] = str(item["name"])
                given = item.get("arguments")
                if kind in _CUSTOM:
                    given = json_text({"input": item.get("input")}, "input")
                function = {"name": item["name"], "arguments": given}
                _add_call(found, {"id": item["call_id"], "type": "function", "function": function})
            case "mcp_call":
                function = {"name": item["name"], "arguments": item["arguments"]}
                _add_call(found, {"id": item["id"], "type": "function", "function": function})
                result = {"content": call_result(item, "input"), "name": item["name"]}
                found.append({"role": "tool", "tool_call_id": item["id"], **result})
            case "function_call_output":
                id = str(item["call_id"])
                message: Json = {
                    "role": "tool",
                    "tool_call_id": id,
                    "content": _output(item, "input"),
                }
                found.append(message | ({"name": names[id]} if id in names else {}))
            case "mcp_list_tools":
                pass  # the tools of the request are shown
            case _:
                report(f"input: type {kind[:40]!r}", "the model is not shown items of this type")
    return [whole_texts(message) for message in found]


def _say(found: list[Json], item: Json, takes_late_system: bool) -> bool:
    """Add a message; system messages at the beginning become one, as most templates want it.

    Returns whether the user had to say what the system should.
    """
    parts = item["content"]
    assert isinstance(parts, list)
    content = _shown(parts)
    text = content if isinstance(content, str) else ""
    role = "system" if item["role"] == "developer" else item["role"]
    is_moved = role == "system" and bool(found) and not takes_late_system
    if role == "system" and not isinstance(content, str):
        raise _refusal("a system message takes text only")
    if role == "assistant":
        add_text(_turn(found), "content", text, "\n")
    elif role == "system" and len(found) == 1 and found[0]["role"] == "system":
        add_text(found[0], "content", text, "\n\n")
        return False
    elif is_moved and found[-1]["role"] == "user":
        add_text(found[-1], "content", text, "\n")
    else:
        found.append({"role": "user" if is_moved else role, "content": content})
    return is_moved


def _turn(found: list[Json]) -> Json:
    """The open message of the model."""
    if not found or found[-1]["role"] != "assistant":
        found.append({"role": "assistant", "content": ""})
    return found[-1]


def _add_call(found: list[Json], call: Json) -> None:
    calls = _turn(found).setdefault("tool_calls", [])
    assert isinstance(calls, list)
    calls.append(call)


def new_id(kind: str) -> str:
    """A new id for an item of this kind."""
    return f"{_PREFIXES.get(_CUSTOM.get(kind, kind), 'item')}_{fresh_id()}"


def _text(item: Json, name: str, where: str) -> str:
    found = item.get(name)
    if not isinstance(found, str):
        raise _refusal(f"{where}.{name} must be a text")
    return found


def _list(value: object, name: str, where: str) -> list[object]:
    if not isinstance(value, list):
        raise _refusal(f"{where}.{name} must be a list")
    return value


def _refusal(text: str) -> RequestError:
    return RequestError(text, param="input")


_LOGPROBS = "message.output_text.logprobs"
_MAX_METADATA = 16


class Reasoning(msgspec.Struct, frozen=True, kw_only=True):
    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class TextForm(msgspec.Struct, frozen=True, kw_only=True):
    format: dict[str, object] | None = None
    verbosity: str | None = None


class PromptRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of the prompt: the body of /v1/responses/input_tokens."""

    model: str = ""
    input: str | list[dict[str, object]]
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: list[dict[str, object]] | None = None
    tool_choice: str | dict[str, object] | None = None
    parallel_tool_calls: bool | None = True
    reasoning: Reasoning | None = None
    text: TextForm | None = None
    truncation: str | None = None
    chat_template_kwargs: dict[str, object] | None = None


class ResponsesRequest(PromptRequest, frozen=True, kw_only=True):
    """The body of /v1/responses."""

    max_output_tokens: int | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = True
    stream: bool | None = False
    background: bool | None = False
    include: list[str] | None = None
    top_logprobs: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    stop: str | list[str] | None = None
    request_id: str | None = None
    priority: int | None = None
    cache_salt: str | None = None
    extra_key: str | None = None
    max_tool_calls: int | None = None


_SAME = (
    *("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty"),
    *("repetition_penalty", "stop", "priority", "cache_salt", "extra_key"),
)
"""Fields with the same meaning in a chat request."""

_NONE = (None, "", [], {})

REFUSED: Refused = {
    "conversation": (_NONE, "conversations are not kept here; use previous_response_id"),
    "prompt": (_NONE, "there are no stored prompts here; send instructions and input"),
    "context_management": (_NONE, "conversations are not compacted here"),
    "moderation": (_NONE, "there is no moderation here"),
}

HARMLESS = frozenset(
    (
        *("service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"),
        *("prompt_cache_options", "user", "stream_options", "session_id"),
        "data_parallel_rank",
    )
)

FIELD_NAMES: Mapping[str, str] = {
    "max_new_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}
"""Field of a chat request -> its name in the Responses API."""


def chat_body(
    request: PromptRequest,
    items: Sequence[Json],
    offered: Offered,
    template: ChatTemplate | None,
    report: Report,
) -> Json:
    """The body of the chat request that continues `items`.

    Args:
        offered: what `request.tools` stands for.
        template: of the model that answers.
        report: takes (field, why it is not honoured).

    Raises:
        RequestError: a field is malformed, or asks for what this server does not have.
    """
    body: Json = {
        "model": request.model,
        "messages": chat_messages(
            request.instructions or "",
            items,
            template is None or template.takes_late_system,
            report,
        ),
        "tools": offered.functions or None,
        "tool_choice": chat_choice(request.tool_choice, offered),
        "parallel_tool_calls": request.parallel_tool_calls,
        "reasoning_effort": request.reasoning.effort if request.reasoning else None,
        "response_format": _form(request.text),
        "chat_template_kwargs": request.chat_template_kwargs,
    }
    _report_prompt(request, report)
    if offered.functions and request.tool_choice in (None, "auto") and _binds(request.text):
        report("tools", "text.format binds the whole answer, so that no tool can be called")
    if isinstance(request, ResponsesRequest):
        body |= {name: getattr(request, name) for name in _SAME}
        body["rid"] = request.request_id
        body["max_tokens"] = request.max_output_tokens
        body |= _logprobs(request, report)
        _check(request)
    return {name: value for name, value in body.items() if value is not None}


def _report_prompt(request: PromptRequest, report: Report) -> None:
    if request.truncation not in (None, "disabled", "auto"):
        raise RequestError("truncation must be auto or disabled", param="truncation")
    if request.truncation == "auto":
        report("truncation", "no item is dropped; an input that is too long is refused")
    if request.text and request.text.verbosity not in (None, "medium"):
        report("text.verbosity", "not used")
    reasoning = request.reasoning
    if reasoning and (reasoning.summary or reasoning.generate_summary):
        report("reasoning.summary", "reasoning is given whole and not summarised")


def _check(request: ResponsesRequest) -> None:
    metadata = request.metadata or {}
    if len(metadata) > _MAX_METADATA or any(
        len(k) > 64 or len(v) > 512 for k, v in metadata.items()
    ):
        raise RequestError(
            f"metadata has at most {_MAX_METADATA} keys of 64 and values of 512 characters",
            param="metadata",
        )
    if request.max_tool_calls is not None and request.max_tool_calls < 0:
        raise RequestError("max_tool_calls must be at least 0", param="max_tool_calls")
    if request.background and request.store is False:
        raise RequestError(
            "a response in the background must be stored to be found again",
            param="store",
            hint="Leave out store, or background",
        )


def _logprobs(request: ResponsesRequest, report: Report) -> Json:
    for name in request.include or []:
        if name == "reasoning.encrypted_content":
            report("include", "reasoning is given as text, not encrypted")
        elif name != _LOGPROBS:
            report("include", f"{name[:60]}: there is nothing of the kind here")
    if _LOGPROBS not in (request.include or []) and not request.top_logprobs:
        return {}
    return {"logprobs": True, "top_logprobs": request.top_logprobs or 0}


def _binds(text: TextForm | None) -> bool:
    """Whether text.format constrains the answer."""
    form = text.format if text else None
    return form is not None and form.get("type") != "text"


def _form(text: TextForm | None) -> Json | None:
    """text.format as response_format."""
    form = text.format if text else None
    if form is None:
        return None
    if form.get("type") == "json_schema":
        if not isinstance(form.get("name"), str) or not isinstance(form.get("schema"), dict):
            raise RequestError(
                "text.format of type json_schema needs a name and a schema", param="text.format"
            )
        return {"type": "json_schema", "json_schema": {k: form[k] for k in form if k != "type"}}
    if form.get("type") not in ("text", "json_object"):
        raise RequestError(
            f"text.format.type must be text, json_object or json_schema, "
            f"got {str(form.get('type'))[:40]!r}",
            param="text.format",
        )
    return form
