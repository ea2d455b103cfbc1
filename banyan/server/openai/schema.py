"""The request fields of the OpenAI routes, in three lists: honoured, refused, harmless.

A field that is in no list is reported as unknown. Sampling fields are only renamed here:
requests.sampling_params validates them for all APIs.
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import TypeVar

import msgspec

from banyan.base.errors import RequestError
from banyan.base.json_types import is_list, is_object
from banyan.media.parts import MEDIA_TYPES, PART_MEMBERS
from banyan.requests import constraint
from banyan.requests.request_spec import (
    LAST_HIDDEN,
    Fields,
    PromptSpec,
    RequestContext,
    RequestSpec,
    build_specs,
)
from banyan.requests.sampling_params import BREAKERS, FILTERS
from banyan.server.errors import Json

Message = dict[str, object]
Members = Mapping[str, "Members | None"]
"""Known members of an object, or of the objects in a list; None = everything below is read."""


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class CommonRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of both chat and completions, without sampling."""

    model: str = ""
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    rid: str | None = None
    cache_salt: str | None = None
    extra_key: str | None = None
    priority: int | None = None
    metadata: dict[str, str] | None = None
    """Repeated in the answer; in a stream, in the event that closes a choice."""
    max_tokens: int | None = None
    return_hidden_states: bool | str | None = False
    return_routed_experts: bool | None = False
    routed_experts_start_len: int | None = 0
    return_cached_tokens_details: bool | None = False
    bootstrap_host: str | list[str] | None = None
    bootstrap_port: int | list[int | None] | None = None
    bootstrap_room: int | list[int] | None = None
    routed_dp_rank: int | None = None
    data_parallel_rank: int | None = None
    disagg_prefill_dp_rank: int | None = None
    lora_path: str | list[str | None] | None = None
    """A list has a name or null for each prompt."""


class ChatRequest(CommonRequest, frozen=True, kw_only=True):
    messages: list[Message]
    max_completion_tokens: int | None = None
    tools: list[object] | None = None
    tool_choice: str | dict[str, object] | None = None
    parallel_tool_calls: bool | None = True
    reasoning_effort: str | None = None
    thinking: bool | dict[str, object] | None = None
    thinking_token_budget: int | None = None
    thinking_budget: int | None = None
    """The same under DashScope's name."""
    separate_reasoning: bool | None = True
    stream_reasoning: bool | None = True
    logprobs: bool | None = False
    top_logprobs: int | None = None
    n_probs: int | None = None
    """logprobs and top_logprobs under llama-server's name."""
    continue_final_message: bool | None = False
    chat_template_kwargs: dict[str, object] | None = None
    input_ids: list[int] | None = None


class CompletionRequest(CommonRequest, frozen=True, kw_only=True):
    prompt: str | list[object]
    echo: bool | None = False
    logprobs: int | None = None
    n_probs: int | None = None
    """logprobs under llama-server's name."""
    best_of: int | None = None
    suffix: str | None = None


_FORMAT = ("type", "schema", "pattern", "regex", "grammar", "value", "format", "structures")
_SCHEMA = ("name", "description", "schema", "strict")
_MEMBERS: Members = {
    "stream_options": dict.fromkeys(StreamOptions.__struct_fields__),
    "response_format": {
        **dict.fromkeys((*_FORMAT, *_SCHEMA, "triggers")),
        "json_schema": dict.fromkeys(_SCHEMA),
    },
    "thinking": {"type": None},
}
"""Members that the OpenAI routes read of these fields."""
PROMPT_MEMBERS: Members = {
    "messages": {
        **dict.fromkeys(("role", "content", "name", "tool_call_id")),
        **dict.fromkeys(("reasoning_content", "reasoning", "thinking")),
        "content": {
            **dict.fromkeys(("type", "text", "refusal", "thinking", *PART_MEMBERS)),
            **{
                name: dict.fromkeys(PART_MEMBERS)
                for _, members in MEDIA_TYPES.values()
                for name in members
            },
        },
        "tool_calls": {
            **dict.fromkeys(("id", "type", "index")),
            "function": dict.fromkeys(("name", "arguments")),
            "custom": dict.fromkeys(("name", "input")),
        },
    },
    "tools": {
        "type": None,
        "function": dict.fromkeys(("name", "description", "parameters", "strict")),
        "custom": dict.fromkeys(("name", "description", "format")),
    },
}
"""Members that a prompt shows of these fields with any chat template."""

