"""/v1/score and the rerank routes: score items against a query.

A causal model gives the probability of label tokens after query and item; a classifier gives the
scores of its classes for the pair. A chat model ranks documents by how likely it says yes.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from banyan.base.errors import RequestError
from banyan.messages.sampling_params import SamplingParams
from banyan.requests.embeddings import (
    Prompt,
    Vector,
    prompts_of,
    sigmoid,
    softmax,
    usage_of,
)
from banyan.requests.generate_request import MAX_SCORE_IDS
from banyan.requests.generation import TextChunk, collect
from banyan.requests.prompts import check_total
from banyan.requests.request_spec import (
    Fields,
    PromptSpec,
    RequestContext,
    RequestSpec,
    ScoreOptions,
    build_specs,
)
from banyan.requests.sampling_params import ParsedSampling
from banyan.server.embeddings import (
    COMMON,
    VectorRequest,
    labels_of,
    model_and_adapters_of,
    refuse_fields,
    shared_fields,
    vector_specs,
    vectors_of,
)
from banyan.server.errors import Json
from banyan.server.http.exchange import HttpExchange
from banyan.server.openai.prompts import (
    Conversation,
    chat_ids,
    check_count,
    checked_ids,
    text_ids,
)
from banyan.server.openai.schema import typed
from banyan.server.state import ServerState, Service
from banyan.tokenizer.stop_strings import TextOptions


class ScoreRequest(VectorRequest, frozen=True, kw_only=True):
    query: object = None
    items: object = None
    label_token_ids: list[int] | None = None
    apply_softmax: bool = False
    temperature: float = 1.0
    item_first: bool = False
    return_token_logprobs: bool = False


class RerankRequest(VectorRequest, frozen=True, kw_only=True):
    query: str
    documents: list[str]
    instruct: str | None = None
    top_n: int | None = None
    return_documents: bool = True


_SCORE_FIELDS = frozenset((*COMMON, *ScoreRequest.__struct_fields__))
_RERANK_FIELDS = frozenset((*COMMON, *RerankRequest.__struct_fields__))


async def score(exchange: HttpExchange, state: ServerState) -> None:
    service = state.admit_to_queue(exchange.context.id)

    def read(raw: Json) -> tuple[ScoreRequest, str, list[RequestSpec]]:
        if raw.get("score_extraction_token"):
            raise RequestError(
                "score_extraction_token is not available in this build",
                param="score_extraction_token",
                code="not_available",
            )
        refuse_fields(raw, _SCORE_FIELDS, exchange.context)
        request = typed(raw, ScoreRequest)
        queries, _ = prompts_of(request.query, "query", service.limits)
        empty = request.items == []
        items = [] if empty else prompts_of(request.items, "items", service.limits)[0]
        if len(queries) != 1:
            raise RequestError("query must be one text or one list of token ids.", param="query")
        model, adapters = model_and_adapters_of(exchange.context, state, request, len(items))
        specs_of_items = _for_classes if service.model_config.labels else _for_labels
        specs = specs_of_items(
            exchange.context, state, service, request, queries[0], items, adapters
        )
        return request, model, specs

    request, model, requests = await exchange.request.read(read)
    if service.model_config.labels:
        body = _classes(request, await vectors_of(exchange.context, state, service, requests))
    else:
        body = await _label_tokens(exchange.context, state, service, request, requests)
    await exchange.json({**body, "model": model, "object": "scoring"})


async def rerank(exchange: HttpExchange, state: ServerState) -> None:
    """Documents by their score with the query, best first, in SGLang's form."""
    request, _, ranked = await _ranked(exchange, state)
    entries: list[Json] = [
        {
            "score": one.score,
            "document": request.documents[one.index] if request.return_documents else None,
            "index": one.index,
            "meta_info": {"id": exchange.context.id, "prompt_tokens": one.prompt_tokens},
        }
        for one in ranked[: request.top_n]
    ]
    await exchange.json(entries)


async def rerank_results(exchange: HttpExchange, state: ServerState) -> None:
    """The same in the form of Cohere and Jina."""
    request, model, ranked = await _ranked(exchange, state, returns_documents=False)
    results: list[Json] = [
        {
            "index": one.index,
            "relevance_score": one.score,
            **(
                {"document": {"text": request.documents[one.index]}}
                if request.return_documents
                else {}
            ),
        }
        for one in ranked[: request.top_n]
    ]
    total = sum(one.prompt_tokens for one in ranked)
    await exchange.json(
        {
            "id": exchange.context.id,
            "model": model,
            "results": results,
            "usage": {"prompt_tokens": total, "total_tokens": total},
            "meta": {"api_version": {"version": "2"}, "billed_units": {"search_units": 1}},
        }
    )


