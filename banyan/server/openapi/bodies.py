"""Request bodies that the routes do not parse into structs, as types for the OpenAPI document.

Tests compare them with the fields that the routes accept.
"""

from collections.abc import Mapping

import msgspec

from banyan.requests.constraint import FIELDS as CONSTRAINTS
from banyan.server.http.route import Body
from banyan.server.openai.schema import SAMPLING, ChatRequest, CompletionRequest

_TEXTS = str | list[str] | None
_SCHEMA = bool | str | dict[str, object] | None
_OBJECT = str | dict[str, object] | None

SAMPLING_TYPES: Mapping[str, object] = {
    **dict.fromkeys(("max_new_tokens", "min_new_tokens", "n", "top_k"), int | None),
    **dict.fromkeys(("sampling_seed", "stream_interval"), int | None),
    **dict.fromkeys(("temperature", "top_p", "min_p"), float | None),
    **dict.fromkeys(("frequency_penalty", "presence_penalty"), float | None),
    "repetition_penalty": float | None,
    "stop": _TEXTS,
    "stop_regex": _TEXTS,
    "stop_token_ids": list[int] | None,
    **dict.fromkeys(("ignore_eos", "no_stop_trim", "skip_special_tokens"), bool | None),
    "spaces_between_special_tokens": bool | None,
    "logit_bias": dict[str, float] | None,
    "custom_logit_processor": str | None,
    "custom_params": dict[str, object] | None,
    "json_schema": _SCHEMA,
    "regex": str | None,
    "ebnf": str | None,
    "structural_tag": _OBJECT,
}
"""Field of `sampling_params` -> its type."""

CONSTRAINT_TYPES: Mapping[str, object] = {
    "response_format": dict[str, object] | None,
    "guided_json": _SCHEMA,
    "guided_regex": str | None,
    "guided_choice": list[str] | None,
    "guided_grammar": str | None,
}
"""Constraint field of the OpenAI routes that /generate does not have -> its type."""

NATIVE_TYPES: Mapping[str, object] = {
    "text": _TEXTS,
    "input_ids": list[int | list[int]] | None,
    "input_embeds": object,
    "sampling_params": object,
    **dict.fromkeys(("rid", "extra_key", "cache_salt"), _TEXTS),
    **dict.fromkeys(("stream", "return_text_in_logprobs", "return_prompt_token_ids"), bool | None),
    "return_logprob": bool | list[bool] | None,
    **dict.fromkeys(("logprob_start_len", "top_logprobs_num"), int | list[int] | None),
    "token_ids_logprob": object,
    "priority": int | None,
    "return_hidden_states": object,
    "return_routed_experts": bool | None,
    "routed_experts_start_len": int | None,
    "custom_logit_processor": object,
    "session_params": dict[str, object] | None,
    "lora_path": _TEXTS,
    "bootstrap_host": _TEXTS,
    **dict.fromkeys(("bootstrap_port", "bootstrap_room"), int | list[int] | None),
    **dict.fromkeys(("routed_dp_rank", "data_parallel_rank", "disagg_prefill_dp_rank"), int | None),
}
"""Field of /generate -> its type."""


def _struct(
    name: str, types: Mapping[str, object], *bases: type[msgspec.Struct]
) -> type[msgspec.Struct]:
    """A struct with the fields of `bases` and `types`; the latter are optional."""
    fields = [(field, type_, None) for field, type_ in types.items()]
    return msgspec.defstruct(name, fields, bases=bases or None, kw_only=True, module=__name__)


SamplingParams = _struct("SamplingParams", SAMPLING_TYPES)
_SAMPLED = {field: SAMPLING_TYPES[native] for field, native in SAMPLING.items()}
_SAMPLED |= {field: {**SAMPLING_TYPES, **CONSTRAINT_TYPES}[field] for field in CONSTRAINTS}

CHAT = Body(_struct("ChatCompletionRequest", _SAMPLED, ChatRequest))
COMPLETION = Body(_struct("TextCompletionRequest", _SAMPLED, CompletionRequest))
GENERATE = Body(
    _struct("NativeGeneration", {**NATIVE_TYPES, "sampling_params": SamplingParams | None})
)


class VertexRequest(msgspec.Struct, kw_only=True):
    instances: list[dict[str, object]]
    parameters: dict[str, object] | None = None


class UploadForm(msgspec.Struct, kw_only=True):
    """A batch input file: JSON lines, with purpose "batch"."""

    file: str
    purpose: str


class FlushRequest(msgspec.Struct, kw_only=True):
    timeout: float = 0.0
    """Seconds to wait for running requests."""
    pinned: bool = False
    """Flush pinned prompts too."""


VERTEX = Body(VertexRequest)
UPLOAD = Body(UploadForm, media="multipart/form-data")
FLUSH = Body(FlushRequest, is_query=True)
