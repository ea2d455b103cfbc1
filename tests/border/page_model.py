"""The model of `page_numbers.py` out of real ops, on real pages: every code is written as V and
read back by the step's attention, and every K decides which V is read.

Integers below 2**24 are exact in float32. Remainders and rounding are sums of saturated tanh, so a
mean that is off in its last bits is whole again before it is written. All of it can be recorded.
Satisfies models.base.Model.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from banyan.layers.cache_spec import CacheTensor, LayerCache
from banyan.layers.step_inputs import AttentionSpec, OutputTokens, StepInputs
from banyan.messages.spans import ContentKind
from banyan.model_config.model_config import FULL, STATE, WINDOW, ModelConfig
from banyan.models.decoder import stage_of
from banyan.ops.api import Ops, PackedEmbedding, PackedLinear
from banyan.ops.stored import StoredWeight
from banyan.parallel.groups import ALONE, Group, Groups
from tests.border.page_features import PageTower
from tests.border.page_numbers import (
    BASE,
    HEAD,
    LARGEST,
    LOGIT_UNIT,
    LONGEST,
    LOWEST,
    POINTED,
    POSITION_FACTORS,
    RANKS,
    STATEFUL,
    STEP,
    TOKEN_CODES,
    VOCAB,
    WIDTH,
    lowest,
    pointed,
)

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8

SHARP = 64.0
"""Makes a number that is 0.4 from its threshold saturate."""
FOCUS = 64.0
"""Distance of the best score to the next: e^-64 of it is nothing."""
LIFT = 32.0
"""silu(x) = x from here on."""


@dataclass(frozen=True)
class Staircase:
    """x [tokens, WIDTH] -> one number per threshold, -1 below and 1 above."""

    ops: Ops
    up: PackedLinear
    bias: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        return self.ops.scale_logits(self.up(x, self.bias), 1.0, 1.0)


class PageModel:
    """
    Args:
        windows: by layer, positions that it sees; 0 = all; STATEFUL.
        groups: `stages` have the layers one part after another, `ffn` share the thresholds of
            remainders, and `head` the vocabulary of the logits.
        certainty: factor on the logits.
        tower: makes features; None = prompts are tokens.
    """

    prunes_to_outputs = True

    def __init__(
        self,
        model_config: ModelConfig,
        ops: Ops,
        windows: tuple[int, ...],
        groups: Groups = ALONE,
        certainty: float = 1.0,
        tower: PageTower | None = None,
    ) -> None:
        self.takes_features = tower is not None
        self.towers = {} if tower is None else {ContentKind.PATCHES: tower}
        self.model_config = model_config
        self._stages, self._ffn, self._heads = groups.stages, groups.ffn, groups.head
        self._here = stage_of(len(windows), self._stages)
        self.caches = [_cache(layer, windows[layer], ops) for layer in self._here]
        self._ops = ops
        self._specs = [
            AttentionSpec(layer, HEADS, KV_HEADS, HEAD_DIM, 1.0, window)
            for layer, window in enumerate(windows)
        ]
        pack = _Packer(ops)
        self._token_codes = pack.table(TOKEN_CODES + LIFT)
        self._factors = pack.table(POSITION_FACTORS)
        self._token_keys = pack.table(_token_keys())
        self._position_keys = pack.table(_position_keys())
        self._ones = pack.table(np.ones((LONGEST, 1)))
        self._before = torch.tensor([[POINTED], [0]]).float().expand(2, WIDTH).contiguous()
        self._queries = [pack.table(_queries(max(0, window))) for window in windows]
        self._counts = [pack.table(_counts(max(0, window))) for window in windows]
        self._spread = pack.linear(np.tile(np.eye(HEAD_DIM, WIDTH), (KV_HEADS, 1)))
        self._gather = pack.linear(_gather())
        # The largest sum there can be is one of LONGEST codes and the single ones beside it.
        top = BASE * (LONGEST + POINTED + LOWEST + LARGEST)
        thresholds = np.arange(BASE, top, BASE)[self._ffn.rank :: self._ffn.size]
        self._wraps = pack.staircase(thresholds)
        self._unwrap = pack.linear(_total(len(thresholds), -BASE / 2))
        self._unwrap_bias = torch.full((WIDTH,), -BASE / 2 * len(thresholds))
        self._units = pack.staircase(np.arange(1, BASE))
        self._count = pack.linear(_total(BASE - 1, 0.5))
        self._count_bias = torch.full((WIDTH,), (BASE - 1) / 2)
        self._head = pack.linear(_part(HEAD, self._heads) * LOGIT_UNIT * certainty)

    def forward(self, step: StepInputs) -> Tensor:
        """returns: [tokens, UNITS], each position's last code as a thermometer, or of those
        chosen alone."""
        ops = self._ops
        keys = ops.add(self._token_keys(step.tokens), self._position_keys(step.positions))
        keys = keys.unflatten(-1, (KV_HEADS, HEAD_DIM))
        units = step.previous_states
        if self._stages.rank == 0:
            parts = [self._token_codes(step.tokens), self._factors(step.positions)]
            units = self._remainder(ops.silu_and_mul(ops.concat(parts)))
            if step.feature_rows is not None:
                units = step.feature_rows.replace(units, ops)
        assert units is not None
        for layer in self._here:
            spec, queries, counts = self._specs[layer], self._queries[layer], self._counts[layer]
            chosen = step.output_tokens if layer == len(self._specs) - 1 else None
            code = self._count(units, self._count_bias)  # [tokens, WIDTH]
            if spec.window == STATEFUL:
                total = self._through_states(spec.layer, code, step)
                units = self._remainder(_narrowed(total, chosen, ops))
                continue
            values = self._spread(code).unflatten(-1, (KV_HEADS, HEAD_DIM))
            query = queries(step.positions).unflatten(-1, (HEADS, HEAD_DIM))
            read = step.attention(spec, query, keys, values).flatten(1)
            # The mean times the number of positions, LIFT times too much, which `gather` takes off.
            total = ops.silu_and_mul(ops.concat([counts(step.positions), read[:, :WIDTH]]))
            units = self._remainder(_narrowed(ops.add(total, self._gather(read)), chosen, ops))
        return units

    def _through_states(self, layer: int, code: Tensor, step: StepInputs) -> Tensor:
        """The sum of all codes so far, and the one before times POINTED."""
        kept, rows = step.states(layer)
        one, values = self._ones(step.positions), code.unflatten(-1, (1, WIDTH))
        key = one.unflatten(-1, (1, 1))
        total = self._ops.scan(key, key, values, one, one, None, False, kept["sum"], rows)
        before = self._ops.short_conv(code, self._before, None, False, kept["before"], rows)
        return self._ops.add(total.flatten(1), before)

    def logits(self, hidden: Tensor) -> Tensor:
        return self._heads.gather_columns(self._head(self._heads.gather_rows(hidden)), VOCAB)

    def classify(self, pooled: Tensor) -> Tensor:
        return pooled

    def _remainder(self, x: Tensor) -> Tensor:
        """x modulo BASE as a thermometer; x: [tokens, WIDTH], almost whole."""
        down = self._unwrap(self._wraps(self._ffn.gather_rows(x)), self._unwrap_bias)
        small = self._ops.add(x, self._ffn.reduce_rows(down))
        return self._units(small)


class _Packer:
    def __init__(self, ops: Ops) -> None:
        self._ops = ops

    def linear(self, weight: np.ndarray) -> PackedLinear:
        return self._ops.pack_linear(_stored(weight))

    def table(self, rows: np.ndarray) -> PackedEmbedding:
        return self._ops.pack_embedding(_stored(rows), 0, len(rows))

    def staircase(self, thresholds: np.ndarray) -> Staircase:
        """Of each of the WIDTH numbers its own block of thresholds, each half a step lower."""
        up = np.kron(np.eye(WIDTH), np.full((len(thresholds), 1), SHARP))
        bias = np.tile(SHARP * (0.5 - thresholds), WIDTH)
        return Staircase(self._ops, self.linear(up), torch.from_numpy(bias).float())


def _narrowed(x: Tensor, chosen: OutputTokens | None, ops: Ops) -> Tensor:
    return x if chosen is None else chosen.of(x, ops)


def _part(rows: np.ndarray, group: Group) -> np.ndarray:
    return rows[len(rows) * group.rank // group.size : len(rows) * (group.rank + 1) // group.size]


def kind_of(window: int) -> str:
    return STATE if window == STATEFUL else WINDOW if window else FULL


def _cache(layer: int, window: int, ops: Ops) -> LayerCache:
    kept = CacheTensor((KV_HEADS, HEAD_DIM), ops.cache_dtype)
    tensors = {"k": kept, "v": kept}
    if window == STATEFUL:
        tensors = {
            "sum": CacheTensor((1, 1, WIDTH), torch.float32),
            "before": CacheTensor((1, WIDTH), torch.float32),
        }
    return LayerCache(layer, tensors, kind_of(window), max(0, window))


def _stored(weight: np.ndarray) -> StoredWeight:
    rows = torch.from_numpy(np.ascontiguousarray(weight, np.float32))
    return StoredWeight.from_bytes("F32", tuple(rows.shape), rows.view(torch.uint8).flatten())


def _total(count: int, factor: float) -> np.ndarray:
    """Adds up the `count` steps of each of the WIDTH numbers. [WIDTH, WIDTH · count]"""
    return np.kron(np.eye(WIDTH), np.full((1, count), factor))


def _token_keys() -> np.ndarray:
    keys = np.zeros((VOCAB, KV_HEADS, HEAD_DIM))
    keys[:, 1, 2] = STEP * RANKS
    return keys.reshape(VOCAB, -1)


def _position_keys() -> np.ndarray:
    """(j, j²) names the position j; beside it lies its rank among equal tokens."""
    keys, at = np.zeros((LONGEST, KV_HEADS, HEAD_DIM)), np.arange(LONGEST)
    keys[:, :, 0], keys[:, :, 1] = at[:, None], at[:, None] ** 2
    keys[:, 1, 2] = at
    return keys.reshape(LONGEST, -1)


def _queries(window: int) -> np.ndarray:
    """By head: all alike; the position pointed to; the lowest one; the largest rank."""
    queries = np.zeros((LONGEST, HEADS, HEAD_DIM))
    for at in range(LONGEST):
        for head, target in ((1, pointed(at, window)), (2, lowest(at, window))):
            queries[at, head, :2] = 2 * target * FOCUS, -FOCUS  # c·(2tj − j²): largest at j = t
    queries[:, 3, 2] = FOCUS
    return queries.reshape(LONGEST, -1)


def _counts(window: int) -> np.ndarray:
    at = np.arange(LONGEST) + 1
    seen = np.minimum(at, window) if window else at
    return np.repeat(seen[:, None] + LIFT, WIDTH, axis=1)


def _gather() -> np.ndarray:
    """What the heads read, with its factors. [WIDTH, HEADS · HEAD_DIM]"""
    factors = np.array([-LIFT, POINTED, LOWEST, LARGEST])
    return np.kron(factors, np.eye(WIDTH, HEAD_DIM))


def bytes_of(pages: Tensor) -> np.ndarray:
    """What a tensor of pages holds, on the host."""
    return pages.cpu().numpy().view(np.uint8)
