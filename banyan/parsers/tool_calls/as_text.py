"""Tools for a chat template that has no place for them: said in a system text, called in text.

What the template would leave out of the conversation (calls, results) is spelled out too. Knows no
model, and no format but by its tags.
"""

import json
from collections.abc import Callable, Mapping, Sequence

from banyan.base.errors import RequestError

Message = Mapping[str, object]
Tag = Callable[[str], tuple[str, str]]
"""Name of a function -> what stands before and behind its arguments (`ToolFormat.tag`)."""

_RESULT = "<tool_response>\n{}\n</tool_response>"


def tools_as_text(
    messages: Sequence[Message], tools: Sequence[Message], tag: Tag, takes_system: bool
) -> list[Message]:
    """The conversation with its tools in a system text.

    Args:
        messages: content is a text, text parts, or None of an assistant.
        takes_system: the template shows system messages; otherwise the tools stand in front of
            what the user says first.
    """
    found = list(messages)
    text, role = _prompt(tools, tag), "system" if takes_system else "user"
    at = next((i for i, m in enumerate(found) if m["role"] == role), None)
    if at is None or (takes_system and at > 0):
        return [{"role": role, "content": text}, *found]
    own = _text(found[at].get("content"))
    found[at] = {**found[at], "content": f"{own}\n\n{text}" if takes_system else f"{text}\n\n{own}"}
    return found


def calls_as_text(messages: Sequence[Message], tag: Tag) -> list[Message]:
    """The conversation with earlier calls as the model wrote them, and what the tools said in
    messages of the user. RequestError when a call has no name."""
    found: list[Message] = []
    results: list[str] = []
    for index, message in enumerate(messages):
        if message["role"] in ("tool", "function"):
            results.append(_RESULT.format(_text(message.get("content"))))
            continue
        if results:
            found.append({"role": "user", "content": "\n".join(results)})
            results = []
        found.append(_with_calls(message, index, tag))
    if results:
        found.append({"role": "user", "content": "\n".join(results)})
    return found


def _prompt(tools: Sequence[Message], tag: Tag) -> str:
    functions = [tool.get("function") for tool in tools]
    listed = "\n".join(json.dumps(function, ensure_ascii=False) for function in functions)
    begin, end = tag("NAME")
    return (
        "You can call functions. These are there, with their parameters as JSON Schemas:\n"
        f"<tools>\n{listed}\n</tools>\n"
        "If one of them helps, answer with a call and nothing else, in this form:\n"
        f'{begin}{{"PARAMETER": VALUE}}{end}\n'
        "If none does, answer in words."
    )


def _with_calls(message: Message, index: int, tag: Tag) -> Message:
    """The message with its calls in the text, as the model wrote them."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list) or not calls:
        return message
    texts = [text] if (text := _text(message.get("content"))) else []
    for number, call in enumerate(calls):
        function = call.get("function") if isinstance(call, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(name, str):
            raise RequestError(
                f"messages[{index}].tool_calls[{number}] has no function.name", param="messages"
            )
        begin, end = tag(name)
        given = function.get("arguments")
        arguments = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
        texts.append(f"{begin}{arguments or '{}'}{end}")
    rest = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**rest, "content": "\n".join(texts)}


def _text(content: object) -> str:
    """The text of a message, also where it comes in parts."""
    if not isinstance(content, list):
        return content if isinstance(content, str) else ""
    return "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
