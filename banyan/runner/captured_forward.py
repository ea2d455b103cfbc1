"""CapturedForward: decode steps as graphs of a few sizes; a step is padded to the next size.

A graph reads only slot numbers. Inside it, positions, tokens and page tables are gathered from the
slot table, and its best tokens and new lengths are written there. So a step is one small copy and
one launch. Padding is slot 0, whose pages are page 0.

With drafts there are also graphs whose rows have that many tokens. A row with fewer drafts runs
extra positions after its own; nothing reads their results, and later rows overwrite them.

Ranks that compute a step together use the same graph, so they exchange the same numbers of rows.
DP attention replicas choose the smallest graph that fits the largest of the agreed row counts,
context parallel ranks the smallest that fits the largest share. With pipeline parallelism a graph
holds the layers of one stage; inputs and outputs are sent outside the graph, and logits are
computed after the last stage.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from banyan.base.log import logger
from banyan.layers.step_inputs import StepInputs
from banyan.messages.plan import SCORE
from banyan.ops.api import OpTime
from banyan.ops.host_memory import copy_to
from banyan.platform.base import Graph
from banyan.runner.attention import GroupView, StepGeometry
from banyan.runner.batch import Batch, is_sampled_plainly
from banyan.runner.forward import EagerForward, ForwardContext
from banyan.runner.inputs import BoundStates, StepTensors, takes_features
from banyan.runner.multi_step import MultiStepRunner
from banyan.runner.sampler import Sampled

log = logger(__name__)

_PROFILED = 10
"""Operations that a profile of captures shows."""


@dataclass(frozen=True)
class CaptureSizes:
    """
    Attributes:
        shapes: rows of the graphs, ascending; with context parallelism rows of one share.
        is_unpadded: steps of other numbers of rows go to `eager` instead of being padded.
        verified: tokens of a row with all its drafts; 0 = rows have no drafts.
        prompts: tokens of the steps with prompts to capture, ascending.
        collects: Python collects garbage meanwhile.
        is_profiled: log which operations the captures spend their time in.
    """

    shapes: tuple[int, ...]
    is_unpadded: bool = False
    verified: int = 0
    prompts: tuple[int, ...] = ()
    collects: bool = False
    is_profiled: bool = False

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Captures inside take less time, as nothing is searched for garbage."""
        was_on = gc.isenabled()
        if not self.collects:
            gc.disable()
        try:
            if not self.is_profiled:
                yield
                return
            with torch.profiler.profile() as profile:
                yield
            table = profile.key_averages().table(sort_by="cpu_time_total", row_limit=_PROFILED)
            log.info("profile of the capture of graphs:\n%s", table)
        finally:
            if was_on:
                gc.enable()


