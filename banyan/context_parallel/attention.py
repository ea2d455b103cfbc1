"""Attention of a rank that computes some of a step's tokens: what the cache keeps of the others
comes from the ranks that compute them, so every rank's pages are complete, and the queries here
read all of it.
"""

from dataclasses import dataclass, replace

from torch import Tensor

from banyan.layers.step_inputs import AttentionSpec, Indexed, LatentSpec, StepAttention
from banyan.parallel.groups import Group
from banyan.runner.attention.base import AttentionBackend, StepGeometry


class GatheredAttention:
    """
    Args:
        inner: attends; it is given the queries of this rank, and what is kept of all tokens.
        group: ranks with the same heads, each with some of the tokens.
    """

    def __init__(self, inner: AttentionBackend, group: Group) -> None:
        self._inner = inner
        self._group = group

    def bind(self, geometry: StepGeometry) -> StepAttention:
        """geometry: locations of all tokens, share by share; all else of this rank's rows."""
        return _Bound(self._inner.bind(geometry), self._group)


@dataclass(frozen=True)
class _Bound:
    inner: StepAttention
    group: Group

    def __call__(
        self, spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        k, v = (self.group.gather_rows(x.flatten(1)).unflatten(1, x.shape[1:]) for x in (k, v))
        return self.inner(spec, q, k, v, sinks)

    def latent(
        self,
        spec: LatentSpec,
        q: Tensor,
        q_turned: Tensor,
        kept: tuple[Tensor, Tensor] | None,
        indexed: Indexed | None = None,
    ) -> Tensor:
        assert kept is not None, "other ranks' latents come from them"
        gather = self.group.gather_rows
        if indexed is not None:
            keys = (gather(indexed.key), gather(indexed.key_turned))
            indexed = replace(indexed, key=keys[0], key_turned=keys[1])
        kept = (gather(kept[0]), gather(kept[1]))
        return self.inner.latent(spec, q, q_turned, kept, indexed)

    def latent_pages(self, layer: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
        return self.inner.latent_pages(layer)
