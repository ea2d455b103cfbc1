"""Forward: how a step's rows go through the model.

A forward computes the hidden states of a step's tokens, then logits where they are needed.
`EagerForward` calls the model. `RecordedForward` (recorded_forward.py) records the model once and
replays it for any batch without Python. `CapturedForward` (captured_forward.py) replays graphs of a
few numbers of rows. All of them give the same numbers; choose_forward.py chooses one.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from banyan.base.errors import ConfigError
from banyan.dp_attention.batch import DPAttentionBatch
from banyan.layers.build import Build
from banyan.layers.step_inputs import AuxHiddenStates
from banyan.messages.plan import HIDDEN, SCORE
from banyan.models.base import Model
from banyan.ops.api import OpTime
from banyan.ops.host_memory import copy_to
from banyan.parallel.groups import Group
from banyan.platform.base import Platform
from banyan.runner.attention import AttentionBackend
from banyan.runner.batch import Batch
from banyan.runner.inputs import StepTensors
from banyan.runner.kvstore import KVStore
from banyan.runner.multi_step import MultiStep, MultiStepRunner
from banyan.runner.sampler import Sampled
from banyan.runner.slots import SlotTable


class Forward(Protocol):
    """One step at a time: `run`, then tokens, logits and hidden states as often as needed.

    Attributes:
        how: "eager", "recorded" or "captured".
        is_recorded: steps are replayed by kernels that time their ops.
        results_are_final: the next step does not overwrite this step's results.
        on_op_times: called with the op times of each recorded step; None = ops are not timed.
        multi_steps: runs several decode steps in one call; None = not supported.
    """

    how: str
    is_recorded: bool
    results_are_final: bool
    on_op_times: Callable[[list[OpTime]], None] | None
    multi_steps: MultiStepRunner | None

    def run(self, batch: Batch) -> None:
        """Compute the hidden states of a batch."""
        ...

    def multi_step(
        self, batch: Batch, steps: int, step_id: int, report_every: int, wake_fd: int
    ) -> MultiStep | None:
        """Run up to `steps` decode steps of a batch, one after another.

        The state afterwards is that after `run` of the last step.

        Args:
            step_id: of the plan.
            report_every, wake_fd: as in MultiStepInputs.

        Returns:
            None, with nothing done, if this batch cannot run several steps.
        """
        ...

    def stage_output(self, batch: Batch) -> Tensor:
        """The input of the next pipeline stage, for the batch that ran last; [tokens, hidden]."""
        ...

    def select(self, batch: Batch) -> None:
        """Make the methods below refer to this earlier batch. Only with pipeline parallelism, where
        other batches may have run since; every rank calls it."""
        ...

    def next_tokens(self) -> Sampled | None:
        """Tokens that the step itself has sampled, valid until the next call; None if none."""
        ...

    def next_logits(self, batch: Batch) -> Tensor:
        """Logits of every output of the batch that ran.

        returns: [outputs, vocab] fp32, valid until the next call.
        """
        ...

    def logits(self, tokens: np.ndarray) -> Tensor:
        """Logits of some of the step's tokens.

        tokens: [n], indices along the step's tokens.
        returns: [n, vocab] fp32, valid until the next call.
        """
        ...

    def hidden(self, tokens: np.ndarray) -> Tensor:
        """Hidden states of some of the step's tokens, [n, hidden]. tokens: as for `logits`."""
        ...

    def aux_hidden(self, tokens: np.ndarray) -> Tensor:
        """Auxiliary hidden states (`RunnerConfig.aux_hidden_layers`) of some of the tokens,
        [n, layers · hidden]. tokens: as for `logits`."""
        ...

    def targets(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Slots and positions that the sampled tokens are written to, both [outputs]."""
        ...

    def op_times(self) -> list[OpTime]:
        """Op times of the last step; ConfigError if steps are not recorded."""
        ...


@dataclass(frozen=True)
class ForwardContext:
    """What every forward works with.

    Attributes:
        prunes_outputs: after the last attention layer the model keeps only the tokens that produce
            output, in steps that read nothing else.
    """

    model: Model
    table: SlotTable
    store: KVStore
    attention: AttentionBackend
    platform: Platform
    build: Build
    prunes_outputs: bool = False

    @property
    def rows_of_all(self) -> DPAttentionBatch | None:
        """Row counts of the ranks that compute a step together: DP attention replicas, or context
        parallel ranks. None = this replica computes its steps alone."""
        return self.build.groups.dp_batch or self.build.groups.cp_batch

    @property
    def stages(self) -> Group:
        return self.build.groups.stages


class PromptSteps(Protocol):
    """Runs steps with prompts as graphs (prompt_graphs.py).

    Attributes:
        step: the inputs of the steps that it runs.
    """

    step: StepTensors

    def run(self, batch: Batch) -> Tensor | None:
        """Hidden states of a batch, in the first rows of the result; None = no graph fits, and
        nothing was done."""
        ...


class EagerForward:
    """Calls the model in every step; works on every device and for every model.

    Args:
        step: the inputs, if they are large enough for the batch.
        larger: makes larger inputs for a batch.
    """

    how = "eager"
    is_recorded = False
    results_are_final = True
    multi_steps: MultiStepRunner | None = None

    def __init__(
        self, context: ForwardContext, step: StepTensors, larger: Callable[[Batch], StepTensors]
    ) -> None:
        self.prompts: PromptSteps | None = None
        """Runs steps with prompts as graphs; None = they are launched op by op."""
        self.on_op_times: Callable[[list[OpTime]], None] | None = None
        self._stages = context.stages
        self._prunes = context.prunes_outputs
        self._kept: np.ndarray | None = None
        """Tokens whose hidden states the last stage has, ascending; None = all."""
        self._model = context.model
        self._step = step
        self._larger = larger
        self._attention = context.attention
        self._device = context.build.device
        self._all = context.rows_of_all
        self._hidden = torch.empty(0)
        self._aux_hidden: AuxHiddenStates | None = None

    def run(self, batch: Batch) -> None:
        prunes = self._prunes and not batch.wanted & (HIDDEN | SCORE)
        self._kept = batch.last if prunes else None
        if self.prompts is not None and (found := self.prompts.run(batch)) is not None:
            self._step, self._hidden, self._aux_hidden = self.prompts.step, found, None
            return
        if not self._step.holds(batch):
            self._step = self._larger(batch)
        self._step.fill(batch)
        inputs = self._step.part(batch, self._attention, prunes)
        self._hidden, self._aux_hidden = self._model.forward(inputs), inputs.aux_hidden_states

    def multi_step(
        self, batch: Batch, steps: int, step_id: int, report_every: int, wake_fd: int
    ) -> None:
        return None

    def select(self, batch: Batch) -> None:
        self._step.choose_of(batch)

    def stage_output(self, batch: Batch) -> Tensor:
        return self._hidden

    def next_tokens(self) -> None:
        return None

    def next_logits(self, batch: Batch) -> Tensor:
        return self.logits(batch.last)

    def logits(self, tokens: np.ndarray) -> Tensor:
        count = len(tokens)
        self._step.choose(tokens)
        return self._model.logits(self.hidden(as_agreed(tokens, self._all)))[:count]

    def hidden(self, tokens: np.ndarray) -> Tensor:
        stages = self._stages
        if stages.rank < stages.size - 1:
            found = self._hidden.new_empty((len(tokens), self._hidden.shape[-1]))
        else:
            found = self._hidden[
                copy_to(places_among(tokens, self._kept), self._device)
            ]  # [n, hidden]
        return stages.broadcast(found, stages.size - 1)

    def aux_hidden(self, tokens: np.ndarray) -> Tensor:
        assert self._aux_hidden is not None, "no layer has auxiliary hidden states"
        return self._aux_hidden.of(copy_to(tokens, self._device))

    def targets(self, batch: Batch) -> tuple[Tensor, Tensor]:
        return self._step.targets(len(batch.last))

    def op_times(self) -> list[OpTime]:
        raise ConfigError("the steps of this model are not recorded: no op can be timed alone")


def shared_sizes(rows_of_all: DPAttentionBatch) -> tuple[int, int]:
    """Tokens of all replicas, and outputs that they compute logits for together."""
    outputs = rows_of_all.outputs.total if rows_of_all.has_outputs else 0
    return rows_of_all.tokens.total, outputs


def places_among(tokens: np.ndarray, kept: np.ndarray | None) -> np.ndarray:
    """Indices of tokens among the tokens whose hidden states were kept; kept: None = all were."""
    if kept is None:
        return tokens
    found = np.searchsorted(kept, tokens)
    assert np.array_equal(kept[found], tokens), "the hidden states of these tokens were pruned"
    return found


def as_agreed(tokens: np.ndarray, rows_of_all: DPAttentionBatch | None) -> np.ndarray:
    """`tokens`, padded to the number of outputs that the replicas agreed on."""
    if rows_of_all is None or not rows_of_all.has_outputs:
        return tokens
    return np.pad(tokens, (0, rows_of_all.outputs.mine - len(tokens)))
