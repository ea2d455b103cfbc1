"""A step's rows through the model: hidden states of its tokens, then logits where they are wanted.

`EagerForward` calls the model. `RecordedForward` has recorded it once, with inputs that stay in
place, and replays it for any batch without Python in between. Both give the same numbers.
"""

from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from banyan.layers.step import StepInputs
from banyan.messages.plan import SCORE
from banyan.models.base import Model
from banyan.ops.api import Ops, OpTime, Recorder
from banyan.ops.sampling import SampleRows
from banyan.runner.attention.base import AttentionBackend, GroupView, StepGeometry
from banyan.runner.inputs import Batch, build_inputs, has_embedded
from banyan.runner.kvstore import GroupLayout
from banyan.runner.sampling.sampler import Sampled
from banyan.runner.slots import SlotTable

_NOWHERE = 0
"""The slot of tokens that nobody wants: padding."""


class Forward(Protocol):
    """One step at a time: `run`, then tokens, logits and hidden states as often as needed."""

    def run(self, batch: Batch) -> None:
        """Compute the hidden states of a batch of at least one row."""
        ...

    def next_tokens(self) -> Sampled | None:
        """What the step has sampled itself, good until the next call; None if it has not."""
        ...

    def next_logits(self, batch: Batch) -> Tensor:
        """Logits behind the last tokens of the rows that sample, of the batch that ran.

        returns: [rows, vocab] fp32, good until the next call.
        """
        ...

    def logits(self, tokens: np.ndarray) -> Tensor:
        """Logits of some of the step's tokens.

        tokens: [n], indices along the step's tokens.
        returns: [n, vocab] fp32, good until the next call.
        """
        ...

    def hidden(self, tokens: np.ndarray) -> Tensor:
        """Hidden states of some of the step's tokens, given as for `logits`; [n, hidden]."""
        ...


class EagerForward:
    """Calls the model anew at every step; serves every device and every model."""

    def __init__(
        self,
        model: Model,
        table: SlotTable,
        groups: tuple[GroupLayout, ...],
        attention: AttentionBackend,
        device: torch.device,
    ) -> None:
        self._model = model
        self._table = table
        self.groups = groups
        self._attention = attention
        self._device = device
        self._hidden = torch.empty(0)

    def run(self, batch: Batch) -> None:
        inputs = build_inputs(batch, self._table, self.groups, self._attention, self._device)
        self._hidden = self._model.forward(inputs)  # [tokens, hidden]

    def next_tokens(self) -> None:
        return None

    def next_logits(self, batch: Batch) -> Tensor:
        return self.logits(batch.last)

    def logits(self, tokens: np.ndarray) -> Tensor:
        return self._model.logits(self.hidden(tokens))

    def hidden(self, tokens: np.ndarray) -> Tensor:
        return self._hidden[torch.from_numpy(tokens).to(self._device)]


