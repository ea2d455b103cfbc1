"""What drafters read of the model that they draft for: its hidden states of the last step, and
those that pages of the cache keep.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from banyan.runner.batch import Batch
from banyan.runner.forward import Forward
from banyan.runner.kvstore import KVStore
from banyan.runner.slots import SlotTable


class TargetStep:
    """The step that ran last.

    Args:
        is_tapped: what drafts reads what comes to some layers, in the place of hidden states.
    """

    def __init__(self, is_tapped: bool = False) -> None:
        self._is_tapped = is_tapped
        self._forward: Forward | None = None
        self._offsets: dict[int, int] = {}
        self._paths: dict[int, list[int]] = {}

    def enter(self, batch: Batch, forward: Forward) -> None:
        self._forward = forward
        slots, offsets = batch.slots.tolist(), batch.offsets.tolist()
        self._offsets = dict(zip(slots, offsets, strict=False))
        self._paths = {}

    def stood(self, slot: int, path: list[int]) -> None:
        """Which tokens of a row that branched stand, one behind another."""
        self._paths[slot] = path

    def hidden(self, slots: Sequence[int], counts: Sequence[int]) -> Tensor:
        """What is read of the first tokens of some rows that stand; [sum of counts, width]."""
        assert self._forward is not None, "no step has run"
        firsts = [self._offsets[slot] for slot in slots]
        parts = [np.arange(at, at + count) for at, count in zip(firsts, counts, strict=True)]
        for i, slot in enumerate(slots):
            if slot in self._paths:
                parts[i] = firsts[i] + np.array(self._paths[slot][: counts[i]], np.int64)
        read = self._forward.tapped if self._is_tapped else self._forward.hidden
        return read(np.concatenate(parts))


class PageEnds:
    """What pages keep of their last token.

    Args:
        pages: of the layer that reads them; layer, name: where in it they are kept.
        width: numbers of one token.
    """

    def __init__(self, table: SlotTable, pages: KVStore, layer: int, name: str, width: int) -> None:
        group = pages.group_of(layer)
        self._tables = table.pages[group]
        self._kept = pages.tensors(layer)[name].flatten(1)  # [num_pages, width and a rest]
        self._width = width
        self.page_size = pages.groups[group].page_size
        assert self._kept.shape[1] >= width

    def keep(self, slots: Sequence[int], positions: Sequence[int], states: Tensor) -> None:
        """Of tokens that are the last of their pages; states: [n, width]."""
        if slots:
            self._kept[self._at(slots, positions), : self._width] = states.to(self._kept.dtype)

    def of(self, slots: Sequence[int], positions: Sequence[int]) -> Tensor:
        """[n, width]"""
        return self._kept[self._at(slots, positions), : self._width]

    def _at(self, slots: Sequence[int], positions: Sequence[int]) -> Tensor:
        columns = torch.tensor(positions) // self.page_size
        return self._tables[torch.tensor(slots), columns].long()
