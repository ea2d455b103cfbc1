"""NativeService: the answers of /generate and the offline Engine, whole or as a stream.

Streams are cumulative by default: each chunk repeats the whole answer so far.
"""

import base64
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import cast

from banyan.base.clock import Clock, WallClock
from banyan.base.thread_pool import THREAD_BYTES, off_loop
from banyan.media.preparation import MediaService, NeedsMedia
from banyan.messages.events import DraftReport
from banyan.requests.generate_request import NativeRequest, NativeSequence, parse_native
from banyan.requests.generation import (
    Finish,
    Generator,
    TextChunk,
    TokenScore,
    cache_miss,
    cached_details,
    collect,
    join,
    run,
    shown_bytes,
)
from banyan.requests.lora_names import AdapterNames
from banyan.requests.request_spec import LAST_HIDDEN, RequestContext
from banyan.requests.sampling_params import NATIVE_DEFAULTS, DrawSeed, Limits, fresh_seed
from banyan.tokenizer.tokenizer import Tokenizer

Pack = Callable[[list[list[object]]], object]


def _as_it_is(triples: list[list[object]]) -> object:
    return triples


@dataclass(frozen=True)
class NativeSettings:
    """Settings of /generate.

    Attributes:
        defaults, draw_seed: sampling parameters and seed of requests without them.
        weight_version: the label of the weights, which may change while a request waits.
        incremental: each streamed chunk holds only the new part.
        store: backend of the hierarchical cache; "" = none.
        pack: serialises a list of log-probabilities. An answer may have a million, and as many
            small objects would stall the event loop.
    """

    defaults: Mapping[str, object] = field(default_factory=lambda: NATIVE_DEFAULTS)
    draw_seed: DrawSeed = fresh_seed
    weight_version: Callable[[], str] = lambda: "default"
    incremental: bool = False
    store: str = ""
    pack: Pack = _as_it_is


