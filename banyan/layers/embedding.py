"""Token embedding and logits, sharded along the vocabulary: rank r holds the r-th part of the ids.

The parts are equal, except for the last ones.
"""

import math

import torch
from torch import Tensor

from banyan.layers.build import Build
from banyan.layers.step_inputs import FeatureRows
from banyan.layers.weight_slot import Layer, WeightSlot, single
from banyan.ops.api import PackedEmbedding, PackedLinear
from banyan.ops.stored import StoredWeight
from banyan.parallel.groups import Group


class _VocabularyShare:
    """Ids of one rank: first … last − 1; `room` ids are reserved on every rank."""

    def __init__(self, vocab_size: int, group: Group) -> None:
        self.room = -(-vocab_size // group.size)
        self.first = min(group.rank * self.room, vocab_size)
        self.last = min(self.first + self.room, vocab_size)


class Embedding(Layer):
    """Args:
        scale: factor on every row.

    Only ranks of the first pipeline stage hold it.
    """

    def __init__(self, vocab_size: int, dim: int, build: Build, scale: float = 1.0) -> None:
        super().__init__()
        self.shape = (vocab_size, dim)
        self.group = build.groups.vocabulary
        self.is_here = build.groups.stages.rank == 0
        self.share = _VocabularyShare(vocab_size, self.group)
        self.ops = build.ops
        self.scale = scale
        self.rows: PackedEmbedding | None = None

    def slots(self) -> dict[str, WeightSlot]:
        return {"weight": single(self.shape)}

    def fill(self, slot: str, parts: list[StoredWeight]) -> None:
        share = self.share
        if self.is_here:
            self.rows = self.ops.pack_embedding(parts[0], share.first, share.last, self.scale)

    def forward(self, tokens: Tensor, feature_rows: FeatureRows | None = None) -> Tensor:
        """feature_rows: rows that replace rows of the table, after the scale."""
        assert self.rows is not None
        found = self.group.all_reduce(self.rows(tokens))  # [tokens, dim]
        return found if feature_rows is None else feature_rows.replace(found, self.ops)


class PositionTable(Layer):
    """A vector for each position, added to the embeddings.

    Args:
        kind: "learned" | "sinusoidal" (sines before cosines, Vaswani et al. 2017).
        count: positions that requests may have.
        skipped: rows of the table before the first position.
    """

    def __init__(self, kind: str, count: int, skipped: int, dim: int, build: Build) -> None:
        super().__init__()
        self.kind, self.count, self.skipped, self.dim = kind, count, skipped, dim
        self.ops = build.ops
        self.rows: PackedEmbedding | None = None
        if kind == "sinusoidal":
            self.fill("weight", [StoredWeight.from_tensor(self._sines())])

    def slots(self) -> dict[str, WeightSlot]:
        learned = {"weight": single((self.count + self.skipped, self.dim))}
        return learned if self.kind == "learned" else {}

    def fill(self, slot: str, parts: list[StoredWeight]) -> None:
        whole = parts[0].cut(0, self.skipped, self.skipped + self.count)
        self.rows = self.ops.pack_embedding(whole, 0, self.count)

    def forward(self, positions: Tensor) -> Tensor:
        """positions: [tokens] int64; returns [tokens, dim]."""
        assert self.rows is not None
        return self.rows(positions)

    def _sines(self) -> Tensor:
        pairs = self.dim // 2
        step = math.log(10000.0) / (pairs - 1)
        frequencies = torch.exp(torch.arange(pairs, dtype=torch.float) * -step)
        angles = torch.arange(self.count + self.skipped).unsqueeze(1) * frequencies
        return torch.cat([angles.sin(), angles.cos()], dim=1)


class Logits(Layer):
    """The last projection, in the activation dtype; its result is fp32 on every rank.

    Args:
        scale: factor on the logits.
        soft_cap: logits become cap·tanh(logits/cap); 0 = off.
        is_normed: columns of the weight are normalised to length one.
    """

    def __init__(
        self,
        vocab_size: int,
        dim: int,
        build: Build,
        scale: float = 1.0,
        soft_cap: float = 0.0,
        has_bias: bool = False,
        is_normed: bool = False,
    ) -> None:
        super().__init__()
        self.shape = (vocab_size, dim)
        self.group = build.groups.head
        self.share = _VocabularyShare(vocab_size, self.group)
        self.ops = build.ops
        self.scale = scale
        self.soft_cap = soft_cap
        self.has_bias, self.is_normed = has_bias, is_normed
        self.weight: PackedLinear | None = None
        self.bias: Tensor | None = None
        self._bias_like = torch.empty(0, dtype=build.dtype, device=build.device)

    def slots(self) -> dict[str, WeightSlot]:
        slots = {"weight": single(self.shape)}
        return slots | {"bias": single(self.shape[:1])} if self.has_bias else slots

    def fill(self, slot: str, parts: list[StoredWeight]) -> None:
        whole = parts[0]
        if self.is_normed:
            values = whole.dense.float()
            whole = StoredWeight.from_tensor(values / (values.norm(dim=0) + 1e-7))
        if self.group.size > 1:
            whole = whole.cut(0, self.share.first, self.share.last)
        if slot == "bias":
            self.bias = whole.dense.to(self._bias_like)
        else:
            self.weight = self.ops.pack_linear(whole, is_head=True)

    def forward(self, hidden: Tensor) -> Tensor:
        assert self.weight is not None
        rows = self.group.gather_rows(hidden)
        logits = self.weight(rows, self.bias)  # [n of all replicas, ids]
        if self.soft_cap or self.scale != 1.0 or logits.dtype != torch.float32:
            logits = self.ops.scale_logits(logits, self.scale, self.soft_cap)
        if self.group.size == 1:
            return logits
        return self.group.gather_columns(logits, self.shape[0])  # [n, vocab]
