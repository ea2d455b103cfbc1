"""What layers keep between steps: each layer declares its cache tensors; `group_caches` groups
them.

`kv_cache/sizing.py` counts pages, `runner/kvstore.py` allocates them.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from banyan.model_config.model_config import FULL, STATE, WINDOW, ModelConfig


@dataclass(frozen=True)
class ShardedAxis:
    """Consecutive heads or channels that are sharded over ranks.

    Attributes:
        size: over all ranks.
        first, last: range on this rank, `last` excluded.
    """

    size: int
    first: int
    last: int


@dataclass(frozen=True)
class CacheTensor:
    """Attributes:
    shape: per token; in a STATE cache per page.
    shared: the sharded axes that shape[axis] consists of; () = replicated on every rank.
    is_spread: the tensor belongs to a page as a whole and is spread over its tokens.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    shared: tuple[ShardedAxis, ...] = ()
    axis: int = 0
    is_spread: bool = False

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class LayerCache:
    """The cache of one layer on one rank.

    Attributes:
        layer: number of the layer in the model; the key of its tensors in the page store.
        tensors: name ("k", "v", "latent" …) -> tensor. All use the same pages.
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
        caches: on this rank, by layer.
    """

    kind: str
    window: int
    caches: tuple[LayerCache, ...] = ()

    def page_bytes(self, page_size: int) -> int:
        """Bytes of a page of `page_size` tokens over all layers of the group."""
        tokens = 1 if self.kind == STATE else page_size
        sizes = (tensor.size_bytes for cache in self.caches for tensor in cache.tensors.values())
        return tokens * sum(sizes)


def caches_of(model: nn.Module) -> list[LayerCache]:
    """The caches that a model's layers declare (attribute `cache`), by layer number."""
    found = [module.cache for module in model.modules() if isinstance(module, Caching)]
    assert len({cache.layer for cache in found}) == len(found), "two caches of one number"
    return sorted(found, key=lambda cache: cache.layer)


class Caching(nn.Module):
    """A layer with a cache."""

    cache: LayerCache


def numbered_through(models: Sequence[Sequence[LayerCache]]) -> list[LayerCache]:
    """The caches of several models in one page store: layers of each model are numbered after those
    before."""
    found: list[LayerCache] = []
    for caches in models:
        first = 1 + max((cache.layer for cache in found), default=-1)
        found += [replace(cache, layer=first + cache.layer) for cache in caches]
    return found


def align_groups(model_config: ModelConfig, mine: Sequence[PageGroup]) -> tuple[PageGroup, ...]:
    """The page groups of the whole model, which may include groups without a layer on this rank.
    Falls back to `mine` if the model config does not know one of them."""
    layers = range(0 if model_config.is_encoder else model_config.num_layers)
    kinds = [kind for layer in layers for kind in model_config.kept_by(layer)]
    keys = dict.fromkeys((kind, model_config.window if kind == WINDOW else 0) for kind in kinds)
    held = {(group.kind, group.window): group for group in mine}
    if not held.keys() <= keys.keys():
        return tuple(mine)
    return tuple(held.get(key, PageGroup(*key)) for key in keys)


def group_caches(caches: Iterable[LayerCache]) -> tuple[PageGroup, ...]:
    """One group per kind and window, ordered by their first layers; plans use this order. A model
    without caches has one empty group."""
    groups: dict[tuple[str, int], list[LayerCache]] = {}
    for cache in caches:
        groups.setdefault((cache.kind, cache.window), []).append(cache)
    made = tuple(PageGroup(*key, tuple(mine)) for key, mine in groups.items())
    return made or (PageGroup(FULL, 0),)
