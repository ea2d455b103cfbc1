"""ExpertWatch: the experts that a step's tokens have chosen, layer by layer.

Holds references to the routers' outputs, so that no later op of a recorded step reuses their
memory.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from banyan.dp_attention.batch import DPAttentionRows
from banyan.ops.api import Recorder
from banyan.parallel.groups import Group

ChoiceObserver = Callable[[np.ndarray, np.ndarray], None]
"""Called with the choices of a step, [layers, tokens, per_token] int32, and the tokens' positions.
With DP attention the choices are of all replicas, the positions of this one."""


class ExpertWatch:
    """Of one rank. Steps of a device are not captured while it watches, because the host reads the
    choices after each step.

    Args:
        recorder: of the ops; None if steps are never recorded.
        joint: rows of the DP attention batch; None without DP attention.
        stages: pipeline stages; all their ranks have a watch.
        layers: number of layers with experts in each stage.
        per_token: experts per token.
        is_recorded: every step is needed, not only for requests that ask for experts.
        device: of the choices.
    """

    def __init__(
        self,
        recorder: Recorder | None,
        dp_rows: DPAttentionRows | None = None,
        stages: Group | None = None,
        layers: Sequence[int] = (),
        per_token: int = 1,
        is_recorded: bool = False,
        device: torch.device | None = None,
    ) -> None:
        self._recorder, self._dp_rows = recorder, dp_rows
        self._stages, self._layers, self._per_token = stages or Group(), layers, per_token
        self.is_recorded = is_recorded
        self._device = device or torch.device("cpu")
        self._recorded: dict[int, Tensor] = {}
        """Layer -> ids [most tokens, per_token] of the recorded step."""
        self._called: dict[int, Tensor] = {}
        """The same for a step whose ops were called one by one."""
        self.local_observers: list[ChoiceObserver] = []
        """Called after a step with the layers of this rank."""
        self.observers: list[ChoiceObserver] = []
        """Called at the end of a step with all layers."""
        self.chosen = np.zeros((0, 0, 0), np.int32)
        """Choices of the last step: [layers with experts here, tokens, per_token]."""

    def chose(self, layer: int, ids: Tensor) -> None:
        """The router of a layer has chosen, or will whenever the recorded step runs."""
        is_recorded = self._recorder is not None and self._recorder.is_recording
        (self._recorded if is_recorded else self._called)[layer] = ids

    def ran(self, positions: np.ndarray) -> None:
        """A step with tokens at these positions has run."""
        seen, self._called = self._called or self._recorded, {}
        count = len(positions) if self._dp_rows is None else self._dp_rows.total
        if not seen or not count:
            self.chosen = np.zeros((len(seen), 0, self._per_token), np.int32)
            return
        chosen = torch.stack([seen[layer][:count] for layer in sorted(seen)]).to(torch.int32)
        self.chosen = chosen.cpu().numpy()  # sync: the host counts the choices of each step
        for observe in self.local_observers:
            observe(self.chosen, positions)

    def whole(self, chosen: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Choices of a step's tokens in all layers, [layers with experts, tokens, per_token]. Every
        rank of all stages calls this.

        chosen: the value of `chosen` after the step.
        """
        if self._stages.size > 1 and len(positions):
            chosen = np.concatenate(self._of_stages(chosen, len(positions)))
        for observe in self.observers if chosen.size else ():
            observe(chosen, positions)
        return chosen

    def own(self, chosen: np.ndarray) -> np.ndarray:
        """Choices of this replica's tokens in the last step."""
        if self._dp_rows is None:
            return chosen
        first = self._dp_rows.first
        return chosen[:, first : first + self._dp_rows.mine]

    def _of_stages(self, chosen: np.ndarray, tokens: int) -> list[np.ndarray]:
        found: list[np.ndarray] = []
        for stage, layers in enumerate(self._layers):
            shape = (layers * tokens, self._per_token)
            part = torch.empty(shape, dtype=torch.int32, device=self._device)
            if stage == self._stages.rank:
                part.copy_(torch.from_numpy(chosen).view(shape))
            if layers:
                self._stages.broadcast(part, stage)
            found.append(part.cpu().numpy().reshape(layers, tokens, self._per_token))
        return found
