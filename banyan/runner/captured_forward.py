"""CapturedForward: decode steps as graphs of a few numbers of rows, the smallest that fits padded.

A graph reads slot numbers and nothing else that changes: positions, tokens and page tables are
gathered from the slot table inside it, and its best tokens and new lengths are entered there. So
one small copy and one launch are a step. Padding is slot 0, whose pages are page 0.

Where drafts are verified there are graphs of rows of that many tokens too. A row with fewer drafts
runs positions behind its own, whose numbers nobody reads, and which later rows write again.

Ranks that work on one step together take the same graph, so that they exchange the same numbers of
rows: replicas the smallest that fits each of them, by the counts that they have agreed on, and
shares of a divided step the smallest that fits the largest share. In a line of stages a graph is
the layers of one stage: what comes in and goes out is handed on outside of it, and logits are made
behind the last one.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from banyan.base.log import logger
from banyan.layers.step_inputs import StepInputs
from banyan.messages.plan import SCORE
from banyan.models.base import Model
from banyan.ops.api import OpTime
from banyan.ops.host import sent
from banyan.parallel.groups import ALONE, Groups
from banyan.platform.base import Graph, Platform
from banyan.runner.attention.base import AttentionBackend, GroupView, StepGeometry
from banyan.runner.batch import Batch
from banyan.runner.forward import EagerForward, is_sampled_plainly
from banyan.runner.inputs import BoundStates, StepTensors, has_embedded
from banyan.runner.kvstore import KVStore
from banyan.runner.sampling.sampler import Sampled
from banyan.runner.slots import SlotTable

log = logger(__name__)


class CapturedForward:
    """Replays steps in which every row runs one token and samples; others go to `eager`.

    Args:
        step: inputs with room for the largest shape.
        shapes: rows of the graphs, rising; of a divided step, those of each share.
        is_unpadded: a step of another number of rows goes to `eager`, none is filled up.
        verified: tokens of a row with all its drafts, 0 = rows have none.
        groups: the ranks that work on steps together.
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
        groups: Groups = ALONE,
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
        # What an indexer chooses for is told its lengths on the device.
        is_sparse = model.model_config.latent is not None and bool(
            model.model_config.latent.index_heads
        )
        self._on_host = platform.traits.lengths_on_host and not is_sparse
        self._joint, self._divided, self._stages = groups.joint, groups.divided, groups.stages
        divided = groups.divided
        self._shares, self._share = (1, 0) if divided is None else (divided.replicas, divided.share)
        is_alone = (groups.joint or divided) is None and self._stages.size == 1
        self._verified = verified if is_alone else 0
        most = min(step.max_tokens, step.max_outputs)
        self._wide = tuple(
            rows for rows in shapes if self._verified > 1 and rows * verified <= most
        )
        """Rows of the graphs that verify drafts."""
        room = self._shares * shapes[-1]
        self._most = max([room, *(rows * verified for rows in self._wide)])
        where = step.tokens.device
        self._hidden = self._logits = torch.empty(0)
        self._best = torch.zeros(self._most, device=where)
        self._tokens, self._to_slots, self._to_positions = (
            torch.zeros(self._most, dtype=torch.int64, device=where) for _ in range(3)
        )
        self._slots = step.slots
        """Of the rows of all shares."""
        if divided is not None:
            self._slots = torch.zeros(room, dtype=torch.int64, device=where)
        self._contexts = step.context_lengths
        if platform.traits.lengths_on_host:  # where the step has them
            self._contexts = torch.zeros(shapes[-1], dtype=torch.int32, device=where)
        self._brought = torch.zeros(2, room, dtype=torch.int64, device=where)
        """Where rows start and how many tokens they run, of a step that verifies drafts or is
        divided."""
        self._is_replayed = False
        """A graph has run the step, else it was eager."""
        self._size = 0
        """Its outputs."""
        self._places: np.ndarray | None = None
        """Where its tokens are among those of the graph; None = in the same places."""
        self._outputs: np.ndarray | None = None
        """The same of its outputs."""
        self._is_sampled = False
        # The largest first: the others fit into the memory that it took.
        self._graphs: dict[tuple[int, int], Graph] = {}
        """By rows and tokens of a row."""
        with torch.inference_mode():
            for rows in reversed(self._wide):
                self._graphs[rows, verified] = platform.capture(self._work(rows, verified))
            for rows in reversed(shapes):
                self._agree_on(rows)
                self._graphs[rows, 1] = platform.capture(self._work(rows))
        log.info("captured decode steps of %s rows", ", ".join(map(str, shapes)))
        if self._wide:
            told = ", ".join(map(str, self._wide))
            log.info("captured steps of %s rows that verify %d tokens each", told, verified)

    def _agree_on(self, rows: int) -> None:
        """A step comes to which all who work on it bring so many rows."""
        for joint in (self._joint, self._divided):
            if joint is not None:
                joint.tokens.enter([rows] * joint.replicas)
                joint.outputs.enter([rows] * joint.replicas)
        if self._divided is not None:
            self._divided.context.enter([rows] * self._shares)

    def _work(self, rows: int, count: int = 1) -> Callable[[], None]:
        """What a step of so many rows of `count` tokens does; of a divided one, of so many rows of
        each share, of which those of this one go through the model here."""
        table, step, size = self._table, self._step, rows * count
        whole = self._shares * size
        """Its outputs."""
        mine = slice(self._share * rows, (self._share + 1) * rows)
        slots = self._slots[mine]
        views = tuple(
            GroupView(pages[:rows], locations[:whole])
            for pages, locations in zip(step.page_tables, step.locations, strict=True)
        )
        on_host = self._on_host
        where = torch.device("cpu") if on_host else slots.device
        starts = torch.arange(0, size + 1, count, dtype=torch.int32, device=where)
        contexts = torch.zeros(rows, dtype=torch.int32) if on_host else self._contexts[:rows]
        geometry = StepGeometry(starts, contexts, views)
        inputs = StepInputs(
            *(step.tokens[:size], step.positions[:size], self._attention.bind(geometry)),
            BoundStates(self._store, geometry),
            previous_states=None if step.previous_states is None else step.previous_states[:size],
        )
        firsts, counts = self._brought[:, : self._shares * rows]
        steps = torch.arange(count, device=slots.device)

        def work() -> None:
            slot_of = self._slots[:whole]
            if self._shares > 1:
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
                self._contexts[:rows] = firsts_now[mine] if self._shares > 1 else firsts_now
            table.lengths[:1].zero_()  # padding stays at its beginning
            hidden = self._model.forward(inputs)
            if not len(self._hidden):
                self._hidden = hidden.new_zeros(self._most, hidden.shape[1])
            self._hidden[:whole] = hidden
            if self._stages.size == 1:
                self._choose(hidden, slot_of, positions + 1)

        return work

    def _choose(self, hidden: Tensor, slot_of: Tensor, ends: Tensor) -> None:
        """Enter the best token behind each; all of as many tokens."""
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
        if shape and self._joint is not None and has_embedded(batch, self._table):
            # The others take their graphs: this replica brings as many rows as they count on.
            self._is_replayed = False
            self._agree_on(shape)
            batch = batch.filled_up(shape)
        if not self._is_replayed:
            self._eager.run(batch)
            return
        self._bring(batch, shape, count)
        if self._on_host:
            ends = (batch.starts + count).tolist()
            self._graphs[shape, count].replay([*ends, *[count] * (shape - len(ends))])
        else:
            self._graphs[shape, count].replay()
        self._find(batch, shape, count)
        params = self._table.params[batch.to_slots]
        is_scored = bool(
            batch.wanted & SCORE
        )  # the scores are of the logits, which are then asked for
        is_best = not is_scored and bool((params["greedy"] & ~params["penalised"]).all())
        is_plain = is_best and is_sampled_plainly(batch, self._table)
        self._is_sampled = is_plain and bool(self._size) and self._stages.size == 1

    def _bring(self, batch: Batch, shape: int, count: int) -> None:
        """Enter what its graph reads."""
        rows, step = len(batch.slots), self._step
        moves = self._table.moves(batch.rows)
        if count > 1 or batch.whole_step is not None:
            parts = np.zeros((3, self._shares * shape), np.int64)
            if batch.whole_step is None:
                parts[:, :rows] = batch.slots, batch.starts, batch.counts
            else:
                at = self._places_of_shares(shape)
                parts[:2, at] = batch.whole_step.slots, batch.whole_step.positions
            packed = self._platform.pinned(parts.shape, torch.int64)
            packed.copy_(torch.from_numpy(parts))
            there = packed.to(self._slots.device, non_blocking=True)
            size = there.shape[1]
            self._slots[:size], self._brought[:, :size] = there[0], there[1:]
        else:
            if moves:
                moved = sent(np.array(moves, np.int64), self._slots.device)
                self._table.lengths[moved[:, 0]] = moved[:, 1]
            packed = self._platform.pinned((shape,), torch.int64)
            packed[:rows], packed[rows:] = torch.from_numpy(batch.slots), 0
            self._slots[:shape].copy_(packed, non_blocking=True)
        step.carry(batch)

    def _places_of_shares(self, shape: int) -> np.ndarray:
        """Where the tokens of a divided step are among those of its graph; [tokens]."""
        assert self._divided is not None
        counts = self._divided.tokens.counts
        return np.concatenate([at * shape + np.arange(n) for at, n in enumerate(counts)])

    def _find(self, batch: Batch, shape: int, count: int) -> None:
        """Where tokens and outputs of the batch lie among those of its graph."""
        tokens = int(batch.offsets[-1])
        self._size, self._places, self._outputs = len(batch.last), None, None
        if batch.whole_step is not None:
            self._places = self._places_of_shares(shape)
        elif tokens < len(batch.slots) * count:
            first = np.arange(len(batch.slots)) * count - batch.offsets[:-1]
            self._places = np.repeat(first, batch.counts) + np.arange(tokens)
        if self._places is not None:
            self._outputs = self._places[batch.last]
        elif self._size < tokens:  # rows that failed are padding
            self._outputs = batch.last

    def multi_step(self, batch: Batch, steps: int, number: int, tell: int, bell: int) -> None:
        return None

    def told(self, number: int) -> None:
        return None

    def interrupt(self, number: int) -> None:
        """There is nothing to end."""

    def _shape_of(self, batch: Batch) -> tuple[int, int]:
        """Rows and tokens of a row of the graph that runs a batch; rows are 0 where none does. The
        same on all ranks."""
        if self._joint is not None:
            counts, outputs = self._joint.tokens.counts, self._joint.outputs.counts
            return self._shape_for(counts) if counts == outputs else 0, 1
        is_embedded = has_embedded(batch, self._table)
        if self._divided is not None:
            is_decode = len(batch.last) == batch.written == len(batch.rows) and not is_embedded
            return self._shape_for(self._divided.tokens.counts) if is_decode else 0, 1
        rows, tokens = len(batch.rows), int(batch.offsets[-1])
        if len(batch.last) != tokens or not rows or is_embedded:
            return 0, 1
        if tokens == rows:
            return self._shape_for([rows]), 1
        count = self._verified
        shape = next((shape for shape in self._wide if shape >= rows), 0)
        is_odd = self._is_unpadded and (shape, shape * count) != (rows, tokens)
        is_long = count > 1 and int(batch.starts.max()) + count > self._table.max_length
        return (0 if is_odd or is_long else shape), count

    def _shape_for(self, counts: list[int]) -> int:
        """Rows of the graph for those who bring so many each; 0 = there is none."""
        shape = next((shape for shape in self._shapes if shape >= max(counts)), 0)
        is_odd = self._is_unpadded and any(count != shape for count in counts)
        return 0 if is_odd or not max(counts) else shape

    def left(self, batch: Batch) -> Tensor:
        if not self._is_replayed:
            return self._eager.left(batch)
        return self._hidden[: batch.offsets[-1]]

    def turn_to(self, batch: Batch) -> None:
        shape, count = self._shape_of(batch)
        self._is_replayed, self._is_sampled = bool(shape), False
        self._eager.turn_to(batch)
        if shape:
            self._find(batch, shape, count)

    def next_tokens(self) -> Sampled | None:
        if not self._is_replayed or not self._is_sampled:
            return None
        return Sampled(self._mine(self._tokens), self._mine(self._best))

    def next_logits(self, batch: Batch) -> Tensor:
        if not self._is_replayed:
            return self._eager.next_logits(batch)
        return self._mine(self._logits) if self._stages.size == 1 else self.logits(batch.last)

    def _mine(self, found: Tensor) -> Tensor:
        """Of the step's own outputs; found: of those of the graph."""
        if self._outputs is None:
            return found[: self._size]
        return found[sent(self._outputs, found.device)]

    def logits(self, tokens: np.ndarray) -> Tensor:
        if not self._is_replayed:
            return self._eager.logits(tokens)
        return self._model.logits(self.hidden(tokens))

    def hidden(self, tokens: np.ndarray) -> Tensor:
        if not self._is_replayed:
            return self._eager.hidden(tokens)
        if self._places is not None:
            tokens = self._places[tokens]
        found = self._hidden[sent(tokens, self._hidden.device)]
        return self._stages.broadcast(found, self._stages.size - 1)  # else of other tokens

    def tapped(self, tokens: np.ndarray) -> Tensor:
        assert not self._is_replayed, "graphs have no taps"
        return self._eager.tapped(tokens)

    def targets(self, batch: Batch) -> tuple[Tensor, Tensor]:
        if not self._is_replayed or self._stages.size > 1:
            return self._eager.targets(batch)
        return self._mine(self._to_slots), self._mine(self._to_positions)

    def op_times(self) -> list[OpTime]:
        return self._eager.op_times()
