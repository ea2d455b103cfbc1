"""Prompt token ids from chat messages, texts or token ids.

CPU work that grows with the request: routes call it off the event loop (`HttpExchange.read`).
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from banyan.base.errors import RequestError
from banyan.base.json_types import is_list, is_object
from banyan.chat_template.template import REASONING_MEMBERS, RESERVED
from banyan.media.parts import PartReader, is_media
from banyan.media.preparation import Expanded, expanded, unread_options
from banyan.parsers.partial_json import object_text
from banyan.parsers.tool_calls.base import CallTag
from banyan.parsers.tool_calls.definitions import Definition
from banyan.requests.constraint import check_depth
from banyan.requests.prompts import encode_texts, fitted_text
from banyan.requests.request_spec import RequestContext
from banyan.server.errors import Json
from banyan.server.openai.custom_tools import call_as_function
from banyan.server.state import Service

_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_TEXT_PARTS = ("text", "input_text", "output_text")
_RESERVED = RESERVED | {"tokenize", "chat_template"}
MAX_MESSAGES = 16384
_TOOL_RESULT = "<tool_response>\n{}\n</tool_response>"


@dataclass(frozen=True)
class Conversation:
    """Messages and how to render them."""

    messages: list[Json]
    options: Json = field(default_factory=dict[str, object])
    """chat_template_kwargs."""
    continue_final_message: bool = False
    add_generation_prompt: bool = True
    tools: Sequence[Definition] | None = None


def chat_ids(context: RequestContext, service: Service, chat: Conversation) -> Expanded:
    """Token ids and pictures of a rendered conversation.

    Text in messages never becomes a special token. Pictures are expanded on the ids, so no text
    can stand for one.

    Raises:
        NeedsMedia: its pictures are not in `context.media` yet.
    """
    if service.chat is None:
        raise RequestError(
            "this model has no chat template",
            code="no_chat_template",
            hint="Use /v1/completions, or start with --chat-template FILE",
        )
    if taken := sorted(_RESERVED & chat.options.keys()):
        raise RequestError(
            f"chat_template_kwargs may not set {', '.join(taken)}", param="chat_template_kwargs"
        )
    for param, value in (
        ("messages", chat.messages),
        ("tools", chat.tools),
        ("chat_template_kwargs", chat.options),
    ):
        check_depth(value, param)
    media = service.media
    reader = None if media is None else PartReader(media.takes)
    messages = checked_messages(chat.messages, chat.continue_final_message, reader)
    parts = [] if reader is None else reader.parts
    items = context.media.of(parts) if parts else []
    if chat.continue_final_message and messages[-1]["role"] != "assistant":
        raise RequestError(
            "continue_final_message needs a last message of the assistant",
            param="continue_final_message",
        )
    tokenizer, template, tools = service.chat.tokenizer, service.chat.template, chat.tools
    tag = service.tool_tag
    if tag and not template.takes_calls:
        messages = calls_as_text(messages, tag, chat.continue_final_message)
    if tag and tools:
        messages, tools = tools_as_text(messages, tools, tag, template.takes_system), None
    ids = service.chat.encode(
        messages,
        tools,
        add_generation_prompt=chat.add_generation_prompt and not chat.continue_final_message,
        continue_final_message=chat.continue_final_message,
        variables=chat.options,
        fit=lambda text: fitted_text(tokenizer, text, service.limits),
    )
    if media is None:
        return Expanded(ids)
    for part in parts:
        for name in unread_options(media.model.rule, part):
            context.warn_or_refuse(f"{part.param}.{name}", "pictures of this model have one size")
    return expanded(ids, items, media.placeholders)


def text_ids(
    service: Service, texts: Iterable[str], add_special_tokens: bool = True
) -> list[list[int]]:
    """Token ids of plain prompts. The texts of special tokens become special tokens."""
    return encode_texts(service.required_tokenizer(), texts, service.limits, add_special_tokens)


def ids_text(
    service: Service, ids: list[int], skip_special_tokens: bool, param: str = "tokens"
) -> str:
    tokenizer = service.required_tokenizer()
    return tokenizer.decode(checked_ids(ids, service, param), skip_special_tokens)


def check_count(num: int, service: Service, param: str, what: str = "prompts") -> None:
    """RequestError if a request has too many of `what`; called before any of them is read."""
    most = service.limits.max_sequences
    if num > most:
        raise RequestError(f"at most {most} {what} are accepted, got {num}", param=param)


def checked_ids(ids: list[int], service: Service, param: str) -> list[int]:
    """`ids` as given, or RequestError 400 naming the first outside the vocabulary."""
    size = service.limits.vocab_size
    for id in ids:
        if type(id) is not int:
            raise RequestError(f"{param} must be a flat list of integers, got {id!r}", param=param)
        if not 0 <= id < size:
            raise RequestError(
                f"{param} has an out-of-vocabulary id: ids are in [0, {size}), got {id}",
                param=param,
            )
    return ids


def checked_messages(
    messages: list[Json], continues_last: bool = False, media: PartReader | None = None
) -> list[Json]:
    """Messages with known roles, with a text or parts as content, and with objects as the arguments
    of their calls.

    Args:
        continues_last: the arguments of the very last call stay as they are, for the model to
            continue them.
        media: reads the parts that are pictures or sounds; None = they are refused.
    """
    if not messages:
        raise RequestError("Messages cannot be empty.", param="messages")
    check_messages(len(messages))
    last = len(messages) - 1 if continues_last else None
    return [_message(m, i, i == last, media) for i, m in enumerate(messages)]


def check_messages(num: int) -> None:
    """RequestError if a conversation has too many messages."""
    if num > MAX_MESSAGES:
        raise RequestError(
            f"at most {MAX_MESSAGES} messages are accepted, got {num}", param="messages"
        )


def json_text(value: object, param: str) -> str:
    """`value` as JSON text, integers of any size included; RequestError when it is too deep."""
    check_depth(value, param)
    return json.dumps(value, ensure_ascii=False)


class _Growing(list[str]):
    """Parts of a text, joined by `whole_texts`."""


def add_text(message: Json, name: str, text: str, between: str) -> None:
    """Append `text` to the field `name` in constant time. The field is a list of parts until
    `whole_texts`. Content with pictures gets one more part."""
    parts = message.get(name)
    if is_list(parts) and not isinstance(parts, _Growing):
        parts.append({"type": "text", "text": text})
        return
    if not isinstance(parts, _Growing):
        parts = message[name] = _Growing([str(parts)] if parts else [])
    if parts:
        parts.append(between)
    parts.append(text)


def content_of(parts: Iterable[str | Json], between: str = "\n") -> str | list[Json]:
    """The content of a message: one text, or parts where some are pictures.

    Args:
        parts: texts, and parts of other kinds.
    """
    found: list[Json] = []
    for part in parts:
        last = found[-1] if found else {}
        if not isinstance(part, str):
            found.append(part)
        elif last.get("type") == "text":
            found[-1] = {"type": "text", "text": f"{last['text']}{between}{part}"}
        else:
            found.append({"type": "text", "text": part})
    if not found or (len(found) == 1 and found[0].get("type") == "text"):
        return str(found[0]["text"]) if found else ""
    return found


def whole_texts(message: Json) -> Json:
    """The message with the parts of `add_text` joined."""
    return {k: "".join(v) if isinstance(v, _Growing) else v for k, v in message.items()}


def _message(message: Json, index: int, is_open: bool, media: PartReader | None) -> Json:
    role = message.get("role")
    known = role.lower() if isinstance(role, str) and len(role) <= 32 else ""
    if known not in _ROLES:
        raise RequestError(
            f"messages[{index}].role must be one of {', '.join(_ROLES)}", param="messages"
        )
    known = "system" if known == "developer" else known
    found = {**message, "role": known}
    if calls := message.get("tool_calls"):
        if not is_list(calls):
            raise RequestError(f"messages[{index}].tool_calls must be a list", param="messages")
        whole = calls[:-1] if is_open else calls
        found["tool_calls"] = [*map(_with_object, whole), *calls[len(whole) :]]
    content = message.get("content")
    if known == "assistant" and is_list(content):
        content, thought = _without_thinking(content)
        if thought and not any(message.get(name) for name in REASONING_MEMBERS):
            found["reasoning_content"] = thought
    return {**found, "content": _content(content, index, known, media)}


def _with_object(call: object) -> object:
    """The call with the text of an object as its arguments."""
    call = call_as_function(call) if is_object(call) else call
    function = call.get("function") if is_object(call) else None
    if not is_object(call) or not is_object(function):
        return call
    return {**call, "function": {**function, "arguments": object_text(function.get("arguments"))}}


def _without_thinking(parts: list[object]) -> tuple[list[object], str]:
    """The other parts, and the text of the parts of type thinking."""
    kept, thoughts = list[object](), list[str]()
    for part in parts:
        thought = part.get("thinking") if is_object(part) else None
        if not is_object(part) or part.get("type") != "thinking":
            kept.append(part)
        elif isinstance(thought, str):
            thoughts.append(thought)
        elif is_list(thought):
            thoughts += [str(one.get("text", "")) for one in thought if is_object(one)]
    return kept, "\n".join(thoughts)


def _content(
    content: object, index: int, role: str, media: PartReader | None
) -> str | list[Json] | None:
    if content is None:
        return None if role == "assistant" else ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(
            f"messages[{index}].content must be a text or a list of parts", param="messages"
        )
    found: list[Json] = []
    for number, part in enumerate(content):
        if media is not None and is_object(part) and is_media(part):
            kind = media.read(part, f"messages[{index}].content[{number}]")
            found.append({"type": kind})
        else:
            found.append({"type": "text", "text": _part_text(part, index)})
    return found


def _part_text(part: object, index: int) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if is_object(part) else None
    if is_object(part) and kind == "refusal" and isinstance(part.get("refusal"), str):
        return str(part["refusal"])
    if not is_object(part) or kind not in _TEXT_PARTS:
        raise RequestError(
            "Model only supports text input; received unsupported content type "
            f"'{str(kind)[:40]}' in messages[{index}].",
            param="messages",
            code="unsupported_content",
        )
    text = part.get("text")
    if not isinstance(text, str):
        raise RequestError(f"messages[{index}]: a text part needs a text", param="messages")
    return text


def tools_as_text(
    messages: Sequence[Mapping[str, object]],
    tools: Sequence[Mapping[str, object]],
    tag: CallTag,
    takes_system: bool,
) -> list[Mapping[str, object]]:
    """The conversation with its tools in a system text, for chat templates that do not show tools.

    Args:
        messages: content is a text, text parts, or None (assistant).
        takes_system: the template shows system messages; otherwise the tools come before the first
            text of the user.
    """
    found = list(messages)
    text, role = _tool_prompt(tools, tag), "system" if takes_system else "user"
    at = next((i for i, m in enumerate(found) if m["role"] == role), None)
    if at is None or (takes_system and at > 0):
        return [{"role": role, "content": text}, *found]
    own = _message_text(found[at].get("content"))
    found[at] = {**found[at], "content": f"{own}\n\n{text}" if takes_system else f"{text}\n\n{own}"}
    return found


def calls_as_text(
    messages: Sequence[Mapping[str, object]], tag: CallTag, continues_last: bool = False
) -> list[Mapping[str, object]]:
    """The conversation with earlier calls as the model's text, and tool results as user messages.

    Args:
        continues_last: the very last call has no end, for the model to continue it.

    Raises:
        RequestError: a call has no name.
    """
    found: list[Mapping[str, object]] = []
    results: list[str] = []
    for index, message in enumerate(messages):
        if message["role"] in ("tool", "function"):
            results.append(_TOOL_RESULT.format(_message_text(message.get("content"))))
            continue
        if results:
            found.append({"role": "user", "content": "\n".join(results)})
            results = []
        is_open = continues_last and index == len(messages) - 1
        found.append(_with_calls(message, index, tag, is_open))
    if results:
        found.append({"role": "user", "content": "\n".join(results)})
    return found


def _tool_prompt(tools: Sequence[Mapping[str, object]], tag: CallTag) -> str:
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


def _with_calls(
    message: Mapping[str, object], index: int, tag: CallTag, is_open: bool
) -> Mapping[str, object]:
    """The message with its calls as part of the text."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list) or not calls:
        return message
    texts = [text] if (text := _message_text(message.get("content"))) else []
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
        is_whole = not is_open or number < len(calls) - 1
        texts.append(f"{begin}{arguments or '{}'}{end if is_whole else ''}")
    rest = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**rest, "content": "\n".join(texts)}


def _message_text(content: object) -> str:
    """The text of a message, whole or in parts."""
    if not isinstance(content, list):
        return content if isinstance(content, str) else ""
    return "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
