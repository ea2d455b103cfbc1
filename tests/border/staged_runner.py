"""Real ModelRunners in a line of stages behind the face of the kit: one thread is one rank.

A page is poison on every rank from when the plan that grants it begins there until a row has
computed it. Turns are taken when something is launched or asked for, so that several plans are in
the line, results wait, and some turns bring no plan.
"""

import threading
from collections import Counter, deque
from functools import partial
from queue import SimpleQueue
from random import Random

import torch
from torch import Tensor

from banyan.messages.control_ops import ControlOp
from banyan.messages.plan import (
    CopyResult,
    Held,
    Join,
    Lookup,
    Mask,
    PageCopy,
    StepPlan,
    StepResult,
)
from banyan.models.base import Model
from banyan.parallel.groups import Group
from banyan.pipeline.runner_stage import PipelineStage
from banyan.runner.runner import ModelRunner
from tests.border.kit import Interrupt
from tests.border.laws import Device, Launched, Laws, Tenancy, require
from tests.border.page_numbers import UNITS, VOCAB
from tests.border.poisoned import poisoned

LIMIT_S = 120.0


class Mail:
    """What the ranks of several threads do together: `Collectives`, as far as a line needs them."""

    def __init__(self, rank: int, boxes: "dict[tuple[int, int], SimpleQueue[Tensor]]") -> None:
        self._rank = rank
        self._boxes = boxes
        self._others = sorted({there for here, there in boxes if here == rank})

    def send(self, x: Tensor, to: int) -> None:
        self._boxes[self._rank, to].put(x.clone())

    def recv(self, x: Tensor, source: int) -> None:
        x.copy_(self._boxes[source, self._rank].get(timeout=LIMIT_S))

    def broadcast(self, x: Tensor, source: int) -> None:
        if self._rank != source:
            return self.recv(x, source)
        for other in self._others:
            self.send(x, other)

    def all_gather(self, x: Tensor, columns: int) -> Tensor:
        parts = [x.clone() for _ in range(len(self._others) + 1)]
        for source, part in enumerate(parts):
            self.broadcast(part, source)
        return torch.cat(parts, dim=1)[:, :columns]

    # Those of ranks with rows of their own; see `DPAttentionRows.table`.

    def gather_rows(self, x: Tensor, rows: Tensor, count: int) -> Tensor:
        return torch.cat(self._shared(x))[:count]

    def reduce_rows(self, x: Tensor, rows: Tensor, count: int) -> Tensor:
        first = int(rows[0])
        return torch.stack(self._shared(x)).sum(0)[first : first + count]

    def gather_columns(self, x: Tensor, columns: int, rows: Tensor, count: int) -> Tensor:
        first = int(rows[0])
        return torch.cat(self._shared(x), dim=1)[first : first + count, :columns]

    def _shared(self, x: Tensor) -> list[Tensor]:
        """The x of every rank, of any sizes."""
        for other in self._others:
            self.send(x, other)
        got = {at: self._boxes[at, self._rank].get(timeout=LIMIT_S) for at in self._others}
        return [got.get(at, x) for at in range(len(self._others) + 1)]


def groups_of_threads(size: int) -> list[Group]:
    """One for each rank; there are boxes for what stages hand on, and for what all receive."""
    ranks = range(size)
    boxes = {(a, b): SimpleQueue[Tensor]() for a in ranks for b in ranks if a != b}
    return [Group(rank, size, Mail(rank, boxes)) for rank in ranks]


class Ranks:
    """Lines that take their turns together.

    Args:
        lines: by stage; that of rank 0 is the caller's.
    """

    def __init__(self, lines: list[PipelineStage]) -> None:
        self._lines = lines
        self._plans = [SimpleQueue[StepPlan | None | Exception]() for _ in lines]
        self.trouble: Exception | None = None
        self._threads = [
            threading.Thread(target=self._serve, args=(rank,), daemon=True)
            for rank in range(1, len(lines))
        ]
        for thread in self._threads:
            thread.start()

    def turn(self, plan: StepPlan | None, mask_of=None) -> tuple[StepResult, CopyResult] | None:
        for plans in self._plans[1:]:
            plans.put(plan)
        pending = self._lines[0].turn(plan, mask_of)
        if self.trouble is not None:
            raise self.trouble
        return None if pending is None else (pending.result(), pending.copies())

    def close(self) -> None:
        for plans in self._plans[1:]:
            plans.put(EOFError())
        for thread in self._threads:
            thread.join(LIMIT_S)

    def _serve(self, rank: int) -> None:
        torch.set_num_threads(1)
        try:
            while not isinstance(plan := self._plans[rank].get(), Exception):
                pending = self._lines[rank].turn(plan)
                if pending is not None:
                    require(not pending.result().error, f"rank {rank}: {pending.result().error}")
        except Exception as error:
            self.trouble = error


