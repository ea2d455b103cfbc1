"""Draft trees: positions, storage places and attention paths of rows whose drafts branch.

The drafts of a tree are stored one after another in the pages and the slot table, although
siblings have the same position. After verification, `Compaction` moves accepted tokens to their
positions.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from banyan.base.draft_tree import is_chain, paths_of
from banyan.messages.plan import Row
from banyan.model_config.model_config import STATE
from banyan.ops.api import Ops
from banyan.ops.pages import move_tokens
from banyan.runner.kvstore import KVStore
from banyan.runner.slots import SlotTable


@dataclass(frozen=True)
class Branches:
    """The draft tree of one row.

    Attributes:
        base: position of the root; up to it every token is stored at its position.
        paths: for each token of the row the distances from the base of its ancestors, from the base
            itself (0) to the token.
    """

    base: int
    paths: Sequence[Sequence[int]]

    @property
    def positions(self) -> list[int]:
        """Position of each token of the row."""
        return [self.base + len(path) - 1 for path in self.paths]

    @property
    def places(self) -> list[int]:
        """Where each token of the row is stored."""
        return [self.base + path[-1] for path in self.paths]


class Mutual(Branches):
    """A row with consecutive positions whose tokens all attend to each other (DFLASH blocks)."""

    @classmethod
    def of(cls, base: int, count: int) -> "Mutual":
        return cls(base, [range(count)] * count)

    @property
    def positions(self) -> list[int]:
        return list(range(self.base, self.base + len(self.paths)))

    @property
    def places(self) -> list[int]:
        return self.positions


def branches_of(
    rows: Sequence[tuple[int, Row]], parents: Mapping[int, Sequence[int]]
) -> dict[int, Branches]:
    """Draft trees by row index; parents: of the drafts of each slot that has a tree."""
    found: dict[int, Branches] = {}
    for at, (_, row) in enumerate(rows):
        mine = parents.get(row.slot, ())[: row.drafts]
        if not is_chain(mine):
            assert row.count == row.drafts + 1, "a tree starts at the newest token"
            found[at] = Branches(row.start, paths_of(mine))
    return found


class Compaction:
    """Moves keys and values of accepted tree tokens to their positions.

    Args:
        layers: number of layers of the target model.
    """

    def __init__(self, table: SlotTable, store: KVStore, layers: int, ops: Ops) -> None:
        self._table = table
        self._store = store
        self._layers = [cache.layer for cache in store.caches if cache.layer < layers]
        self._ops = ops

    def move(self, slots: Sequence[int], sources: Sequence[int], targets: Sequence[int]) -> None:
        """Move places `sources` of slots to `targets`, all at once; a place may be in both."""
        places = [
            [self._locate(group, slots, positions) for positions in (sources, targets)]
            for group in range(len(self._store.groups))
        ]
        for layer in self._layers:
            group = self._store.group_of(layer)
            assert self._store.groups[group].kind != STATE, "states cannot be moved"
            tensors = dict(self._store.tensors(layer))
            if "k" in tensors:
                self._ops.move_kv(tensors.pop("k"), tensors.pop("v"), *places[group])
            for pages in tensors.values():
                move_tokens(pages, *places[group])

    def _locate(self, group: int, slots: Sequence[int], positions: Sequence[int]) -> Tensor:
        layout, tables = self._store.groups[group], self._table.pages[group]
        slots_there, where = torch.tensor([slots, positions], device=tables.device)
        pages = tables[slots_there, layout.column(where)].long()
        return layout.locate(pages, where)
