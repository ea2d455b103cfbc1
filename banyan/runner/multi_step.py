"""MultiStepRunner: decode steps of a recorded model that run one after another in one call.

The inputs of a step stay where they are, so between two steps little has to change: tokens become
what was sampled, positions go on by one. Where those lie in their pages is worked out before.
"""

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from banyan.ops.api import MultiStepInputs, Recording
from banyan.runner.batch import Batch
from banyan.runner.inputs import StepTensors
from banyan.runner.slots import SlotTable

_PACE_NS = 8_000_000
"""Between two events of a stream: 125 a second. Each costs wake-ups of the loop, the front and the
reader, on cores that compute the next step."""


@dataclass(frozen=True)
class MultiStep:
    """What steps before the last one came to.

    Attributes:
        steps: how many have run, the last one included.
        earlier: [rows, steps - 1] int32, the tokens of each row before its last one.
    """

    steps: int
    earlier: np.ndarray


@dataclass(frozen=True)
class _Running:
    """A burst while it runs, as other threads see it.

    Attributes:
        number: of the plan.
        told: [1] int32, steps whose tokens stand.
    """

    number: int
    batch: Batch
    told: np.ndarray


class MultiStepRunner:
    """
    Args:
        step: the inputs of the recording.
        sampled, best: [outputs], what it samples and their logits.
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

    def interrupt(self, number: int) -> None:
        """End the steps of plans up to this number after the current one; from any thread."""
        self._interrupt[0] = number

    def told(self, number: int) -> dict[int, bytes] | None:
        """What the rows of plan `number` have sampled in steps that others have followed: index in
        the plan -> int32 ids. None when its burst does not run. From any thread."""
        now = self._running
        if now is None or now.number != number or not now.told[0]:
            return None
        tokens = self.earlier(now.batch, int(now.told[0]) + 1)
        return {int(i): row.tobytes() for i, row in zip(now.batch.indices, tokens, strict=True)}

    def run(self, batch: Batch, steps: int, number: int, tell: int, bell: int) -> int:
        """Run up to `steps` decode steps of a batch that has been entered (`StepTensors.fill`);
        returns how many have run. number: of the plan. tell, bell: as in MultiStepInputs."""
        at = self._step.foresee(batch, steps)
        stops = [self._table.join_of(row.slot).sampling.stop_ids for row in batch.rows]
        counts = np.cumsum([0, *map(len, stops)], dtype=np.int32)
        step = self._step
        inputs = MultiStepInputs(
            *(self._sampled, self._best, step.tokens.numpy(), step.positions.numpy()),
            *(step.to_positions.numpy(), step.context_lengths.numpy()),
            [locations.numpy() for locations in step.locations],
            at,
            counts,
            np.array([id for ids in stops for id in ids], np.int32),
            self._interrupt,
            number,
            np.zeros(1, np.int32),
            tell,
            bell,
            _PACE_NS,
        )
        self._running = _Running(number, batch, inputs.told)
        try:
            return self._recording.multi_step(len(batch.rows), inputs)
        finally:
            self._running = None

    def earlier(self, batch: Batch, ran: int) -> np.ndarray:
        """The tokens of every row but the last one; [rows, ran - 1] int32."""
        positions = batch.to_positions[:, None] + np.arange(ran - 1)
        return self._table.tokens.numpy()[batch.slots[:, None], positions]
