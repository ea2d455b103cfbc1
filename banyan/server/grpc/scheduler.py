"""SGLang's gRPC service `sglang.grpc.scheduler.SglangScheduler`: tokens in, tokens out.

Gateways that tokenize call it (smg, sglang-router). The methods call the same functions as
the HTTP routes. Methods that are not here answer UNIMPLEMENTED. Reading a large message takes long,
so it runs in a thread (`off_loop`).

Source of the protocol: the package smg-grpc-proto, sglang_scheduler.proto.
"""

import asyncio
import hashlib
import io
import json
import time
import zipfile
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, aclosing
from pathlib import Path
from typing import Any, Protocol

import grpc
from google.protobuf.json_format import MessageToDict, ParseDict
from google.protobuf.message import Message
from google.protobuf.struct_pb2 import Struct
from smg_grpc_proto.generated import common_pb2 as common
from smg_grpc_proto.generated import sglang_scheduler_pb2 as pb
from smg_grpc_proto.generated import sglang_scheduler_pb2_grpc as service

from banyan.base.errors import RequestError
from banyan.base.thread_pool import off_loop
from banyan.requests.generate_request import NativeRequest, NativeSequence
from banyan.requests.generate_response import split_states
from banyan.requests.generation import (
    Finish,
    TextChunk,
    TokenScore,
    join,
    run,
    shown_bytes,
    unstreamed,
)
from banyan.requests.request_spec import RequestContext
from banyan.requests.sampling_params import merged
from banyan.server.admin import control, health, memory, server_info, weights
from banyan.server.embeddings import vector_service
from banyan.server.errors import Json
from banyan.server.http import auth
from banyan.server.sglang.generate import native_service
from banyan.server.state import ServerState, Service

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "config.json",
    "generation_config.json",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
    "chat_template.json",
)
_TOKENIZER_PATTERNS = ("*.jinja", "*.model", "*.tiktoken")
_PIECE_BYTES = 64 << 10
_MAX_LORA_ID = 4096


_SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


_CONSTRAINTS = {
    "regex": "regex",
    "json_schema": "json_schema",
    "ebnf_grammar": "ebnf",
    "structural_tag": "structural_tag",
}
"""Field of the message -> field of `sampling_params`."""


class OpenCall(Protocol):
    """A call that has been admitted."""

    context: RequestContext

    async def write(self, message: Message) -> None:
        """Send one message of a stream."""
        ...


class CallAdmission(Protocol):
    """Checks calls and ends them in order (`listener.Calls`)."""

    def enter(
        self, rpc: grpc.aio.ServicerContext, method: str, guard: str = auth.KEY
    ) -> AbstractAsyncContextManager[OpenCall]: ...


