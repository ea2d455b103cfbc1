"""PipelineStage: one rank's part of a pipeline through which several plans pass at once.

All ranks take turns together. In a turn, each stage runs another plan: the first stage the plan
that comes in, every other stage the plan that the stage before ran in the last turn. Then all ranks
sample together for the plan that has passed the last stage. A turn without a new plan moves the
others on.

A stage enters a plan into its tables when it runs it, so every rank enters plans in their order. A
slot is left only when none of its steps is in the pipeline (scheduler/request_table.py).
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from banyan.base.errors import DeviceError
from banyan.messages.plan import CopyResult, StepPlan
from banyan.parallel.groups import Group
from banyan.runner.batch import Batch
from banyan.runner.control_ops import ControlOpExecutor, StepInFlight
from banyan.runner.runner import MaskOf, ModelRunner
from banyan.runner.step_outputs import BegunStep, LaunchedStep, finish_after


@dataclass
class _InFlight:
    """A plan in the pipeline."""

    plan: StepPlan
    mask_of: MaskOf | None
    begun: BegunStep | None = None
    output: Tensor | None = None
    """Input of the next stage."""
    copies: CopyResult | None = None
    seconds: float = 0.0


class PipelineStage:
    """
    Args:
        runner: of the layers of this stage.
        executor: runs control ops on the same runner.
        stages: the ranks that hold the other stages' layers.
        world: all ranks of all stages.
        like: an empty tensor with the dtype and device of the stages' outputs.
        width: numbers per token of the stages' outputs.

    Attributes:
        turns: turns taken since the start.
        ran: turns in which this stage ran a plan with rows.
    """

    def __init__(
        self,
        runner: ModelRunner,
        executor: ControlOpExecutor,
        stages: Group,
        world: Group,
        like: Tensor,
        width: int,
    ) -> None:
        self._runner = runner
        self._executor = executor
        self._stages = stages
        self._world = world
        self._like = like
        self._width = width
        self._pipeline: deque[_InFlight | None] = deque([None] * stages.size, stages.size)
        """The plan of each stage in this turn."""
        self.turns = 0
        self.ran = 0

    @torch.inference_mode()
    def turn(self, plan: StepPlan | None, mask_of: MaskOf | None = None) -> StepInFlight | None:
        """Take a turn; `plan` comes in. A plan with control ops comes alone and runs at once.

        returns: the plan that has passed all stages, if any.

        Raises:
            DeviceError: a plan cannot run here; the ranks are no longer in step.
        """
        self.turns += 1
        if plan is not None and plan.control_ops:
            assert not any(self._pipeline), "control ops came while plans were in the pipeline"
            return self._executor.launch(plan, mask_of)
        self._pipeline.appendleft(None if plan is None else _InFlight(plan, mask_of))
        self._send_output()
        here = self._pipeline[self._stages.rank]
        if here is not None:
            self._begin(here)
        last = self._pipeline[-1]
        if last is None:
            return None
        self._pipeline[-1] = None
        return self._end(last)

    def _send_output(self) -> None:
        """Send the output of the last turn to the next stage."""
        stage = self._stages.rank
        sending = self._pipeline[stage + 1] if stage + 1 < self._stages.size else None
        if sending is not None and sending.output is not None:
            with self._runner.platform.stream():
                self._stages.send(sending.output, stage + 1)
            sending.output = None

    def _receive(self, batch: Batch) -> Tensor:
        """The previous stage's output for a batch."""
        x = self._like.new_empty((int(batch.offsets[-1]), self._width))
        return self._stages.recv(x, self._stages.rank - 1)

    def _begin(self, here: _InFlight) -> None:
        runner, stage, plan = self._runner, self._stages.rank, here.plan
        began = time.perf_counter()
        here.copies = runner.begin_copies(plan.copies)
        try:
            with runner.platform.stream():
                here.begun = runner.begin(plan, self._receive if stage else None)
                runner.store.copy(plan.copies, "after")
        except Exception as error:
            text = f"step {plan.step} in stage {stage}: {type(error).__name__}: {error}"
            raise DeviceError(text, hint="the replica ends; start it again") from error
        if runner.on_ran is not None and plan.rows:
            runner.on_ran()
        if here.begun.has_run:
            self.ran += 1
            if stage + 1 < self._stages.size:
                here.output = runner.forward.stage_output(here.begun.batch)
        here.seconds = time.perf_counter() - began

    def _end(self, last: _InFlight) -> StepInFlight:
        runner, began = self._runner, time.perf_counter()
        assert last.begun is not None and last.copies is not None
        with runner.platform.stream():
            if last.begun.has_run:
                runner.forward.select(last.begun.batch)
            finish = runner.end(last.begun, last.mask_of)
            # When a step has ended, its pages may be read on any rank, so all ranks must have run
            # it. Logits synchronise them; a step without outputs needs a barrier.
            if not len(last.begun.batch.last):
                finish = finish_after(runner.platform.fetch([self._barrier()]), finish)
        seconds = last.seconds + time.perf_counter() - began
        return LaunchedStep(last.plan, last.copies, finish, seconds)

    def _barrier(self) -> Tensor:
        """A tensor that is ready once all ranks have run their work up to here."""
        return self._world.all_gather(self._like.new_zeros((1, 1)), self._world.size)


def serve_stage(stage: PipelineStage, receive: Callable[[], list[StepPlan] | None]) -> None:
    """Main loop of a pipeline rank other than 0: take turns until `receive` returns None.

    Args:
        receive: returns a list with the plan that comes in this turn, or an empty list.

    Raises:
        DeviceError: a step failed here. The ranks may no longer be in step, so this one ends.
    """
    while (coming := receive()) is not None:
        plan = coming[0] if coming else None
        pending = stage.turn(plan)
        if pending is not None and (error := pending.result().error):
            raise DeviceError(
                f"a step failed on this rank: {error}", hint="the replica ends; start it again"
            )
