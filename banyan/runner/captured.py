"""CapturedForward: decode steps as graphs of a few numbers of rows, the smallest that fits padded.

A graph reads slot numbers and nothing else that changes: positions, tokens and page tables are
gathered from the slot table inside it, and its best tokens and new lengths are entered there. So
one small copy and one launch are a step. Padding is slot 0, whose pages are page 0.

Where drafts are verified there are graphs of rows of that many tokens too. A row with fewer drafts
runs positions behind its own, whose numbers nobody reads, and which later rows write again.
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
from banyan.runner.batch import Batch
from banyan.runner.forward import EagerForward, is_sampled_plainly
from banyan.runner.inputs import StepTensors, has_embedded
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
        verified: tokens of a row with all its drafts, 0 = rows have none.
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
        verified: int = 0,
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
        self._verified = verified
        most = min(step.max_tokens, step.max_outputs)
        self._wide = tuple(rows for rows in shapes if verified > 1 and rows * verified <= most)
        """Rows of the graphs that verify drafts."""
        self._most = max([shapes[-1], *(rows * verified for rows in self._wide)])
        self._best = torch.zeros(self._most, device=step.tokens.device)
        self._tokens = torch.zeros(self._most, dtype=torch.int64, device=step.tokens.device)
        self._brought = torch.zeros(2, shapes[-1], dtype=torch.int64, device=step.tokens.device)
        """Where rows start and how many tokens they run, of a step that verifies drafts."""
        self._rows = 0
        """Of the step that a graph has run; 0 = the last one was eager."""
        self._size = 0
        """Its tokens that are not padding."""
        self._places: np.ndarray | None = None
        """Where its tokens are among those of the graph; None = in the same places."""
        self._is_sampled = False
        # The largest first: the others fit into the memory that it took.
        self._graphs: dict[tuple[int, int], Graph] = {}
        """By rows and tokens of a row."""
        with torch.inference_mode():
            for rows in reversed(self._wide):
                self._graphs[rows, verified] = platform.capture(self._work(rows, verified))
            for rows in reversed(shapes):
                self._graphs[rows, 1] = platform.capture(self._work(rows))
        log.info("captured decode steps of %s rows", ", ".join(map(str, shapes)))
        if self._wide:
            told = ", ".join(map(str, self._wide))
            log.info("captured steps of %s rows that verify %d tokens each", told, verified)

    def _work(self, rows: int, count: int = 1) -> Callable[[], None]:
        """What a step of so many rows of `count` tokens does."""
        table, step, size = self._table, self._step, rows * count
        slots = step.slots[:rows]
        views = tuple(
            GroupView(pages[:rows], locations[:size])
            for pages, locations in zip(step.page_tables, step.locations, strict=True)
        )
        on_host = self._on_host
        where = step.row_starts.device
        starts = torch.arange(0, size + 1, count, dtype=torch.int32, device=where)
        contexts = torch.zeros(rows, dtype=torch.int32) if on_host else step.context_lengths[:rows]
        geometry = StepGeometry(starts, contexts, views)
        inputs = StepInputs(
            *(step.tokens[:size], step.positions[:size], self._attention.bind(geometry)),
            BoundStates(self._store, geometry),
        )
        firsts, counts = self._brought[:, :rows]
        steps = torch.arange(count, device=slots.device)

        def work() -> None:
            if count == 1:
                slot_of = slots
                firsts_now = positions = table.lengths[slots]
                table.lengths[slots] = positions + 1
            else:
                slot_of = slots[:, None].expand(-1, count).reshape(-1)
                firsts_now = firsts
                positions = (firsts[:, None] + steps).reshape(-1)
                table.lengths[slots] = firsts + counts
            step.place(slot_of, positions, slots, table.max_length)
            if not on_host:
                step.context_lengths[:rows] = firsts_now
            ends = positions + 1
            table.lengths[:1].zero_()  # padding stays at its beginning
            step.to_slots[:size] = slot_of
            step.to_positions[:size] = ends
            hidden = self._model.forward(inputs)
            logits = self._model.logits(hidden)
            if not len(self._logits):
                self._hidden = hidden.new_zeros(self._most, hidden.shape[1])
                self._logits = logits.new_zeros(self._most, logits.shape[1])
            self._hidden[:size] = hidden
            self._logits[:size] = logits
            best, tokens = logits.max(-1)
            self._best[:size] = best
            self._tokens[:size] = torch.where(best.isfinite(), tokens, 0)
            table.tokens[slot_of, ends] = self._tokens[:size].to(torch.int32)

        return work

    def run(self, batch: Batch) -> None:
        rows = len(batch.rows)
        shape, count = self._shape_of(batch)
        if not shape:
            self._rows = 0
            self._eager.run(batch)
            return
        moves = self._table.moves(batch.rows)
        if count > 1:
            parts = np.zeros((3, shape), np.int64)
            parts[:, :rows] = batch.slots, batch.starts, batch.counts
            packed = self._platform.pinned((3, shape), torch.int64)
            packed.copy_(torch.from_numpy(parts))
            there = packed.to(self._step.slots.device, non_blocking=True)
            self._step.slots[:shape], self._brought[:, :shape] = there[0], there[1:]
        else:
            if moves:
                moved = torch.tensor(moves, dtype=torch.int64).to(self._step.slots.device)
                self._table.lengths[moved[:, 0]] = moved[:, 1]
            packed = self._platform.pinned((shape,), torch.int64)
            packed[:rows], packed[rows:] = torch.from_numpy(batch.slots), 0
            self._step.slots[:shape].copy_(packed, non_blocking=True)
        if self._on_host:
            ends = (batch.starts + count).tolist()
            self._graphs[shape, count].replay([*ends, *[count] * (shape - rows)])
        else:
            self._graphs[shape, count].replay()
        self._rows, self._size = rows, int(batch.offsets[-1])
        self._places = None
        if self._size < rows * count:
            first = np.arange(rows) * count - batch.offsets[:-1]
            self._places = np.repeat(first, batch.counts) + np.arange(self._size)
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

    def _shape_of(self, batch: Batch) -> tuple[int, int]:
        """Rows and tokens of a row of the graph that runs a batch; rows are 0 where none does."""
        rows, tokens = len(batch.rows), int(batch.offsets[-1])
        if len(batch.last) != tokens or not rows or has_embedded(batch, self._table):
            return 0, 1
        count = 1 if tokens == rows else self._verified
        shapes = self._shapes if count == 1 else self._wide
        shape = next((shape for shape in shapes if shape >= rows), 0)
        is_odd = self._is_unpadded and (shape, shape * count) != (rows, tokens)
        is_long = count > 1 and int(batch.starts.max()) + count > self._table.max_length
        return (0 if is_odd or is_long else shape), count

    def left(self, batch: Batch) -> Tensor:
        return self._eager.left(batch)

    def turn_to(self, batch: Batch) -> None:
        self._eager.turn_to(batch)

    def next_tokens(self) -> Sampled | None:
        if not self._rows or not self._is_sampled:
            return None
        return Sampled(self._mine(self._tokens), self._mine(self._best))

    def next_logits(self, batch: Batch) -> Tensor:
        if not self._rows:
            return self._eager.next_logits(batch)
        return self._mine(self._logits)

    def _mine(self, found: Tensor) -> Tensor:
        """Of the step's own tokens; found: of those of the graph."""
        if self._places is None:
            return found[: self._size]
        return found[torch.from_numpy(self._places).to(found.device)]

    def logits(self, tokens: np.ndarray) -> Tensor:
        return self._model.logits(self.hidden(tokens)) if self._rows else self._eager.logits(tokens)

    def hidden(self, tokens: np.ndarray) -> Tensor:
        if not self._rows:
            return self._eager.hidden(tokens)
        if self._places is not None:
            tokens = self._places[tokens]
        return self._hidden[torch.from_numpy(tokens).to(self._hidden.device)]

    def tapped(self, tokens: np.ndarray) -> Tensor:
        assert not self._rows, "graphs have no taps"
        return self._eager.tapped(tokens)

    def targets(self, batch: Batch) -> tuple[Tensor, Tensor]:
        if not self._rows:
            return self._eager.targets(batch)
        slots, positions = self._step.to_slots, self._step.to_positions
        return self._mine(slots), self._mine(positions)

    def op_times(self) -> list[OpTime]:
        return self._eager.op_times()
