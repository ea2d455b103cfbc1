"""BoundStates: where the rows of one step find the states that layers keep of them."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from banyan.ops.state_api import StateRows
from banyan.runner.attention.base import StepGeometry
from banyan.runner.kvstore import KVStore


@dataclass(frozen=True)
class BoundStates:
    """Satisfies `layers.step.StepStates`. A request has one page in a group of states: the first
    entry of its page table."""

    store: KVStore
    step: StepGeometry

    def __call__(self, layer: int) -> tuple[Mapping[str, Tensor], StateRows]:
        view = self.step.groups[self.store.group_of(layer)]
        pages = view.page_tables[:, 0]
        lengths = (self.step.row_starts, self.step.context_lengths)
        rows = StateRows(pages, *lengths, self.step.rollback_checkpoints)
        return self.store.tensors(layer), rows
