"""Shelves: where the pages of one rank lie, tensor by tensor, and what each is a share of."""

from collections.abc import Sequence

import msgspec

from banyan.config.card import STATE
from banyan.layers.cache import LayerCache, Shared
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

    @property
    def fact(self) -> tuple[object, ...]:
        """What it is on any number of ranks."""
        sizes = tuple(part.size for part in self.shared)
        return self.group, self.layer, self.name, self.dtype, self.shape, sizes, self.axis


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
    )


def layout_facts(shelves: Sequence[Shelf], groups: Sequence[GroupLayout]) -> tuple[object, ...]:
    """What two servers have in common whose pages are cut for different numbers of ranks; their
    page size is another fact, how far states are apart is one of these."""
    kinds = [
        (group.kind, group.window, group.page_size if group.kind == STATE else 0)
        for group in groups
    ]
    return (kinds, sorted(dict.fromkeys(shelf.fact for shelf in shelves)))
