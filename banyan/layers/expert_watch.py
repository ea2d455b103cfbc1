"""ExpertWatch: the experts that a step's tokens have chosen, layer by layer.

Keeps hold of what routers give, so that no later op of a recorded step takes its memory; it adds
nothing to a step. Knows no requests and no files.
"""

from collections.abc import Callable

import numpy as np
from torch import Tensor

from banyan.ops.api import Recorder
from banyan.parallel.joint import JointRows

Heard = Callable[[np.ndarray, np.ndarray], None]
"""Told of each pass: choices [layers, tokens, per_token] int32, and the tokens' positions; where
several replicas work on one batch, the choices of all of them, and the positions of this one's."""


class ExpertWatch:
    """Of one rank, whose device's memory is the host's.

    Args:
        recorder: of the ops that route; None where steps are never recorded.
        joint: whose rows are routed; None where they are those of one replica.
    """

    def __init__(self, recorder: Recorder | None, joint: JointRows | None = None) -> None:
        self._recorder, self._joint = recorder, joint
        self._recorded: dict[int, Tensor] = {}
        """Layer -> ids [most tokens, per_token] of the recorded step."""
        self._called: dict[int, Tensor] = {}
        """The same of a step whose ops were called one by one."""
        self.heard: list[Heard] = []
        self.chosen = np.zeros((0, 0, 0), np.int32)
        """What the last step chose: [layers with experts, tokens, per_token]."""

    def saw(self, layer: int, ids: Tensor) -> None:
        """The router of a layer has chosen, or will whenever the recorded step runs."""
        is_recorded = self._recorder is not None and self._recorder.is_recording
        (self._recorded if is_recorded else self._called)[layer] = ids

    def ran(self, positions: np.ndarray) -> None:
        """A step has run with tokens of these positions."""
        seen, self._called = self._called or self._recorded, {}
        count = len(positions) if self._joint is None else self._joint.total
        if not seen or not count:
            return
        chosen = [seen[layer][:count].numpy() for layer in sorted(seen)]
        self.chosen = np.stack(chosen).astype(np.int32)
        for told in self.heard:
            told(self.chosen, positions)
