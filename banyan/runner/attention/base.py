"""What an attention backend is given for a step, and what it must provide."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from banyan.layers.step_inputs import StepAttention


@dataclass(frozen=True)
class GroupView:
    """Where one group's pages of this step lie.

    Attributes:
        page_tables: [rows, max_pages] int32.
        locations: [tokens] int64, page · page_size + offset of each token of the step.
    """

    page_tables: Tensor
    locations: Tensor


@dataclass(frozen=True)
class StepGeometry:
    """Rows of a step, on the device; both lengths on the host where `Traits.lengths_on_host`.

    Attributes:
        row_starts: [rows + 1] int32, row r owns tokens row_starts[r] … row_starts[r + 1] − 1.
        context_lengths: [rows] int32, positions before this step's tokens.
        groups: one view per cache group.
        paths: of drafts that branch, as `ops.api.Ops.paged_attention` takes them; None where none
            ever do.
        trails: of rows whose last tokens may not stand, as `StateRows.rollback_checkpoints`.
    """

    row_starts: Tensor
    context_lengths: Tensor
    groups: tuple[GroupView, ...]
    paths: Tensor | None = None
    rollback_checkpoints: Tensor | None = None


class AttentionBackend(Protocol):
    """Serves all layers; constructed once with (ops, store)."""

    def bind(self, geometry: StepGeometry) -> StepAttention:
        """The attention of one step. Two bound steps may be alive at once."""
        ...
