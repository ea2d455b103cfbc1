"""RecordedForward: the model recorded once on the host, and replayed without Python."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from banyan.dp_attention.batch import DPAttentionBatch
from banyan.messages.plan import HIDDEN, SCORE
from banyan.ops.api import OpTime, Recorder
from banyan.ops.sampling import SampleRows
from banyan.runner.batch import Batch, is_sampled_plainly
from banyan.runner.forward import (
    EagerForward,
    ForwardContext,
    as_agreed,
    places_among,
    shared_sizes,
)
from banyan.runner.inputs import StepTensors
from banyan.runner.multi_step import MultiStep, MultiStepRunner
from banyan.runner.sampler import Sampled

_NOWHERE = 0
"""Slot for tokens that nothing reads: padding."""


class RecordedForward:
    """Replays the model on the host.

    These steps go to `eager`: more tokens or rows than were recorded, decode steps of more rows
    than the largest of `shapes`, and with output-token pruning steps that need other hidden states.

    With output-token pruning the recording runs everything after the last attention layer on the
    outputs only. It runs that part again when logits of other tokens are needed.

    Args:
        step: inputs of the largest step that is recorded.
        shapes: rows of the decode steps to replay; () = of all.
        is_exact: only decode steps of just these rows.

    Raises:
        NotRecordable: the model does something that is not a compiled op.
    """

    how = "recorded"
    is_recorded = True
    results_are_final = False

    def __init__(
        self,
        context: ForwardContext,
        eager: EagerForward,
        step: StepTensors,
        recorder: Recorder,
        shapes: Sequence[int] = (),
        is_exact: bool = False,
    ) -> None:
        model, ops, table = context.model, context.build.ops, context.table
        self.on_op_times: Callable[[list[OpTime]], None] | None = None
        self._prunes = context.prunes_outputs
        self._kept: np.ndarray | None = None
        """As in EagerForward."""
        self._all: DPAttentionBatch | None = context.rows_of_all
        self._stages = context.stages
        self._eager = eager
        self._shapes = frozenset(shapes)
        self._is_exact = is_exact
        self._is_eager = False
        self._last = (0, 0, 0)
        """Tokens, rows and outputs of the last step."""
        self._table = table
        self._inputs = step
        self._max_outputs = step.max_outputs
        self._chosen = step.chosen.numpy()
        self._entered = np.zeros(step.max_outputs, np.int64)
        """Slots to which the recorded sampler writes tokens."""
        prunes_here = self._prunes and self._stages.rank == self._stages.size - 1
        inputs = step.whole(context.attention, prunes_here)
        self._aux_hidden = inputs.aux_hidden_states
        positions = step.to_positions.numpy()
        sampling = SampleRows.of(table.params, positions, self._entered, table.tokens)
        self._has_logits = model.model_config.pooling is None
        self._num_ready = 0
        """Rows of the result that hold logits of the last step."""
        self._is_ready = False
        """The last step has computed logits, of this replica or of others."""
        self._is_sampled = False
        # The recording uses these tensors' memory. References keep it from being used again.
        self._pruning = inputs.output_tokens
        self._hidden = self._sampled = self._best = torch.empty(0)
        self._sampled_of: dict[int, Sampled] = {}
        """Tokens of the recorded sampler by number of rows; their memory stays the same."""

        def whole() -> Tensor:
            self._hidden = model.forward(inputs)
            if not self._has_logits:
                return self._hidden
            chosen = self._hidden
            if not prunes_here:
                # Wrong rows on other stages; the broadcast from the last stage replaces them.
                chosen = ops.select_rows(chosen, step.chosen)
            logits = model.logits(self._of_last_stage(chosen))
            self._sampled, self._best = ops.sample(logits, sampling)
            return logits

        replicas = 1 if self._all is None else self._all.replicas
        self._step = recorder.record(whole, step.max_tokens, step.max_outputs, replicas)
        self.multi_steps: MultiStepRunner | None = None
        if self._has_logits and self._all is None:
            self.multi_steps = MultiStepRunner(self._step, step, table, self._sampled, self._best)

    def run(self, batch: Batch) -> None:
        num_rows, num_tokens = len(batch.slots), int(batch.offsets[-1])
        self._is_eager = self._goes_eager(batch)
        if self._is_eager:
            self._eager.run(batch)
            return
        self._inputs.fill(batch)
        self._last = (num_tokens, num_rows, len(batch.last))
        self._kept = batch.last if self._prunes else None
        if self._stages.size > 1:  # logits are computed after the last stage
            self._run(num_tokens, num_rows, 0, 0, 0)
            return
        # Scores of prompt tokens use the same memory first; then logits are computed afterwards.
        all_tokens, all_outputs = (0, 0) if self._all is None else shared_sizes(self._all)
        is_scored = bool(batch.wanted & SCORE)
        is_late = not all_outputs if self._shares_head else is_scored
        count = self._num_ready = 0 if is_late else len(batch.last)
        self._is_ready = bool(count or all_outputs)
        self._enter_outputs(batch, count, is_scored)
        self._run(num_tokens, num_rows, count, all_tokens, all_outputs)

    def select(self, batch: Batch) -> None:
        self._is_eager = self._goes_eager(batch)
        if self._is_eager:
            self._eager.select(batch)
            return
        self._inputs.choose_of(batch)
        self._kept = batch.last if self._prunes else None
        is_scored = bool(batch.wanted & SCORE) or not self._has_logits
        count = self._num_ready = 0 if is_scored else len(batch.last)
        self._is_ready = bool(count)
        self._enter_outputs(batch, count, is_scored)
        if count:
            self._run(0, 0, count, 0, 0)

    def stage_output(self, batch: Batch) -> Tensor:
        return (
            self._eager.stage_output(batch) if self._is_eager else self._hidden[: batch.offsets[-1]]
        )

    def _of_last_stage(self, x: Tensor) -> Tensor:
        return self._stages.broadcast(x, self._stages.size - 1)

    def _goes_eager(self, batch: Batch) -> bool:
        if not self._inputs.holds(batch) or self._is_too_large_together() or self._is_odd(batch):
            return True
        if self._prunes and batch.wanted & HIDDEN:
            is_output = len(batch.last) == batch.offsets[-1]  # every token is an output
            if not is_output or batch.wanted & SCORE:
                return True
        return False

    def _is_odd(self, batch: Batch) -> bool:
        """Whether it is a decode step of other sizes than those that were named."""
        tokens, rows = batch.largest  # the same on all ranks
        if not self._shapes or tokens > rows:
            return False
        return rows not in self._shapes if self._is_exact else rows > max(self._shapes)

    def _enter_outputs(self, batch: Batch, count: int, is_scored: bool) -> None:
        """Decide whether the recorded sampler samples, and enter the slots it writes to."""
        is_plain = bool(count) and not is_scored
        self._is_sampled = is_plain and is_sampled_plainly(batch, self._table)
        self._entered[:count] = batch.to_slots[:count] if self._is_sampled else _NOWHERE

    def _run(self, *sizes: int) -> None:
        if self.on_op_times is None:
            self._step.run(*sizes)
        else:
            self.on_op_times(self._step.times(*sizes))

    def multi_step(
        self, batch: Batch, steps: int, step_id: int, report_every: int, wake_fd: int
    ) -> MultiStep | None:
        is_plain = not batch.wanted & SCORE and is_sampled_plainly(batch, self._table)
        if self.multi_steps is None or self.on_op_times is not None or not is_plain:
            return None
        if not self._inputs.holds(batch) or self._is_odd(batch):
            return None
        self._inputs.fill(batch)
        self._is_eager, self._is_ready, self._is_sampled = False, True, True
        count = self._num_ready = len(batch.last)
        self._entered[:count] = batch.to_slots
        ran = self.multi_steps.run(batch, steps, step_id, report_every, wake_fd)
        self._last = (count, count, count)
        self._kept = batch.last if self._prunes else None
        return MultiStep(ran, self.multi_steps.earlier(batch, ran))

    def next_tokens(self) -> Sampled | None:
        if self._is_eager or not self._is_sampled:
            return None
        count = self._num_ready
        if count not in self._sampled_of:
            tokens, best = self._sampled[:count], self._best[:count]
            here = tokens.numpy(), best.numpy()
            self._sampled_of[count] = Sampled(tokens, best, here=here)
        return self._sampled_of[count]

    def next_logits(self, batch: Batch) -> Tensor:
        if self._is_eager or not self._is_ready:
            return self.logits(batch.last)
        return self._step.result[: self._num_ready]

    def logits(self, tokens: np.ndarray) -> Tensor:
        if self._is_eager:
            return self._eager.logits(tokens)
        most = self._max_outputs
        if len(tokens) <= most:
            return self._some_logits(tokens)
        parts = range(0, len(tokens), most)
        return torch.cat([self._some_logits(tokens[at : at + most]).clone() for at in parts])

    def hidden(self, tokens: np.ndarray) -> Tensor:
        if self._is_eager:
            return self._eager.hidden(tokens)
        # Other stages than the last select wrong tokens here; the broadcast replaces them.
        places = places_among(tokens, self._kept)
        return self._of_last_stage(self._hidden[torch.from_numpy(places)])

    def aux_hidden(self, tokens: np.ndarray) -> Tensor:
        if self._is_eager:
            return self._eager.aux_hidden(tokens)
        assert self._aux_hidden is not None, "no layer has auxiliary hidden states"
        return self._aux_hidden.of(torch.from_numpy(tokens))

    def targets(self, batch: Batch) -> tuple[Tensor, Tensor]:
        if self._is_eager:
            return self._eager.targets(batch)
        return self._inputs.targets(len(batch.last))

    def op_times(self) -> list[OpTime]:
        """Op times of the last step, which runs once more."""
        return self._step.times(*self._last)

    def _some_logits(self, tokens: np.ndarray) -> Tensor:
        assert self._has_logits, "an embedding model has no logits"
        wanted = len(tokens)
        tokens = as_agreed(tokens, self._all)
        count = len(tokens)
        self._chosen[:count] = tokens
        self._inputs.choose(tokens)
        self._entered[:count] = _NOWHERE
        all_outputs = 0 if self._all is None else shared_sizes(self._all)[1]
        # No tokens: the logits come from the hidden states of the last run.
        self._step.run(0, 0, count, 0, all_outputs)
        return self._step.result[:wanted]

    @property
    def _shares_head(self) -> bool:
        return self._all is not None and self._all.has_outputs

    def _is_too_large_together(self) -> bool:
        """Whether all replicas together have more tokens than were recorded."""
        every = self._all
        return every is not None and every.tokens.total > every.replicas * self._inputs.max_tokens
