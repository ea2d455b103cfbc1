"""Prompts from texts (`encode_texts`) or from rows of embeddings (`parse_embeds`), with bounds.

The tokenizer needs some hundred bytes of memory per token until it is done. So a text that may be
too long is counted in pieces before it is tokenized as a whole.
"""

import hashlib
import math
from array import array
from collections.abc import Iterable
from itertools import islice

from banyan.base.errors import RequestError
from banyan.messages.spans import Content, ContentKind, Span
from banyan.requests.sampling_params import Limits
from banyan.tokenizer.tokenizer import Tokenizer

PIECE_CHARS = 32 << 10
_CUT_TOKENS = 16
"""Upper bound of the tokens that a cut between two pieces adds."""


BATCH_TEXTS = 32
"""Most texts per call of the tokenizer; the bound on all texts is checked in between."""


def encode_texts(
    tokenizer: Tokenizer, texts: Iterable[str], limits: Limits, add_special_tokens: bool = True
) -> list[list[int]]:
    """Token ids of each text.

    Raises:
        RequestError: one is longer than the context, or all together are longer than a request may
            be, or one is not valid.
    """
    found: list[list[int]] = []
    total = 0
    size = BATCH_TEXTS if limits.batch_encode else 1
    fitted = (fitted_text(tokenizer, text, limits) for text in texts)
    while batch := list(islice(fitted, size)):
        if limits.batch_encode:
            encoded = tokenizer.encode_batch(batch, add_special_tokens)
        else:
            encoded = [tokenizer.encode(batch[0], add_special_tokens)]
        total += sum(map(len, encoded))
        check_total(total, limits)
        found += encoded
    return found


def fitted_text(tokenizer: Tokenizer, text: str, limits: Limits) -> str:
    """`text`, or as much of its beginning as fills the context where prompts may be cut.

    Raises:
        RequestError: it is longer than the context by far; else the caller finds out.
    """
    end = end_of_tokens(tokenizer, text, limits.total)
    if end == len(text) or limits.auto_truncate:
        return text[:end]
    raise RequestError(
        f"The input (more than {limits.total} tokens in {len(text)} characters) is longer than the "
        f"model's context length ({limits.total} tokens).",
        code="context_length_exceeded",
    )


def end_of_tokens(tokenizer: Tokenizer, text: str, most: int) -> int:
    """A position in `text` up to which it has more than `most` tokens; its end if there is none.

    Texts of up to two characters a token are not counted: they cost little.
    """
    if len(text) <= max(PIECE_CHARS, 2 * most):
        return len(text)
    num_tokens = 0
    for at in range(0, len(text), PIECE_CHARS):
        piece = text[at : at + PIECE_CHARS]
        num_tokens += len(tokenizer.encode(piece, add_special_tokens=False)) - _CUT_TOKENS
        if num_tokens > most:
            return at + len(piece)
    return len(text)


def check_total(num_tokens: int, limits: Limits) -> None:
    """RequestError when the prompts of one request have this many tokens in all."""
    most = max(limits.max_prompt_tokens, limits.total)
    if num_tokens > most:
        raise RequestError(
            f"The prompts of one request may have {most} tokens in all, each counted as often as "
            f"it is answered; these have {num_tokens} or more.",
            code="context_length_exceeded",
        )


NAME = "input_embeds"
PLACEHOLDER = 0
"""Token id in place of an embedding."""
FLOAT_BYTES = 4
_SPAN_ROWS = 1024

_NUMBERS = {int, float}


def parse_embeds(given: object, limits: Limits) -> tuple[list[bytes], bool]:
    """The prompts, each as float32 little-endian [positions, hidden] at the scale of the model's
    embeddings, and whether they are a list.

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


def as_contents(rows: bytes, width: int) -> tuple[tuple[Span, ...], tuple[Content, ...]]:
    """The spans and contents of a prompt of nothing but feature rows.

    Long prompts are cut, so that prompts that begin alike share pages, and that not all rows of one
    must be at the engine at once.

    Args:
        rows: float32 [positions, width].
    """
    spans: list[Span] = []
    contents: dict[bytes, Content] = {}
    row_bytes = width * FLOAT_BYTES
    for first in range(0, len(rows) // row_bytes, _SPAN_ROWS):
        data = rows[first * row_bytes : (first + _SPAN_ROWS) * row_bytes]
        count = len(data) // row_bytes
        digest = hashlib.sha256(f"{ContentKind.FEATURES} {width} ".encode() + data).digest()
        spans.append(Span(first, count, digest, kind=ContentKind.FEATURES))
        contents[digest] = Content(digest, ContentKind.FEATURES, data, (1, 1, count), count)
    return tuple(spans), tuple(contents.values())


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
    scale = limits.embedding_scale
    return values.tobytes() if scale == 1.0 else array("f", [v * scale for v in values]).tobytes()


def _wrong(rule: str, got: str, position: int | None = None) -> RequestError:
    where = "" if position is None else f" at position {position}"
    return RequestError(f"{NAME} must be {rule}, got {got}{where}.", param=NAME)