class NativeService:
    """Parses requests of /generate and renders their answers. Shared by the route and the offline
    Engine.

    Args:
        adapters: adapters that requests may name; None = none.
        media: prepares pictures; None = the model takes none.
    """

    def __init__(
        self,
        generator: Generator,
        tokenizer: Tokenizer | None,
        limits: Limits,
        settings: NativeSettings | None = None,
        adapters: AdapterNames | None = None,
        media: MediaService | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._adapters = adapters
        self._media = media
        self.settings = settings or NativeSettings()
        self._generator = generator
        self._tokenizer = tokenizer
        self.limits = limits
        self._clock = clock or WallClock()

    async def read(
        self,
        body: Mapping[str, object],
        context: RequestContext | None = None,
        size: int | None = None,
    ) -> NativeRequest:
        """As `parse`, in a thread when the body is long.

        Args:
            size: of the body in bytes; None = judged by the length of its prompts.
        """
        if size is None:
            text = body.get("text")
            size = len(text) if isinstance(text, str) else THREAD_BYTES + 1
        if self._tokenizer is not None and self._tokenizer.waits:
            size += THREAD_BYTES + 1
        context = context or RequestContext()
        try:
            return await off_loop(size, lambda: self.parse(body, context))
        except NeedsMedia as needed:
            assert self._media is not None, "a model without pictures refuses them"
            context.media.items |= await self._media.prepare(needed.parts, context.tenant)
        return await off_loop(size, lambda: self.parse(body, context))

    async def answer(self, request: NativeRequest) -> dict[str, object] | list[dict[str, object]]:
        """The complete answer; RequestError with the status when a sequence failed."""
        started_s = self._clock.now()
        chunks = await collect(self._generator, [s.request for s in request.sequences])
        pairs = zip(request.sequences, chunks, strict=True)
        answers = await off_loop(
            shown_bytes(chunks),
            lambda: [self._render(sequence, chunk, started_s) for sequence, chunk in pairs],
        )
        return answers if request.is_list else answers[0]

    async def stream(self, request: NativeRequest) -> AsyncGenerator[dict[str, object], None]:
        """Answers as they grow. Several sequences interleave and have an `index`.

        Raises:
            RequestError: a sequence failed; the others are aborted.
        """
        started_s = self._clock.now()
        asked = [s.request for s in request.sequences]
        so_far: dict[int, TextChunk] = {}
        async with aclosing(run(self._generator, asked)) as chunks:
            async for i, chunk in chunks:
                if not self.settings.incremental:
                    so_far[i] = chunk = join([so_far[i], chunk]) if i in so_far else chunk
                work = partial(self._render, request.sequences[i], chunk, started_s)
                answer = await off_loop(shown_bytes([chunk]), work)
                yield {**answer, "index": i} if request.is_list else answer

    def parse(
        self, body: Mapping[str, object], context: RequestContext | None = None
    ) -> NativeRequest:
        """Check a body and tokenise its prompts; RequestError when it is refused."""
        return parse_native(
            body,
            tokenizer=self._tokenizer,
            limits=self.limits,
            defaults=self.settings.defaults,
            draw_seed=self.settings.draw_seed,
            context=context,
            adapters=self._adapters,
            media=self._media,
        )

    def _render(
        self, sequence: NativeSequence, chunk: TextChunk, started_s: float
    ) -> dict[str, object]:
        usage = chunk.usage
        meta: dict[str, object] = {
            "id": sequence.request.id,
            "finish_reason": finish_reason(chunk.finish, sequence.request.sampling.max_new_tokens),
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.output_tokens,
            "cached_tokens": usage.cached_tokens,
            "num_retractions": usage.retractions,
            "weight_version": self.settings.weight_version(),
        }
        meta |= cache_miss([usage])
        if self.settings.store:
            meta["cached_tokens_details"] = cached_details([usage], self.settings.store)
        if chunk.finish is not None:
            meta["e2e_latency"] = self._clock.now() - started_s
            if usage.drafts is not None:
                meta |= _drafted(usage.drafts)
        if sequence.show_scores:
            meta |= self._scores(sequence, chunk)
        if sequence.request.hidden and chunk.finish is not None:
            meta["hidden_states"] = self._hidden_states(sequence, chunk)
        if sequence.request.message.wants_experts and chunk.finish is not None:
            meta["routed_experts"] = base64.b64encode(chunk.experts).decode("ascii")
        if sequence.show_prompt_ids:
            meta["prompt_token_ids"] = sequence.request.prompt
        if sequence.not_honoured:
            meta["not_honoured"] = list(sequence.not_honoured)
        return {"text": chunk.text, "output_ids": chunk.tokens, "meta_info": meta}

    def _scores(self, sequence: NativeSequence, chunk: TextChunk) -> dict[str, object]:
        shown: dict[str, object] = {"output_token_logprobs_length": len(chunk.output_scores)}
        for part, scores in (("input", chunk.prompt_scores), ("output", chunk.output_scores)):
            shown[f"{part}_token_logprobs"] = self.settings.pack(
                [self._triple(sequence, s.logprob, s.token) for s in scores]
            )
            if sequence.show_top:
                shown[f"{part}_top_logprobs"] = [self._triples(sequence, s, s.top) for s in scores]
            if sequence.show_picked:
                shown[f"{part}_token_ids_logprobs"] = [
                    self._triples(sequence, s, s.picked) for s in scores
                ]
        return shown

    def _hidden_states(self, sequence: NativeSequence, chunk: TextChunk) -> list[object]:
        """The prompt's states as one list, then one state for each token that was read; of
        "last" the one state."""
        states = split_states(chunk.hidden, self.limits.hidden_size)
        if sequence.request.hidden == LAST_HIDDEN:
            return [*states]
        num_prompt = len(sequence.request.prompt)
        return [states[:num_prompt], *states[num_prompt:]]

    def _triples(
        self, sequence: NativeSequence, score: TokenScore, pairs: list[tuple[float, int]]
    ) -> object:
        if score.logprob is None:
            return None
        return self.settings.pack(
            [self._triple(sequence, logprob, token) for logprob, token in pairs]
        )

    def _triple(self, sequence: NativeSequence, logprob: float | None, token: int) -> list[object]:
        if not sequence.show_score_text or self._tokenizer is None:
            return [logprob, token, None]
        return [logprob, token, self._tokenizer.decode([token], skip_special_tokens=False)]


def split_states(states: bytes, width: int) -> list[list[float]]:
    """Hidden states as lists of numbers, [positions, width]."""
    if not states:
        return []
    shape = (len(states) // (width * 4), width)
    found = memoryview(states).cast("B").cast("f", shape).tolist()
    return cast(list[list[float]], found)  # to a type checker a view has one dimension


def finish_reason(finish: Finish | None, max_new_tokens: int) -> dict[str, object] | None:
    """The native form of how a sequence ended; None while it goes on."""
    if finish is None:
        return None
    match finish.reason:
        case "stop":
            return {"type": "stop", "matched": finish.matched}
        case "length":
            return {"type": "length", "length": max_new_tokens}
    text = finish.text or "The request was aborted."
    return {"type": "abort", "message": text, "status_code": None, "err_type": None}


def _drafted(drafts: DraftReport) -> dict[str, object]:
    rows, proposed = drafts.steps, drafts.proposed
    return {
        "spec_accept_rate": drafts.correct / proposed if proposed else 0.0,
        "spec_accept_length": (rows + drafts.correct) / rows if rows else 0.0,
        "spec_num_correct_drafts": drafts.correct,
        "spec_num_proposed_drafts": proposed,
        "spec_verify_ct": rows,
        "spec_correct_drafts_histogram": drafts.histogram,
    }
