"""CapturedForward: decode steps as graphs of a few numbers of rows, the smallest that fits padded.

A graph reads slot numbers and nothing else that changes: positions, tokens and page tables are
gathered from the slot table inside it, and its best tokens and new lengths are entered there. So
one small copy and one launch are a step. Padding is slot 0, whose pages are page 0.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from banyan.base.log import logger
from banyan.layers.step import StepInputs
from banyan.messages.plan import SCORE
from banyan.models.base import Model
from banyan.ops.api import OpTime
from banyan.platform.base import Graph, Platform
from banyan.runner.attention.base import AttentionBackend, GroupView, StepGeometry
from banyan.runner.forward import EagerForward, is_sampled_plainly
from banyan.runner.inputs import Batch, StepTensors, has_embedded
from banyan.runner.kvstore import KVStore
from banyan.runner.sampling.sampler import Sampled
from banyan.runner.slots import SlotTable
from banyan.runner.states import BoundStates

log = logger(__name__)


class CapturedForward:
    """Replays steps in which every row runs one token and samples; others go to `eager`.

    Args:
        step: inputs with room for the largest shape.
        shapes: rows of the graphs, rising.
        is_unpadded: a step of another number of rows goes to `eager`, none is filled up.
    """

    how = "captured"
    is_recorded = False
    results_are_final = True

    def __init__(
        self,
        eager: EagerForward,
        model: Model,
        table: SlotTable,
        store: KVStore,
        attention: AttentionBackend,
        platform: Platform,
        step: StepTensors,
        shapes: tuple[int, ...],
        is_unpadded: bool = False,
    ) -> None:
        self.watch: Callable[[list[OpTime]], None] | None = None
        self._eager = eager
        self._model = model
        self._table = table
        self._store = store
        self._attention = attention
        self._platform = platform
        self._step = step
        self._shapes = shapes
        self._is_unpadded = is_unpadded
        self._on_host = platform.traits.lengths_on_host
        self._hidden = self._logits = torch.empty(0)
        self._best = torch.zeros(shapes[-1], device=step.tokens.device)
        self._tokens = torch.zeros_like(step.slots)
        self._rows = 0
        """Of the step that a graph has run; 0 = the last one was eager."""
        self._is_sampled = False
        # The largest first: the others fit into the memory that it took.
        self._graphs: dict[int, Graph] = {}
        with torch.inference_mode():
            for rows in reversed(shapes):
                self._graphs[rows] = platform.capture(self._work(rows))
        log.info("captured decode steps of %s rows", ", ".join(map(str, shapes)))

    def _work(self, rows: int) -> Callable[[], None]:
        """What a step of so many rows does."""
        table, step = self._table, self._step
        slots = step.slots[:rows]
        views = tuple(
            GroupView(pages[:rows], locations[:rows])
            for pages, locations in zip(step.page_tables, step.locations, strict=True)
        )
        on_host = self._on_host
        starts = torch.arange(rows + 1, dtype=torch.int32, device=step.row_starts.device)
        geometry = StepGeometry(starts, step.context_lengths[:rows], views)
        inputs = StepInputs(
            *(step.tokens[:rows], step.positions[:rows], self._attention.bind(geometry)),
            BoundStates(self._store, geometry),
        )

        def work() -> None:
            positions = table.lengths[slots]
            step.place(slots, positions, slots, table.max_length)
            if not on_host:
                step.context_lengths[:rows] = positions
            ends = positions + 1
            table.lengths[slots] = ends
            table.lengths[:1].zero_()  # padding stays at its beginning
            step.to_slots[:rows] = slots
            step.to_positions[:rows] = ends
            hidden = self._model.forward(inputs)
            logits = self._model.logits(hidden)
            if not len(self._logits):
                most = self._shapes[-1]
                self._hidden = hidden.new_zeros(most, hidden.shape[1])
                self._logits = logits.new_zeros(most, logits.shape[1])
            self._hidden[:rows] = hidden
            self._logits[:rows] = logits
            best, tokens = logits.max(-1)
            self._best[:rows] = best
            self._tokens[:rows] = torch.where(best.isfinite(), tokens, 0)
            table.tokens[slots, ends] = self._tokens[:rows].to(torch.int32)

        return work

    def run(self, batch: Batch) -> None:
        rows = len(batch.rows)
        is_decode = len(batch.last) == rows == int(batch.offsets[-1])
        shape = next((shape for shape in self._shapes if shape >= rows), 0)
        is_captured = shape == rows if self._is_unpadded else shape > 0
        if not is_decode or not is_captured or has_embedded(batch, self._table):
            self._rows = 0
            self._eager.run(batch)
            return
        moves = self._table.moves(batch.rows)
        if moves:
            moved = torch.tensor(moves, dtype=torch.int64).to(self._step.slots.device)
            self._table.lengths[moved[:, 0]] = moved[:, 1]
        packed = self._platform.pinned((shape,), torch.int64)
        packed[:rows], packed[rows:] = torch.from_numpy(batch.slots), 0
        self._step.slots[:shape].copy_(packed, non_blocking=True)
        if self._on_host:
            self._graphs[shape].replay([*batch.ends.tolist(), *[1] * (shape - rows)])
        else:
            self._graphs[shape].replay()
        self._rows = rows
        params = self._table.params[batch.to_slots]
        is_scored = bool(
            batch.wanted & SCORE
        )  # the scores are of the logits, which are then asked for
        is_best = not is_scored and bool((params["greedy"] & ~params["penalised"]).all())
        self._is_sampled = is_best and is_sampled_plainly(batch, self._table)

    def burst(self, batch: Batch, steps: int, number: int) -> None:
        return None

    def hurry(self, number: int) -> None:
        """There is nothing to end."""

    def next_tokens(self) -> Sampled | None:
        if not self._rows or not self._is_sampled:
            return None
        return Sampled(self._tokens[: self._rows], self._best[: self._rows])

    def next_logits(self, batch: Batch) -> Tensor:
        if not self._rows:
            return self._eager.next_logits(batch)
        return self._logits[: self._rows]

    def logits(self, tokens: np.ndarray) -> Tensor:
        return self._model.logits(self.hidden(tokens)) if self._rows else self._eager.logits(tokens)

    def hidden(self, tokens: np.ndarray) -> Tensor:
        if not self._rows:
            return self._eager.hidden(tokens)
        return self._hidden[torch.from_numpy(tokens).to(self._hidden.device)]

    def tapped(self, tokens: np.ndarray) -> Tensor:
        assert not self._rows, "graphs have no taps: nothing drafts on a device that captures"
        return self._eager.tapped(tokens)

    def targets(self, batch: Batch) -> tuple[Tensor, Tensor]:
        if not self._rows:
            return self._eager.targets(batch)
        return self._step.targets(self._rows)

    def op_times(self) -> list[OpTime]:
        return self._eager.op_times()