class CapturedForward:
    """Replays steps in which every row runs one token and samples; others go to `eager`.

    Args:
        step: inputs with room for the largest shape.
    """

    how = "captured"
    is_recorded = False
    results_are_final = True
    multi_steps: MultiStepRunner | None = None

    def __init__(
        self,
        context: ForwardContext,
        eager: EagerForward,
        step: StepTensors,
        sizes: CaptureSizes,
    ) -> None:
        model, platform, groups = context.model, context.platform, context.build.groups
        shapes, verified = sizes.shapes, sizes.verified
        self.on_op_times: Callable[[list[OpTime]], None] | None = None
        self._eager = eager
        self._model = model
        self._table = context.table
        self._store = context.store
        self._attention = context.attention
        self._platform = platform
        self._step = step
        self._shapes = shapes
        self._is_unpadded = sizes.is_unpadded
        # Sparse attention: the indexer reads the lengths on the device.
        is_sparse = model.model_config.latent is not None and bool(
            model.model_config.latent.index_heads
        )
        self._on_host = platform.traits.lengths_on_host and not is_sparse
        self._dp, self._cp, self._stages = groups.dp_batch, groups.cp_batch, groups.stages
        cp = groups.cp_batch
        self._cp_size, self._cp_rank = (1, 0) if cp is None else (cp.replicas, cp.share)
        is_alone = context.rows_of_all is None and self._stages.size == 1
        self._verified = verified if is_alone else 0
        most = min(step.max_tokens, step.max_outputs)
        self._wide = tuple(
            rows for rows in shapes if self._verified > 1 and rows * verified <= most
        )
        """Rows of the graphs that verify drafts."""
        capacity = self._cp_size * shapes[-1]
        self._most = max([capacity, *(rows * verified for rows in self._wide)])
        where = step.tokens.device
        self._hidden = self._logits = torch.empty(0)
        self._best = torch.zeros(self._most, device=where)
        self._tokens, self._to_slots, self._to_positions = (
            torch.zeros(self._most, dtype=torch.int64, device=where) for _ in range(3)
        )
        self._slots = step.slots
        """Slots of the rows of all context parallel shares."""
        if cp is not None:
            self._slots = torch.zeros(capacity, dtype=torch.int64, device=where)
        self._contexts = step.context_lengths
        if platform.traits.lengths_on_host:  # the step's lengths are on the host
            self._contexts = torch.zeros(shapes[-1], dtype=torch.int32, device=where)
        self._row_spans = torch.zeros(2, capacity, dtype=torch.int64, device=where)
        """First position and number of tokens of each row, for drafts or context parallelism."""
        self._is_replayed = False
        """A graph ran the last step; else it was eager."""
        self._size = 0
        """Outputs of the last step."""
        self._places: np.ndarray | None = None
        """Index of each token of the step among the graph's tokens; None = the same indices."""
        self._outputs: np.ndarray | None = None
        """Index of each output among the graph's outputs; None = the first ones."""
        self._is_sampled = False
        # The largest first: the others fit into its memory.
        self._graphs: dict[tuple[int, int], Graph] = {}
        """By number of rows and tokens per row."""
        with torch.inference_mode(), sizes.capturing():
            for rows in reversed(self._wide):
                self._graphs[rows, verified] = platform.capture(self._work(rows, verified))
            for rows in reversed(shapes):
                self._agree_on(rows)
                self._graphs[rows, 1] = platform.capture(self._work(rows))
        log.info("captured decode steps of %s rows", ", ".join(map(str, shapes)))
        if self._wide:
            wide = ", ".join(map(str, self._wide))
            log.info("captured steps of %s rows that verify %d tokens each", wide, verified)

    def _agree_on(self, rows: int) -> None:
        """Enter the row counts of a step to which every rank brings `rows` rows."""
        for every in (self._dp, self._cp):
            if every is not None:
                every.tokens.enter([rows] * every.replicas)
                every.outputs.enter([rows] * every.replicas)
        if self._cp is not None:
            self._cp.context.enter([rows] * self._cp_size)

    def _work(self, rows: int, count: int = 1) -> Callable[[], None]:
        """One decode step of `rows` rows with `count` tokens each, for the graph.

        With context parallelism `rows` is per share, and only this rank's share runs here.
        """
        table, step, size = self._table, self._step, rows * count
        outputs = self._cp_size * size
        mine = slice(self._cp_rank * rows, (self._cp_rank + 1) * rows)
        slots = self._slots[mine]
        views = tuple(
            GroupView(pages[:rows], locations[:outputs])
            for pages, locations in zip(step.page_tables, step.locations, strict=True)
        )
        on_host = self._on_host
        where = torch.device("cpu") if on_host else slots.device
        starts = torch.arange(0, size + 1, count, dtype=torch.int32, device=where)
        contexts = torch.zeros(rows, dtype=torch.int32) if on_host else self._contexts[:rows]
        kept = step.rollback_checkpoints
        kept = None if kept is None else kept[:rows]
        geometry = StepGeometry(starts, contexts, views, rollback_checkpoints=kept)
        inputs = StepInputs(
            tokens=step.tokens[:size],
            positions=step.positions[:size],
            attention=self._attention.bind(geometry),
            states=BoundStates(self._store, geometry),
            shifts=None if step.shifts is None else step.shifts[:size],
            previous_states=None if step.carried is None else step.carried[:size],
        )
        firsts, counts = self._row_spans[:, : self._cp_size * rows]
        steps = torch.arange(count, device=slots.device)

        def work() -> None:
            slot_of = self._slots[:outputs]
            if self._cp_size > 1:
                firsts_now = positions = firsts
                step.place(slots, positions[mine], slots, table.max_length)
                step.locate_all(slot_of, positions)
            elif count == 1:
                firsts_now = positions = table.lengths[slots]
                table.lengths[slots] = positions + 1
                step.place(slot_of, positions, slots, table.max_length)
            else:
                slot_of = slots[:, None].expand(-1, count).reshape(-1)
                firsts_now = firsts
                positions = (firsts[:, None] + steps).reshape(-1)
                table.lengths[slots] = firsts + counts
                step.place(slot_of, positions, slots, table.max_length)
            if not on_host:
                self._contexts[:rows] = firsts_now[mine] if self._cp_size > 1 else firsts_now
            table.lengths[:1].zero_()  # padding stays at position 0
            hidden = self._model.forward(inputs)
            if not len(self._hidden):
                self._hidden = hidden.new_zeros(self._most, hidden.shape[1])
            self._hidden[:outputs] = hidden
            if self._stages.size == 1:
                self._choose(hidden, slot_of, positions + 1)

        return work

    def _choose(self, hidden: Tensor, slot_of: Tensor, ends: Tensor) -> None:
        """Write the best next token after each position; [size] each."""
        size = len(hidden)
        self._to_slots[:size] = slot_of
        self._to_positions[:size] = ends
        logits = self._model.logits(hidden)
        if not len(self._logits):
            self._logits = logits.new_zeros(self._most, logits.shape[1])
        self._logits[:size] = logits
        best, tokens = logits.max(-1)
        self._best[:size] = best
        self._tokens[:size] = torch.where(best.isfinite(), tokens, 0)
        self._table.tokens[slot_of, ends] = self._tokens[:size].to(torch.int32)

    def run(self, batch: Batch) -> None:
        shape, count = self._shape_of(batch)
        self._is_replayed = bool(shape)
        if shape and self._dp is not None and takes_features(batch, self._table):
            # The other replicas replay graphs: this one must bring as many rows as they expect.
            self._is_replayed = False
            self._agree_on(shape)
            batch = batch.filled_up(shape)
        if not self._is_replayed:
            self._eager.run(batch)
            return
        self._copy_inputs(batch, shape, count)
        if self._on_host:
            ends = (batch.starts + count).tolist()
            self._graphs[shape, count].replay([*ends, *[count] * (shape - len(ends))])
        else:
            self._graphs[shape, count].replay()
        self._map_outputs(batch, shape, count)
        params = self._table.params[batch.to_slots]
        is_scored = bool(batch.wanted & SCORE)  # scoring needs the logits afterwards
        is_best = not is_scored and bool((params["greedy"] & ~params["penalised"]).all())
        is_plain = is_best and is_sampled_plainly(batch, self._table)
        self._is_sampled = is_plain and bool(self._size) and self._stages.size == 1

    def _copy_inputs(self, batch: Batch, shape: int, count: int) -> None:
        """Copy the inputs of the graph to the device."""
        rows, step = len(batch.slots), self._step
        moves = self._table.moves(batch.rows)
        if count > 1 or batch.whole_step is not None:
            parts = np.zeros((3, self._cp_size * shape), np.int64)
            if batch.whole_step is None:
                parts[:, :rows] = batch.slots, batch.starts, batch.counts
            else:
                at = self._places_of_cp_shares(shape)
                parts[:2, at] = batch.whole_step.slots, batch.whole_step.positions
            packed = self._platform.pinned(parts.shape, torch.int64)
            packed.copy_(torch.from_numpy(parts))
            there = packed.to(self._slots.device, non_blocking=True)
            size = there.shape[1]
            self._slots[:size], self._row_spans[:, :size] = there[0], there[1:]
        else:
            if moves:
                moved = copy_to(np.array(moves, np.int64), self._slots.device)
                self._table.lengths[moved[:, 0]] = moved[:, 1]
            packed = self._platform.pinned((shape,), torch.int64)
            packed[:rows], packed[rows:] = torch.from_numpy(batch.slots), 0
            self._slots[:shape].copy_(packed, non_blocking=True)
        step.carry(batch, shape)

    def _places_of_cp_shares(self, shape: int) -> np.ndarray:
        """Index of each token of a context parallel step among the graph's tokens; [tokens]."""
        assert self._cp is not None
        counts = self._cp.tokens.counts
        return np.concatenate([at * shape + np.arange(n) for at, n in enumerate(counts)])

    def _map_outputs(self, batch: Batch, shape: int, count: int) -> None:
        """Map tokens and outputs of the batch to the places in its graph."""
        tokens = int(batch.offsets[-1])
        self._size, self._places, self._outputs = len(batch.last), None, None
        if batch.whole_step is not None:
            self._places = self._places_of_cp_shares(shape)
        elif tokens < len(batch.slots) * count:
            first = np.arange(len(batch.slots)) * count - batch.offsets[:-1]
            self._places = np.repeat(first, batch.counts) + np.arange(tokens)
        if self._places is not None:
            self._outputs = self._places[batch.last]
        elif self._size < tokens:  # rows that failed are padding
            self._outputs = batch.last

    def multi_step(
        self, batch: Batch, steps: int, step_id: int, report_every: int, wake_fd: int
    ) -> None:
        return None

    def _shape_of(self, batch: Batch) -> tuple[int, int]:
        """(rows, tokens per row) of the graph for a batch; 0 rows = none. Equal on all ranks."""
        if self._dp is not None:
            counts, outputs = self._dp.tokens.counts, self._dp.outputs.counts
            return self._shape_for(counts) if counts == outputs else 0, 1
        if batch.branches:
            return 0, 1
        takes = takes_features(batch, self._table)
        if self._cp is not None:
            is_decode = len(batch.last) == batch.written == len(batch.rows) and not takes
            return self._shape_for(self._cp.tokens.counts) if is_decode else 0, 1
        rows, tokens = len(batch.rows), int(batch.offsets[-1])
        if len(batch.last) != tokens or not rows or takes:
            return 0, 1
        if tokens == rows:
            return self._shape_for([rows]), 1
        count = self._verified
        shape = next((shape for shape in self._wide if shape >= rows), 0)
        is_odd = self._is_unpadded and (shape, shape * count) != (rows, tokens)
        # A state would take in the tokens after a row's own.
        is_odd |= self._step.rollback_checkpoints is not None and tokens != rows * count
        is_long = count > 1 and int(batch.starts.max()) + count > self._table.max_length
        return (0 if is_odd or is_long else shape), count

    def _shape_for(self, counts: list[int]) -> int:
        """Rows of the graph for ranks that bring `counts` rows each; 0 = no graph fits."""
        shape = next((shape for shape in self._shapes if shape >= max(counts)), 0)
        is_odd = self._is_unpadded and any(count != shape for count in counts)
        return 0 if is_odd or not max(counts) else shape

    def stage_output(self, batch: Batch) -> Tensor:
        if not self._is_replayed:
            return self._eager.stage_output(batch)
        return self._hidden[: batch.offsets[-1]]

    def select(self, batch: Batch) -> None:
        shape, count = self._shape_of(batch)
        self._is_replayed, self._is_sampled = bool(shape), False
        self._eager.select(batch)
        if shape:
            self._map_outputs(batch, shape, count)

    def next_tokens(self) -> Sampled | None:
        if not self._is_replayed or not self._is_sampled:
            return None
        return Sampled(self._own_outputs(self._tokens), self._own_outputs(self._best))

    def next_logits(self, batch: Batch) -> Tensor:
        if not self._is_replayed:
            return self._eager.next_logits(batch)
        return (
            self._own_outputs(self._logits) if self._stages.size == 1 else self.logits(batch.last)
        )

    def _own_outputs(self, found: Tensor) -> Tensor:
        """The rows of the step's outputs; found: one row for each output of the graph."""
        if self._outputs is None:
            return found[: self._size]
        return found[copy_to(self._outputs, found.device)]

    def logits(self, tokens: np.ndarray) -> Tensor:
        if not self._is_replayed:
            return self._eager.logits(tokens)
        return self._model.logits(self.hidden(tokens))

    def hidden(self, tokens: np.ndarray) -> Tensor:
        if not self._is_replayed:
            return self._eager.hidden(tokens)
        if self._places is not None:
            tokens = self._places[tokens]
        found = self._hidden[copy_to(tokens, self._hidden.device)]
        return self._stages.broadcast(found, self._stages.size - 1)  # only the last stage is right

    def aux_hidden(self, tokens: np.ndarray) -> Tensor:
        assert not self._is_replayed, "graphs keep no auxiliary hidden states"
        return self._eager.aux_hidden(tokens)

    def targets(self, batch: Batch) -> tuple[Tensor, Tensor]:
        if not self._is_replayed or self._stages.size > 1:
            return self._eager.targets(batch)
        return self._own_outputs(self._to_slots), self._own_outputs(self._to_positions)

    def op_times(self) -> list[OpTime]:
        return self._eager.op_times()
