"""Translation between SGLang's gRPC messages and requests.

`native_body` and `embed_fields` read requests, `chunk_of` and `complete_of` write responses.
Reading a large message takes long, so it runs in a thread (`off_loop`).
"""

from collections.abc import Sequence

from google.protobuf.json_format import MessageToDict
from smg_grpc_proto.generated import sglang_scheduler_pb2 as pb

from banyan.base.errors import RequestError
from banyan.requests.context import RequestContext
from banyan.requests.generate_request import NativeSequence
from banyan.requests.generate_response import split_states
from banyan.requests.generation import Finish, TextChunk, TokenScore
from banyan.server.errors import Json

_CONSTRAINTS = {
    "regex": "regex",
    "json_schema": "json_schema",
    "ebnf_grammar": "ebnf",
    "structural_tag": "structural_tag",
}
"""Field of the message -> field of `sampling_params`."""


def native_body(request: pb.GenerateRequest, context: RequestContext) -> Json:
    """The body of POST /generate that asks for the same.

    Raises:
        RequestError: the request has no token ids, or asks for something that is not available.
    """
    for name, is_given in (
        ("mm_inputs", request.HasField("mm_inputs")),
        ("input_embeds", bool(request.input_embeds)),
    ):
        if is_given:
            raise RequestError(
                f"{name} is not available over gRPC", param=name, code="not_available"
            )
    if request.require_reasoning:
        context.warn_or_refuse("require_reasoning", "reasoning tokens are not counted")
    body: Json = {
        "rid": request.request_id or context.id,
        "input_ids": token_ids(request.tokenized),
        "stream": request.stream,
    }
    if request.HasField("sampling_params"):
        body["sampling_params"] = _sampling(request.sampling_params)
    if request.return_logprob:
        body["return_logprob"] = True
        body["logprob_start_len"] = request.logprob_start_len
        body["top_logprobs_num"] = request.top_logprobs_num
        if request.token_ids_logprob:
            body["token_ids_logprob"] = [id for id in request.token_ids_logprob]
    if request.return_hidden_states:
        body["return_hidden_states"] = True
    if request.custom_logit_processor:
        body["custom_logit_processor"] = request.custom_logit_processor
    if request.lora_id:
        body["lora_path"] = request.lora_id
    if request.HasField("data_parallel_rank"):
        body["routed_dp_rank"] = request.data_parallel_rank
    if request.HasField("disaggregated_params"):
        pair = request.disaggregated_params
        body["bootstrap_host"] = pair.bootstrap_host or None
        body["bootstrap_port"] = pair.bootstrap_port or None
        body["bootstrap_room"] = pair.bootstrap_room
    return body


def embed_fields(request: pb.EmbedRequest, context: RequestContext) -> Json:
    """The fields of POST /encode that ask for the same, apart from the prompt.

    Raises:
        RequestError: the request asks for something that is not available.
    """
    for name, is_given in (
        ("is_cross_encoder", request.is_cross_encoder),
        ("mm_inputs", request.HasField("mm_inputs")),
        ("texts", bool(request.texts)),
        ("token_type_ids", bool(request.token_type_ids)),
    ):
        if is_given:
            raise RequestError(
                f"{name} is not available over gRPC",
                param=name,
                code="not_available",
                hint="Score pairs with POST /v1/rerank or /v1/score.",
            )
    if request.HasField("sampling_params") and request.sampling_params.ByteSize():
        context.warn_or_refuse("sampling_params", "embeddings are not sampled")
    fields: Json = {"rid": request.request_id or context.id}
    if request.data_parallel_rank:  # the message does not distinguish 0 and absent
        fields["routed_dp_rank"] = request.data_parallel_rank
    return fields


def token_ids(tokenized: pb.TokenizedInput) -> list[int]:
    if not tokenized.input_ids:
        raise RequestError("tokenized.input_ids must not be empty", param="tokenized")
    # A comprehension lets other threads run in between; list() of a million ids does not.
    return [id for id in tokenized.input_ids]


