"""Real ModelRunners of joined replicas behind the face of the kit: each runs in a thread of its
own, and where one waits for another, that one is driven on until it has come.

A step runs when its result is asked for, or when another replica needs it; so some replicas are a
step ahead of others, and results wait.
"""

import threading
from collections import Counter, deque
from functools import partial
from queue import SimpleQueue
from random import Random

import torch

from banyan.kv_cache.cache import TOKEN_BYTES
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
from banyan.runner.runner import ModelRunner
from tests.border.driver import Play
from tests.border.kit import Interrupt
from tests.border.laws import Device, Launched, Laws, Tenancy, require
from tests.border.page_numbers import VOCAB
from tests.border.poisoned import poisoned

LIMIT_S = 120.0
MOST_BESIDE = 10
"""Plans of one replica that are no joint steps, between two that are."""
Key = tuple[int, int]


class Company:
    """The replicas of one game, and what their threads have to say.

    Attributes:
        desk: (replica, the key of a mask that it waits for, or how a step of it has ended).
    """

    def __init__(self) -> None:
        self.runners: list[JoinedRunner] = []
        self.plays: list[Play] = []
        self.desk = SimpleQueue[tuple[int, Key | tuple[StepResult, CopyResult | None]]]()

    def bring(self, count: int) -> None:
        """Let every replica begin its first `count` joint steps."""
        for runner, game in zip(self.runners, self.plays, strict=True):
            for _ in range(MOST_BESIDE):
                if runner.begun >= count:
                    break
                if not runner.has_coming:
                    game.act(("launch", 1))
                if runner.has_coming:
                    runner.begin()
            require(runner.begun >= count, f"no plan comes for joint step {count}")

    def hear(self) -> None:
        """Take in one thing that a thread has to say."""
        replica, said = self.desk.get(timeout=LIMIT_S)
        self.runners[replica].hear(said)


class JoinedRunner:
    """
    Args:
        runner: fresh.
        model: that it has.
        poison: what pages hold that nobody has written.
        hurry: lets the driver go on while a step waits for a mask.
    """

    def __init__(
        self,
        runner: ModelRunner,
        model: Model,
        device: Device,
        poison: float,
        company: Company,
        random: Random,
        interrupt: Interrupt,
    ) -> None:
        self.laws = Laws(device, self._enter)
        self.failed_seeds: set[int] = set()
        self.begun = 0
        """Joint steps that its thread has been given."""
        self._number = len(company.runners)
        company.runners.append(self)
        self._company = company
        self._random = random
        self._interrupt = interrupt
        self._taker = poisoned(runner, model, device, poison, self.laws.carry_out)
        self._coming: deque[Launched] = deque()
        self._passing: deque[StepPlan] = deque()
        self._done: deque[StepResult] = deque()
        self._ended: list[PageCopy] = []
        self._plans = SimpleQueue[StepPlan | None]()
        self._masks = SimpleQueue[bytes]()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

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

    @property
    def has_coming(self) -> bool:
        return bool(self._coming)

    def launch(self, plan: StepPlan) -> None:
        self._coming.append(self.laws.launch(plan))
        self.seen["masked rows"] += sum(row.masked for row in plan.rows)
        if self._random.random() < 0.3:
            self.begin()

    def begin(self) -> None:
        """Give the thread the oldest plan that it has not got; it may wait for others there."""
        launched = self._coming.popleft()
        self.laws.start(launched)
        self.begun += bool(launched.plan.replica_loads)
        self._passing.append(launched.plan)
        self._plans.put(launched.plan)

    def close(self) -> None:
        self._plans.put(None)
        self._thread.join(LIMIT_S)

    def give_masks(self, masks: list[Mask]) -> None:
        self.laws.give_masks(masks)

    def execute(self) -> StepResult:
        while not self._done:
            if not self._passing:
                self.begin()
            self._company.bring(self.begun)
            self._company.hear()
        result = self._done.popleft()
        self.laws.completed = self.laws.queue.popleft().plan.step
        require(not result.error, f"step {result.step} fails: {result.error}")
        return result

    def hear(self, said: Key | tuple[StepResult, CopyResult | None]) -> None:
        if not isinstance(said[0], StepResult):
            self._masks.put(self._mask_of(said))
            return
        result, reported = said
        plan = self._passing.popleft()
        require(result.step == plan.step, f"step {plan.step} answers as {result.step}")
        done = [] if reported is None else reported.ids
        mine = [copy for copy in plan.copies if copy.id in done]
        require(len(mine) == len(plan.copies), f"copies {reported} of {plan.copies}")
        self._ended += mine
        for row, tokens in zip(plan.rows, result.tokens, strict=True):
            stand = len(tokens) // TOKEN_BYTES
            self.seen["accepted drafts"] += max(0, stand - 1)
            self.seen["rejected drafts"] += row.drafts + 1 - stand if stand else 0
        self._done.append(result)
        self.seen["late results"] += len(self._done) > 1

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

    def _mask_of(self, key: Key) -> bytes:
        while key not in self.laws.masks:
            self.seen["late masks"] += 1
            is_hurried = self._interrupt(bool(self._done))
            require(is_hurried, f"step {key[0]} row {key[1]}: no mask came before sampling")
        return self.laws.masks[key]

    def _serve(self) -> None:
        torch.set_num_threads(1)
        while (plan := self._plans.get()) is not None:
            pending = self._taker.launch(plan, partial(self._ask, plan.step))
            self._company.desk.put((self._number, (pending.result(), pending.copies())))

    def _ask(self, step: int, index: int) -> bytes:
        self._company.desk.put((self._number, (step, index)))
        return self._masks.get(timeout=LIMIT_S)

    def _enter(self, join: Join, life: int, tokens: list[int]) -> Tenancy:
        if max(tokens) >= VOCAB:
            self.failed_seeds.add(join.sampling.seed)
            self.seen["refused joins"] += 1
        return Tenancy(join, life, len(tokens), length=len(tokens))
