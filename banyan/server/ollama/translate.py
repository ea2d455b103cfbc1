"""From a request of Ollama's API to the equivalent chat request.

The tables name each request field and option: honoured, refused, or without effect.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import TypeVar

import msgspec

from banyan.base.errors import RequestError
from banyan.base.json_types import whole_number
from banyan.requests.request_spec import RequestContext
from banyan.server.errors import Json
from banyan.server.http.exchange import HttpExchange
from banyan.server.openai.models import check_model
from banyan.server.openai.prompts import check_messages, content_of, json_text
from banyan.server.openai.schema import (
    Members,
    Report,
    account_for,
    account_for_members,
    typed,
    unread_members,
)
from banyan.server.state import ServerState


class Message(msgspec.Struct, frozen=True, kw_only=True):
    role: str
    content: str | None = None
    thinking: str | None = None
    images: list[object] | None = None
    tool_calls: list[dict[str, object]] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class TextRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of both /api/chat and /api/generate."""

    model: str
    stream: bool | None = True
    format: str | dict[str, object] | None = None
    options: dict[str, object] | None = None
    think: bool | str | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None


class OllamaChatRequest(TextRequest, frozen=True, kw_only=True):
    messages: list[Message] | None = None
    tools: list[object] | None = None


class GenerateRequest(TextRequest, frozen=True, kw_only=True):
    prompt: str | None = None
    suffix: str | None = None
    system: str | None = None
    images: list[object] | None = None
    raw: bool | None = None


class EmbedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """/api/embed has `input`, the older /api/embeddings has `prompt`."""

    model: str
    input: object = None
    prompt: str | None = None
    dimensions: int | None = None
    truncate: bool | None = None
    """Texts that are too long are cut, unless this is false."""
    options: dict[str, object] | None = None


class ShowRequest(msgspec.Struct, frozen=True, kw_only=True):
    model: str = ""
    name: str = ""
    """The older name of `model`."""


_NONE = (None, "", [], {})

REFUSED: Mapping[str, tuple[Sequence[object], str]] = {
    "template": (_NONE, "a request may not bring its own template; use raw: true"),
    "context": (_NONE, "context is not available; send the messages to /api/chat"),
    "width": (_NONE, "this server makes no images"),
    "height": (_NONE, "this server makes no images"),
    "steps": (_NONE, "this server makes no images"),
}

HARMLESS = frozenset(("keep_alive", "truncate", "shift", "verbose", "insecure"))
"""Fields without effect: the model stays loaded, and prompts that are too long are refused."""

_CALLS: Members = {
    "messages": {
        **dict.fromkeys(Message.__struct_fields__),
        "tool_calls": {
            **dict.fromkeys(("id", "type")),
            "function": dict.fromkeys(("name", "arguments", "index")),
        },
    }
}

SAMPLING: Mapping[str, str] = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "typical_p": "typical_p",
    "seed": "seed",
    "stop": "stop",
    "num_predict": "max_tokens",
    "repeat_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
}
"""Option -> field of a chat request."""

_LOADING = "set when the server starts"
_SAMPLER = "this sampler is not available"

IDLE: Mapping[str, tuple[Sequence[object], str]] = {
    "num_ctx": ((), "the context's length is set when the server starts"),
    "num_keep": ((), "prompts are never shortened"),
    "repeat_last_n": ((-1,), "the penalty covers the whole text"),
    "tfs_z": ((1,), _SAMPLER),
    "mirostat": ((0,), _SAMPLER),
    "mirostat_tau": ((), _SAMPLER),
    "mirostat_eta": ((), _SAMPLER),
    "penalize_newline": ((True,), "line breaks are penalised like other tokens"),
    **dict.fromkeys(
        (
            "num_batch",
            "num_gpu",
            "main_gpu",
            "num_thread",
            "numa",
            "low_vram",
            "f16_kv",
            "logits_all",
            "vocab_only",
            "use_mmap",
            "use_mlock",
            "embedding_only",
            "draft_num_predict",
        ),
        ((), _LOADING),
    ),
}
"""Option -> (values that ask for what happens anyway, why others have no effect)."""