class SglangScheduler(service.SglangSchedulerServicer):
    """The methods of the service, over the server's state."""

    def __init__(self, state: ServerState, calls: CallAdmission) -> None:
        self._state = state
        self._calls = calls
        self._lora_names: dict[str, str] = {}
        """Names of loaded adapters by the id that their client chose."""

    async def Generate(self, request: pb.GenerateRequest, rpc: grpc.aio.ServicerContext) -> None:
        async with self._calls.enter(rpc, "Generate") as call:
            context, state = call.context, self._state
            started = state.admit_to_queue(context.id)
            native = native_service(started, state)
            size = request.ByteSize()
            body = await off_loop(size, lambda: native_body(request, context))
            if request.lora_id:
                body["lora_path"] = self._lora_names.get(request.lora_id, request.lora_id)
            asked = await native.read(body, context, size)
            for name, why in merged(s.not_honoured for s in asked.sequences).items():
                context.warn_or_refuse(name, why)
            with state.open.holding([s.request for s in asked.sequences], context.tenant):
                async for message in _answers(started, asked):
                    await call.write(message)

    async def Embed(
        self, request: pb.EmbedRequest, rpc: grpc.aio.ServicerContext
    ) -> pb.EmbedResponse:
        async with self._calls.enter(rpc, "Embed") as call:
            context, state = call.context, self._state
            vectors = vector_service(state.admit_to_queue(context.id), state)
            asked = await off_loop(
                request.ByteSize(),
                lambda: vectors.read(
                    context,
                    embed_fields(request, context),
                    [token_ids(request.tokenized)],
                    "embed",
                ),
            )
            with state.open.holding(asked, context.tenant):
                (vector,) = await vectors.vectors(asked)
            return pb.EmbedResponse(
                embedding=vector.values,
                embedding_dim=len(vector.values),
                prompt_tokens=vector.usage.prompt_tokens,
            )

    async def HealthCheck(
        self, request: pb.HealthCheckRequest, rpc: grpc.aio.ServicerContext
    ) -> pb.HealthCheckResponse:
        """Generate one token, as GET /health_generate does."""
        async with self._calls.enter(rpc, "HealthCheck", auth.OPEN):
            try:
                await health.check_generation(self._state)
            except RequestError as error:
                return pb.HealthCheckResponse(healthy=False, message=str(error))
            return pb.HealthCheckResponse(healthy=True, message="healthy")

    async def Abort(
        self, request: pb.AbortRequest, rpc: grpc.aio.ServicerContext
    ) -> pb.AbortResponse:
        async with self._calls.enter(rpc, "Abort", auth.OWN) as call:
            if not request.request_id:
                raise RequestError("request_id must be given", param="request_id")
            found = control.abort(self._state, call.context, request.request_id)
            text = f"aborted {found} requests" if found else "no open request has this id"
            return pb.AbortResponse(success=bool(found), message=text)

    async def GetModelInfo(
        self, request: pb.GetModelInfoRequest, rpc: grpc.aio.ServicerContext
    ) -> pb.GetModelInfoResponse:
        async with self._calls.enter(rpc, "GetModelInfo"):
            return _model_info(self._state, self._state.started())

    async def GetServerInfo(
        self, request: pb.GetServerInfoRequest, rpc: grpc.aio.ServicerContext
    ) -> pb.GetServerInfoResponse:
        async with self._calls.enter(rpc, "GetServerInfo"):
            return _server_info(self._state, self._state.started())

    async def GetLoads(
        self, request: pb.GetLoadsRequest, rpc: grpc.aio.ServicerContext
    ) -> pb.GetLoadsResponse:
        async with self._calls.enter(rpc, "GetLoads"):
            rank = str(request.dp_rank) if request.HasField("dp_rank") else None
            return _loads(server_info.all_loads(self._state, request.include or ("all",), rank))

    async def FlushCache(
        self, request: common.FlushCacheRequest, rpc: grpc.aio.ServicerContext
    ) -> common.FlushCacheResponse:
        async with self._calls.enter(rpc, "FlushCache", auth.ADMIN):
            reply = await memory.flush(self._state, request.timeout_s)
            return common.FlushCacheResponse(success=reply.ok, message=reply.text)

    async def LoadLoRAAdapter(
        self, request: pb.LoadLoRAAdapterRequest, rpc: grpc.aio.ServicerContext
    ) -> pb.LoadLoRAAdapterResponse:
        """Load an adapter. Requests name it by `lora_id`, or by its name."""
        async with self._calls.enter(rpc, "LoadLoRAAdapter", auth.ADMIN):
            id, name = request.lora_id or request.lora_name, request.lora_name
            if len(id) > _MAX_LORA_ID or (id != name and id in self._lora_ids()):
                raise RequestError(
                    f"lora_id must be new, and have at most {_MAX_LORA_ID} characters",
                    param="lora_id",
                )
            asked = weights.LoadRequest(
                lora_name=name, lora_path=request.lora_path, pinned=request.pinned
            )
            reply = await weights.load(self._state, asked)
            if reply.ok:
                self._lora_names[id] = name
            return pb.LoadLoRAAdapterResponse(
                success=reply.ok,
                message="" if reply.ok else reply.text,
                loaded_lora_ids=self._lora_ids(),
            )

    async def UnloadLoRAAdapter(
        self, request: pb.UnloadLoRAAdapterRequest, rpc: grpc.aio.ServicerContext
    ) -> pb.UnloadLoRAAdapterResponse:
        async with self._calls.enter(rpc, "UnloadLoRAAdapter", auth.ADMIN):
            id = request.lora_id
            name = request.lora_name or self._lora_names.get(id, id)
            if id and self._lora_names.get(id, name) != name:
                raise RequestError(
                    "lora_id and lora_name are of two different adapters", param="lora_id"
                )
            reply = await weights.unload(self._state, name)
            return pb.UnloadLoRAAdapterResponse(
                success=reply.ok,
                message="" if reply.ok else reply.text,
                loaded_lora_ids=self._lora_ids(),
            )

    async def ListLoadedLoRAAdapters(
        self, request: pb.ListLoadedLoRAAdaptersRequest, rpc: grpc.aio.ServicerContext
    ) -> pb.ListLoadedLoRAAdaptersResponse:
        async with self._calls.enter(rpc, "ListLoadedLoRAAdapters"):
            places = self._state.adapters.places()
            return pb.ListLoadedLoRAAdaptersResponse(
                loaded_adapters=[
                    pb.LoadedLoRAAdapter(
                        lora_id=id,
                        lora_name=place.name,
                        lora_path=place.path,
                        pinned=place.is_pinned,
                    )
                    for id, place in zip(self._lora_ids(), places, strict=True)
                ]
            )

    def _lora_ids(self) -> list[str]:
        """The id of each loaded adapter: its client's, else its name. Forgets unloaded ones."""
        loaded = [place.name for place in self._state.adapters.places()]
        self._lora_names = {id: name for id, name in self._lora_names.items() if name in loaded}
        chosen = {name: id for id, name in self._lora_names.items()}
        return [chosen.get(name, name) for name in loaded]

    async def GetTokenizer(
        self, request: common.GetTokenizerRequest, rpc: grpc.aio.ServicerContext
    ) -> None:
        """Send the tokenizer's files as a zip archive in pieces."""
        async with self._calls.enter(rpc, "GetTokenizer") as call:
            model = self._state.config.model
            folder = Path(model.tokenizer_path or model.path)
            archive = await asyncio.to_thread(_tokenizer_archive, folder)
            digest = hashlib.sha256(archive).hexdigest()
            for start in range(0, len(archive), _PIECE_BYTES):
                is_last = start + _PIECE_BYTES >= len(archive)
                piece = archive[start : start + _PIECE_BYTES]
                await call.write(
                    common.GetTokenizerChunk(data=piece, sha256=digest if is_last else "")
                )


