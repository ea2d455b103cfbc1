"""Log-probabilities of known and sampled tokens.

A prompt token's value is log_softmax of the raw logits. An output token's value comes from the
distribution it is drawn from, before top_k, top_p and min_p: log_softmax of the logits after the
grammar mask, biases and penalties, divided by the temperature (1 if greedy). With
`RunnerConfig.raw_logprobs` it is log_softmax of the raw logits too.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from banyan.messages.plan import SAMPLE, SCORE, RowScores
from banyan.ops.api import Ops
from banyan.ops.host_memory import copy_to
from banyan.runner.batch import Batch
from banyan.runner.slots import SlotTable

EXCLUDED = -9999.0
"""The value of a token that a mask or a bias excludes, as in OpenAI's API."""
CHUNK_ELEMENTS = 1 << 24
"""Most logits that exist at once while scoring a prompt: 64 MiB of fp32."""


@dataclass(frozen=True)
class ScoredPositions:
    """The positions that a step scores, one entry per position, in the order of the rows.

    Attributes:
        row: index into the batch.
        position: of the token that is scored.
        is_sampled: the token is sampled in this step.
        top: most alternatives that any row wants.
        picked: [n, most ids] int64, the ids whose scores a row wants, padded with 0.
    """

    row: np.ndarray
    position: np.ndarray
    is_sampled: np.ndarray
    top: int
    picked: np.ndarray

    def __len__(self) -> int:
        return len(self.row)

    @classmethod
    def of(cls, batch: Batch, table: SlotTable) -> "ScoredPositions":
        rows, positions, sampled = [], [], []
        for i in batch.wanting(SCORE):
            row, end = batch.rows[i], int(batch.ends[i])
            is_sampled = bool(row.want & SAMPLE)
            last = end if is_sampled or end < table.known[row.slot] else end - 1
            span = np.arange(max(row.start + 1, row.score_from), last + 1)
            rows.append(np.full(len(span), i))
            positions.append(span)
            sampled.append((span >= end - row.drafts) & is_sampled)
        if not rows:
            none = np.zeros(0, np.int64)
            return cls(none, none, none.astype(bool), 0, none.reshape(0, 0))
        row_of = np.concatenate(rows)
        joins = {int(i): table.join_of(batch.rows[i].slot) for i in np.unique(row_of)}
        most = max((len(j.score_ids) for j in joins.values()), default=0)
        picked = np.zeros((len(row_of), most), np.int64)
        for i, join in joins.items():
            picked[row_of == i, : len(join.score_ids)] = join.score_ids
        return cls(
            row=row_of,
            position=np.concatenate(positions),
            is_sampled=np.concatenate(sampled),
            top=max((j.score_top for j in joins.values()), default=0),
            picked=picked,
        )


class StepScores:
    """Log-probabilities of the scored positions, on the device until `rows()`."""

    def __init__(
        self,
        builder: ScoredPositions,
        batch: Batch,
        table: SlotTable,
        device: torch.device,
        ops: Ops,
        is_raw: bool = False,
    ) -> None:
        self._builder = builder
        self._batch = batch
        self._ops = ops
        self._device = device
        self._joins = {int(i): table.join_of(batch.rows[i].slot) for i in np.unique(builder.row)}
        params = table.params[batch.slots[builder.row]]
        is_output = (builder.position >= params["prompt_len"]) & (not is_raw)
        self._temperature = np.where(is_output, params["temperature"], 1.0)
        count, most = len(builder), builder.picked.shape[1]
        self._logprobs = torch.zeros(count, device=device)
        self._top_ids = torch.zeros((count, builder.top), dtype=torch.int32, device=device)
        self._top_logprobs = torch.zeros((count, builder.top), device=device)
        self._picked = torch.zeros((count, most), device=device)

    def fill(self, entries: np.ndarray, logits: Tensor, rows: np.ndarray, tokens: Tensor) -> None:
        """Score some of the positions, given by index.

        logits: [rows, vocab] fp32; rows: [n] int64, the row of `logits` before each position;
        tokens: [n] int64, the tokens to score.
        """
        top = min(self._builder.top, logits.shape[1])
        arrays = (rows, self._temperature[entries], self._builder.picked[entries], entries)
        row, temperature, picked, where = (copy_to(x, self._device) for x in arrays)
        scored = self._ops.logprobs(logits, row, temperature, tokens, top, picked)
        self._logprobs[where] = scored[0].clamp(min=EXCLUDED)
        self._top_ids[where, :top] = scored[1]
        self._top_logprobs[where, :top] = scored[2].clamp(min=EXCLUDED)
        self._picked[where] = scored[3].clamp(min=EXCLUDED)

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors that `rows` takes on the host."""
        return [self._logprobs, self._top_ids, self._top_logprobs, self._picked]

    def rows(
        self, values: list[Tensor], without: set[int], cut: Mapping[int, int]
    ) -> list[RowScores]:
        """The scores by row.

        values: `tensors` on the host; without: plan indices to omit; cut: number of last positions
        to omit, by plan index.
        """
        if not len(self._builder):
            return []
        logprobs, top_ids, top_logprobs, picked = (value.numpy() for value in values)
        edges = np.flatnonzero(np.diff(self._builder.row, prepend=-1, append=-1))
        scores = []
        for begin, end in zip(edges[:-1], edges[1:], strict=True):
            row = int(self._builder.row[begin])
            index = int(self._batch.indices[row])
            end -= cut.get(index, 0)
            if index in without or end <= begin:
                continue
            join = self._joins[row]
            top, ids = join.score_top, len(join.score_ids)
            scores.append(
                RowScores(
                    row=index,
                    first=int(self._builder.position[begin]),
                    logprobs=logprobs[begin:end].tobytes(),
                    top_ids=top_ids[begin:end, :top].tobytes(),
                    top_logprobs=top_logprobs[begin:end, :top].tobytes(),
                    picked=picked[begin:end, :ids].tobytes(),
                )
            )
        return scores