class RecordedForward:
    """Replays the model on the host.

    Batches of more than `max_tokens` tokens or `max_rows` rows go to `eager`, and so do those with
    prompts of embeddings: what was recorded reads token ids.

    Args:
        max_tokens: tokens of the largest step that is recorded.
        max_rows: rows of the largest step, and most logits computed at once.

    Raises:
        NotRecordable: the model does something that is not a compiled op.
    """

    def __init__(
        self,
        eager: EagerForward,
        model: Model,
        ops: Ops,
        recorder: Recorder,
        table: SlotTable,
        attention: AttentionBackend,
        max_tokens: int,
        max_rows: int,
    ) -> None:
        self.watch: Callable[[list[OpTime]], None] | None = None
        """Told what the stages of each step took; None = they are not timed."""
        self._eager = eager
        self._is_eager = False
        self._last = (0, 0)
        """Tokens and rows of the last step."""
        self._groups = eager.groups
        self._table = table
        self._max_rows = max_rows
        self._max_tokens = max(max_tokens, max_rows + 1)  # a recording tells sizes apart
        self._tokens = np.zeros(self._max_tokens, np.int64)
        self._positions = np.zeros(self._max_tokens, np.int64)
        self._row_starts = np.zeros(max_rows + 1, np.int32)
        self._context_lengths = np.zeros(max_rows, np.int32)
        self._chosen = np.zeros(max_rows, np.int64)
        self._to_slots = np.zeros(max_rows, np.int64)
        self._to_positions = np.zeros(max_rows, np.int64)
        self._page_tables = [np.zeros((max_rows, p.shape[1]), np.int32) for p in table.pages]
        self._locations = [np.zeros(self._max_tokens, np.int64) for _ in eager.groups]
        self._known_tokens = table.tokens.numpy()
        self._known_pages = [pages.numpy() for pages in table.pages]
        views = [
            GroupView(torch.from_numpy(pages), torch.from_numpy(locations))
            for pages, locations in zip(self._page_tables, self._locations, strict=True)
        ]
        starts, contexts = map(torch.from_numpy, (self._row_starts, self._context_lengths))
        inputs = StepInputs(
            tokens=torch.from_numpy(self._tokens),
            positions=torch.from_numpy(self._positions),
            attention=attention.bind(StepGeometry(starts, contexts, tuple(views))),
        )
        chosen = torch.from_numpy(self._chosen)
        sampling = SampleRows(table.params, self._to_positions, self._to_slots, table.tokens)
        self._has_logits = model.card.pooling is None
        self._num_ready = 0
        """Rows of the result that hold the logits of the last step."""
        self._is_sampled = False
        # What outlives its use in the recording is kept, so that its memory is not used again.
        self._hidden = self._sampled = self._best = torch.empty(0)

        def whole() -> Tensor:
            self._hidden = model.forward(inputs)
            if not self._has_logits:
                return self._hidden
            logits = model.logits(ops.select_rows(self._hidden, chosen))
            self._sampled, self._best = ops.sample(logits, sampling)
            return logits

        self._step = recorder.record(whole, self._max_tokens, max_rows)

    def run(self, batch: Batch) -> None:
        num_rows, num_tokens = len(batch.rows), int(batch.offsets[-1])
        self._is_eager = num_tokens > self._max_tokens or num_rows > self._max_rows
        if self._table.embeds:
            self._is_eager = self._is_eager or has_embedded(batch, self._table)
        if self._is_eager:
            self._eager.run(batch)
            return
        if num_tokens == num_rows:
            slot_of, positions = batch.slots, batch.starts
        else:
            slot_of = np.repeat(batch.slots, batch.counts)
            first = np.repeat(batch.starts - batch.offsets[:-1], batch.counts)
            positions = np.arange(num_tokens) + first
        self._tokens[:num_tokens] = self._known_tokens[slot_of, positions]
        self._positions[:num_tokens] = positions
        self._row_starts[: num_rows + 1] = batch.offsets
        self._context_lengths[:num_rows] = batch.starts
        longest = max(batch.ends.tolist())
        for index, layout in enumerate(self._groups):
            known, width = self._known_pages[index], layout.columns(longest)
            self._page_tables[index][:num_rows, :width] = known[batch.slots, :width]
            pages = known[slot_of, layout.column(positions)].astype(np.int64)
            self._locations[index][:num_tokens] = layout.locate(pages, positions)
        # Logits of a prompt come first in the same memory, if there are any.
        count = self._num_ready = 0 if batch.wanted & SCORE else len(batch.last)
        self._is_sampled = bool(count) and self._is_sampled_plainly(batch)
        self._chosen[:count] = batch.last[:count]
        self._to_slots[:count] = batch.to_slots[:count] if self._is_sampled else _NOWHERE
        self._to_positions[:count] = batch.to_positions[:count]
        if self.watch is None:
            self._step.run(num_tokens, num_rows, count)
        else:
            self.watch(self._step.times(num_tokens, num_rows, count))
        self._last = (num_tokens, num_rows)

    def _is_sampled_plainly(self, batch: Batch) -> bool:
        """Do the logits and the parameters alone decide on the tokens?"""
        if self._table.edited or self._table.processed:
            return False
        return not any(row.masked for row in batch.rows)

    def next_tokens(self) -> Sampled | None:
        if self._is_eager or not self._is_sampled:
            return None
        return Sampled(self._sampled[: self._num_ready], self._best[: self._num_ready])

    def next_logits(self, batch: Batch) -> Tensor:
        if self._is_eager or not self._num_ready:
            return self.logits(batch.last)
        return self._step.result[: self._num_ready]

    def logits(self, tokens: np.ndarray) -> Tensor:
        if self._is_eager:
            return self._eager.logits(tokens)
        if len(tokens) <= self._max_rows:
            return self._some_logits(tokens)
        parts = range(0, len(tokens), self._max_rows)
        return torch.cat(
            [self._some_logits(tokens[at : at + self._max_rows]).clone() for at in parts]
        )

    def hidden(self, tokens: np.ndarray) -> Tensor:
        if self._is_eager:
            return self._eager.hidden(tokens)
        return self._hidden[torch.from_numpy(tokens)]

    def op_times(self) -> list[OpTime]:
        """What the stages of the last step took, run once more."""
        tokens, rows = self._last
        return self._step.times(tokens, rows, rows if self._has_logits else 0)

    def _some_logits(self, tokens: np.ndarray) -> Tensor:
        assert self._has_logits, "a model for vectors has no logits"
        count = len(tokens)
        self._chosen[:count] = tokens
        self._to_slots[:count] = _NOWHERE
        self._step.run(0, 0, count)  # of the hidden states that are there
        return self._step.result[:count]
