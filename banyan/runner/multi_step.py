"""MultiStepRunner: several decode steps of a recorded model in one call.

The inputs of a step stay in place, so little changes between two steps: tokens become the sampled
ones, positions advance by one. The cache locations of all steps are computed before the first.
"""

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from banyan.ops.api import MultiStepInputs, Recording
from banyan.runner.batch import Batch
from banyan.runner.inputs import StepTensors
from banyan.runner.slots import SlotTable

_PACE_NS = 8_000_000
"""Shortest time between two reports: 125 a second. Each report wakes the engine loop, the API
process and the client, on cores that compute the next step."""


@dataclass(frozen=True)
class MultiStep:
    """The result of the steps before the last one.

    Attributes:
        steps: how many have run, including the last one.
        earlier: [rows, steps - 1] int32, the tokens of each row before its last one.
    """

    steps: int
    earlier: np.ndarray


@dataclass(frozen=True)
class _Running:
    """A multi-step plan while it runs, as other threads see it.

    Attributes:
        step_id: of the plan.
        completed: [1] int32, steps whose tokens are final.
    """

    step_id: int
    batch: Batch
    completed: np.ndarray


class MultiStepRunner:
    """
    Args:
        step: the inputs of the recording.
        sampled, best: [outputs], the tokens it samples and their logits.
    """

    def __init__(
        self,
        recording: Recording,
        step: StepTensors,
        table: SlotTable,
        sampled: Tensor,
        best: Tensor,
    ) -> None:
        self._recording = recording
        self._step = step
        self._table = table
        self._sampled, self._best = sampled.numpy(), best.numpy()
        self._interrupt = np.full(1, -1, np.int64)
        self._running: _Running | None = None

    def interrupt(self, step_id: int) -> None:
        """End plans up to this one after their current step; from any thread."""
        self._interrupt[0] = step_id

    def tokens_so_far(self, step_id: int) -> dict[int, bytes] | None:
        """Tokens of a running plan's completed steps; from any thread.

        returns: index in the plan -> int32 ids; None if that plan is not running.
        """
        now = self._running
        if now is None or now.step_id != step_id or not now.completed[0]:
            return None
        tokens = self.earlier(now.batch, int(now.completed[0]) + 1)
        return {int(i): row.tobytes() for i, row in zip(now.batch.indices, tokens, strict=True)}

    def run(self, batch: Batch, steps: int, step_id: int, report_every: int, wake_fd: int) -> int:
        """Run up to `steps` decode steps of a batch that has been entered (`StepTensors.fill`).

        Args:
            step_id: of the plan.
            report_every, wake_fd: as in MultiStepInputs.

        Returns:
            How many steps have run.
        """
        at = self._step.locate_steps(batch, steps)
        stops = [self._table.join_of(row.slot).sampling.stop_ids for row in batch.rows]
        counts = np.cumsum([0, *map(len, stops)], dtype=np.int32)
        step = self._step
        inputs = MultiStepInputs(
            sampled=self._sampled,
            best=self._best,
            tokens=step.tokens.numpy(),
            positions=step.positions.numpy(),
            to_positions=step.to_positions.numpy(),
            lengths=step.context_lengths.numpy(),
            places=[locations.numpy() for locations in step.locations],
            at=at,
            first_stop=counts,
            stops=np.array([id for ids in stops for id in ids], np.int32),
            interrupt=self._interrupt,
            number=step_id,
            steps_done=np.zeros(1, np.int32),
            report_every=report_every,
            wake_fd=wake_fd,
            pace_ns=_PACE_NS,
        )
        self._running = _Running(step_id, batch, inputs.steps_done)
        try:
            return self._recording.multi_step(len(batch.rows), inputs)
        finally:
            self._running = None

    def earlier(self, batch: Batch, ran: int) -> np.ndarray:
        """The tokens of every row but the last one; [rows, ran - 1] int32."""
        positions = batch.to_positions[:, None] + np.arange(ran - 1)
        return self._table.tokens.numpy()[batch.slots[:, None], positions]
