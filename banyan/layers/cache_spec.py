"""What layers keep between steps: each declares its tensors, and one function makes groups of them.

Knows no page counts and no owners; `kv_cache/sizing.py` counts pages, `runner/kvstore.py` holds
them.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from banyan.model_config.model_config import FULL, STATE, WINDOW, ModelConfig


@dataclass(frozen=True)
class Shared:
    """Heads or channels that lie one behind another and that ranks share.

    Attributes:
        size: over all ranks.
        first, last: those that are here, `last` left out.
    """

    size: int
    first: int
    last: int


@dataclass(frozen=True)
class CacheTensor:
    """
    Attributes:
        shape: of one token; in a STATE cache, of one page.
        shared: what shape[axis] consists of; () = each rank keeps all there is.
        is_spread: it is of the whole page, over whose tokens it is spread.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    shared: tuple[Shared, ...] = ()
    axis: int = 0
    is_spread: bool = False

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class LayerCache:
    """The cache of one layer on one rank.

    Attributes:
        layer: number of the layer within the model, by which the page store finds its tensors.
        tensors: name -> what is kept ("k", "v"; "latent" …). All lie in the same pages.
        kind: FULL | WINDOW | STATE.
        window: positions that a WINDOW layer reads, its own included.
    """

    layer: int
    tensors: Mapping[str, CacheTensor]
    kind: str = FULL
    window: int = 0


@dataclass(frozen=True)
class PageGroup:
    """Layers whose caches share page tables.

    Attributes:
        caches: theirs on this rank, by layer.
    """

    kind: str
    window: int
    caches: tuple[LayerCache, ...] = ()

    def page_bytes(self, page_size: int) -> int:
        """Bytes that one page of `page_size` tokens takes over all layers of the group."""
        tokens = 1 if self.kind == STATE else page_size
        sizes = (tensor.size_bytes for cache in self.caches for tensor in cache.tensors.values())
        return tokens * sum(sizes)


def caches_of(model: nn.Module) -> list[LayerCache]:
    """What the layers of a model declare (attribute `cache`), in the order of their numbers."""
    found = [module.cache for module in model.modules() if isinstance(module, Caching)]
    assert len({cache.layer for cache in found}) == len(found), "two caches of one number"
    return sorted(found, key=lambda cache: cache.layer)


class Caching(nn.Module):
    """A layer that keeps something between steps."""

    cache: LayerCache


def numbered_through(models: Sequence[Sequence[LayerCache]]) -> list[LayerCache]:
    """The caches of models whose pages lie beside each other: layers of each are numbered behind
    those of the ones before."""
    found: list[LayerCache] = []
    for caches in models:
        first = 1 + max((cache.layer for cache in found), default=-1)
        found += [replace(cache, layer=first + cache.layer) for cache in caches]
    return found


def align_groups(model_config: ModelConfig, mine: Sequence[PageGroup]) -> tuple[PageGroup, ...]:
    """The groups of the whole model, of which this rank may hold no layer; where the card knows
    of none that is ours, ours are all."""
    layers = range(0 if model_config.is_encoder else model_config.num_layers)
    kinds = [kind for layer in layers for kind in model_config.kept_by(layer)]
    keys = dict.fromkeys((kind, model_config.window if kind == WINDOW else 0) for kind in kinds)
    held = {(group.kind, group.window): group for group in mine}
    if not held.keys() <= keys.keys():
        return tuple(mine)
    return tuple(held.get(key, PageGroup(*key)) for key in keys)


def group_caches(caches: Iterable[LayerCache]) -> tuple[PageGroup, ...]:
    """One group per kind and window, in the order of their first layers, which numbers them in
    plans. A model that keeps nothing has one group without layers."""
    groups: dict[tuple[str, int], list[LayerCache]] = {}
    for cache in caches:
        groups.setdefault((cache.kind, cache.window), []).append(cache)
    made = tuple(PageGroup(*key, tuple(mine)) for key, mine in groups.items())
    return made or (PageGroup(FULL, 0),)
