"""DPAttentionBatch: whose rows a batch consists of that several replicas work on together.

The rows of replica 0 come first, then those of replica 1 … The ranks of one replica have the same
rows, and the first of them gives them to the others. DividedBatch: the same, but of shares of one
replica's step, each of which is computed by some of its ranks.
"""

from collections.abc import Iterator, Sequence

import torch

from banyan.messages.plan import StepLoad
from banyan.ops.api import Recorder


class DPAttentionRows:
    """
    Args:
        replica: the one that this rank belongs to.
        replicas: how many there are, each of `ranks` ranks.
        recorder: of the ops that work on the rows; what it records holds for any counts.
    """

    def __init__(
        self, replica: int, replicas: int, ranks: int, recorder: Recorder | None = None
    ) -> None:
        self.replicas = replicas
        self.total = self.mine = 0
        self._replica, self._ranks = replica, ranks
        self._recorder = recorder
        self.table = torch.zeros(2 + replicas * ranks, dtype=torch.int64)
        """The first of this rank's rows, how many it has, then how many each rank gives. It stays
        where it is, so that recorded ops read what holds for their step."""
        self._host = self.table.numpy()

    def enter(self, counts: Sequence[int]) -> None:
        """The rows of each replica in the step that comes."""
        assert len(counts) == self.replicas, f"{len(counts)} counts of {self.replicas} replicas"
        self.total, self.mine = sum(counts), counts[self._replica]
        self._host[0] = sum(counts[: self._replica])
        self._host[1] = self.mine
        self._host[2 :: self._ranks] = counts

    @property
    def first(self) -> int:
        """Of this replica's rows among those of all."""
        return int(self._host[0])

    @property
    def counts(self) -> list[int]:
        """The rows of each replica."""
        return self._host[2 :: self._ranks].tolist()

    def all_of(self, mine: int) -> int:
        """Rows of all replicas, where this one has `mine`."""
        if self._is_recording:
            return mine * self.replicas
        assert mine == self.mine, f"{mine} rows, {self.mine} were agreed on"
        return self.total

    def own_of(self, total: int) -> int:
        """Rows of this replica among `total`."""
        if self._is_recording:
            return total // self.replicas
        assert total == self.total, f"{total} rows, {self.total} were agreed on"
        return self.mine

    @property
    def _is_recording(self) -> bool:
        return self._recorder is not None and self._recorder.is_recording


class DPAttentionBatch:
    """A batch of several replicas: its tokens, and the outputs that logits are made for."""

    def __init__(
        self,
        replica: int,
        replicas: int,
        ranks: int,
        recorder: Recorder | None = None,
        has_outputs: bool = True,
    ) -> None:
        self.replicas = replicas
        self.has_outputs = has_outputs
        """The replicas share the weight of the logits; else each makes its own."""
        self.tokens = DPAttentionRows(replica, replicas, ranks, recorder)
        self.outputs = DPAttentionRows(replica, replicas, ranks, recorder)


class DividedBatch(DPAttentionBatch):
    """A step of one replica whose tokens are divided among its ranks (context parallelism); here a
    share of them is what a replica is of a joint batch. Every rank makes all logits.

    Args:
        share: the one that this rank computes, together with `ranks` − 1 others.
        shares: how many there are.
        split: how rows are cut (`context_parallel.split.SPLITS`).
    """

    def __init__(
        self, share: int, shares: int, ranks: int, split: str, recorder: Recorder | None = None
    ) -> None:
        super().__init__(share, shares, ranks, recorder, has_outputs=False)
        self.share, self.split = share, split
        self.context = DPAttentionRows(share, shares, 1, recorder)
        """The same rows, among the ranks that have the same heads."""

    def enter(self, counts: Sequence[int]) -> None:
        """The tokens of each share in the step that comes."""
        self.tokens.enter(counts)
        self.context.enter(counts)


class DPAttentionStep:
    """What one step does together with other replicas.

    All replicas run the same sequence of collectives, whatever rows each has: the forward pass of
    all tokens; then, if they share the logits' weights, rounds of logits for tokens that are
    scored, and the logits of the tokens to sample.

    Args:
        joint: row counts that the layers of this rank read.
        chunk: most tokens of one replica in a round of scores; equal on all replicas.
    """

    def __init__(self, joint: DPAttentionBatch, chunk: int) -> None:
        self._joint = joint
        self._chunk = chunk
        self._loads: list[StepLoad] = []

    def begin(self, loads: list[StepLoad]) -> None:
        """Enter the loads of all replicas in the step that begins.

        Raises:
            ValueError: the plan is for another number of replicas.
        """
        if len(loads) != self._joint.replicas:
            raise ValueError(f"{len(loads)} loads for a step of {self._joint.replicas} replicas")
        self._loads = loads
        self._joint.tokens.enter([load.tokens for load in loads])
        self._joint.outputs.enter([0 if self.has_scores else load.outputs for load in loads])

    @property
    def has_outputs(self) -> bool:
        """Whether this rank helps to compute logits, for any replica."""
        return self._joint.has_outputs and any(load.outputs for load in self._loads)

    @property
    def has_scores(self) -> bool:
        """Whether this rank helps to compute logits of known tokens, for any replica."""
        return self._joint.has_outputs and any(load.scores for load in self._loads)

    def rounds(self) -> Iterator[slice]:
        """Rounds of logits for scores: the slice of this replica's tokens in each."""
        for first in range(0, max(load.scores for load in self._loads), self._chunk):
            left = [max(0, load.scores - first) for load in self._loads]
            self._joint.outputs.enter([min(count, self._chunk) for count in left])
            yield slice(first, first + self._chunk)
        self._joint.outputs.enter([load.outputs for load in self._loads])
