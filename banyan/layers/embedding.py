"""Token embedding and logits, cut along the vocabulary: rank r holds the r-th share of the ids.

The shares are equal; ids past the vocabulary on the last rank exist as zeros and are cut off.
"""

import torch
from torch import Tensor

from banyan.layers.quant import pack
from banyan.layers.slot import Layer, WeightSlot, single
from banyan.ops.api import Ops, PackedLinear
from banyan.ops.stored import StoredWeight
from banyan.parallel.mesh import Mesh


class _VocabularyShare:
    """Ids of one rank: first … last − 1, and how many every rank makes room for."""

    def __init__(self, vocab_size: int, mesh: Mesh) -> None:
        self.room = -(-vocab_size // mesh.size)
        self.first = min(mesh.rank * self.room, vocab_size)
        self.last = min(self.first + self.room, vocab_size)


class Embedding(Layer):
    def __init__(
        self,
        vocab_size: int,
        dim: int,
        mesh: Mesh,
        ops: Ops,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.shape = (vocab_size, dim)
        self.share = _VocabularyShare(vocab_size, mesh)
        self.mesh = mesh
        self.ops = ops
        self.table = torch.empty(0, dtype=dtype, device=device)  # [ids, dim] once filled

    def slots(self) -> dict[str, WeightSlot]:
        return {"weight": single(self.shape)}

    def fill(self, slot: str, parts: list[StoredWeight]) -> None:
        whole = self.mesh.size == 1
        mine = parts[0] if whole else parts[0].cut(0, self.share.first, self.share.last)
        self.table = mine.dense.to(self.table)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.mesh.all_reduce(self.ops.embedding(tokens, self.table, self.share.first))


class Logits(Layer):
    """The last projection, in the activation dtype; its result is fp32 on every rank."""

    def __init__(self, vocab_size: int, dim: int, mesh: Mesh, ops: Ops) -> None:
        super().__init__()
        self.shape = (vocab_size, dim)
        self.share = _VocabularyShare(vocab_size, mesh)
        self.mesh = mesh
        self.ops = ops
        self.weight: PackedLinear | None = None

    def slots(self) -> dict[str, WeightSlot]:
        return {"weight": single(self.shape)}

    def fill(self, slot: str, parts: list[StoredWeight]) -> None:
        whole = self.mesh.size == 1
        mine = parts[0] if whole else parts[0].cut(0, self.share.first, self.share.last)
        self.weight = pack([mine], self.ops)

    def forward(self, hidden: Tensor) -> Tensor:
        assert self.weight is not None
        logits = self.weight(hidden).float()  # [n, ids]
        if self.mesh.size == 1:
            return logits
        missing = self.share.room - logits.shape[1]
        logits = torch.nn.functional.pad(logits, (0, missing))
        return self.mesh.all_gather(logits)[:, : self.shape[0]]  # [n, vocab]
