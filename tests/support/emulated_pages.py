"""Pages on the emulated NPU."""

import math

import torch

from banyan.ascend.ops.operators import Operators
from banyan.ops import reference

HEADS, KV_HEADS, PAGE, PAGES = 8, 2, 128, 16

HALF = torch.bfloat16
LENGTHS = [130, 257, 5]


def random(*shape: int, dtype: torch.dtype = HALF) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(dtype)


class Scene:
    """Pages of three rows, on the device."""

    def __init__(self, on, dim: int) -> None:
        self.on, self.dim = on, dim
        self.k, self.v = random(PAGES, PAGE, KV_HEADS, dim), random(PAGES, PAGE, KV_HEADS, dim) * 2
        self.table = torch.zeros(3, 4, dtype=torch.int32)
        pages = iter(range(PAGES - 1, 0, -2))
        for row, length in enumerate(LENGTHS):
            for column in range(-(-length // PAGE)):
                self.table[row, column] = next(pages)
        self.pages = on(self.k).flatten(2), on(self.v).flatten(2)
        self.scale = 1 / math.sqrt(dim)

    def wanted(self, q: torch.Tensor, counts: list[int], window: int = 0) -> torch.Tensor:
        starts = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()])
        contexts = torch.tensor([n - c for n, c in zip(LENGTHS, counts, strict=True)])
        return reference.paged_attention(
            *(q.float(), self.k.float(), self.v.float(), self.table, starts, contexts),
            *(self.scale, window, 0.0),
        )

    def query(self) -> dict[str, torch.Tensor]:
        """A single token of each row, and where its pages are."""
        query = random(3, 1, HEADS, self.dim)
        return {"query": self.on(query), "table": self.on(self.table)}

    def single(self, operators: Operators, **changed) -> torch.Tensor:
        given = {
            **({} if {"query", "table"} <= changed.keys() else self.query()),
            **dict(zip(("key", "value"), self.pages, strict=True)),
            "lengths": LENGTHS,
            "kv_heads": KV_HEADS,
            "scale": self.scale,
        }
        return operators.attention.attend_single(**given | changed)

    def together(self, operators: Operators, **changed) -> torch.Tensor:
        given = {
            "query": self.on(random(45, HEADS, self.dim)),
            **dict(zip(("key", "value"), self.pages, strict=True)),
            "table": self.on(self.table),
            "ends": [10, 40, 45],
            "lengths": LENGTHS,
            "kv_heads": KV_HEADS,
            "scale": self.scale,
            "window": 0,
        }
        return operators.attention.attend_together(**given | changed)
