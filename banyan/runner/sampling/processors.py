"""Logit processors: installed functions that change the logits of requests that name them.

A processor that raises or returns something else than logits fails only its own row.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import cast

import msgspec
import numpy as np
import torch
from torch import Tensor

from banyan.base.log import logger, printable
from banyan.messages.logit_processors import LOGIT_PROCESSORS
from banyan.messages.plan import Join
from banyan.runner.slots import SlotTable

log = logger(__name__)


@dataclass(frozen=True)
class LogitContext:
    """Input of a processor.

    Attributes:
        tokens: [n] int32, prompt and output so far; placeholders if the prompt is embeddings.
        prompt_len: how many of them are the prompt.
        params: the request's `custom_params`.
    """

    tokens: np.ndarray
    prompt_len: int
    params: Mapping[str, object]


LogitProcessor = Callable[[Tensor, LogitContext], Tensor]
"""(logits [vocab] fp32, a copy; context) -> logits [vocab]. It must be a pure function of these
two, because a request may be computed again from the middle."""


class Processors:
    """Applies the processors that requests name."""

    def __init__(self, table: SlotTable) -> None:
        self._table = table
        self._loaded: dict[str, LogitProcessor] = {}

    def apply(
        self,
        logits: Tensor,
        slots: np.ndarray,
        positions: np.ndarray,
        past: Tensor | None = None,
    ) -> tuple[Tensor, dict[int, str]]:
        """Logits to sample from, and why rows failed, by index.

        logits: [rows, vocab] fp32, not changed; slots, positions: where the tokens are written;
        past: as for `Sampler.sample`.
        """
        changed, failed = logits, dict[int, str]()
        for i, (slot, position) in enumerate(zip(slots.tolist(), positions.tolist(), strict=True)):
            if slot not in self._table.processed:
                continue
            join = self._table.join_of(slot)
            if changed is logits:
                changed = logits.clone()
            try:
                known = self._table.tokens_of(slot, position)
                tokens = known if past is None else past[i, :position].numpy()
                changed[i] = self._processed(logits[i].clone(), join, tokens)
            except Exception as error:  # an exception of installed code fails only its own row
                name = join.sampling.processor
                log.exception("logit processor %s failed", name)
                why = printable(f"{type(error).__name__}: {error}", 200)
                failed[i] = f"logit processor {name!r} failed: {why}"
        return changed, failed

    def _processed(self, logits: Tensor, join: Join, tokens: np.ndarray) -> Tensor:
        sampling = join.sampling
        if sampling.processor not in self._loaded:
            found = LOGIT_PROCESSORS.load(sampling.processor)
            self._loaded[sampling.processor] = cast(LogitProcessor, found)
        params = msgspec.json.decode(sampling.processor_params or b"{}", type=dict)
        context = LogitContext(tokens, join.prompt_len, params)
        result = self._loaded[sampling.processor](logits, context)
        if not isinstance(result, Tensor) or result.shape != logits.shape:
            shape = list(result.shape) if isinstance(result, Tensor) else type(result).__name__
            raise ValueError(f"it must return logits of shape {list(logits.shape)}, not {shape}")
        if torch.isnan(result).any():  # sync: the error must name its row
            raise ValueError("it returned NaN")
        return result
