"""/v1/completions: prompts in, their continuations out."""

import time
from collections.abc import Sequence
from contextlib import aclosing
from functools import partial
from typing import cast

import msgspec

from banyan.base.errors import RequestError
from banyan.base.json_types import whole_number
from banyan.base.thread_pool import THREAD_BYTES, off_loop
from banyan.requests.generation import (
    Arrival,
    TextChunk,
    Usage,
    collect,
    run,
    shown_bytes,
)
from banyan.requests.request_spec import PromptSpec, RequestContext, RequestSpec, ScoreOptions
from banyan.requests.sampling_params import fit_prompt, merged, parse_sampling
from banyan.server.errors import Json
from banyan.server.http.dialect import OPENAI, FrameTemplate
from banyan.server.http.exchange import HttpExchange, Later, follow
from banyan.server.openai.models import model_and_adapters
from banyan.server.openai.prompts import check_count, checked_ids, ids_text, text_ids
from banyan.server.openai.schema import (
    CompletionRequest,
    native_sampling,
    read_fields,
    specs_of,
    with_openai_names,
)
from banyan.server.openai.shapes import (
    Extension,
    UsageCount,
    completion_logprobs,
    finish_reason,
    hidden_states,
    matched_stop,
)
from banyan.server.state import ServerState, Service

DEFAULT_MAX_TOKENS = 16
MAX_LOGPROBS = 20


async def completions(exchange: HttpExchange, state: ServerState) -> None:
    service = state.admit_to_queue(exchange.context.id)
    server, context = state.config.server, exchange.context

    def read(raw: Json) -> tuple[CompletionRequest, str, CompletionPlan]:
        request = read_fields(raw, CompletionRequest, context)
        if request.logprobs is None and request.n_probs:
            request = msgspec.structs.replace(request, logprobs=request.n_probs)
        try:
            count = _count(service, request.prompt)
            model, adapters = model_and_adapters(
                request.model, state, context, request.lora_path, count
            )
            return request, model, _plan(context, service, raw, request, adapters)
        except RequestError as error:
            raise with_openai_names(error) from None

    request, model, plan = await exchange.request.read(read)
    extension = Extension(request, state.config.cache.store)
    rid = request.rid or context.id
    answer = CompletionAnswer(service, rid, plan, request, model, server.cache_report, extension)
    with state.open.holding(plan.asked, exchange.context.tenant):
        if request.stream:
            await _stream(exchange, service, request, answer, plan)
        else:
            chunks = await collect(service.generator, plan.asked)
            await exchange.json(await off_loop(shown_bytes(chunks), lambda: answer.whole(chunks)))


