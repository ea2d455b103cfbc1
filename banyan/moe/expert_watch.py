"""ExpertWatch: the experts that a step's tokens have chosen, layer by layer.

Keeps hold of what routers give, so that no later op of a recorded step takes its memory; it adds
nothing to a step. Knows no requests and no files.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from banyan.dp_attention.batch import DPAttentionRows
from banyan.ops.api import Recorder
from banyan.parallel.groups import Group

ChoiceObserver = Callable[[np.ndarray, np.ndarray], None]
"""Told of each pass: choices [layers, tokens, per_token] int32, and the tokens' positions; where
several replicas work on one batch, the choices of all of them, and the positions of this one's."""


class ExpertWatch:
    """Of one rank, whose device's memory is the host's.

    Args:
        recorder: of the ops that route; None where steps are never recorded.
        joint: whose rows are routed; None where they are those of one replica.
        stages: between which the layers are divided; all of their ranks have such a watch.
        layers: with experts, of each stage.
        per_token: experts that a token chooses.
        is_recorded: every pass is wanted whole, not only those that requests ask about.
    """

    def __init__(
        self,
        recorder: Recorder | None,
        joint: DPAttentionRows | None = None,
        stages: Group | None = None,
        layers: Sequence[int] = (),
        per_token: int = 1,
        is_recorded: bool = False,
    ) -> None:
        self._recorder, self._joint = recorder, joint
        self._stages, self._layers, self._per_token = stages or Group(), layers, per_token
        self.is_recorded = is_recorded
        self._recorded: dict[int, Tensor] = {}
        """Layer -> ids [most tokens, per_token] of the recorded step."""
        self._called: dict[int, Tensor] = {}
        """The same of a step whose ops were called one by one."""
        self.local_observers: list[ChoiceObserver] = []
        """Told of the layers that are here, when a pass has been through them."""
        self.observers: list[ChoiceObserver] = []
        """Told of all layers, at the end of a pass."""
        self.chosen = np.zeros((0, 0, 0), np.int32)
        """What the last step chose: [layers with experts here, tokens, per_token]."""

    def chose(self, layer: int, ids: Tensor) -> None:
        """The router of a layer has chosen, or will whenever the recorded step runs."""
        is_recorded = self._recorder is not None and self._recorder.is_recording
        (self._recorded if is_recorded else self._called)[layer] = ids

    def ran(self, positions: np.ndarray) -> None:
        """A step has run with tokens of these positions."""
        seen, self._called = self._called or self._recorded, {}
        count = len(positions) if self._joint is None else self._joint.total
        if not seen or not count:
            self.chosen = np.zeros((len(seen), 0, self._per_token), np.int32)
            return
        chosen = [seen[layer][:count].numpy() for layer in sorted(seen)]
        self.chosen = np.stack(chosen).astype(np.int32)
        for told in self.local_observers:
            told(self.chosen, positions)

    def whole(self, chosen: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """What the tokens of a step chose in all layers, [layers with experts, tokens, per_token].
        Every rank of all stages calls this.

        chosen: as `chosen` was when it had run here.
        """
        if self._stages.size > 1 and len(positions):
            chosen = np.concatenate(self._of_stages(chosen, len(positions)))
        for told in self.observers if chosen.size else ():
            told(chosen, positions)
        return chosen

    def own(self, chosen: np.ndarray) -> np.ndarray:
        """Those of this replica's tokens among the choices of the step that ran last."""
        if self._joint is None:
            return chosen
        first = self._joint.first
        return chosen[:, first : first + self._joint.mine]

    def _of_stages(self, chosen: np.ndarray, tokens: int) -> list[np.ndarray]:
        found: list[np.ndarray] = []
        for stage, layers in enumerate(self._layers):
            part = torch.empty((layers * tokens, self._per_token), dtype=torch.int32)
            if stage == self._stages.rank:
                part.copy_(torch.from_numpy(chosen).view(part.shape))
            if layers:
                self._stages.broadcast(part, stage)
            found.append(part.numpy().reshape(layers, tokens, self._per_token))
        return found
