"""The body of a Responses request: its fields in three lists, and the equivalent chat request."""

from collections.abc import Mapping, Sequence

import msgspec

from banyan.base.errors import RequestError
from banyan.chat_template.template import ChatTemplate
from banyan.server.errors import Json
from banyan.server.openai.fields import Refused, Report
from banyan.server.responses.items import chat_messages
from banyan.server.responses.tools import Offered, chat_choice

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
