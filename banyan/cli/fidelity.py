"""What rounding has done to a model: the source and the result, each served by an engine, on the
same tokens."""

from collections.abc import Iterator, Sequence
from typing import cast

from banyan.bench.divergence import TEXT, Divergence, Likeliest, Scores, divergence
from banyan.llm import Engine
from banyan.model_config.model_config import ModelConfig

_PIECE = 256
"""Tokens of one prompt."""
_TOP = 256
"""Likeliest tokens at each place, the most that the engine tells."""
_CACHE_TOKENS = 4096
_DRAWN = 400
"""Tokens that stand for the text where a model has no tokenizer."""


def fidelity(source: str, result: str, model_config: ModelConfig) -> Divergence:
    """
    Args:
        source, result: paths of both models.
        card: of the source.

    Raises:
        BanyanError: one of them cannot be served.
    """
    most = min(_PIECE, model_config.context_length - 2)
    reference, pieces = _scored(source, most, model_config, None)
    other, _ = _scored(result, most, model_config, pieces)
    return divergence(reference, other)


def _scored(
    path: str, most: int, model_config: ModelConfig, given: Sequence[list[int]] | None
) -> tuple[Scores, Sequence[list[int]]]:
    words = ["--model-path", path, "--log-level", "error", "--skip-server-warmup"]
    words += ["--max-total-tokens", str(_CACHE_TOKENS)]
    with Engine.from_words(words) as engine:
        pieces = given or list(_pieces(engine, most, model_config.vocab_size))
        logprobs, likeliest = list[float](), list[Likeliest]()
        for piece in pieces:
            answer = engine.generate(
                input_ids=piece,
                sampling_params={"temperature": 0, "max_new_tokens": 1},
                return_logprob=True,
                logprob_start_len=0,
                top_logprobs_num=min(_TOP, model_config.vocab_size),
            )
            facts = cast(dict[str, list[object]], cast(dict[str, object], answer)["meta_info"])
            # The very first token follows nothing.
            tokens = cast(list[tuple[float, int, str]], facts["input_token_logprobs"][1:])
            tops = cast(list[list[tuple[float, int, str]]], facts["input_top_logprobs"][1:])
            logprobs += [logprob for logprob, _, _ in tokens]
            likeliest += [{token: logprob for logprob, token, _ in top} for top in tops]
    return Scores(logprobs, likeliest), pieces


def _pieces(engine: Engine, most: int, vocab_size: int) -> Iterator[list[int]]:
    if engine.tokenizer is not None:
        tokens = list(engine.tokenizer.encode(TEXT))
    else:
        tokens = [(7919 * at * at + 104729 * at) % vocab_size for at in range(_DRAWN)]
    for first in range(0, len(tokens), most):
        piece = tokens[first : first + most]
        if len(piece) > 1:
            yield piece
