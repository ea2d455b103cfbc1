"""All that comes before latent attention as one operator, where a device has it, a part of
`ops/api.py`. It knows no layers."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from banyan.ops.stored import StoredWeight

SQUEEZE, QUERY, LATENT, KEYS = PARTS = ("squeeze", "query", "latent", "keys")
"""Its weights: x to squeezed queries, those to the heads, x to latent and key, heads' keys."""


@dataclass(frozen=True)
class PrologueShape:
    """
    Attributes:
        dim: of the residual stream.
        query_rank: width that queries are squeezed through, 0 = none.
        heads: of this rank.
        rank, plain_dim, rope_dim: as of `config.model_config.LatentFacts`.
        query_eps, latent_eps: of the norms of squeezed queries and of latents.
        reads_squeezed: somebody else reads squeezed queries.
        obstacle: what this layer does that no operator of them all does, "" = nothing.
    """

    dim: int
    query_rank: int
    heads: int
    rank: int
    plain_dim: int
    rope_dim: int
    query_eps: float
    latent_eps: float
    reads_squeezed: bool = False
    obstacle: str = ""


class LatentPrologue(Protocol):
    """One layer's projections, norms and rotation, and the writing of its pages."""

    def take(self, part: str, weight: StoredWeight) -> None:
        """Called at load, once per part, and again when weights are replaced.

        weight: of SQUEEZE [query_rank, dim]; of QUERY [heads · (plain_dim + rope_dim), query_rank]
        and of LATENT [rank + rope_dim, dim], whose rows that rotate lie as halves; of KEYS [heads,
        plain_dim, rank].
        """
        ...

    def is_ready(self) -> bool:
        """It has all parts and can do with these; where it cannot, the log says why."""
        ...

    def __call__(
        self,
        x: Tensor,
        gammas: tuple[Tensor, Tensor],
        angles: tuple[Tensor, Tensor] | None,
        pages: tuple[Tensor, Tensor],
        flat_locations: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Write latents and turned keys of the step into `pages`, and return its queries.

        x: [tokens, dim]; gammas: [query_rank], [rank]; angles: [tokens, rope_dim / 2] fp32 each;
        pages: as for `write_latent`; flat_locations: as for write_kv.
        returns: [tokens, heads, rank], [tokens, heads, rope_dim], and what was squeezed and normed,
        [tokens, query_rank], or anything where nobody reads it.
        """
        ...


class PrologueOps(Protocol):
    """See `ops.api.Ops`."""

    def open_prologue(self, shape: PrologueShape) -> LatentPrologue | None:
        """None where several ops come before latent attention; the log says why where one was
        asked for."""
        ...
