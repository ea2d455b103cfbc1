"""How pages keep what an indexer of sparse latent attention reads, a part of `ops/api.py`."""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class IndexShape:
    """
    Attributes:
        heads, dim: of the indexer.
        top: positions that it chooses.
        rank, rope_dim: of the latent attention that reads them.
    """

    heads: int
    dim: int
    top: int
    rank: int
    rope_dim: int


class IndexOps(Protocol):
    """See `ops.api.Ops`."""

    def joins_index(self, shape: IndexShape) -> bool:
        """Whether pages keep both parts of such an indexer's keys side by side; then `write_latent`
        and `choose_positions` get the same pages for both."""
        ...
