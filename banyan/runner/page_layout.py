"""Shelves: where the pages of one rank lie, tensor by tensor, and what each is a share of."""

import math
from collections.abc import Callable, Sequence

import msgspec
import torch

from banyan.disaggregation.page_cutting import Block, PageForm
from banyan.layers.cache_spec import LayerCache, Shared
from banyan.model_config.model_config import STATE
from banyan.runner.kvstore import GroupLayout, KVStore


class Shelf(msgspec.Struct, frozen=True):
    """The pages of one tensor of one layer on one rank.

    Attributes:
        at: where it begins in the rank's file.
        page_bytes: of one page.
        dtype, shape: of what is kept of one token, or of one state.
        shared: what ranks share of it, () where each of them has it whole: shape[axis] then counts
            what all of them have.
        is_state: it is kept once in a page, and not for each token.
        is_spread: it is kept once in a page too, spread over its tokens.
    """

    group: int
    layer: int
    name: str
    at: int
    page_bytes: int
    dtype: str
    shape: tuple[int, ...]
    shared: tuple[Shared, ...]
    axis: int
    is_state: bool
    is_spread: bool = False

    @property
    def fact(self) -> tuple[object, ...]:
        """What it is on any number of ranks, and in pages of any size."""
        sizes = tuple(part.size for part in self.shared)
        shape = () if self.is_spread else self.shape
        return self.group, self.layer, self.name, self.dtype, shape, sizes, self.axis


def shelves_of(store: KVStore) -> list[Shelf]:
    """Of one rank, by layer."""
    return [
        _shelf(store.groups, store.group_of(cache.layer), cache, name, store.places)
        for cache in store.caches
        for name in cache.tensors
    ]


def in_window(shelves: Sequence[Shelf]) -> list[Shelf]:
    """Where they lie in one page of a window."""
    ends: dict[int, int] = {}
    moved: list[Shelf] = []
    for shelf in shelves:
        at = ends.get(shelf.group, 0)
        moved.append(msgspec.structs.replace(shelf, at=at))
        ends[shelf.group] = at + shelf.page_bytes
    return moved


def _shelf(
    groups: Sequence[GroupLayout],
    group: int,
    cache: LayerCache,
    name: str,
    places: dict[int, dict[str, int]],
) -> Shelf:
    tensor, is_state = cache.tensors[name], groups[group].kind == STATE
    shape = list(tensor.shape)
    if tensor.shared:
        shape[tensor.axis] = sum(part.size for part in tensor.shared)
    return Shelf(
        group=group,
        layer=cache.layer,
        name=name,
        at=places[cache.layer].get(name, 0),
        page_bytes=tensor.size_bytes * (1 if is_state else groups[group].page_size),
        dtype=str(tensor.dtype),
        shape=tuple(shape),
        shared=tensor.shared,
        axis=tensor.axis,
        is_state=is_state,
        is_spread=tensor.is_spread,
    )


def layout_facts(shelves: Sequence[Shelf], groups: Sequence[GroupLayout]) -> tuple[object, ...]:
    """What two servers have in common whose pages are cut for different numbers of ranks and for
    different numbers of tokens."""
    kinds = [(group.kind, group.window) for group in groups]
    return (kinds, sorted(dict.fromkeys(shelf.fact for shelf in shelves)))


PartsOfHead = Callable[[str, int, torch.dtype], tuple[tuple[int, int], ...]]
"""(name, width, dtype) of a tensor whose heads lie one behind another -> `Block.parts` of one."""


def forms_of(
    shelves: Sequence[Shelf], groups: Sequence[GroupLayout], by_head: PartsOfHead | None
) -> tuple[PageForm, ...]:
    """How the tokens lie in pages of each group, as they travel: layers in order, tensors as
    declared, all heads.

    Args:
        shelves: of all ranks.
        by_head: None = the heads of a token lie side by side, as all else does.
    """
    found = {(shelf.layer, shelf.name): shelf for shelf in shelves}
    names = list(dict.fromkeys(shelf.name for shelf in shelves))
    blocks: list[list[Block]] = [[] for _ in groups]
    for layer, name in sorted(found, key=lambda key: (key[0], names.index(key[1]))):
        shelf = found[layer, name]
        if not shelf.is_state:
            dtype: torch.dtype = getattr(torch, shelf.dtype.removeprefix("torch."))
            if by_head is not None and shelf.shared:
                heads, width = shelf.shape
                blocks[shelf.group].append(Block(heads, by_head(name, width, dtype)))
            else:
                parts = ((1, math.prod(shelf.shape) * dtype.itemsize),)
                blocks[shelf.group].append(Block(1, parts))
    fixed = {shelf.group for shelf in shelves if shelf.is_spread}
    return tuple(
        PageForm(0)
        if group.kind == STATE
        else PageForm(group.page_size, None if at in fixed else tuple(mine))
        for at, (group, mine) in enumerate(zip(groups, blocks, strict=True))
    )