@dataclass(frozen=True)
class _Ranked:
    """A document: its index, its score and the tokens that were read."""

    index: int
    score: float
    prompt_tokens: int


async def _ranked(
    exchange: HttpExchange, state: ServerState, returns_documents: bool = True
) -> tuple[RerankRequest, str, list[_Ranked]]:
    """The request, the model's name and all documents, best first.

    A cross-encoder scores each pair; a chat model says yes or no.

    Args:
        returns_documents: documents are in the answer if the request does not say.
    """
    service = state.admit_to_queue(exchange.context.id)
    judges = not service.model_config.labels and not service.limits.is_embedding

    def read(raw: Json) -> tuple[RerankRequest, str, list[RequestSpec]]:
        refuse_fields(raw, _RERANK_FIELDS, exchange.context)
        request = typed({"return_documents": returns_documents, **raw}, RerankRequest)
        if not request.query or not request.documents or not all(request.documents):
            raise RequestError("query and documents cannot be empty.", param="documents")
        if request.top_n is not None and request.top_n < 1:
            raise RequestError(f"top_n must be at least 1, got {request.top_n}.", param="top_n")
        check_count(len(request.documents), service, "documents", "documents")
        asked = exchange.context, state, request
        model, adapters = model_and_adapters_of(*asked, len(request.documents))
        if judges:
            return request, model, _for_judge(exchange.context, service, request, adapters)
        if request.instruct:
            raise RequestError("A cross-encoder takes no instruction", param="instruct")
        if len(labels := labels_of(service)) != 1:
            raise RequestError(
                f"A reranker scores one class, this model has {len(labels)}",
                code="not_a_reranker",
                hint="Use /v1/classify or /v1/score.",
            )
        pairs = [(request.query, document) for document in request.documents]
        specs = vector_specs(exchange.context, state, service, request, pairs, "rerank", adapters)
        return request, model, specs

    request, model, requests = await exchange.request.read(read)
    if judges:
        with state.open.holding(requests, exchange.context.tenant):
            chunks = await collect(service.generator, requests)
        found = [(softmax(_picked(chunk))[0], chunk.usage.prompt_tokens) for chunk in chunks]
    else:
        vectors = await vectors_of(exchange.context, state, service, requests)
        found = [(sigmoid(v.values[0]), v.usage.prompt_tokens) for v in vectors]
    order = sorted(range(len(found)), key=lambda index: (-found[index][0], index))
    return request, model, [_Ranked(index, *found[index]) for index in order]


JUDGE = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".'
)
INSTRUCT = "Given a web search query, retrieve relevant passages that answer the query"
"""The prompt that Qwen3-Reranker was trained with, and its default instruction."""


def _for_judge(
    context: RequestContext, service: Service, request: RerankRequest, adapters: Sequence[str]
) -> list[RequestSpec]:
    """One request for the probabilities of "yes" and "no" about each document."""
    template = service.chat.template if service.chat else None
    options: Json = {}
    if template and "enable_thinking" in template.variables:
        options["enable_thinking"] = False
    labels = tuple(
        text_ids(service, [word], add_special_tokens=False)[0][0] for word in ("yes", "no")
    )
    parsed = ParsedSampling(SamplingParams(max_new_tokens=1), TextOptions())
    specs: list[PromptSpec] = []
    total = 0
    for document, adapter in zip(request.documents, adapters, strict=True):
        asked = (
            f"<Instruct>: {request.instruct or INSTRUCT}\n<Query>: {request.query}\n"
            f"<Document>: {document}"
        )
        messages: list[Json] = [
            {"role": "system", "content": JUDGE},
            {"role": "user", "content": asked},
        ]
        tokens = chat_ids(context, service, Conversation(messages, options)).ids
        _check_length(tokens, service)
        total += len(tokens)
        check_total(total, service.limits)
        specs.append(PromptSpec(tokens, parsed, ScoreOptions(len(tokens), 0, labels), adapter))
    return build_specs(context, Fields(shared_fields(context, request), len(specs)), specs, "score")


