"""The request fields of the OpenAI routes, in three lists: honoured, refused, harmless.

A field that is in no list is reported as unknown. Sampling fields are only renamed here:
requests.sampling_params validates them for all APIs.
"""

from collections.abc import Mapping

import msgspec

Message = dict[str, object]


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
    separate_reasoning: bool | None = True
    stream_reasoning: bool | None = True
    logprobs: bool | None = False
    top_logprobs: int | None = None
    continue_final_message: bool | None = False
    chat_template_kwargs: dict[str, object] | None = None
    input_ids: list[int] | None = None


class CompletionRequest(CommonRequest, frozen=True, kw_only=True):
    prompt: str | list[object]
    echo: bool | None = False
    logprobs: int | None = None
    best_of: int | None = None
    suffix: str | None = None


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