SAMPLING: Mapping[str, str] = {
    "n": "n",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "frequency_penalty": "frequency_penalty",
    "presence_penalty": "presence_penalty",
    "repetition_penalty": "repetition_penalty",
    "min_tokens": "min_new_tokens",
    "seed": "sampling_seed",
    "stop": "stop",
    "stop_token_ids": "stop_token_ids",
    "stop_regex": "stop_regex",
    "no_stop_trim": "no_stop_trim",
    "ignore_eos": "ignore_eos",
    "skip_special_tokens": "skip_special_tokens",
    "spaces_between_special_tokens": "spaces_between_special_tokens",
    "logit_bias": "logit_bias",
    "custom_logit_processor": "custom_logit_processor",
    "custom_params": "custom_params",
    **{name: name for name in (*FILTERS, BREAKERS)},
}
"""Field of the OpenAI routes -> field of sampling_params."""

_TOOLS = "functions and function_call are the old names; use tools and tool_choice"
_MEDIA = "this server takes text only"
_RESEARCH = "this output is not available in this build"
_SESSIONS = "sessions are not available in this build"

_OFF = (None, False, "", 0)
_NONE = (None, "", [], {})

REFUSED: Mapping[str, tuple[tuple[object, ...], str]] = {
    "functions": (_NONE, _TOOLS),
    "function_call": ((None, "auto", "none"), _TOOLS),
    "modalities": ((None, [], ["text"]), _MEDIA),
    "audio": (_NONE, _MEDIA),
    "mm_processor_kwargs": (_NONE, _MEDIA),
    "images_config": (_NONE, _MEDIA),
    "video_config": (_NONE, _MEDIA),
    "return_sampling_mask": (_OFF, _RESEARCH),
    "return_flat_raw_output_top_logprobs": (_OFF, _RESEARCH),
    "return_spec_tokens_details": (_OFF, _RESEARCH),
    "sampling_logprobs_mode": ((None, "selected"), _RESEARCH),
    "return_input_ids_in_sglext": (_OFF, _RESEARCH),
    "return_output_ids_in_sglext": (_OFF, _RESEARCH),
    "return_token_ids": (_OFF, f"{_RESEARCH}; /generate returns output_ids"),
    "return_prompt_token_ids": (_OFF, f"{_RESEARCH}; /tokenize returns them"),
    "return_meta_info": (_OFF, f"{_RESEARCH}; /generate returns meta_info"),
    "session_params": (_NONE, _SESSIONS),
    "watermark": (_NONE, _RESEARCH),
    "beam_width": ((None, 1), "beam search is not available in this build"),
    "chat_template": (_NONE, "a request may not bring its own chat template"),
    "bad_words": (_NONE, "bad_words is not available; use logit_bias"),
    "allowed_token_ids": (_NONE, "allowed_token_ids is not available; use logit_bias"),
    "prediction": (_NONE, "predicted outputs are not available in this build"),
    "web_search_options": (_NONE, "web search is not available in this build"),
}
"""Field -> (values that are accepted because they change nothing, reason to refuse others)."""

HARMLESS = frozenset(
    (
        "user",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "verbosity",
        "task",
        "session_id",
        "custom_labels",
        "return_flat_raw_top_logprobs_b64",
        "max_dynamic_patch",
        "min_dynamic_patch",
        "use_audio_in_video",
    )
)
"""Fields that do not change the answer; accepted and reported."""


R = TypeVar("R", bound=CommonRequest)
T = TypeVar("T")

Report = Callable[[str, str], None]
"""Reports (field, why it is not honoured)."""
Refused = Mapping[str, tuple[Sequence[object], str]]
"""Field -> (values that are accepted because they change nothing, reason to refuse others)."""

_MAX_UNREAD = 64
_AT_FIELD = re.compile(r"at `\$\.(\w+)")


def typed(raw: Mapping[str, object], kind: type[T]) -> T:
    """`raw` as a Struct of type `kind`; RequestError names the field of the wrong type.

    Numbers and booleans may be texts, as in a query: "15" is 15. Whole numbers may be floats.
    """
    try:
        with suppress(msgspec.ValidationError):
            return msgspec.convert(raw, kind)
        return msgspec.convert(raw, kind, strict=False)
    except msgspec.ValidationError as error:
        text = str(error)
        found = _AT_FIELD.search(text) or re.search(r"required field `(\w+)`", text)
        raise RequestError(text, param=found.group(1) if found else "") from None
    except (RecursionError, OverflowError) as error:
        raise RequestError(f"the request cannot be read: {error}") from None


