"""From what a client sends to prompt token ids: chat messages, texts, or ids as they are.

Large texts are rendered and tokenised in a thread, so that other streams go on meanwhile.
"""

import json
from dataclasses import dataclass, field

from banyan.base.errors import RequestError
from banyan.frontend.chat import RESERVED
from banyan.frontend.constraint import check_depth
from banyan.frontend.threads import THREAD_BYTES, off_loop
from banyan.server.errors import Json
from banyan.server.state import Service

_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_TEXT_PARTS = ("text", "input_text", "output_text")
_RESERVED = RESERVED | {"tokenize", "chat_template"}
MAX_MESSAGES = 16384


@dataclass(frozen=True)
class Conversation:
    """Messages and how to render them."""

    messages: list[Json]
    options: Json = field(default_factory=dict)
    """chat_template_kwargs."""
    continue_final_message: bool = False
    add_generation_prompt: bool = True
    tools: list[Json] | None = None
    tools_bytes: int = 0
    """Size of `tools` as JSON."""


async def chat_ids(service: Service, chat: Conversation) -> list[int]:
    """Token ids of a rendered conversation; text inside messages never becomes a special token."""
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
    messages = checked_messages(chat.messages)
    if chat.continue_final_message and messages[-1]["role"] != "assistant":
        raise RequestError(
            "continue_final_message needs a last message of the assistant",
            param="continue_final_message",
        )
    template = service.chat

    def render() -> list[int]:
        return template.encode(
            messages,
            chat.tools,
            add_generation_prompt=chat.add_generation_prompt and not chat.continue_final_message,
            continue_final_message=chat.continue_final_message,
            **chat.options,
        )

    # In a thread whatever the size: it waits for the process that the template runs in.
    size = sum(_size(m["content"]) for m in messages) + chat.tools_bytes
    return await off_loop(THREAD_BYTES + 1 + size, render)


async def text_ids(service: Service, text: str, add_special_tokens: bool = True) -> list[int]:
    """Token ids of a plain prompt, in which the texts of special tokens count as such."""
    tokenizer = service.words()
    return await off_loop(len(text), lambda: tokenizer.encode(text, add_special_tokens))


async def ids_text(
    service: Service, ids: list[int], skip_special_tokens: bool, param: str = "tokens"
) -> str:
    tokenizer = service.words()
    checked_ids(ids, service, param)
    return await off_loop(len(ids), lambda: tokenizer.decode(ids, skip_special_tokens))


def checked_ids(ids: list[int], service: Service, param: str) -> list[int]:
    """`ids` as given, or RequestError 400 naming the first outside the vocabulary."""
    size = service.limits.vocab_size
    for id in ids:
        if type(id) is not int or not 0 <= id < size:
            raise RequestError(f"{param} must be token ids in [0, {size}), got {id!r}", param=param)
    return ids


def checked_messages(messages: list[Json]) -> list[Json]:
    """Messages that a template can render: known roles, content a text or text parts."""
    if not messages:
        raise RequestError("Messages cannot be empty.", param="messages")
    if len(messages) > MAX_MESSAGES:
        raise RequestError(
            f"at most {MAX_MESSAGES} messages are accepted, got {len(messages)}", param="messages"
        )
    return [_message(m, i) for i, m in enumerate(messages)]


def json_text(value: object, param: str) -> str:
    """`value` as JSON text, integers of any size included; RequestError when it is too deep."""
    check_depth(value, param)
    return json.dumps(value, ensure_ascii=False)


def _message(message: Json, index: int) -> Json:
    role = message.get("role")
    known = role.lower() if isinstance(role, str) and len(role) <= 32 else ""
    if known not in _ROLES:
        raise RequestError(
            f"messages[{index}].role must be one of {', '.join(_ROLES)}", param="messages"
        )
    known = "system" if known == "developer" else known
    if message.get("tool_calls") and not isinstance(message["tool_calls"], list):
        raise RequestError(f"messages[{index}].tool_calls must be a list", param="messages")
    return {**message, "role": known, "content": _content(message.get("content"), index, known)}


def _content(content: object, index: int, role: str) -> str | list[Json] | None:
    if isinstance(content, str) or (content is None and role == "assistant"):
        return content
    if not isinstance(content, list):
        raise RequestError(
            f"messages[{index}].content must be a text or a list of parts", param="messages"
        )
    return [{"type": "text", "text": _part_text(part, index)} for part in content]


def _part_text(part: object, index: int) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in _TEXT_PARTS:
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


def _size(content: object) -> int:
    """Characters of checked content."""
    if isinstance(content, list):
        return sum(len(part["text"]) for part in content)
    return len(content) if isinstance(content, str) else 0