async def _answers(service: Service, asked: NativeRequest) -> AsyncIterator[pb.GenerateResponse]:
    """The messages of a generation.

    A stream has a message for each chunk. Each sequence ends with a GenerateComplete, which repeats
    all of its tokens.
    """
    wanted = [sequence.request for sequence in asked.sequences]
    received: list[list[TextChunk]] = [[] for _ in wanted]
    width = service.limits.hidden_size
    chunks = run(service.generator, wanted if asked.stream else unstreamed(wanted))
    async with aclosing(chunks):
        async for index, chunk in chunks:
            sequence, parts = asked.sequences[index], received[index]
            parts.append(chunk)
            if asked.stream:
                yield await off_loop(
                    shown_bytes([chunk]),
                    lambda s=sequence, i=index, c=chunk: chunk_of(s, i, c),
                )
            if chunk.finish is not None:
                yield await off_loop(
                    shown_bytes(parts),
                    lambda s=sequence, i=index, p=parts: complete_of(s, i, join(p), width),
                )


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


def _model_info(state: ServerState, service: Service) -> pb.GetModelInfoResponse:
    facts = server_info.model_facts(state)
    model_config, server = service.model_config, state.config.server
    labels = model_config.labels
    preferred = json.dumps(dict(server.preferred_sampling)) if server.preferred_sampling else ""
    defaults = {
        name: value
        for name, value in service.chat_defaults.items()
        if name in _SAMPLING_DEFAULTS and value is not None
    }
    tokenizer = service.tokenizer
    return pb.GetModelInfoResponse(
        model_path=str(facts["model_path"]),
        tokenizer_path=str(facts["tokenizer_path"]),
        is_generation=not service.limits.is_embedding,
        preferred_sampling_params=preferred,
        default_sampling_params_json=json.dumps(defaults) if defaults else "",
        weight_version=state.config.model.weight_version,
        served_model_name=state.served_name,
        max_context_length=service.limits.total,
        vocab_size=model_config.vocab_size,
        model_type=model_config.model_type,
        architectures=[model_config.architecture],
        eos_token_ids=service.limits.eos_ids,
        bos_token_id=-1 if tokenizer is None or tokenizer.bos_id is None else tokenizer.bos_id,
        pad_token_id=-1,
        max_req_input_len=service.limits.total - 1,
        id2label_json=json.dumps(dict(enumerate(labels))) if labels else "",
        num_labels=len(labels),
    )