def _for_classes(
    context: RequestContext,
    state: ServerState,
    service: Service,
    request: ScoreRequest,
    query: Prompt,
    items: Sequence[Prompt],
    adapters: Sequence[str],
) -> list[RequestSpec]:
    """One request for the classes of each pair of query and item."""
    if request.label_token_ids or request.return_token_logprobs:
        raise RequestError("A classifier scores classes, not label tokens", param="label_token_ids")
    texts = [item for item in items if isinstance(item, str)]
    if not isinstance(query, str) or len(texts) != len(items):
        raise RequestError("A classifier needs query and items as texts.", param="items")
    pairs = [(item, query) if request.item_first else (query, item) for item in texts]
    return vector_specs(context, state, service, request, pairs, "score", adapters)


def _classes(request: ScoreRequest, found: Sequence[Vector]) -> Json:
    """Scores of the model's classes."""
    rows = [v.values.tolist() for v in found]
    scores = [softmax(row) for row in rows] if request.apply_softmax else rows
    return {"scores": scores, "usage": usage_of(found)}


def _for_labels(
    context: RequestContext,
    state: ServerState,
    service: Service,
    request: ScoreRequest,
    query: Prompt,
    items: Sequence[Prompt],
    adapters: Sequence[str],
) -> list[RequestSpec]:
    """One request for the probabilities of the label tokens after query and each item."""
    labels = _labels(request, service)
    if not request.temperature > 0:
        raise RequestError("temperature must be finite and above 0.", param="temperature")
    sampling = SamplingParams(max_new_tokens=1, temperature=request.temperature)
    sampling.check(service.limits.vocab_size)
    first = _plain_ids(service, query, is_first=not request.item_first)
    delimiter = state.config.server.score_delimiter
    between = [] if delimiter < 0 else [delimiter]
    prompts: list[list[int]] = []
    total = 0
    for item in items:
        second = _plain_ids(service, item, is_first=request.item_first)
        parts = (second, between, first) if request.item_first else (first, between, second)
        prompts.append([id for part in parts for id in part])
        _check_length(prompts[-1], service)
        total += len(prompts[-1])
        check_total(total, service.limits)
    parsed = ParsedSampling(sampling, TextOptions())
    specs = [
        PromptSpec(tokens, parsed, ScoreOptions(len(tokens), 0, labels), adapter)
        for tokens, adapter in zip(prompts, adapters, strict=True)
    ]
    fields = Fields(shared_fields(context, request), len(specs))
    return build_specs(context, fields, specs, "score")


async def _label_tokens(
    context: RequestContext,
    state: ServerState,
    service: Service,
    request: ScoreRequest,
    requests: list[RequestSpec],
) -> Json:
    """Probabilities of the label tokens as the next token after query and item."""
    with state.open.holding(requests, context.tenant):
        chunks = await collect(service.generator, requests)
    logprobs = [_picked(chunk) for chunk in chunks]
    turn = softmax if request.apply_softmax else lambda row: [math.exp(x) for x in row]
    total = sum(chunk.usage.prompt_tokens for chunk in chunks)
    return {
        "scores": [turn(row) for row in logprobs],
        "token_logprobs": logprobs if request.return_token_logprobs else None,
        "usage": {"prompt_tokens": total, "completion_tokens": 0, "total_tokens": total},
    }


def _labels(request: ScoreRequest, service: Service) -> tuple[int, ...]:
    labels, vocab_size = request.label_token_ids, service.limits.vocab_size
    if not labels or len(labels) > MAX_SCORE_IDS:
        raise RequestError(
            f"label_token_ids must be 1 to {MAX_SCORE_IDS} token ids.", param="label_token_ids"
        )
    wrong = next((t for t in labels if not 0 <= t < vocab_size), None)
    if wrong is not None:
        raise RequestError(
            f"label_token_ids must be in [0, {vocab_size}), got {str(wrong)[:40]}.",
            param="label_token_ids",
        )
    return tuple(labels)


def _plain_ids(service: Service, prompt: Prompt, is_first: bool) -> list[int]:
    """Ids of one part; only the first has the model's own start."""
    if isinstance(prompt, str):
        (ids,) = text_ids(service, [prompt], add_special_tokens=is_first)
        return ids
    assert isinstance(prompt, list)
    return checked_ids(prompt, service, "input_ids")


def _check_length(prompt: list[int], service: Service) -> None:
    if len(prompt) >= service.limits.total:
        raise RequestError(
            f"The input ({len(prompt)} tokens) is longer than the model's context length "
            f"({service.limits.total} tokens).",
            code="context_length_exceeded",
        )


def _picked(chunk: TextChunk) -> list[float]:
    return [logprob for logprob, _ in chunk.output_scores[0].picked]
