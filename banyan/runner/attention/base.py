"""The attention backend protocol, and the geometry of a step that it works on."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from banyan.layers.step_inputs import StepAttention


@dataclass(frozen=True)
class GroupView:
    """One cache group's pages in this step.

    Attributes:
        page_tables: [rows, max_pages] int32.
        locations: [tokens] int64, page · page_size + offset of each token of the step.
    """

    page_tables: Tensor
    locations: Tensor


@dataclass(frozen=True)
class StepGeometry:
    """Rows of a step, on the device; both lengths are on the host if `Traits.lengths_on_host`.

    Attributes:
        row_starts: [rows + 1] int32; row r has tokens row_starts[r] … row_starts[r + 1] − 1.
        context_lengths: [rows] int32, positions before this step's tokens.
        groups: one view per cache group.
        paths: of draft trees, as in `ops.api.Ops.paged_attention`; None = drafts are chains.
        rollback_checkpoints: of rows with drafts, as `StateRows.rollback_checkpoints`.
    """

    row_starts: Tensor
    context_lengths: Tensor
    groups: tuple[GroupView, ...]
    paths: Tensor | None = None
    rollback_checkpoints: Tensor | None = None


class AttentionBackend(Protocol):
    """Attention of all layers; created once with (ops, store)."""

    def bind(self, geometry: StepGeometry) -> StepAttention:
        """The attention of one step. Two bound steps may exist at once."""
        ...
