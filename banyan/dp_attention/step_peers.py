"""Peers: what a step does together with other replicas (data-parallel attention).

All of them run the same sequence of exchanges, whatever each brings: the forward pass of the tokens
of all, and where they share the weight of the logits, so many rounds of logits for known tokens
that are scored, then those of the tokens to sample.
"""

from collections.abc import Iterator

from banyan.dp_attention.batch import DPAttentionBatch
from banyan.messages.plan import StepLoad


class Peers:
    """
    Args:
        joint: what the layers of this rank go by.
        chunk: most tokens of one replica in a round of scores; the same on all of them.
    """

    def __init__(self, joint: DPAttentionBatch, chunk: int) -> None:
        self._joint = joint
        self._chunk = chunk
        self._loads: list[StepLoad] = []

    def begin(self, loads: list[StepLoad]) -> None:
        """A step begins.

        Raises:
            ValueError: the plan is not one for these replicas.
        """
        if len(loads) != self._joint.replicas:
            raise ValueError(f"{len(loads)} loads for a step of {self._joint.replicas} replicas")
        self._loads = loads
        self._joint.tokens.enter([load.tokens for load in loads])
        self._joint.outputs.enter([0 if self.has_scores else load.outputs for load in loads])

    @property
    def has_outputs(self) -> bool:
        """Whether this rank takes part in making logits, for whichever replica."""
        return self._joint.has_outputs and any(load.outputs for load in self._loads)

    @property
    def has_scores(self) -> bool:
        """Whether it takes part in making logits of known tokens, for whichever replica."""
        return self._joint.has_outputs and any(load.scores for load in self._loads)

    def rounds(self) -> Iterator[slice]:
        """The rounds of logits for scores: the part of this replica's tokens that is in each."""
        for first in range(0, max(load.scores for load in self._loads), self._chunk):
            left = [max(0, load.scores - first) for load in self._loads]
            self._joint.outputs.enter([min(count, self._chunk) for count in left])
            yield slice(first, first + self._chunk)
        self._joint.outputs.enter([load.outputs for load in self._loads])
