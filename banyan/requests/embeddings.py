"""VectorService: the pooled vectors of texts, pairs of texts or token ids.

Used by embeddings, rerank and classify in every API, and by the offline Engine.
"""

import math
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from banyan.base.clock import Clock, WallClock
from banyan.base.errors import RequestError
from banyan.messages.sampling_params import SamplingParams
from banyan.requests.generation import Generator, Usage, collect
from banyan.requests.prompts import check_total, fitted_text
from banyan.requests.request_spec import (
    Fields,
    PromptSpec,
    RequestContext,
    RequestSpec,
    build_specs,
)
from banyan.requests.sampling_params import Limits, ParsedSampling
from banyan.tokenizer.stop_strings import TextOptions
from banyan.tokenizer.tokenizer import Tokenizer

Prompt = str | list[int] | tuple[str, str]

_NO_OUTPUT = ParsedSampling(SamplingParams(max_new_tokens=0), TextOptions())


@dataclass(frozen=True)
class Vector:
    """The vector of one prompt."""

    values: "array[float]"
    usage: Usage


def prompts_of(
    value: object, name: str, limits: Limits, with_pairs: bool = False
) -> tuple[list[Prompt], bool]:
    """The prompts in a field, and whether the field is a list of them.

    Args:
        value: a text, a list of texts, token ids, or a list of those.
        with_pairs: lists of two texts each are pairs.

    Raises:
        RequestError: nothing, too many, or something else.
    """
    rule = f"{name} must be a text, token ids, or a list of either"
    if isinstance(value, str):
        _refuse_empty(value, name)
        return [value], False
    if not isinstance(value, list) or not value:
        raise RequestError(f"{rule}, got {_shown(value)}.", param=name)
    if all(type(v) is int for v in value):
        return [value], False
    if len(value) > limits.max_sequences:
        raise RequestError(
            f"at most {limits.max_sequences} prompts per request, got {len(value)}.", param=name
        )
    found: list[Prompt] = []
    for item in value:
        if isinstance(item, str):
            _refuse_empty(item, name)
            found.append(item)
        elif isinstance(item, list) and item and all(type(v) is int for v in item):
            found.append(item)
        elif with_pairs and isinstance(item, list) and _is_pair(item):
            found.append((item[0], item[1]))
        else:
            raise RequestError(f"{rule}, got {_shown(item)} in it.", param=name)
    return found, True


def _is_pair(item: list[object]) -> bool:
    return len(item) == 2 and all(isinstance(part, str) and part for part in item)


def _refuse_empty(text: str, name: str) -> None:
    if not text:
        raise RequestError(f"{name} cannot be an empty text.", param=name)


def _shown(value: object) -> str:
    return "an empty list" if value == [] else type(value).__name__


class VectorService:
    """Requests for vectors, and their answers. Shared by the routes and the offline Engine."""

    def __init__(
        self,
        generator: Generator,
        tokenizer: Tokenizer | None,
        limits: Limits,
        weight_version: Callable[[], str] = lambda: "default",
        clock: Clock | None = None,
    ) -> None:
        self._generator = generator
        self._tokenizer = tokenizer
        self._limits = limits
        self._weight_version = weight_version
        self._clock = clock or WallClock()

    def read(
        self,
        context: RequestContext,
        fields: Mapping[str, object],
        prompts: Sequence[Prompt],
        route: str,
        adapters: Sequence[str] = (),
    ) -> list[RequestSpec]:
        """One request for the vector of each prompt.

        Args:
            fields: of the body; `build_specs` reads those that all APIs share.
            adapters: one for each prompt, "" for none; () = none at all.

        Raises:
            RequestError: there are too many, or one is too long or not legal.
        """
        limits, tokenizer = self._limits, self._tokenizer
        if len(prompts) > limits.max_sequences:
            raise RequestError(
                f"at most {limits.max_sequences} prompts per request, got {len(prompts)}.",
                param="input",
            )
        specs: list[PromptSpec] = []
        total = 0
        for index, prompt in enumerate(prompts):
            tokens = _ids(prompt, tokenizer, limits)
            total += len(tokens)
            check_total(total, limits)
            adapter = adapters[index] if adapters else ""
            specs.append(PromptSpec(tokens, _NO_OUTPUT, adapter=adapter, pool=True))
        num = len(specs) if len(specs) > 1 else None
        return build_specs(context, Fields(fields, num), specs, route)

    async def vectors(self, requests: Sequence[RequestSpec]) -> list[Vector]:
        """The vector of each request, in order; RequestError when one is refused or failed."""
        chunks = await collect(self._generator, requests)
        return [Vector(array("f", chunk.vector), chunk.usage) for chunk in chunks]

    async def answer(
        self, requests: Sequence[RequestSpec], dimensions: int | None = None
    ) -> list[dict[str, object]]:
        """The native form of the vectors; errors as of `vectors` and `shortened`."""
        began_s = self._clock.now()
        found = await self.vectors(requests)
        return [
            {
                "embedding": shortened(vector.values, dimensions).tolist(),
                "meta_info": {
                    "id": request.id,
                    "finish_reason": {"type": "length", "length": 0},
                    "prompt_tokens": vector.usage.prompt_tokens,
                    "cached_tokens": vector.usage.cached_tokens,
                    "weight_version": self._weight_version(),
                    "e2e_latency": self._clock.now() - began_s,
                },
            }
            for request, vector in zip(requests, found, strict=True)
        ]


def _ids(prompt: Prompt, tokenizer: Tokenizer | None, limits: Limits) -> list[int]:
    if isinstance(prompt, list):
        wrong = next((t for t in prompt if not 0 <= t < limits.vocab_size), None)
        if wrong is not None:
            raise RequestError(
                f"token ids must be in [0, {limits.vocab_size}), got {str(wrong)[:40]}.",
                param="input",
            )
        found = prompt
    elif tokenizer is None:
        raise RequestError("this server runs without a tokenizer", hint="Send token ids.")
    elif isinstance(prompt, tuple):
        first, second = (fitted_text(tokenizer, part, limits) for part in prompt)
        found = tokenizer.encode_pair(first, second)
    else:
        found = tokenizer.encode(fitted_text(tokenizer, prompt, limits))
    if len(found) > limits.total:
        if limits.auto_truncate:
            return found[: limits.total]
        raise RequestError(
            f"The input ({len(found)} tokens) is longer than the model's context length "
            f"({limits.total} tokens).",
            code="context_length_exceeded",
        )
    return found


def shortened(values: "array[float]", dimensions: int | None) -> "array[float]":
    """All values, or the first `dimensions`, of length one again (Matryoshka, arXiv 2205.13147).

    Raises:
        RequestError: the vector is not that long.
    """
    if dimensions is None:
        return values
    if not 1 <= dimensions <= len(values):
        raise RequestError(
            f"dimensions must be in [1, {len(values)}], got {dimensions}.", param="dimensions"
        )
    kept = values[:dimensions]
    length = math.sqrt(sum(x * x for x in kept))
    return array("f", [x / length for x in kept]) if length else kept


def softmax(scores: Sequence[float]) -> list[float]:
    top = max(scores)
    weights = [math.exp(s - top) for s in scores]
    total = sum(weights)
    return [w / total for w in weights]


def sigmoid(score: float) -> float:
    weight = math.exp(-abs(score))
    return 1 / (1 + weight) if score >= 0 else weight / (1 + weight)


def usage_of(vectors: Sequence[Vector]) -> Mapping[str, int]:
    total = sum(v.usage.prompt_tokens for v in vectors)
    return {"prompt_tokens": total, "completion_tokens": 0, "total_tokens": total}
