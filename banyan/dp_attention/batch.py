"""Row counts of a step with DP attention (several replicas) or context parallelism (shares).

A batch has the rows of replica 0 first, then the rows of replica 1 … The ranks of one replica have
the same rows; its first rank sends them to the other replicas.
"""

from collections.abc import Iterator, Sequence

import torch

from banyan.messages.plan import StepLoad
from banyan.ops.api import Recorder


class DPAttentionRows:
    """Row counts of all replicas in the current step.

    Args:
        replica: this rank's replica.
        replicas: number of replicas, each with `ranks` ranks.
        recorder: recorder of the ops on these rows; a recording is valid for any counts.
    """

    def __init__(
        self, replica: int, replicas: int, ranks: int, recorder: Recorder | None = None
    ) -> None:
        self.replicas = replicas
        self.total = self.mine = 0
        self._replica, self._ranks = replica, ranks
        self._recorder = recorder
        self.table = torch.zeros(2 + replicas * ranks, dtype=torch.int64)
        """[first row of this rank, its number of rows, number of rows of each rank …]. Its address
        never changes, because recorded ops read it at every step."""
        self._host = self.table.numpy()

    def enter(self, counts: Sequence[int]) -> None:
        """Set the number of rows of each replica in the next step."""
        assert len(counts) == self.replicas, f"{len(counts)} counts of {self.replicas} replicas"
        self.total, self.mine = sum(counts), counts[self._replica]
        self._host[0] = sum(counts[: self._replica])
        self._host[1] = self.mine
        self._host[2 :: self._ranks] = counts

    @property
    def first(self) -> int:
        """Index of this replica's first row."""
        return int(self._host[0])

    @property
    def counts(self) -> list[int]:
        """Number of rows of each replica."""
        return self._host[2 :: self._ranks].tolist()

    def all_of(self, mine: int) -> int:
        """Number of rows of all replicas, given this replica's number."""
        if self._is_recording:
            return mine * self.replicas
        assert mine == self.mine, f"{mine} rows, {self.mine} were agreed on"
        return self.total

    def own_of(self, total: int) -> int:
        """Number of rows of this replica, given the number of all replicas."""
        if self._is_recording:
            return total // self.replicas
        assert total == self.total, f"{total} rows, {self.total} were agreed on"
        return self.mine

    @property
    def _is_recording(self) -> bool:
        return self._recorder is not None and self._recorder.is_recording


class DPAttentionBatch:
    """Row counts of several replicas: of tokens, and of outputs that need logits."""

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
        """The replicas share the weight of the logits; otherwise each computes its own logits."""
        self.tokens = DPAttentionRows(replica, replicas, ranks, recorder)
        self.outputs = DPAttentionRows(replica, replicas, ranks, recorder)


class ContextParallelBatch(DPAttentionBatch):
    """Row counts of a step whose tokens are split among the ranks of one replica.

    A share takes the role of a replica in `DPAttentionBatch`. Every rank computes all logits.

    Args:
        share: this rank's share; `ranks` ranks compute it.
        shares: number of shares.
        split: how rows are split (`context_parallel.split.SPLITS`).
    """

    def __init__(
        self, share: int, shares: int, ranks: int, split: str, recorder: Recorder | None = None
    ) -> None:
        super().__init__(share, shares, ranks, recorder, has_outputs=False)
        self.share, self.split = share, split
        self.context = DPAttentionRows(share, shares, 1, recorder)
        """The same rows, for the group of ranks that have the same heads."""

    def enter(self, counts: Sequence[int]) -> None:
        """Set the number of tokens of each share in the next step."""
        self.tokens.enter(counts)
        self.context.enter(counts)


class DPAttentionStep:
    """The part of a step that all replicas run together.

    All replicas run the same sequence of collectives, whatever rows each has: the forward pass of
    all tokens; then, if they share the logits' weights, rounds of logits for tokens that are
    scored, and the logits of the tokens to sample.

    Args:
        batch: row counts that the layers of this rank read.
        chunk: most tokens of one replica in a round of scores; equal on all replicas.
    """

    def __init__(self, batch: DPAttentionBatch, chunk: int) -> None:
        self._batch = batch
        self._chunk = chunk
        self._loads: list[StepLoad] = []

    def begin(self, loads: list[StepLoad]) -> None:
        """Set the loads of all replicas in this step.

        Raises:
            ValueError: the plan is for another number of replicas.
        """
        if len(loads) != self._batch.replicas:
            raise ValueError(f"{len(loads)} loads for a step of {self._batch.replicas} replicas")
        self._loads = loads
        self._batch.tokens.enter([load.tokens for load in loads])
        self._batch.outputs.enter([0 if self.has_scores else load.outputs for load in loads])

    @property
    def has_outputs(self) -> bool:
        """Whether this rank helps to compute logits, for any replica."""
        return self._batch.has_outputs and any(load.outputs for load in self._loads)

    @property
    def has_scores(self) -> bool:
        """Whether this rank helps to compute logits of known tokens, for any replica."""
        return self._batch.has_outputs and any(load.scores for load in self._loads)

    def rounds(self) -> Iterator[slice]:
        """Rounds of logits for scores: the slice of this replica's tokens in each."""
        for first in range(0, max(load.scores for load in self._loads), self._chunk):
            left = [max(0, load.scores - first) for load in self._loads]
            self._batch.outputs.enter([min(count, self._chunk) for count in left])
            yield slice(first, first + self._chunk)
        self._batch.outputs.enter([load.outputs for load in self._loads])
