"""`input_embeds`: prompts given as rows of the embedding table, or as anything of that shape.

Knows numbers and sizes, and nothing of what they mean to the model.
"""

import hashlib
import math
from array import array

from banyan.base.errors import RequestError
from banyan.requests.sampling_params import Limits

NAME = "input_embeds"
PLACEHOLDER = 0
"""Token id that stands where a prompt has no tokens."""

_NUMBERS = {int, float}


def parse_embeds(given: object, limits: Limits) -> tuple[list[bytes], bool]:
    """The prompts, each as float32 little-endian [positions, hidden], and whether they are a list.

    Args:
        given: [positions, hidden] numbers, or a list of such prompts.

    Raises:
        RequestError: another shape, a number that is not finite, or a prompt that is too long.
    """
    if not limits.takes_embeds:
        raise RequestError(
            "This model takes no input_embeds: it runs in the implementation of transformers",
            param=NAME,
            code="not_available",
            hint="Send input_ids, or start without --model-impl transformers.",
        )
    is_batch = isinstance(given, list) and bool(given) and _is_prompt(given[0])
    prompts = given if is_batch else [given]
    assert isinstance(prompts, list)
    if len(prompts) > limits.max_sequences:
        raise RequestError(
            f"{NAME} must be at most {limits.max_sequences} prompts, got {len(prompts)}.",
            param=NAME,
        )
    return [_prompt(prompt, limits) for prompt in prompts], is_batch


def namespace_with(namespace: bytes, embeds: bytes) -> bytes:
    """The prefix-cache namespace of a prompt of `embeds`, if any: equal numbers share pages."""
    if not embeds:
        return namespace
    return hashlib.sha256(namespace + embeds).digest()[:16]


def _is_prompt(value: object) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], list)


def _prompt(rows: object, limits: Limits) -> bytes:
    width = limits.hidden_size
    if not isinstance(rows, list) or not rows:
        raise _wrong(f"lists of rows of {width} numbers", type(rows).__name__)
    if len(rows) >= limits.total:
        raise RequestError(
            f"The input ({len(rows)} tokens) is longer than the model's context length "
            f"({limits.total} tokens).",
            param=NAME,
            code="context_length_exceeded",
        )
    values = array("f")
    for position, row in enumerate(rows):
        if not isinstance(row, list) or len(row) != width:
            size = f"{len(row)} numbers" if isinstance(row, list) else type(row).__name__
            raise _wrong(f"rows of {width} numbers, the width of the model", size, position)
        if not set(map(type, row)) <= _NUMBERS:
            raise _wrong("numbers", "something else", position)
        try:
            floats = array("f", row)
        except OverflowError:
            raise _wrong("finite float32 numbers", "a larger one", position) from None
        if not all(map(math.isfinite, floats)):
            raise _wrong("finite float32 numbers", "another", position)
        values.extend(floats)
    return values.tobytes()


def _wrong(rule: str, got: str, position: int | None = None) -> RequestError:
    where = "" if position is None else f" at position {position}"
    return RequestError(f"{NAME} must be {rule}, got {got}{where}.", param=NAME)
