"""Filters of logits that local servers are used for: DRY, top-n-sigma, typical, XTC and a
temperature that follows the entropy. One logit processor, in this order, before penalties, top_k,
top_p and min_p.

Each is a pure function of the logits, the tokens so far, the seed and the position. So a token is
the same alone, in a batch, and when it is computed again. Distributions are at temperature 1.
"""

import math
from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from banyan.messages.sampling_params import GREEDY_TEMPERATURE
from banyan.ops.sampling import quantile
from banyan.runner.sampler import LogitContext

LONGEST_MATCH = 128
"""DRY compares at most so many tokens. Longer repetitions are penalised like this one."""
LARGEST_PENALTY = 1e4
_XTC_STREAM = 0x5874_4363
"""The choice itself uses other random numbers than XTC."""
_LEAST_SHARE = 1e-3
"""The entropy lowers the temperature to no less than this share of it."""


def filter_logits(logits: Tensor, context: LogitContext) -> Tensor:
    """Logits after the filters that `context.params` names; a field that is absent is off."""
    given = cast(Mapping[str, Any], context.params)
    if given.get("dry_multiplier"):
        logits = penalise_repetition(logits, context.tokens, given)
    if given.get("top_n_sigma"):
        logits = _kept(logits, logits >= logits.max() - given["top_n_sigma"] * _deviation(logits))
    if given.get("typical_p"):
        logits = _kept(logits, is_typical(logits, given["typical_p"]))
    if given.get("xtc_probability"):
        at = quantile(context.seed ^ _XTC_STREAM, len(context.tokens)) / 2**64
        if at < given["xtc_probability"]:
            logits = without_top_choices(logits, given["xtc_threshold"])
    if given.get("dynatemp_range"):
        logits = logits * _sharpness(logits, context.temperature, given)
    return logits


def penalise_repetition(logits: Tensor, tokens: np.ndarray, given: Mapping[str, Any]) -> Tensor:
    """DRY: a token that would continue a repetition of length n loses
    multiplier · base^(n - allowed_length), from n = allowed_length on.

    The repetition is the longest part of the last `dry_penalty_last_n` tokens (-1 = all of them)
    that ends like the text itself, without a token of `dry_breakers`.
    """
    last = given.get("dry_penalty_last_n", -1)
    said = tokens if last < 0 else tokens[max(0, len(tokens) - last) :]
    followers, lengths = repetitions(said, set(given.get("dry_breakers", ())))
    allowed = given.get("dry_allowed_length", 2)
    is_long = lengths >= allowed
    if not is_long.any():
        return logits
    exponents = (lengths[is_long] - allowed).astype(np.float64)
    with np.errstate(over="ignore"):
        penalties = given["dry_multiplier"] * given.get("dry_base", 1.75) ** exponents
    penalties = np.minimum(penalties, LARGEST_PENALTY).astype(np.float32)
    worst = np.zeros(len(logits), np.float32)
    np.maximum.at(worst, followers[is_long], penalties)
    return logits - torch.from_numpy(worst).to(logits.device)


def repetitions(said: np.ndarray, breakers: set[int]) -> tuple[np.ndarray, np.ndarray]:
    """Tokens that followed what the text ends with, and how many tokens before them agree with
    its end: (ids, lengths), a pair for each place."""
    ends = np.flatnonzero(said[:-1] == said[-1]) if len(said) > 1 else np.empty(0, np.int64)
    lengths = np.zeros(len(ends), np.int64)
    open = np.arange(len(ends))  # places whose match may be longer
    for back in range(min(LONGEST_MATCH, len(said) - 1)):
        token = int(said[-1 - back])
        if token in breakers or not len(open):
            break
        reach = ends[open] - back
        agrees = (reach >= 0) & (said[reach] == token)
        open = open[agrees]
        lengths[open] += 1
    return said[ends + 1], lengths


def is_typical(logits: Tensor, share: float) -> Tensor:
    """The tokens whose surprise is nearest to the entropy and that together reach `share` of the
    probability (Meister and others, arXiv 2202.00666)."""
    log_p = torch.log_softmax(logits.double(), 0)
    p = log_p.exp()
    entropy = -(p * log_p.where(p > 0, 0.0)).sum()
    order = torch.sort((-log_p - entropy).abs(), stable=True).indices
    reached = torch.cumsum(p[order], 0)
    count = int((reached < share).sum()) + 1
    keep = torch.zeros(len(logits), dtype=torch.bool, device=logits.device)
    keep[order[:count]] = True
    return keep


def without_top_choices(logits: Tensor, threshold: float) -> Tensor:
    """XTC: of the tokens whose probability is at least `threshold` only the least likely stays,
    if there are two or more."""
    p = torch.softmax(logits.double(), 0)
    above = torch.nonzero(p >= threshold).flatten()
    if len(above) < 2:
        return logits
    kept = above[torch.argmin(p[above])]
    removed = above[above != kept]
    result = logits.clone()
    result[removed] = -math.inf
    return result


def _sharpness(logits: Tensor, temperature: float, given: Mapping[str, Any]) -> float:
    """What turns the request's temperature into the one of this token: from temperature - range
    for a certain token to temperature + range for an even distribution."""
    log_p = torch.log_softmax(logits.double(), 0)
    p = log_p.exp()
    choices = int(torch.isfinite(logits).sum())
    if choices < 2 or temperature < GREEDY_TEMPERATURE:
        return 1.0
    entropy = float(-(p * log_p.where(p > 0, 0.0)).sum())
    low = max(0.0, temperature - given["dynatemp_range"])
    high = temperature + given["dynatemp_range"]
    share = min(1.0, max(0.0, entropy / math.log(choices)))
    wanted = low + (high - low) * share ** given.get("dynatemp_exponent", 1.0)
    return temperature / max(wanted, _LEAST_SHARE * temperature)


def _deviation(logits: Tensor) -> Tensor:
    finite = logits[torch.isfinite(logits)]
    return finite.double().std(correction=0).float()


def _kept(logits: Tensor, keep: Tensor) -> Tensor:
    return logits.where(keep, -math.inf)