R = TypeVar("R", bound=msgspec.Struct)

_NO_NAMES: Mapping[str, str] = {}


def reporter(context: RequestContext, names: Mapping[str, str] = _NO_NAMES) -> Report:
    """Reports a field without effect, or refuses the request under --strict-requests.

    Args:
        names: our name of a field -> the client's.
    """

    def report(field: str, why: str) -> None:
        context.warn_or_refuse(names.get(field, field), why)

    return report


def typed_from(raw: Json, kind: type[R], report: Report) -> R:
    """The typed request. Every field of the body is honoured, refused or reported."""
    account_for(raw, kind.__struct_fields__, REFUSED, HARMLESS, report)
    account_for_members(raw, {"messages": Message}, (), report)
    for path in unread_members({"messages": raw.get("messages")}, _CALLS):
        report(path, "the model is not shown it")
    return typed(raw, kind)


async def read(exchange: HttpExchange, kind: type[R], report: Report) -> R:
    """The typed request of a body."""
    return await exchange.request.read(lambda raw: typed_from(raw, kind, report))


def model_and_adapter_of(name: str, context: RequestContext, state: ServerState) -> tuple[str, str]:
    """The model name to answer with, and the adapter that it names: ADAPTER, ADAPTER:TAG or
    BASE:ADAPTER. Any other tag (":latest", ":8b") is ignored."""
    served, names = state.served_name, state.adapters
    stem, _, tag = name.partition(":")
    for adapter in (name, stem, tag):
        if adapter in names and name != served:
            return name, adapter
    if name != served:
        check_model(stem, served, context)
    return name or served, ""


FIELD_NAMES: Mapping[str, str] = {
    "max_new_tokens": "num_predict",
    "max_tokens": "num_predict",
    "repetition_penalty": "repeat_penalty",
    "sampling_seed": "seed",
    "response_format": "format",
    "reasoning_effort": "think",
    "thinking": "think",
}
"""Field of a chat request -> its name in Ollama's API."""


class Pending:
    """(id, name) of calls without a result so far."""

    def __init__(self) -> None:
        self._calls: list[tuple[str, str] | None] = []
        self._places: dict[tuple[str, str], deque[int]] = {}
        """Indices of calls in order, by ("id", id), ("name", name), and ("", "") for all."""

    def __len__(self) -> int:
        return len(self._calls)

    def add(self, id: str, name: str) -> None:
        for key in (("id", id), ("name", name), ("", "")):
            self._places.setdefault(key, deque()).append(len(self._calls))
        self._calls.append((id, name))

    def take(self, id: str | None, name: str | None) -> tuple[str, str] | None:
        """The call of a result: by its id, else by name, else in order."""
        places = self._places.get(("id", id) if id else ("name", name) if name else ("", ""))
        while places:
            at = places.popleft()
            call, self._calls[at] = self._calls[at], None
            if call is not None:
                return call
        return None


def chat_body(request: OllamaChatRequest, report: Report) -> Json:
    """The body of a chat request; RequestError when a field is malformed."""
    given = request.messages or []
    check_messages(len(given))
    pending = Pending()
    messages = [_message(message, i, pending) for i, message in enumerate(given)]
    last = given[-1] if given else None
    return {
        **_common(request, report),
        "messages": messages,
        "tools": request.tools or None,
        "continue_final_message": bool(
            last and last.role == "assistant" and last.content and not last.tool_calls
        ),
    }


def prompt_body(request: GenerateRequest, report: Report) -> Json:
    """The body of a chat request with `prompt` as a user's message."""
    messages: list[Json] = []
    if request.system:
        messages.append({"role": "system", "content": request.system})
    content = _content(request.prompt or "", request.images, "images")
    messages.append({"role": "user", "content": content})
    return {**_common(request, report), "messages": messages}


