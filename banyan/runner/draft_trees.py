"""Rows whose drafts branch. They lie one behind another in the pages and in the slot table, and
stand below each other: where each stands, what it follows, and what lies where once some stand.
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
    """One row.

    Attributes:
        base: position behind which it branches; up to it every token lies where it stands.
        paths: of each token of the row: how far behind the base those lie that lead to it, from the
            base itself on, and itself the last.
    """

    base: int
    paths: Sequence[Sequence[int]]

    @property
    def positions(self) -> list[int]:
        """Of each token of the row."""
        return [self.base + len(path) - 1 for path in self.paths]

    @property
    def places(self) -> list[int]:
        """Where each token of the row lies."""
        return [self.base + path[-1] for path in self.paths]


class Mutual(Branches):
    """A row whose tokens stand one behind another, and all read each other."""

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
    """The rows that branch, by their index; parents: of the drafts of slots where they do."""
    found: dict[int, Branches] = {}
    for at, (_, row) in enumerate(rows if parents else ()):
        mine = parents.get(row.slot, ())[: row.drafts]
        if not is_chain(mine):
            assert row.count == row.drafts + 1, "drafts branch behind the newest token"
            found[at] = Branches(row.start, paths_of(mine))
    return found


class Compaction:
    """Brings what layers have written of the drafts that stand to where they stand.

    Args:
        layers: of the model that verifies.
    """

    def __init__(self, table: SlotTable, store: KVStore, layers: int, ops: Ops) -> None:
        self._table = table
        self._store = store
        self._layers = [cache.layer for cache in store.caches if cache.layer < layers]
        self._ops = ops

    def move(self, slots: Sequence[int], sources: Sequence[int], targets: Sequence[int]) -> None:
        """Positions `sources` of slots to `targets`, all at once; a token may be in both."""
        places = [
            [self._locate(group, slots, positions) for positions in (sources, targets)]
            for group in range(len(self._store.groups))
        ]
        for layer in self._layers:
            group = self._store.group_of(layer)
            assert self._store.groups[group].kind != STATE, "a state does not branch"
            tensors = dict(self._store.tensors(layer))
            if "k" in tensors:
                self._ops.move_kv(tensors.pop("k"), tensors.pop("v"), *places[group])
            for pages in tensors.values():
                move_tokens(pages, *places[group])

    def _locate(self, group: int, slots: Sequence[int], positions: Sequence[int]) -> Tensor:
        layout, where = self._store.groups[group], torch.tensor(positions)
        pages = self._table.pages[group][torch.tensor(slots), layout.column(where)].long()
        return layout.locate(pages, where)
