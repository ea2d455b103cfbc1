"""What the sequences of one request may ask for together, whichever route it came by.

Each sequence alone is checked by its generator; here is what many of them, each legal, would take
of the server's memory.
"""

from collections.abc import Sequence

from banyan.base.errors import RequestError
from banyan.messages.requests import NO_SCORES
from banyan.requests.long_texts import check_total
from banyan.requests.request_spec import ALL_HIDDEN, RequestSpec
from banyan.requests.sampling_params import Limits


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
    chosen = sum(map(_told_positions, requests)) * limits.expert_choices
    if chosen > limits.max_hidden:
        raise RequestError(
            f"The request asks for {chosen} choices of experts; at most {limits.max_hidden} are "
            "given",
            param="return_routed_experts",
            hint="Give routed_experts_start_len, or ask for fewer tokens.",
        )


def _positions(request: RequestSpec) -> int:
    return len(request.prompt) + request.sampling.max_new_tokens


def _told_positions(request: RequestSpec) -> int:
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
