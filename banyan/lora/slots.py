"""Which adapter each slot has, and so each token of a step: on the host, where its memory is the
device's, else on the device, where slots have it too. Knows no files and no matrices.
"""

import numpy as np
import torch
from torch import Tensor

from banyan.lora.pool import LoRAPool
from banyan.lora.targets import LoRATargets
from banyan.ops.lora import AdapterTokens
from banyan.parallel.groups import Group, Groups


class StepAdapters:
    """Which tokens of a step have which adapter, in memory that stays where it is.

    Args:
        seats: of the rank.
        max_tokens, max_outputs: of the largest step.
        sharers: replicas or shares whose rows layers gather.
    """

    def __init__(
        self, lora_targets: LoRATargets, max_tokens: int, max_outputs: int, sharers: int
    ) -> None:
        self.own = lora_targets.new_tokens(max_tokens)
        self.gathered = lora_targets.new_tokens(max_tokens * sharers) if sharers > 1 else None
        self.outputs = AdapterTokens(max_outputs)


class AdapterSlots:
    """The adapter of each slot.

    Args:
        slots: how many there are, padding included.
        groups: of this rank.
    """

    def __init__(self, slots: int, lora_pool: LoRAPool, groups: Groups) -> None:
        self._numbers = np.zeros(slots, np.int64)
        self._of_step = self._numbers
        """Of each token of the step at hand; of a divided one of all shares."""
        self._lora_pool = lora_pool
        stacked = lora_pool.lora_targets.stacked
        self._on_device: Tensor | None = None
        """The same for the device, where its memory is not the host's."""
        if stacked is not None:
            self._on_device = torch.zeros(slots, dtype=torch.int64, device=stacked.device)
        self._replicas: Group | None = None
        """Whose rows are gathered from step to step."""
        self._sharers = 1
        if groups.joint is not None:
            self._replicas = groups.everyone.of_rows(groups.joint.tokens)
            self._sharers = groups.joint.replicas
        if groups.divided is not None:
            self._sharers = groups.divided.replicas

    def problem(self, number: int) -> str:
        """Why a slot cannot have this adapter; "" when it can."""
        if not number or self._lora_pool.has(number):
            return ""
        return f"the request wants adapter {number}, which is not loaded"

    def enter(self, slot: int, number: int) -> None:
        self._numbers[slot] = number
        if self._on_device is not None:
            self._on_device[slot : slot + 1].fill_(number)

    def room(self, max_tokens: int, max_outputs: int) -> StepAdapters:
        """For steps of that size."""
        return StepAdapters(self._lora_pool.lora_targets, max_tokens, max_outputs, self._sharers)

    def show(self, step: StepAdapters) -> None:
        """Let what is computed or recorded next read these."""
        lora_targets = self._lora_pool.lora_targets
        lora_targets.tokens, lora_targets.gathered = step.own, step.gathered

    def fill(self, step: StepAdapters, slots: np.ndarray, of_all: np.ndarray | None) -> None:
        """Enter a step, at the same time as the other replicas that work on it.

        Args:
            slots: [tokens], of each token.
            of_all: of those of all shares, where it is divided.
        """
        mine = self._numbers[slots]
        self._of_step = mine if of_all is None else self._numbers[of_all]
        step.own.fill(mine)
        self.show(step)
        if step.gathered is None:
            return
        everyone = self._of_step
        if self._replicas is not None:
            told = self._replicas.gather_rows(torch.from_numpy(mine).unsqueeze(1))
            everyone = told.flatten().numpy()
        has_room = len(everyone) <= len(step.gathered.order)
        gathered = step.gathered if has_room else AdapterTokens(len(everyone))
        gathered.fill(everyone)
        self._lora_pool.lora_targets.gathered = gathered

    def mark(self, step: StepAdapters, slot_of: Tensor) -> None:
        """`fill` on the device, in the stream at hand or in what is captured: of a divided step
        this rank's share. slot_of: [tokens] int64, the slot of each token."""
        assert self._on_device is not None
        numbers = self._on_device[slot_of]
        step.own.mark(numbers)
        self.show(step)
        if self._replicas is not None and step.gathered is not None:
            self._gather(step.gathered, self._replicas.gather_rows(numbers.unsqueeze(1)).flatten())

    def mark_all(self, step: StepAdapters, slot_of: Tensor) -> None:
        """The rest of a divided step. slot_of: of the tokens of all shares."""
        assert self._on_device is not None and step.gathered is not None
        self._gather(step.gathered, self._on_device[slot_of])

    def _gather(self, gathered: AdapterTokens, numbers: Tensor) -> None:
        assert gathered.others is not None
        if len(numbers) > len(gathered.others):
            gathered = self._lora_pool.lora_targets.new_tokens(len(numbers))
        gathered.mark(numbers)
        self._lora_pool.lora_targets.gathered = gathered

    def turn_to(self, slots: np.ndarray) -> None:
        """Let `choose` be of a step that was entered before. slots: [tokens], as for `fill`."""
        self._of_step = self._numbers[slots]

    @property
    def has_outputs(self) -> bool:
        """Logits depend on adapters of their own."""
        return self._lora_pool.lora_targets.has_outputs

    def show_outputs(self, outputs: AdapterTokens) -> None:
        """Let logits that are made or recorded next read these."""
        self._lora_pool.lora_targets.outputs = outputs

    def choose(self, outputs: AdapterTokens, chosen: np.ndarray) -> None:
        """chosen: [n], tokens of the step whose logits are wanted."""
        outputs.fill(self._of_step[chosen])
        self.show_outputs(outputs)
