"""PromptGraphs: steps with prompts as graphs of a few numbers of tokens.

A row of padding fills a step up to the next size; its slot is 0, its pages are page 0. Rows that
are left have no tokens. So all launches of a size are the same, whatever rows the step has, and the
host launches one graph in place of every op of every layer. Inputs are entered before the graph
runs, as for an eager step; logits are computed after it.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from banyan.base.log import logger
from banyan.messages.plan import HIDDEN, SCORE
from banyan.platform.base import Graph
from banyan.runner.batch import Batch
from banyan.runner.captured_forward import CaptureSizes
from banyan.runner.forward import ForwardContext
from banyan.runner.inputs import StepTensors, takes_features

log = logger(__name__)


class PromptGraphs:
    """
    Args:
        step: inputs with room for the largest size.

    Attributes:
        step: the inputs of the steps that it runs.
    """

    def __init__(self, context: ForwardContext, step: StepTensors, sizes: CaptureSizes) -> None:
        self.step = step
        self._table, self._model = context.table, context.model
        self._attention, self._prunes = context.attention, context.prunes_outputs
        self._sizes = [size for size in sizes.prompts if 1 < size <= step.max_tokens]
        self._hidden = torch.empty(0)
        self._graphs: dict[int, Graph] = {}
        with torch.inference_mode(), sizes.capturing():
            for size in reversed(self._sizes):  # the others fit into the memory of the largest
                self._graphs[size] = context.platform.capture(self._work(size))
        log.info("captured prompt steps of %s tokens", ", ".join(map(str, self._sizes)))

    def _rows(self, size: int) -> int:
        """Rows of a graph. Fewer than tokens: kernels take as many of both for a decode step."""
        return min(self.step.max_rows, size - 1)

    def _work(self, size: int) -> Callable[[], None]:
        rows = self._rows(size)

        def work() -> None:
            inputs = self.step.sized(size, rows, self._attention, self._prunes)
            hidden = self._model.forward(inputs)
            if not len(self._hidden):
                most = min(self.step.max_outputs, size) if self._prunes else size
                self._hidden = hidden.new_zeros(most, hidden.shape[1])
            self._hidden[: len(hidden)] = hidden

        return work

    def run(self, batch: Batch) -> Tensor | None:
        """Hidden states of a batch's outputs if outputs are pruned, else of its tokens, in the
        first rows of the result; None = no graph fits, and nothing was done."""
        tokens, rows = int(batch.offsets[-1]), len(batch.slots)
        size = next((size for size in self._sizes if size >= tokens), 0)
        padding = size - tokens
        if not (tokens and size) or padding > self._table.max_length:
            return None
        if rows + bool(padding) > self._rows(size) or len(batch.last) > self.step.max_outputs:
            return None
        if self._prunes and (batch.wanted & (HIDDEN | SCORE) or len(batch.last) > size):
            return None
        if batch.branches or takes_features(batch, self._table):
            return None
        self._fill(batch.padded(padding) if padding else batch, self._rows(size))
        self._graphs[size].replay()
        return self._hidden

    def _fill(self, batch: Batch, rows: int) -> None:
        """Enter a batch; the graph's rows after it have no tokens."""
        step, mine = self.step, len(batch.slots)
        step.fill(batch)
        step.row_starts[mine + 1 : rows + 1] = int(batch.offsets[-1])
        step.context_lengths[mine:rows] = 0
        step.chosen[len(batch.last) :] = 0
        self._table.lengths[:1].zero_()  # padding stays at position 0
