"""A step's rows through the model: hidden states of its tokens, then logits where they are wanted.

`EagerForward` calls the model. `RecordedForward` has recorded it once, with inputs that stay in
place, and replays it for any batch without Python in between; `CapturedForward` (captured.py) does
that for a few numbers of rows. All give the same numbers.
"""

from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from banyan.base.errors import ConfigError
from banyan.dp_attention.batch import DPAttentionBatch
from banyan.layers.step_inputs import AuxHiddenStates
from banyan.messages.plan import HIDDEN, SCORE
from banyan.models.base import Model
from banyan.ops.api import Ops, OpTime, Recorder
from banyan.ops.host import sent
from banyan.ops.sampling import SampleRows
from banyan.parallel.groups import Group
from banyan.runner.attention.base import AttentionBackend
from banyan.runner.batch import Batch
from banyan.runner.inputs import StepTensors, has_embedded
from banyan.runner.multi_step import MultiStep, MultiStepRunner
from banyan.runner.sampling.sampler import Sampled
from banyan.runner.slots import SlotTable

_NOWHERE = 0
"""The slot of tokens that nobody wants: padding."""


class Forward(Protocol):
    """One step at a time: `run`, then tokens, logits and hidden states as often as needed.

    Attributes:
        how: "eager", "recorded" or "captured".
        is_recorded: steps are replayed by kernels that time their ops.
        results_are_final: what a step gives is not written again when the next one runs.
        watch: told what the stages of each recorded step took; None = they are not timed.
    """

    how: str
    is_recorded: bool
    results_are_final: bool
    watch: Callable[[list[OpTime]], None] | None

    def run(self, batch: Batch) -> None:
        """Compute the hidden states of a batch."""
        ...

    def multi_step(
        self, batch: Batch, steps: int, number: int, tell: int, bell: int
    ) -> MultiStep | None:
        """Run up to `steps` decode steps of a batch, one after another, and be as behind `run` with
        the last of them; None (and nothing done) where this is not done. number: of the plan.
        tell, bell: as in MultiStepInputs."""
        ...

    def told(self, number: int) -> dict[int, bytes] | None:
        """Tokens that a plan's steps have sampled so far; as `MultiStepRunner.told`."""
        ...

    def interrupt(self, number: int) -> None:
        """End the steps of plans up to this number after the current one; from any thread."""
        ...

    def left(self, batch: Batch) -> Tensor:
        """What the next stage goes on with, of the batch that ran last; [tokens, hidden]."""
        ...

    def turn_to(self, batch: Batch) -> None:
        """From here on everything below is of this batch, which another one may have followed into
        a line of stages. Only there; every rank does it."""
        ...

    def next_tokens(self) -> Sampled | None:
        """What the step has sampled itself, good until the next call; None if it has not."""
        ...

    def next_logits(self, batch: Batch) -> Tensor:
        """Logits behind the last tokens of the rows that sample, of the batch that ran.

        returns: [rows, vocab] fp32, good until the next call.
        """
        ...

    def logits(self, tokens: np.ndarray) -> Tensor:
        """Logits of some of the step's tokens.

        tokens: [n], indices along the step's tokens.
        returns: [n, vocab] fp32, good until the next call.
        """
        ...

    def hidden(self, tokens: np.ndarray) -> Tensor:
        """Hidden states of some of the step's tokens, given as for `logits`; [n, hidden]."""
        ...

    def tapped(self, tokens: np.ndarray) -> Tensor:
        """What came to the layers that are tapped (`RunnerConfig.taps`) of some of the tokens,
        given as for `logits`; [n, layers · hidden]."""
        ...

    def targets(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Slots and positions that the tokens of the batch that ran go to, both [outputs]."""
        ...

    def op_times(self) -> list[OpTime]:
        """What the stages of the last step took; ConfigError where steps are not recorded."""
        ...


class EagerForward:
    """Calls the model anew at every step; serves every device and every model.

    Args:
        step: its inputs, where they are large enough for a batch.
        joint: of the replicas that work on one batch; None for one by itself.
        stages: the last of them has the hidden states that all make logits of.
        narrows: where a step's outputs are all that anybody reads, the model goes on with their
            tokens alone behind its last attention.
    """

    how = "eager"
    is_recorded = False
    results_are_final = True

    def __init__(
        self,
        model: Model,
        step: StepTensors,
        attention: AttentionBackend,
        larger: Callable[[Batch], StepTensors],
        device: torch.device,
        joint: DPAttentionBatch | None = None,
        stages: Group | None = None,
        prunes_to_outputs: bool = False,
    ) -> None:
        self.watch: Callable[[list[OpTime]], None] | None = None
        self._stages = stages or Group()
        self._narrows = prunes_to_outputs
        self._kept: np.ndarray | None = None
        """The tokens whose hidden states the last stage has, rising; None = all."""
        self._model = model
        self._step = step
        self._larger = larger
        self._attention = attention
        self._device = device
        self._joint = joint
        self._hidden = torch.empty(0)
        self._taps: AuxHiddenStates | None = None

    def run(self, batch: Batch) -> None:
        if not self._step.holds(batch):
            self._step = self._larger(batch)
        self._step.fill(batch)
        prunes_to_outputs = self._narrows and not batch.wanted & (HIDDEN | SCORE)
        self._kept = batch.last if prunes_to_outputs else None
        inputs = self._step.part(batch, self._attention, prunes_to_outputs)
        self._hidden, self._taps = self._model.forward(inputs), inputs.aux_hidden_states

    def multi_step(self, batch: Batch, steps: int, number: int, tell: int, bell: int) -> None:
        return None

    def told(self, number: int) -> None:
        return None

    def interrupt(self, number: int) -> None:
        """There is nothing to end."""

    def turn_to(self, batch: Batch) -> None:
        self._step.choose_of(batch)

    def left(self, batch: Batch) -> Tensor:
        return self._hidden

    def next_tokens(self) -> None:
        return None

    def next_logits(self, batch: Batch) -> Tensor:
        return self.logits(batch.last)

    def logits(self, tokens: np.ndarray) -> Tensor:
        count = len(tokens)
        self._step.choose(tokens)
        return self._model.logits(self.hidden(as_agreed(tokens, self._joint)))[:count]

    def hidden(self, tokens: np.ndarray) -> Tensor:
        stages = self._stages
        if stages.rank < stages.size - 1:
            found = self._hidden.new_empty((len(tokens), self._hidden.shape[-1]))
        else:
            found = self._hidden[sent(_places(tokens, self._kept), self._device)]  # [n, hidden]
        return stages.broadcast(found, stages.size - 1)

    def tapped(self, tokens: np.ndarray) -> Tensor:
        assert self._taps is not None, "no layer is tapped"
        return self._taps.of(sent(tokens, self._device))

    def targets(self, batch: Batch) -> tuple[Tensor, Tensor]:
        return self._step.targets(len(batch.last))

    def op_times(self) -> list[OpTime]:
        raise ConfigError("the steps of this model are not recorded: no op can be timed alone")


class RecordedForward:
    """Replays the model on the host.

    Batches of more than `max_tokens` tokens or `max_rows` rows go to `eager`, and so do those with
    prompts of embeddings: what was recorded reads token ids. Where it narrows, what is behind the
    last attention runs on outputs alone, and does so again for other tokens whose logits are
    wanted; steps of which more hidden states are wanted go to `eager` too.

    Args:
        step: inputs of the largest step that is recorded, also of most logits computed at once.
        joint, stages, narrows: as for EagerForward.

    Raises:
        NotRecordable: the model does something that is not a compiled op.
    """

    how = "recorded"
    is_recorded = True
    results_are_final = False

    def __init__(
        self,
        eager: EagerForward,
        model: Model,
        ops: Ops,
        recorder: Recorder,
        table: SlotTable,
        attention: AttentionBackend,
        step: StepTensors,
        joint: DPAttentionBatch | None = None,
        stages: Group | None = None,
        prunes_to_outputs: bool = False,
    ) -> None:
        self.watch: Callable[[list[OpTime]], None] | None = None
        self._narrows = prunes_to_outputs
        self._kept: np.ndarray | None = None
        """As in EagerForward."""
        self._joint = joint
        self._stages = stages or Group()
        self._eager = eager
        self._is_eager = False
        self._last = (0, 0, 0)
        """Tokens, rows and outputs of the last step."""
        self._table = table
        self._inputs = step
        self._max_outputs = step.max_outputs
        self._chosen = step.chosen.numpy()
        self._entered = np.zeros(step.max_outputs, np.int64)
        """Where the program's own sampler enters tokens."""
        narrows_here = prunes_to_outputs and self._stages.rank == self._stages.size - 1
        inputs = step.whole(attention, narrows_here)
        self._taps = inputs.aux_hidden_states
        positions = step.to_positions.numpy()
        sampling = SampleRows.of(table.params, positions, self._entered, table.tokens)
        self._has_logits = model.model_config.pooling is None
        self._num_ready = 0
        """Rows of the result that hold the logits of the last step."""
        self._is_ready = False
        """The last step has made logits, of this replica or of others."""
        self._is_sampled = False
        # What outlives its use in the recording is kept, so that its memory is not used again.
        self._narrowing = inputs.output_tokens
        self._hidden = self._sampled = self._best = torch.empty(0)
        self._sampled_of: dict[int, Sampled] = {}
        """What the program has sampled, by the number of rows; its memory stays the same."""

        def whole() -> Tensor:
            self._hidden = model.forward(inputs)
            if not self._has_logits:
                return self._hidden
            chosen = self._hidden
            if not narrows_here:
                chosen = ops.select_rows(chosen, step.chosen)  # of the last stage they are right
            logits = model.logits(self._of_last_stage(chosen))
            self._sampled, self._best = ops.sample(logits, sampling)
            return logits

        replicas = 1 if joint is None else joint.replicas
        self._step = recorder.record(whole, step.max_tokens, step.max_outputs, replicas)
        self._multi_step_runner = None
        if self._has_logits and joint is None:
            self._multi_step_runner = MultiStepRunner(
                self._step, step, table, self._sampled, self._best
            )

    def run(self, batch: Batch) -> None:
        num_rows, num_tokens = len(batch.slots), int(batch.offsets[-1])
        self._is_eager = self._goes_eager(batch)
        if self._is_eager:
            self._eager.run(batch)
            return
        self._inputs.fill(batch)
        self._last = (num_tokens, num_rows, len(batch.last))
        self._kept = batch.last if self._narrows else None
        if self._stages.size > 1:  # logits come when it has been through all of them
            self._run(num_tokens, num_rows, 0, 0, 0)
            return
        # Logits of a prompt come first in the same memory, if there are any.
        all_tokens, all_outputs = _shared_sizes(self._joint)
        is_scored = bool(batch.wanted & SCORE)
        is_late = not all_outputs if self._shares_head else is_scored
        count = self._num_ready = 0 if is_late else len(batch.last)
        self._is_ready = bool(count or all_outputs)
        self._enter_outputs(batch, count, is_scored)
        self._run(num_tokens, num_rows, count, all_tokens, all_outputs)

    def turn_to(self, batch: Batch) -> None:
        self._is_eager = self._goes_eager(batch)
        if self._is_eager:
            self._eager.turn_to(batch)
            return
        self._inputs.choose_of(batch)
        self._kept = batch.last if self._narrows else None
        is_scored = bool(batch.wanted & SCORE) or not self._has_logits
        count = self._num_ready = 0 if is_scored else len(batch.last)
        self._is_ready = bool(count)
        self._enter_outputs(batch, count, is_scored)
        if count:
            self._run(0, 0, count, 0, 0)

    def left(self, batch: Batch) -> Tensor:
        return self._eager.left(batch) if self._is_eager else self._hidden[: batch.offsets[-1]]

    def _of_last_stage(self, x: Tensor) -> Tensor:
        return self._stages.broadcast(x, self._stages.size - 1)

    def _goes_eager(self, batch: Batch) -> bool:
        if not self._inputs.holds(batch) or self._is_too_joint():
            return True
        if self._narrows and batch.wanted & HIDDEN:
            is_output = len(batch.last) == batch.offsets[-1]  # each of its tokens
            if not is_output or batch.wanted & SCORE:
                return True
        return bool(self._table.embeds) and has_embedded(batch, self._table)

    def _enter_outputs(self, batch: Batch, count: int, is_scored: bool) -> None:
        """Say whether the program itself samples, and where to."""
        is_plain = bool(count) and not is_scored
        self._is_sampled = is_plain and is_sampled_plainly(batch, self._table)
        self._entered[:count] = batch.to_slots[:count] if self._is_sampled else _NOWHERE

    def _run(self, *sizes: int) -> None:
        if self.watch is None:
            self._step.run(*sizes)
        else:
            self.watch(self._step.times(*sizes))

    def multi_step(
        self, batch: Batch, steps: int, number: int, tell: int, bell: int
    ) -> MultiStep | None:
        is_plain = not batch.wanted & SCORE and is_sampled_plainly(batch, self._table)
        if self._multi_step_runner is None or self.watch is not None or not is_plain:
            return None
        if not self._inputs.holds(batch) or has_embedded(batch, self._table):
            return None
        self._inputs.fill(batch)
        self._is_eager, self._is_ready, self._is_sampled = False, True, True
        count = self._num_ready = len(batch.last)
        self._entered[:count] = batch.to_slots
        ran = self._multi_step_runner.run(batch, steps, number, tell, bell)
        self._last = (count, count, count)
        self._kept = batch.last if self._narrows else None
        return MultiStep(ran, self._multi_step_runner.earlier(batch, ran))

    def told(self, number: int) -> dict[int, bytes] | None:
        return None if self._multi_step_runner is None else self._multi_step_runner.told(number)

    def interrupt(self, number: int) -> None:
        if self._multi_step_runner is not None:
            self._multi_step_runner.interrupt(number)

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
        # Of other stages than the last one these are other tokens', which the broadcast replaces.
        places = _places(tokens, self._kept)
        return self._of_last_stage(self._hidden[torch.from_numpy(places)])

    def tapped(self, tokens: np.ndarray) -> Tensor:
        if self._is_eager:
            return self._eager.tapped(tokens)
        assert self._taps is not None, "no layer is tapped"
        return self._taps.of(torch.from_numpy(tokens))

    def targets(self, batch: Batch) -> tuple[Tensor, Tensor]:
        if self._is_eager:
            return self._eager.targets(batch)
        return self._inputs.targets(len(batch.last))

    def op_times(self) -> list[OpTime]:
        """What the stages of the last step took, run once more."""
        return self._step.times(*self._last)

    def _some_logits(self, tokens: np.ndarray) -> Tensor:
        assert self._has_logits, "a model for vectors has no logits"
        wanted = len(tokens)
        tokens = as_agreed(tokens, self._joint)
        count = len(tokens)
        self._chosen[:count] = tokens
        self._inputs.choose(tokens)
        self._entered[:count] = _NOWHERE
        all_outputs = _shared_sizes(self._joint)[1]
        self._step.run(0, 0, count, 0, all_outputs)  # of the hidden states that are there
        return self._step.result[:wanted]

    @property
    def _shares_head(self) -> bool:
        return self._joint is not None and self._joint.has_outputs

    def _is_too_joint(self) -> bool:
        """Whether the tokens of all replicas are more than what was recorded has room for."""
        joint = self._joint
        return joint is not None and joint.tokens.total > joint.replicas * self._inputs.max_tokens


def _shared_sizes(joint: DPAttentionBatch | None) -> tuple[int, int]:
    """Tokens of all replicas, and outputs that they make logits for together."""
    if joint is None:
        return 0, 0
    return joint.tokens.total, joint.outputs.total if joint.has_outputs else 0


def _places(tokens: np.ndarray, kept: np.ndarray | None) -> np.ndarray:
    """Where the hidden states of some tokens are, where there are those of `kept`; None = all."""
    if kept is None:
        return tokens
    found = np.searchsorted(kept, tokens)
    assert np.array_equal(kept[found], tokens), "more tokens are asked for than outputs"
    return found


def as_agreed(tokens: np.ndarray, joint: DPAttentionBatch | None) -> np.ndarray:
    """`tokens` to make logits for, filled up with the first to as many as replicas agreed on."""
    if joint is None or not joint.has_outputs:
        return tokens
    return np.pad(tokens, (0, joint.outputs.mine - len(tokens)))


def is_sampled_plainly(batch: Batch, table: SlotTable) -> bool:
    """Do the logits and the parameters alone decide on the tokens?"""
    if table.edited or table.processed:
        return False
    if any(table.params["penalised"][slot] for slot in batch.branching_slots):
        return False  # what each of its drafts comes behind stands nowhere in one piece
    return not any(row.masked for row in batch.rows)
