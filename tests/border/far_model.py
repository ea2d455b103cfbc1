"""The model of `far_numbers.py` on a device: its K and V lie in pages in half precision, and which
V is read is decided by the device's own attention. The rest is exact in float32.

Satisfies models.base.Model.
"""

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from banyan.layers.cache_spec import CacheTensor, LayerCache
from banyan.layers.step_inputs import AttentionSpec, StepInputs
from banyan.model_config.model_config import FULL, WINDOW, ModelConfig
from tests.border.far_numbers import (
    BLOCK,
    FACTORS,
    LONGEST,
    POSITION_FACTORS,
    RANKS,
    STEP,
    TOKEN_CODES,
    named,
)
from tests.border.page_numbers import BASE, HEAD, LOGIT_UNIT, VOCAB, WIDTH, lowest

HEADS, KV_HEADS = 4, 2
FOCUS = 64.0
"""Distance of the best score to the next: e^-64 of it is nothing."""


class FarModel:
    """
    Args:
        windows: by layer, positions that it sees; 0 = all.
        dtype: of Q, K and V.
        kept: of K and V in pages.
    """

    prunes_to_outputs = False
    takes_features = False
    towers: dict = {}

    def __init__(
        self,
        model_config: ModelConfig,
        windows: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        kept: torch.dtype,
    ) -> None:
        def table(rows: np.ndarray) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(rows, np.float32)).to(device)

        self.model_config = model_config
        dim = model_config.head_dim
        pages = CacheTensor((KV_HEADS, dim), kept)
        self.caches = [
            LayerCache(layer, {"k": pages, "v": pages}, WINDOW if window else FULL, window)
            for layer, window in enumerate(windows)
        ]
        self._dtype = dtype
        self._specs = [
            AttentionSpec(layer, HEADS, KV_HEADS, dim, FOCUS, window)
            for layer, window in enumerate(windows)
        ]
        self._queries = [table(_queries(window, dim)) for window in windows]
        self._token_codes = table(TOKEN_CODES + BASE)
        self._factors = table(POSITION_FACTORS)
        self._token_keys = table(_token_keys(dim))
        self._position_keys = table(_position_keys(dim))
        self._read_factors = table(np.array(FACTORS)[:, None])
        self._steps = table(np.arange(1, BASE))
        self._head = table(HEAD * LOGIT_UNIT)
        self._signs = table(np.array([-1, 1]))

    def forward(self, step: StepInputs) -> Tensor:
        """returns: [tokens, UNITS], each position's last code as a thermometer."""
        tokens, positions = step.tokens, step.positions
        keys = self._token_keys[tokens] + self._position_keys[positions]
        keys = _for_heads(keys).to(self._dtype)
        code = (self._token_codes[tokens] * self._factors[positions]).remainder(BASE)
        for spec, queries in zip(self._specs, self._queries, strict=True):
            values = functional.pad(code, (0, spec.head_dim - WIDTH))
            query = queries[positions].unflatten(-1, (HEADS, spec.head_dim)).to(self._dtype)
            read = step.attention(spec, query, keys, _for_heads(values).to(self._dtype))
            read = read[..., :WIDTH].float().round() * self._read_factors  # [tokens, HEADS, WIDTH]
            code = (code + read.sum(1)).remainder(BASE)
        return self._signs[(code.unsqueeze(-1) >= self._steps).long()].flatten(1)

    def logits(self, hidden: Tensor) -> Tensor:
        return functional.linear(hidden, self._head)

    def classify(self, pooled: Tensor) -> Tensor:
        return pooled


def _for_heads(x: Tensor) -> Tensor:
    """The same for every head of keys: [tokens, KV_HEADS, dim]."""
    return x.unsqueeze(1).expand(-1, KV_HEADS, -1).contiguous()


def _token_keys(dim: int) -> np.ndarray:
    keys = np.zeros((VOCAB, dim))
    keys[:, 5] = RANKS
    return keys


def _position_keys(dim: int) -> np.ndarray:
    """Of position a · BLOCK + b: a, a², b, and b² in two parts."""
    keys = np.zeros((LONGEST, dim))
    a, b = np.divmod(np.arange(LONGEST), BLOCK)
    keys[:, :5] = np.stack([a, a**2, b, b**2 // BLOCK, b**2 % BLOCK], axis=1)
    return keys


def _queries(window: int, dim: int) -> np.ndarray:
    """By head: the two positions named; the lowest one; the largest rank. Of a position t the score
    is largest there: 2·t·j − j², for a and b."""
    queries = np.zeros((LONGEST, HEADS, dim))
    for at in range(LONGEST):
        targets = (named(0, at, window), named(1, at, window), lowest(at, window))
        for head, target in enumerate(targets):
            a, b = divmod(target, BLOCK)
            queries[at, head, :5] = 2 * a, -1, 2 * b, -BLOCK, -1
    queries[:, 3, 0], queries[:, 3, 2], queries[:, 3, 5] = BLOCK, 1, STEP
    return queries.reshape(LONGEST, -1)
