"""PageLayout: where the pages of one rank lie, tensor by tensor, and which share each holds."""

import math
from collections.abc import Callable, Sequence

import msgspec
import torch

from banyan.disaggregation.page_cutting import Block, PageForm
from banyan.layers.cache_spec import LayerCache, ShardedAxis
from banyan.model_config.model_config import STATE
from banyan.runner.kvstore import GroupLayout, KVStore


class PageLayout(msgspec.Struct, frozen=True):
    """The pages of one tensor of one layer on one rank.

    Attributes:
        at: first byte in the rank's memory.
        page_bytes: size of one page.
        dtype, shape: of one token's entry, or of one state.
        shared: which parts of it ranks share; () = each rank has it whole. With parts, shape[axis]
            counts the parts of all ranks together.
        is_state: one entry per page, not per token.
        is_spread: one entry per page, spread over the page's tokens.
    """

    group: int
    layer: int
    name: str
    at: int
    page_bytes: int
    dtype: str
    shape: tuple[int, ...]
    shared: tuple[ShardedAxis, ...]
    axis: int
    is_state: bool
    is_spread: bool = False

    @property
    def fact(self) -> tuple[object, ...]:
        """The properties that do not depend on the number of ranks or the page size."""
        sizes = tuple(part.size for part in self.shared)
        shape = () if self.is_spread else self.shape
        return self.group, self.layer, self.name, self.dtype, shape, sizes, self.axis


def page_layouts_of(store: KVStore) -> list[PageLayout]:
    """The layouts of one rank, by layer."""
    return [
        _page_layout(store.groups, store.group_of(cache.layer), cache, name, store.places)
        for cache in store.caches
        for name in cache.tensors
    ]


def window_layouts(page_layouts: Sequence[PageLayout]) -> list[PageLayout]:
    """The same tensors in a window, which holds one page."""
    ends: dict[int, int] = {}
    moved: list[PageLayout] = []
    for page_layout in page_layouts:
        at = ends.get(page_layout.group, 0)
        moved.append(msgspec.structs.replace(page_layout, at=at))
        ends[page_layout.group] = at + page_layout.page_bytes
    return moved


def _page_layout(
    groups: Sequence[GroupLayout],
    group: int,
    cache: LayerCache,
    name: str,
    places: dict[int, dict[str, int]],
) -> PageLayout:
    tensor, is_state = cache.tensors[name], groups[group].kind == STATE
    shape = list(tensor.shape)
    if tensor.shared:
        shape[tensor.axis] = sum(part.size for part in tensor.shared)
    return PageLayout(
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


def layout_facts(
    page_layouts: Sequence[PageLayout], groups: Sequence[GroupLayout]
) -> tuple[object, ...]:
    """Facts that must be equal on two servers whose pages may be cut for different numbers of
    ranks and tokens."""
    kinds = [(group.kind, group.window) for group in groups]
    return (kinds, sorted(dict.fromkeys(page_layout.fact for page_layout in page_layouts)))


PartsOfHead = Callable[[str, int, torch.dtype], tuple[tuple[int, int], ...]]
"""(name, width, dtype) of a tensor with consecutive heads -> `Block.parts` of one head."""


def forms_of(
    page_layouts: Sequence[PageLayout], groups: Sequence[GroupLayout], by_head: PartsOfHead | None
) -> tuple[PageForm, ...]:
    """Layout of tokens in transferred pages of each group: layers in order, tensors as declared,
    all heads.

    Args:
        page_layouts: of all ranks.
        by_head: None = the heads of one token are stored together.
    """
    found = {(page_layout.layer, page_layout.name): page_layout for page_layout in page_layouts}
    names = list(dict.fromkeys(page_layout.name for page_layout in page_layouts))
    blocks: list[list[Block]] = [[] for _ in groups]
    for layer, name in sorted(found, key=lambda key: (key[0], names.index(key[1]))):
        page_layout = found[layer, name]
        if not page_layout.is_state:
            dtype: torch.dtype = getattr(torch, page_layout.dtype.removeprefix("torch."))
            if by_head is not None and page_layout.shared:
                heads, width = page_layout.shape
                blocks[page_layout.group].append(Block(heads, by_head(name, width, dtype)))
            else:
                parts = ((1, math.prod(page_layout.shape) * dtype.itemsize),)
                blocks[page_layout.group].append(Block(1, parts))
    fixed = {page_layout.group for page_layout in page_layouts if page_layout.is_spread}
    return tuple(
        PageForm(0)
        if group.kind == STATE
        else PageForm(group.page_size, None if at in fixed else tuple(mine))
        for at, (group, mine) in enumerate(zip(groups, blocks, strict=True))
    )
