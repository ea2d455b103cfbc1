"""PipelineStage: one rank's place in a line of stages, through which several plans go at once.

The ranks take turns together. In a turn each stage runs another plan: the first one the plan that
comes in, every other one what the stage before has run in the turn before. Then all ranks sample
together what the last stage has run. A turn may bring no plan, so that those in the line go on.

A stage enters a plan into its tables when it runs it, so every rank meets plans in their order. A
slot is left only when nothing of it is in the line (scheduler/request_table.py).
"""

import time
from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from banyan.base.errors import DeviceError
from banyan.messages.plan import CopyResult, StepPlan
from banyan.parallel.groups import Group
from banyan.runner.batch import Batch
from banyan.runner.control_ops import ControlOpExecutor, StepInFlight
from banyan.runner.pending import BegunStep, PendingStep, after
from banyan.runner.runner import MaskOf, ModelRunner


@dataclass
class _InFlight:
    """A plan on its way."""

    plan: StepPlan
    mask_of: MaskOf | None
    begun: BegunStep | None = None
    left: Tensor | None = None
    """What the next stage goes on with."""
    copies: CopyResult | None = None
    seconds: float = 0.0


class PipelineStage:
    """
    Args:
        runner: of the layers that are here.
        obeying: the same runner, which carries out orders too.
        stages: who has the layers before and behind.
        world: all ranks of all stages.
        like: an empty tensor of the number type and on the device of what stages hand on.
        width: of what they hand on, for each token.

    Attributes:
        turns: taken since the start.
        ran: in how many of them a plan with rows ran here.
    """

    def __init__(
        self,
        runner: ModelRunner,
        obeying: ControlOpExecutor,
        stages: Group,
        world: Group,
        like: Tensor,
        width: int,
    ) -> None:
        self._runner = runner
        self._obeying = obeying
        self._stages = stages
        self._world = world
        self._like = like
        self._width = width
        self._line: deque[_InFlight | None] = deque([None] * stages.size, stages.size)
        """By stage, in this turn."""
        self.turns = 0
        self.ran = 0

    @torch.inference_mode()
    def turn(self, plan: StepPlan | None, mask_of: MaskOf | None = None) -> StepInFlight | None:
        """Take a turn; `plan` comes in. Orders come alone, and are carried out at once.

        returns: the plan that has been through all stages, if there is one.

        Raises:
            DeviceError: a plan cannot be run here; the ranks are no longer in step.
        """
        self.turns += 1
        if plan is not None and plan.control_ops:
            assert not any(self._line), "orders came while plans were in the line"
            return self._obeying.launch(plan, mask_of)
        self._line.appendleft(None if plan is None else _InFlight(plan, mask_of))
        self._hand_on()
        here = self._line[self._stages.rank]
        if here is not None:
            self._begin(here)
        last = self._line[-1]
        if last is None:
            return None
        self._line[-1] = None
        return self._end(last)

    def _hand_on(self) -> None:
        """To the next stage what the last turn has made here."""
        stage = self._stages.rank
        gone = self._line[stage + 1] if stage + 1 < self._stages.size else None
        if gone is not None and gone.left is not None:
            with self._runner.platform.stream():
                self._stages.send(gone.left, stage + 1)
            gone.left = None

    def _meet(self) -> Tensor:
        """Is there once all ranks have run what ends here: whoever hears of its end may read its
        pages on any of them."""
        return self._world.all_gather(self._like.new_zeros((1, 1)), self._world.size)

    def _carry(self, batch: Batch) -> Tensor:
        """What the stage before has made of a batch."""
        x = self._like.new_empty((int(batch.offsets[-1]), self._width))
        return self._stages.recv(x, self._stages.rank - 1)

    def _begin(self, here: _InFlight) -> None:
        runner, stage, plan = self._runner, self._stages.rank, here.plan
        began = time.perf_counter()
        here.copies = runner.begin_copies(plan.copies)
        try:
            with runner.platform.stream():
                here.begun = runner.begin(plan, self._carry if stage else None)
                runner.store.copy(plan.copies, "after")
        except Exception as error:
            told = f"step {plan.step} in stage {stage}: {type(error).__name__}: {error}"
            raise DeviceError(told, hint="the replica ends; start it again") from error
        self._obeying.has_run(plan)
        if here.begun.has_run:
            self.ran += 1
            if stage + 1 < self._stages.size:
                here.left = runner.left(here.begun)
        here.seconds = time.perf_counter() - began

    def _end(self, last: _InFlight) -> StepInFlight:
        runner, began = self._runner, time.perf_counter()
        assert last.begun is not None and last.copies is not None
        with runner.platform.stream():
            if last.begun.has_run:
                runner.turn_to(last.begun)
            finish = runner.end(last.begun, last.mask_of)
            if not len(last.begun.batch.last):  # else the ranks have met at the logits
                finish = after(runner.platform.fetch([self._meet()]), finish)
        seconds = last.seconds + time.perf_counter() - began
        return PendingStep(last.plan, last.copies, finish, seconds)
