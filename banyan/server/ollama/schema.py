"""The request fields and options of the Ollama routes: honoured, refused and without effect."""

from collections.abc import Mapping, Sequence
from typing import TypeVar

import msgspec

from banyan.requests.request_spec import RequestContext
from banyan.server.errors import Json
from banyan.server.http.exchange import HttpExchange
from banyan.server.openai.models import check_model
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