def read_fields(raw: Json, kind: type[R], context: RequestContext) -> R:
    """The typed request. Every field of `raw` is honoured, refused or reported."""
    known = {*kind.__struct_fields__, *SAMPLING, *constraint.FIELDS}
    account_for(raw, known, REFUSED, HARMLESS, context.warn_or_refuse)
    for path in unread_members({name: raw.get(name) for name in _MEMBERS}, _MEMBERS):
        context.warn_or_refuse(path, "not used")
    return typed(raw, kind)


def account_for(
    raw: Json, known: Collection[str], refused: Refused, harmless: Collection[str], report: Report
) -> None:
    """Refuse or report every field of `raw` that is not `known`."""
    for name, value in raw.items():
        if name in known:
            continue
        if name in refused:
            _refuse_unless_neutral(name, value, *refused[name])
        elif value and name in constraint.FIELDS:
            why = "this field would constrain the output, and this route does not read it"
            raise RequestError(why, param=name, code="not_available")
        elif value is not None:
            report(name, "not used" if name in harmless else "unknown field, ignored")


def unread_members(value: object, tree: Members) -> list[str]:
    """Paths of the members of `value` that are in no tree, without those that are null."""
    found: dict[str, None] = {}
    _unread(value, tree, "", found)
    return list(found)[:_MAX_UNREAD]


def _unread(value: object, tree: Members, path: str, found: dict[str, None]) -> None:
    for one in value if is_list(value) else [value]:
        if not is_object(one):
            continue
        for name, inner in one.items():
            if inner is None:
                continue
            if name not in tree:
                found[f"{path}{name[:40]}"] = None
            elif (below := tree[name]) is not None:
                _unread(inner, below, f"{path}{name}.", found)


def account_for_members(
    raw: Json,
    kinds: Mapping[str, type[msgspec.Struct]],
    harmless: Collection[str],
    report: Report,
) -> None:
    """Report unknown members of objects in these fields of `raw`, alone or in a list."""
    found: dict[str, None] = {}
    for name, kind in kinds.items():
        value = raw.get(name)
        known = {*kind.__struct_fields__, *harmless}
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, dict):
                unread = [m for m in one if m not in known and one[m] is not None]
                found |= {f"{name}.{m}": None for m in unread}
    for name in found:
        report(name, "not used")


def _refuse_unless_neutral(name: str, value: object, neutral: Sequence[object], why: str) -> None:
    if not any(type(value) is type(n) and value == n for n in neutral):
        raise RequestError(why, param=name, code="not_available")


def native_sampling(raw: Json, max_new_tokens: int | None) -> Json:
    """The equivalent sampling_params of /generate; null fields take their defaults."""
    params: Json = {
        native: raw[name] for name, native in SAMPLING.items() if raw.get(name) is not None
    }
    params["max_new_tokens"] = max_new_tokens
    return {**params, **constraint.native_constraint(raw)}


def with_openai_names(error: RequestError) -> RequestError:
    """The same refusal with the names of OpenAI's fields."""
    names = {native: name for name, native in SAMPLING.items()} | {"max_new_tokens": "max_tokens"}
    return with_names(error, names)


def with_names(error: RequestError, names: Mapping[str, str]) -> RequestError:
    """The same refusal with other names of fields: `names` maps ours to the client's."""
    name = names.get(error.param, error.param)
    if name == error.param:
        return error
    text = error.text
    for native, own in names.items():
        text = text.replace(native, own)
    return RequestError(text, param=name, status=error.status, code=error.code, hint=error.hint)


def specs_of(
    context: RequestContext, request: msgspec.Struct, prompts: Sequence[PromptSpec], route: str
) -> list[RequestSpec]:
    """One spec for each sequence in answer order: all of the first prompt, then the next.

    True for return_hidden_states means the last hidden state on these routes. The id of the
    exchange is used if the body has no rid.
    """
    fields = msgspec.structs.asdict(request)
    if fields.get("rid") is None:
        fields["rid"] = context.id
    if fields.get("return_hidden_states") is True:
        fields["return_hidden_states"] = LAST_HIDDEN
    num = len(prompts) if len(prompts) > 1 else None
    specs = build_specs(context, Fields(fields, num), prompts, route)
    if len(specs) > 1 and specs[0].message.wants_experts:
        raise RequestError(
            f"return_routed_experts is of one sequence on this route, and these are {len(specs)}",
            param="return_routed_experts",
            hint="Ask for one at a time, or use /generate.",
        )
    return specs