def raw_body(request: GenerateRequest, ids: list[int], report: Report) -> Json:
    """The body of a chat request with token ids as prompt; the answer is not parsed."""
    common = _common(request, report)
    return {**common, "messages": [], "input_ids": ids, "separate_reasoning": False}


def _common(request: TextRequest, report: Report) -> Json:
    effort = request.think if isinstance(request.think, str) else None
    return {
        "model": request.model,
        "stream": request.stream is not False,
        "thinking": None if effort is not None else request.think,
        "reasoning_effort": effort,
        "response_format": _form(request.format),
        "logprobs": bool(request.logprobs),
        "top_logprobs": request.top_logprobs,
        **_options(request.options or {}, report),
    }


def _options(options: Mapping[str, object], report: Report) -> Json:
    """Sampling fields. Options without effect are reported."""
    found: Json = {}
    for name, value in options.items():
        if value is None:
            continue
        if name in SAMPLING:
            found[SAMPLING[name]] = _off(name, value)
        elif name not in IDLE:
            report(f"options.{name}", "unknown option, ignored")
        elif value not in IDLE[name][0]:
            report(f"options.{name}", IDLE[name][1])
    return found


def _off(name: str, value: object) -> object:
    """`value`, or what means "off" here where Ollama's API spells that otherwise."""
    value = whole_number(value)
    is_number = type(value) is int
    if name == "num_predict" and is_number and value <= 0:
        return None  # as much as fits
    if name == "seed" and is_number and value < 0:
        return None  # drawn
    if name == "top_k" and is_number and value <= 0:
        return -1
    return value


def _form(form: str | dict[str, object] | None) -> Json | None:
    if form is None or form == "":
        return None
    if form == "json":
        return {"type": "json_object"}
    if isinstance(form, str):
        raise RequestError(
            f'format must be "json" or a JSON schema, got {form[:40]!r}', param="format"
        )
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": form}}


def _content(text: str, images: list[object] | None, where: str) -> str | list[Json]:
    """The content of a message: its pictures, then its text."""
    parts: list[str | Json] = []
    for image in images or []:
        if not isinstance(image, str):
            raise RequestError(f"{where} must be base64 texts", param="messages")
        data = image if image[:5].lower() == "data:" else f"data:image/png;base64,{image}"
        parts.append({"type": "image_url", "image_url": {"url": data}})
    return content_of([*parts, text] if text or not parts else parts)


def _message(message: Message, index: int, pending: Pending) -> Json:
    content = _content(message.content or "", message.images, f"messages[{index}].images")
    found: Json = {"role": message.role, "content": content}
    if message.thinking:
        found["reasoning_content"] = message.thinking
    if message.tool_calls:
        found["tool_calls"] = [_call(call, index, pending) for call in message.tool_calls]
    if message.role == "tool":
        id, name = _answered(message, pending)
        found |= {"tool_call_id": id} if id else {}
        found |= {"name": name} if name else {}
    return found


def _call(call: Json, index: int, pending: Pending) -> Json:
    function = call.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    arguments = function.get("arguments") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise RequestError(
            f'messages[{index}].tool_calls must be {{"function": {{"name", "arguments": {{…}}}}}}',
            param="messages",
        )
    given = call.get("id")
    id = given if isinstance(given, str) and given else f"call_{index}_{len(pending)}"
    pending.add(id, name)
    text = json_text(arguments, "messages") if isinstance(arguments, dict) else arguments
    return {"id": id, "type": "function", "function": {"name": name, "arguments": text}}


def _answered(message: Message, pending: Pending) -> tuple[str, str]:
    """Id and name of the call of a result."""
    wanted, name = message.tool_call_id, message.tool_name
    call = pending.take(wanted, name)
    return (call[0], name or call[1]) if call else (wanted or "", name or "")