def _sampling(given: pb.SamplingParams) -> Json:
    """`sampling_params` of /generate. A zero that no client can mean is an absent field."""
    sampling: Json = {
        # Absent means as many as fit, not the default of /generate.
        "max_new_tokens": given.max_new_tokens if given.HasField("max_new_tokens") else None,
        "temperature": _decimal(given.temperature),
        "top_p": _decimal(given.top_p) or 1.0,
        "top_k": given.top_k or -1,
        "min_p": _decimal(given.min_p),
        "frequency_penalty": _decimal(given.frequency_penalty),
        "presence_penalty": _decimal(given.presence_penalty),
        "repetition_penalty": _decimal(given.repetition_penalty) or 1.0,
        "n": given.n or 1,
        "min_new_tokens": given.min_new_tokens,
        "ignore_eos": given.ignore_eos,
        "no_stop_trim": given.no_stop_trim,
        "skip_special_tokens": given.skip_special_tokens,
        "spaces_between_special_tokens": given.spaces_between_special_tokens,
    }
    if given.HasField("stream_interval"):
        sampling["stream_interval"] = given.stream_interval
    if given.stop:
        sampling["stop"] = [text for text in given.stop]
    if given.stop_token_ids:
        sampling["stop_token_ids"] = [id for id in given.stop_token_ids]
    if given.logit_bias:
        sampling["logit_bias"] = {key: _decimal(bias) for key, bias in given.logit_bias.items()}
    if given.HasField("custom_params"):
        sampling["custom_params"] = MessageToDict(given.custom_params)
    if constraint := given.WhichOneof("constraint"):
        sampling[_CONSTRAINTS[constraint]] = getattr(given, constraint)
    return sampling


def _decimal(value: float) -> float:
    """The number that a client wrote: a float32 holds seven digits of it."""
    return float(f"{value:.7g}")


def chunk_of(sequence: NativeSequence, index: int, chunk: TextChunk) -> pb.GenerateResponse:
    """One message of a stream: the new tokens, and the counts so far."""
    usage = chunk.usage
    return pb.GenerateResponse(
        request_id=sequence.request.id,
        chunk=pb.GenerateStreamChunk(
            token_ids=chunk.tokens,
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.output_tokens,
            cached_tokens=usage.cached_tokens,
            output_logprobs=_output_logprobs(sequence, chunk.output_scores),
            input_logprobs=_input_logprobs(sequence, chunk.prompt_scores),
            index=index,
        ),
    )


def complete_of(
    sequence: NativeSequence, index: int, answer: TextChunk, hidden_size: int
) -> pb.GenerateResponse:
    """The last message of a sequence.

    Args:
        answer: all its chunks as one.
    """
    usage, finish = answer.usage, answer.finish
    assert finish is not None, "the last chunk has the reason of the end"
    complete = pb.GenerateComplete(
        output_ids=answer.tokens,
        finish_reason=finish.reason,
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.output_tokens,
        cached_tokens=usage.cached_tokens,
        output_logprobs=_output_logprobs(sequence, answer.output_scores),
        input_logprobs=_input_logprobs(sequence, answer.prompt_scores),
        all_hidden_states=[
            pb.HiddenStates(values=state, position=position)
            for position, state in enumerate(split_states(answer.hidden, hidden_size))
        ],
        index=index,
    )
    if usage.drafts is not None:
        complete.spec_accepted_tokens = usage.drafts.correct
        complete.spec_draft_tokens = usage.drafts.proposed
    _set_matched_stop(complete, finish)
    return pb.GenerateResponse(request_id=sequence.request.id, complete=complete)


def _set_matched_stop(complete: pb.GenerateComplete, finish: Finish) -> None:
    if isinstance(finish.matched, int):
        complete.matched_token_id = finish.matched
    elif isinstance(finish.matched, str):
        complete.matched_stop_str = finish.matched


def _output_logprobs(
    sequence: NativeSequence, scores: Sequence[TokenScore]
) -> pb.OutputLogProbs | None:
    if not sequence.show_scores or not scores:
        return None
    return pb.OutputLogProbs(
        token_logprobs=[score.logprob or 0.0 for score in scores],
        token_ids=[score.token for score in scores],
        top_logprobs=_top(sequence.show_top, scores),
        token_ids_logprobs=[
            pb.TopLogProbs(values=score.picked_logprobs, token_ids=score.picked_ids)
            for score in scores
            if sequence.show_picked
        ],
    )


def _input_logprobs(
    sequence: NativeSequence, scores: Sequence[TokenScore]
) -> pb.InputLogProbs | None:
    """Log-probabilities of the prompt. The first token has none."""
    if not sequence.show_scores or not scores:
        return None
    return pb.InputLogProbs(
        token_logprobs=[pb.InputTokenLogProb(value=score.logprob) for score in scores],
        token_ids=[score.token for score in scores],
        top_logprobs=_top(sequence.show_top, scores),
    )


def _top(is_wanted: bool, scores: Sequence[TokenScore]) -> list[pb.TopLogProbs]:
    return [
        pb.TopLogProbs(values=score.top_logprobs, token_ids=score.top_ids)
        for score in scores
        if is_wanted
    ]
