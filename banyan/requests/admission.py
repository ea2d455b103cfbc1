"""Admission checks: refuse a request before it takes anything of the server.

`check_spec` looks at one sequence. `check_budget` bounds all sequences of one request together.
"""

from collections.abc import Sequence

from banyan.base.errors import RequestError
from banyan.messages.requests import NO_SCORES
from banyan.requests.bootstrap import check_room
from banyan.requests.prompts import check_total
from banyan.requests.request_spec import ALL_HIDDEN, RequestSpec
from banyan.requests.sampling_params import Limits

OWN_ROUTES = ("probe", "warm-up")
"""Requests of the server itself."""


def check_spec(request: RequestSpec, limits: Limits, has_tokenizer: bool) -> None:
    """Refuse a sequence that this model or server cannot run. Every API's requests come by here.

    Raises:
        RequestError: names the field, the rule and the value.
    """
    prompt, vocab_size = request.prompt, limits.vocab_size
    check_priority(request.message.priority)
    if not prompt:
        raise RequestError("The prompt is empty.", param="text")
    low, high = min(prompt), max(prompt)
    if low < 0 or high >= vocab_size:
        wrong = low if low < 0 else high
        raise RequestError(
            f"input_ids must be in [0, {vocab_size}), got {wrong}.", param="input_ids"
        )
    if not request.message.spans and any(id in prompt for id in limits.media_ids):
        raise RequestError(
            "The prompt has the placeholder of a picture, and no picture came with it.",
            code="unsupported_content",
            hint="Send pictures as parts of /v1/chat/completions, or as image_data of /generate.",
        )
    if limits.is_transcriber and not request.message.spans and request.route not in OWN_ROUTES:
        raise RequestError(
            "This model is served for speech, not for text",
            code="not_a_generation_model",
            hint="Use /v1/audio/transcriptions.",
        )
    if not has_tokenizer and (request.text.stop or request.text.stop_regex):
        raise RequestError(
            "stop needs a tokenizer and this server runs without one",
            param="stop",
            hint="Use stop_token_ids.",
        )
    if request.message.pool and not limits.is_embedding:
        raise RequestError(
            "This model is served for text, not for embeddings or scores of classes",
            code="not_an_embedding_model",
            hint="Start the server with --is-embedding.",
        )
    if limits.is_embedding and not request.message.pool:
        raise RequestError(
            "This model is served for embeddings, not for text",
            code="not_a_generation_model",
            hint="Use /v1/embeddings or /encode.",
        )
    _check_scores(request, limits)
    message = request.message
    if limits.role or message.transfer_id or message.prefill_replica >= 0:
        check_room(request, limits)
    if request.hidden and not limits.hidden_states:
        raise RequestError(
            "The server is not configured to return the hidden states",
            param="return_hidden_states",
            code="not_available",
            hint="Start the server with --enable-return-hidden-states.",
        )
    if request.message.wants_experts:
        _check_experts(request, limits)
    if request.message.spans:
        _check_spans(request)


def _check_scores(request: RequestSpec, limits: Limits) -> None:
    message, vocab_size = request.message, limits.vocab_size
    if message.score_from == NO_SCORES:
        return
    for id in message.score_ids:
        if not 0 <= id < vocab_size:
            raise RequestError(
                f"token_ids_logprob must be in [0, {vocab_size}), got {id}.",
                param="token_ids_logprob",
            )


def check_priority(priority: int) -> None:
    if not -(2**31) <= priority < 2**31:
        raise RequestError(
            f"priority must be a 32-bit integer, got {str(priority)[:40]}.", param="priority"
        )


def _check_experts(request: RequestSpec, limits: Limits) -> None:
    if not limits.expert_choices:
        raise RequestError(
            "The server is not configured to return the experts that tokens chose",
            param="return_routed_experts",
            code="not_available",
            hint="Start the server with --enable-return-routed-experts.",
        )
    if request.hidden:
        raise RequestError(
            "return_routed_experts and return_hidden_states cannot be combined",
            param="return_routed_experts",
            hint="Ask for one of them.",
        )
    if request.message.hidden_from > len(request.prompt):
        raise RequestError(
            f"routed_experts_start_len must be in [0, {len(request.prompt)}], the length of the "
            f"prompt, got {request.message.hidden_from}.",
            param="routed_experts_start_len",
        )


def _check_spans(request: RequestSpec) -> None:
    """Refuse what would read the tokens of a prompt that has none."""
    spans = request.message.spans
    if sum(span.count for span in spans) < len(request.prompt):
        return
    asked = {
        "logprob_start_len": NO_SCORES != request.message.score_from < len(request.prompt),
        "repetition_penalty": request.sampling.repetition_penalty != 1.0,
    }
    for name, is_asked in asked.items():
        if is_asked:
            raise RequestError(
                f"{name} reads the tokens of the prompt, and input_embeds have none", param=name
            )


def check_budget(requests: Sequence[RequestSpec], limits: Limits) -> None:
    """Raise RequestError when `requests`, the sequences of one request, ask for too much."""
    check_total(sum(len(r.prompt) for r in requests), limits)
    scores = sum(map(_prompt_scores, requests))
    if scores > limits.max_scores:
        raise _too_many_scores(
            f"{scores} log-probabilities of its prompts; at most {limits.max_scores} are given"
        )
    scores = sum(map(_output_scores, requests))
    if scores > limits.max_output_scores:
        raise _too_many_scores(
            f"{scores} log-probabilities of its {len(requests)} outputs; at most "
            f"{limits.max_output_scores} are given",
            "Ask for fewer tokens (max_tokens), alternatives or sequences.",
        )
    hidden = sum(_positions(r) for r in requests if r.hidden == ALL_HIDDEN) * limits.hidden_size
    if hidden > limits.max_hidden:
        raise RequestError(
            f"The request asks for {hidden} values of hidden states; at most {limits.max_hidden} "
            "are given",
            param="return_hidden_states",
            hint='Ask for "last", or for fewer tokens.',
        )
    chosen = sum(map(_returned_positions, requests)) * limits.expert_choices
    if chosen > limits.max_hidden:
        raise RequestError(
            f"The request asks for {chosen} choices of experts; at most {limits.max_hidden} are "
            "given",
            param="return_routed_experts",
            hint="Give routed_experts_start_len, or ask for fewer tokens.",
        )


def _positions(request: RequestSpec) -> int:
    return len(request.prompt) + request.sampling.max_new_tokens


def _returned_positions(request: RequestSpec) -> int:
    message = request.message
    return _positions(request) - message.hidden_from if message.wants_experts else 0


def _width(request: RequestSpec) -> int:
    """Log-probabilities at each scored position."""
    message = request.message
    if message.score_from == NO_SCORES:
        return 0
    return 1 + message.score_top + len(message.score_ids)


def _prompt_scores(request: RequestSpec) -> int:
    return (len(request.prompt) - request.message.score_from) * _width(request)


def _output_scores(request: RequestSpec) -> int:
    return request.sampling.max_new_tokens * _width(request)


def _too_many_scores(asked: str, hint: str = "") -> RequestError:
    return RequestError(f"The request asks for {asked}.", param="top_logprobs_num", hint=hint)