class CompletionPlan:
    """The sequences of one completion request: `best_of` per prompt; the best `n` are answered."""

    def __init__(self, asked: list[RequestSpec], echoes: list[str], n: int, best_of: int) -> None:
        self.asked = asked
        self.echoes = echoes
        """Text to repeat before each prompt's answers; "" without echo."""
        self.n = n
        self.best_of = best_of

    def echo_of(self, index: int) -> str:
        return self.echoes[index // self.best_of]


def _plan(
    context: RequestContext,
    service: Service,
    raw: Json,
    request: CompletionRequest,
    adapters: Sequence[str],
) -> CompletionPlan:
    prompts = _prompts(request.prompt)
    best_of = min(_sequences_of(raw, request), service.limits.max_n)
    if len(prompts) * best_of > service.limits.max_sequences:
        raise RequestError(
            f"{len(prompts)} prompts x {best_of} sequences are more than "
            f"{service.limits.max_sequences}",
            param="n",
        )
    max_tokens = DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens
    if max_tokens < 0:
        raise RequestError(f"max_tokens must be at least 0, got {max_tokens}", param="max_tokens")
    if request.logprobs is not None and not 0 <= request.logprobs <= MAX_LOGPROBS:
        raise RequestError(
            f"logprobs must be in [0, {MAX_LOGPROBS}], got {request.logprobs}", param="logprobs"
        )
    found = []
    for ids in _ids(service, prompts, request.suffix):
        ids = fit_prompt(ids, service.limits)
        parsed = parse_sampling(
            native_sampling(raw, max_tokens),
            prompt_len=len(ids),
            limits=service.limits,
            defaults=service.native_defaults,
            draw_seed=service.draw_seed,
        )
        found.append((ids, parsed))
    for name, why in merged(parsed.ignored for _, parsed in found).items():
        context.warn_or_refuse(name, why)
    n = found[0][1].n
    best_of = _best_of(request, n, service.limits.max_n)
    echoes = [_echo(service, p) for p in prompts] if request.echo else [""] * len(prompts)
    top = request.logprobs if request.logprobs is not None else (0 if best_of > n else None)

    def scores(ids: list[int]) -> ScoreOptions:
        if top is None:
            return ScoreOptions()
        return ScoreOptions(0 if request.echo and request.logprobs is not None else len(ids), top)

    specs = [
        PromptSpec(ids, parsed, scores(ids), adapter, count=best_of)
        for (ids, parsed), adapter in zip(found, adapters or [""] * len(found), strict=True)
    ]
    return CompletionPlan(specs_of(context, request, specs, "completion"), echoes, n, best_of)


def _count(service: Service, prompt: object) -> int:
    """Number of prompts; RequestError if there are too many."""
    if not isinstance(prompt, list) or not prompt or _is_ids(prompt):
        return 1
    check_count(len(prompt), service, "prompt")
    return len(prompt)


def _prompts(prompt: object) -> list[str | list[int]]:
    """The prompts of a request; a text or a list of ids is one."""
    if isinstance(prompt, str) or _is_ids(prompt):
        found = [prompt]
    else:
        found = list(prompt) if isinstance(prompt, list) else []
    for one in found:
        if not isinstance(one, str | list) or (isinstance(one, list) and one and not _is_ids(one)):
            raise RequestError(
                "prompt must be a text, a list of token ids, or a list of either", param="prompt"
            )
    if not found or not all(found):
        raise RequestError("Prompt cannot be empty", param="prompt")
    return cast(list[str | list[int]], found)


def _is_ids(prompt: object) -> bool:
    return isinstance(prompt, list) and bool(prompt) and all(type(p) is int for p in prompt)


def _ids(service: Service, prompts: list[str | list[int]], suffix: str | None) -> list[list[int]]:
    if suffix:
        prompts = [filled_in(service, prompt, suffix) for prompt in prompts]
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    encoded = iter(text_ids(service, texts) if texts else [])
    return [
        next(encoded) if isinstance(prompt, str) else checked_ids(prompt, service, "prompt")
        for prompt in prompts
    ]


def filled_in(service: Service, prompt: str | list[int], suffix: str) -> str:
    """The prompt of a model that fills the gap between `prompt` and `suffix`."""
    if service.fill_in is None:
        raise RequestError(
            "suffix needs a server that was started with --completion-template", param="suffix"
        )
    if not isinstance(prompt, str):
        raise RequestError("suffix needs a prompt of text, not of token ids", param="suffix")
    return service.fill_in.prompt(prompt, suffix)


def _echo(service: Service, prompt: str | list[int]) -> str:
    if isinstance(prompt, str):
        return prompt
    return ids_text(service, prompt, skip_special_tokens=True, param="prompt")


def _sequences_of(raw: Json, request: CompletionRequest) -> int:
    """Sequences per prompt, estimated before any prompt is encoded."""
    n = whole_number(raw.get("n"))
    return max(1, n if type(n) is int else 1, request.best_of or 1)


def _best_of(request: CompletionRequest, n: int, max_n: int) -> int:
    best_of = n if request.best_of is None else request.best_of
    if not n <= best_of <= max_n:
        raise RequestError(f"best_of must be in [n({n}), {max_n}], got {best_of}", param="best_of")
    if best_of > n and request.stream:
        raise RequestError(
            f"a stream cannot wait for the best {n} of {best_of}",
            param="best_of",
            hint="Leave out best_of or stream",
        )
    return best_of


def _mean_logprob(chunk: TextChunk) -> float:
    logprobs = [s.logprob for s in chunk.output_scores if s.logprob is not None]
    return sum(logprobs) / len(logprobs) if logprobs else 0.0


class CompletionAnswer:
    """Shapes of one completion answer, whole or in chunks."""

    def __init__(
        self,
        service: Service,
        rid: str,
        plan: CompletionPlan,
        request: CompletionRequest,
        model: str,
        with_cache: bool,
        extension: Extension,
    ) -> None:
        self._extension = extension
        self.usage = UsageCount(len(plan.asked), plan.best_of, with_cache)
        self._service = service
        self._plan = plan
        self._top = request.logprobs
        self._echo = bool(request.echo)
        options = request.stream_options
        self._counts_along = bool(options and options.continuous_usage_stats)
        """Every event of a stream has the usage so far."""
        self._id = rid
        self._model = model
        self._created = int(time.time())
        self._opened: set[int] = set()
        self._templates: dict[int, FrameTemplate] = {}
        """By choice: template of the events that have only text."""

    def frames(self, arrival: Arrival) -> bytes | Later:
        """The events of one chunk; built in a thread if they show many log-probabilities."""
        index, chunk = arrival
        self.usage.take(index, chunk.usage)
        is_first = index not in self._opened
        self._opened.add(index)
        has_scores = bool(chunk.output_scores or chunk.prompt_scores)
        if not (is_first or has_scores or chunk.finish or self._counts_along):
            return self._plain(index, chunk.text) if chunk.text else b""
        work = partial(self._frames, index, chunk, is_first)
        size = shown_bytes([chunk])
        return work() if size <= THREAD_BYTES else partial(off_loop, size, work)

    def _frames(self, index: int, chunk: TextChunk, is_first: bool) -> bytes:
        bodies: list[Json] = []
        if is_first or chunk.text or chunk.output_scores or chunk.finish:
            body = self._chunk(index, chunk, is_first)
            if self._counts_along:
                body["usage"] = self.usage.of(index)
            if chunk.finish:
                body |= self._extension.echoed
            bodies.append(body)
        bodies += self._hidden(index, chunk)
        return b"".join(map(OPENAI.frame, bodies))

    def _plain(self, index: int, text: str) -> bytes:
        """The event of a chunk that has only text."""
        template = self._templates.get(index)
        if template is None:
            body = self._chunk(index, TextChunk(FrameTemplate.GAP, [], Usage(0, 0)), False)
            template = self._templates[index] = FrameTemplate(OPENAI.frame(body))
        return template.fill(text)

    def whole(self, chunks: list[TextChunk]) -> Json:
        for index, chunk in enumerate(chunks):
            self.usage.take(index, chunk.usage)
            self._extension.take(chunk)
        kept = self._kept(chunks)
        choices = [
            self._choice(i, self._plan.echo_of(at) + chunks[at].text, chunks[at])
            | hidden_states(chunks[at])
            for i, at in enumerate(kept)
        ]
        return {
            **self._head(),
            "choices": choices,
            "usage": self.usage.total(),
            **self._extension.echoed,
            **self._extension.of(self.usage),
        }

    def _chunk(self, index: int, chunk: TextChunk, is_first: bool) -> Json:
        text = (self._plan.echo_of(index) if is_first else "") + chunk.text
        return {**self._head(), "choices": [self._choice(index, text, chunk)], "usage": None}

    def _hidden(self, index: int, chunk: TextChunk) -> list[Json]:
        """The event with the last hidden state after the end of a choice, if it was requested."""
        self._extension.take(chunk)
        if not chunk.hidden:
            return []
        choice = self._choice(index, "", TextChunk("", [], chunk.usage)) | hidden_states(chunk)
        return [{**self._head(), "choices": [choice], "usage": None}]

    def last(self) -> list[Json]:
        """The `sglext` event after all choices, if it was requested."""
        extra = self._extension.of(self.usage)
        return [{**self._head(), "choices": [], "usage": None, **extra}] if extra else []

    def total(self) -> Json:
        return {**self._head(), "choices": [], "usage": self.usage.total()}

    def _kept(self, chunks: list[TextChunk]) -> list[int]:
        """Indices of the answers: the best `n` of the `best_of` of each prompt."""
        plan = self._plan
        if plan.n == plan.best_of:
            return list(range(len(chunks)))
        kept = []
        for start in range(0, len(chunks), plan.best_of):
            group = range(start, start + plan.best_of)
            kept += sorted(group, key=lambda i: -_mean_logprob(chunks[i]))[: plan.n]
        return kept

    def _choice(self, index: int, text: str, chunk: TextChunk) -> Json:
        logprobs = None
        if self._top is not None:
            logprobs = completion_logprobs(
                self._service.required_tokenizer(), chunk, self._top, self._echo
            )
        return {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": finish_reason(chunk.finish),
            "matched_stop": matched_stop(chunk.finish),
        }

    def _head(self) -> Json:
        return {
            "id": self._id,
            "object": "text_completion",
            "created": self._created,
            "model": self._model,
        }


async def _stream(
    exchange: HttpExchange,
    service: Service,
    request: CompletionRequest,
    answer: CompletionAnswer,
    plan: CompletionPlan,
) -> None:
    options = request.stream_options
    async with aclosing(run(service.generator, plan.asked)) as chunks:
        await follow(exchange, chunks, answer.frames)
    for body in answer.last():
        await exchange.event(body)
    if options and options.include_usage:
        await exchange.event(answer.total())
    await exchange.end_events()