class StagedRunner:
    """
    Args:
        runners: by stage, fresh.
        models: that they have.
        poison: what pages hold that nobody has written.
        hurry: lets the driver go on while a step waits for a mask.
    """

    def __init__(
        self,
        runners: list[ModelRunner],
        models: list[Model],
        groups: list[Group],
        device: Device,
        poison: float,
        random: Random,
        interrupt: Interrupt,
    ) -> None:
        self.laws = Laws(device, self._enter)
        self.failed_seeds: set[int] = set()
        self._random = random
        self._interrupt = interrupt
        self._coming: deque[Launched] = deque()
        self._passing: deque[Launched] = deque()
        self._done: deque[StepResult] = deque()
        self._ended: list[PageCopy] = []
        self.lines: list[PipelineStage] = []
        for rank, runner in enumerate(runners):
            reported = self.laws.carry_out if rank == 0 else None
            executor = poisoned(runner, models[rank], device, poison, reported)
            self.lines.append(
                PipelineStage(runner, executor, groups[rank], groups[rank], torch.empty(0), UNITS)
            )
        self._ranks = Ranks(self.lines)

    @property
    def seen(self) -> Counter[str]:
        return self.laws.seen

    @property
    def carried_out(self) -> list[ControlOp]:
        return self.laws.carried_out

    @property
    def copies_to_report(self) -> int:
        return len(self._ended)

    @property
    def is_quiet(self) -> bool:
        return not self.laws.queue and not self._ended

    def launch(self, plan: StepPlan) -> None:
        self._coming.append(self.laws.launch(plan))
        self.seen["masked rows"] += sum(row.masked for row in plan.rows)
        for _ in range(self._random.randrange(4)):
            if self._coming or self._random.random() < 0.3:
                self._turn()

    def close(self) -> None:
        """Let the other ranks come to the turn of rank 0, and end."""
        self._ranks.close()

    def give_masks(self, masks: list[Mask]) -> None:
        self.laws.give_masks(masks)

    def execute(self) -> StepResult:
        while not self._done:
            self._turn()
        result = self._done.popleft()
        self.laws.completed = self.laws.queue.popleft().plan.step
        require(not result.error, f"step {result.step} fails: {result.error}")
        return result

    def report_copies(self, count: int) -> CopyResult:
        batch, self._ended = self._ended[:count], self._ended[count:]
        for copy in batch:
            del self.laws.copies[copy.id]
            self.laws.note_copy(copy)
        return CopyResult([copy.id for copy in batch])

    def look(self, lookups: list[Lookup]) -> None:
        require(not lookups, "there is no store to look in")

    def report_held(self) -> Held | None:
        return None

    def _turn(self) -> None:
        launched, came = None, None
        if self._coming:
            launched = self._coming.popleft()
            self.laws.start(launched)
            self._passing.append(launched)
            self.seen["steps side by side"] += len(self._passing) > 1
            came = self._ranks.turn(launched.plan, partial(self._mask_of, launched))
        elif self._passing:
            self.seen["turns without a plan"] += 1
            came = self._ranks.turn(None)
        if came is not None:
            plan = self._passing.popleft().plan
            result, reported = came
            require(result.step == plan.step, f"step {plan.step} answers as {result.step}")
            done = [] if reported is None else reported.ids
            mine = [copy for copy in plan.copies if copy.id in done]
            require(len(mine) == len(plan.copies), f"copies {reported} of {plan.copies}")
            self._ended += mine
            self._done.append(result)

    def _mask_of(self, launched: Launched, index: int) -> bytes:
        key = (launched.plan.step, index)
        while key not in self.laws.masks:
            self.seen["late masks"] += 1
            is_hurried = self._interrupt(bool(self._done))
            require(is_hurried, f"{launched.where(index)}: no mask came before sampling")
        return self.laws.masks[key]

    def _enter(self, join: Join, life: int, tokens: list[int]) -> Tenancy:
        if max(tokens) >= VOCAB:
            self.failed_seeds.add(join.sampling.seed)
            self.seen["refused joins"] += 1
        return Tenancy(join, life, len(tokens), length=len(tokens))
