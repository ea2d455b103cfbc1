"""Items of the Responses API: the input of a client with ids, and its conversation."""

from collections.abc import Sequence

from banyan.base.errors import RequestError
from banyan.base.ids import fresh_id
from banyan.base.json_types import is_object
from banyan.server.errors import Json
from banyan.server.openai.fields import Report
from banyan.server.openai.prompts import add_text, json_text, whole_texts

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
    if not isinstance(kind, str) or kind not in _PREFIXES:
        raise _refusal(
            f"{where}.type must be one of {', '.join(_PREFIXES)}, got {str(kind)[:40]!r}"
        )
    id = item.get("id")
    whole = {**item, "type": kind, "id": id if isinstance(id, str) and id else new_id(kind)}
    match kind:
        case "message":
            whole["content"] = _content(item, where)
            whole["status"] = item.get("status") or "completed"
        case "function_call":
            for name in ("call_id", "name", "arguments"):
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
    """Content of a message as parts, which are of text."""
    role, content = item.get("role"), item.get("content")
    if role not in _ROLES:
        raise _refusal(f"{where}.role must be one of {', '.join(_ROLES)}")
    kind = "output_text" if role == "assistant" else "input_text"
    if isinstance(content, str):
        content = [{"type": kind, "text": content}]
    if not isinstance(content, list):
        raise _refusal(f"{where}.content must be a text or a list of parts")
    return [_part(part, kind, where) for part in content]


def _part(part: object, kind: str, where: str) -> Json:
    given: Json = part if is_object(part) else {}
    found, text = given.get("type"), given.get("text")
    if found == "refusal" and isinstance(given.get("refusal"), str):
        return given
    if found not in ("input_text", "output_text", "text") or not isinstance(text, str):
        raise RequestError(
            f"{where} has a part of type {str(found)[:40]!r}; this server takes text only",
            param="input",
            code="unsupported_content",
        )
    extra = {"annotations": given.get("annotations") or []} if kind == "output_text" else {}
    return {"type": kind, "text": text, **extra}


def _output(item: Json, where: str) -> str:
    """Text of a tool's result."""
    output = item.get("output")
    if isinstance(output, str):
        return output
    if not isinstance(output, list):
        raise _refusal(f"{where}.output must be a text or a list of parts")
    return "\n".join(str(_part(part, "input_text", where)["text"]) for part in output)


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
        match item["type"]:
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
                function = {"name": item["name"], "arguments": item["arguments"]}
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
    return [whole_texts(message) for message in found]


def _say(found: list[Json], item: Json, takes_late_system: bool) -> bool:
    """Add a message; system messages at the beginning become one, as most templates want it.

    Returns whether the user had to say what the system should.
    """
    parts = item["content"]
    assert isinstance(parts, list)
    text = "\n".join(str(p.get("text", p.get("refusal"))) for p in parts)
    role = "system" if item["role"] == "developer" else item["role"]
    is_moved = role == "system" and bool(found) and not takes_late_system
    if role == "assistant":
        add_text(_turn(found), "content", text, "\n")
    elif role == "system" and len(found) == 1 and found[0]["role"] == "system":
        add_text(found[0], "content", text, "\n\n")
        return False
    elif is_moved and found[-1]["role"] == "user":
        add_text(found[-1], "content", text, "\n")
    else:
        found.append({"role": "user" if is_moved else role, "content": text})
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
    return f"{_PREFIXES[kind]}_{fresh_id()}"


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
