"""AdapterSlots: the adapter of each request slot, and so of each token of a step. A device that is
not the host has its own copy."""

import numpy as np
import torch
from torch import Tensor

from banyan.lora.pool import LoRAPool
from banyan.lora.targets import LoRATargets
from banyan.ops.lora import AdapterTokens
from banyan.parallel.groups import Group, Groups


class StepAdapters:
    """Adapters of the tokens of a step, in memory with a fixed address.

    Args:
        max_tokens, max_outputs: sizes of the largest step.
        sharers: replicas or context-parallel ranks whose rows are gathered in layers.
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
        slots: number of slots, padding included.
        groups: process groups of this rank.
    """

    def __init__(self, slots: int, lora_pool: LoRAPool, groups: Groups) -> None:
        self._numbers = np.zeros(slots, np.int64)
        self._of_step = self._numbers
        """Adapter of each token of the current step; with context parallelism for all ranks'
        tokens."""
        self._lora_pool = lora_pool
        stacked = lora_pool.lora_targets.stacked
        self._on_device: Tensor | None = None
        """Copy of `_numbers` on the device; None if the device is the host."""
        if stacked is not None:
            self._on_device = torch.zeros(slots, dtype=torch.int64, device=stacked.device)
        self._replicas: Group | None = None
        """The replicas that gather rows in each step."""
        self._sharers = 1
        if groups.dp_batch is not None:
            self._replicas = groups.everyone.of_rows(groups.dp_batch.tokens)
            self._sharers = groups.dp_batch.replicas
        if groups.cp_batch is not None:
            self._sharers = groups.cp_batch.replicas

    def problem(self, number: int) -> str:
        """Why a slot cannot use this adapter; "" if it can."""
        if not number or self._lora_pool.has(number):
            return ""
        return f"the request wants adapter {number}, which is not loaded"

    def enter(self, slot: int, number: int) -> None:
        self._numbers[slot] = number
        if self._on_device is not None:
            self._on_device[slot : slot + 1].fill_(number)

    def new_step(self, max_tokens: int, max_outputs: int) -> StepAdapters:
        """Buffers for steps of this size."""
        return StepAdapters(self._lora_pool.lora_targets, max_tokens, max_outputs, self._sharers)

    def use(self, step: StepAdapters) -> None:
        """Make the layers read these adapters from now on."""
        lora_targets = self._lora_pool.lora_targets
        lora_targets.tokens, lora_targets.gathered = step.own, step.gathered

    def fill(self, step: StepAdapters, slots: np.ndarray, of_all: np.ndarray | None) -> None:
        """Set the adapters of a step; replicas that share the step call this together.

        Args:
            slots: [tokens], slot of each token.
            of_all: slots of all ranks' tokens, with context parallelism.
        """
        mine = self._numbers[slots]
        self._of_step = mine if of_all is None else self._numbers[of_all]
        step.own.fill(mine)
        self.use(step)
        if step.gathered is None:
            return
        everyone = self._of_step
        if self._replicas is not None:
            numbers = self._replicas.gather_rows(torch.from_numpy(mine).unsqueeze(1))
            everyone = numbers.flatten().numpy()
        fits = len(everyone) <= len(step.gathered.order)
        gathered = step.gathered if fits else AdapterTokens(len(everyone))
        gathered.fill(everyone)
        self._lora_pool.lora_targets.gathered = gathered

    def fill_on_device(self, step: StepAdapters, slot_of: Tensor) -> None:
        """`fill` on the device, in the current stream or while a graph is captured. With context
        parallelism only for this rank's tokens.

        slot_of: [tokens] int64, slot of each token.
        """
        assert self._on_device is not None
        numbers = self._on_device[slot_of]
        step.own.mark(numbers)
        self.use(step)
        if self._replicas is not None and step.gathered is not None:
            self._gather(step.gathered, self._replicas.gather_rows(numbers.unsqueeze(1)).flatten())

    def fill_all_on_device(self, step: StepAdapters, slot_of: Tensor) -> None:
        """The tokens of all context-parallel ranks. slot_of: slot of each of them."""
        assert self._on_device is not None and step.gathered is not None
        self._gather(step.gathered, self._on_device[slot_of])

    def _gather(self, gathered: AdapterTokens, numbers: Tensor) -> None:
        assert gathered.others is not None
        if len(numbers) > len(gathered.others):
            gathered = self._lora_pool.lora_targets.new_tokens(len(numbers))
        gathered.mark(numbers)
        self._lora_pool.lora_targets.gathered = gathered

    def select_step(self, slots: np.ndarray) -> None:
        """Make `fill_outputs` refer to a step that was filled before. slots: [tokens], as for
        `fill`."""
        self._of_step = self._numbers[slots]

    @property
    def has_outputs(self) -> bool:
        """Whether logits depend on the adapter directly."""
        return self._lora_pool.lora_targets.has_outputs

    def use_outputs(self, outputs: AdapterTokens) -> None:
        """Make the computation of logits read these adapters from now on."""
        self._lora_pool.lora_targets.outputs = outputs

    def fill_outputs(self, outputs: AdapterTokens, chosen: np.ndarray) -> None:
        """Set the adapters of the tokens whose logits are computed. chosen: [n], indices of these
        tokens."""
        outputs.fill(self._of_step[chosen])
        self.use_outputs(outputs)