def _server_info(state: ServerState, service: Service) -> pb.GetServerInfoResponse:
    settings, scheduler = Struct(), Struct()
    settings.update(_plain(server_info.server_facts(state)))
    scheduler.update(
        {
            "max_total_num_tokens": service.ready.max_total_tokens,
            "max_running_requests": service.ready.max_running,
            "max_req_input_len": service.limits.total - 1,
            "is_generation": not service.limits.is_embedding,
        }
    )
    info = pb.GetServerInfoResponse(
        server_args=settings,
        scheduler_info=scheduler,
        active_requests=len(state.open),
        is_paused=state.paused,
        uptime_seconds=time.monotonic() - state.started_s,
        sglang_version=state.version,
        server_type="grpc",
        max_total_num_tokens=service.ready.max_total_tokens,
    )
    info.start_time.FromSeconds(state.created)
    return info


def _plain(value: Json) -> dict[str, Any]:
    """`value` with JSON types only, as a protobuf Struct needs."""
    return json.loads(json.dumps(value, default=str))


def _loads(found: Json) -> pb.GetLoadsResponse:
    """The JSON of /v1/loads as a message; it has the same field names."""
    ranks = found["loads"]
    assert isinstance(ranks, list)
    running = sum(rank["num_running_reqs"] for rank in ranks)
    waiting = sum(rank["num_waiting_reqs"] for rank in ranks)
    number = max(1, len(ranks))
    message = pb.GetLoadsResponse(
        dp_rank_count=len(ranks),
        aggregate=pb.AggregateMetrics(
            total_running_reqs=running,
            total_waiting_reqs=waiting,
            total_reqs=running + waiting,
            avg_token_usage=sum(rank["token_usage"] for rank in ranks) / number,
            avg_utilization=sum(rank["utilization"] for rank in ranks) / number,
        ),
    )
    # num_total_tokens and counters have no field in the message.
    ParseDict(_without_none(found), message, ignore_unknown_fields=True)
    for load in message.loads:
        load.num_total_reqs = load.num_running_reqs + load.num_waiting_reqs
    return message


def _without_none(value: Any) -> Any:
    """`value` without the members of objects that are None, which proto3 fields cannot be."""
    if isinstance(value, dict):
        return {k: _without_none(v) for k, v in value.items() if v is not None}
    if isinstance(value, list):
        return [_without_none(item) for item in value]
    return value


def _tokenizer_archive(folder: Path) -> bytes:
    """The files of a tokenizer and the model's configuration as a zip archive."""
    files = [folder / name for name in _TOKENIZER_FILES]
    files += [file for pattern in _TOKENIZER_PATTERNS for file in folder.glob(pattern)]
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in files:
            if file.is_file():
                archive.write(file, file.name)
        if not archive.namelist():
            raise RequestError("the model has no tokenizer files", status=404, code="no_tokenizer")
    return content.getvalue()
