"""Sampler: chooses the next token of every output, all in one op. Processors: installed functions
that change the logits of requests that name them.

The sampler gathers the parameters, masks and biases of the rows for that op. A row without a valid
choice fails alone, and so does a row whose processor raises or returns something else than logits.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

import msgspec
import numpy as np
import torch
from torch import Tensor

from banyan.base.ids import SlotId
from banyan.base.log import logger, printable
from banyan.messages.plan import NOT_FINITE, Join
from banyan.messages.sampling_params import LOGIT_PROCESSORS
from banyan.ops.api import Ops
from banyan.ops.host_memory import copy_to
from banyan.ops.sampling import MAX_VOCAB, Addends, Masks, SampleRows
from banyan.ops.tensor_sampling import edited_logits
from banyan.platform.base import Platform
from banyan.runner.slots import SlotTable

log = logger(__name__)

ALL_BANNED = "every token is banned by the grammar, logit_bias and min_new_tokens"
"""Error of a row whose constraints exclude every token."""


@dataclass(frozen=True)
class Sampled:
    """StepOutputs of one sampling.

    Attributes:
        tokens: [rows] int64, on the device; meaningless for failed rows.
        best: [rows] fp32, the largest logit of each row; None on ranks that do not sample.
        failed: index among the sampled rows -> error text.
        edited: logits and parameters that the tokens were chosen from; None on ranks that do not
            sample.
        here: `tokens` and `best` as numpy arrays, if they are in host memory that stays valid until
            the result is read.
    """

    tokens: Tensor
    best: Tensor | None = None
    failed: dict[int, str] = field(default_factory=dict)
    edited: tuple[Tensor, SampleRows] | None = None
    here: tuple[np.ndarray, np.ndarray] | None = None

    def edited_logits(self, logits: Tensor) -> Tensor:
        """Logits after custom processors, penalties, bans, masks and biases.

        logits: the raw logits, which are the result if nothing edits them.
        """
        return logits if self.edited is None else edited_logits(*self.edited)

    def fetched(self, platform: Platform) -> "Sampled":
        """A copy on the host; waits for the device."""
        if self.here is not None:
            return self
        here = [self.tokens] if self.best is None else [self.tokens, self.best]
        found = platform.fetch(here)()
        return Sampled(found[0], None if self.best is None else found[1], self.failed)

    def faults(self, best: Tensor | np.ndarray | None) -> dict[int, str]:
        """Rows without a valid choice, and why. best: `self.best` on the host."""
        if best is None:
            return self.failed
        values = best.tolist()
        if all(map(math.isfinite, values)):
            return self.failed
        bad = {i: _why(value) for i, value in enumerate(values) if not math.isfinite(value)}
        return bad | self.failed


def _why(best: float) -> str:
    """Why a row with this largest logit has no valid choice."""
    if best == -math.inf:
        return ALL_BANNED
    return NOT_FINITE


class _SlotAddends:
    """One request's additions to logits, as arrays: banned tokens and biases."""

    def __init__(self, join: Join) -> None:
        sampling = join.sampling
        self.join = join
        self.stop_ids = np.array(sampling.stop_ids, np.int32)
        self.bans = np.full(len(self.stop_ids), -np.inf, np.float32)
        self.bias_ids = np.fromiter(sampling.logit_bias.keys(), np.int32)
        with np.errstate(over="ignore"):
            self.biases = np.array(list(sampling.logit_bias.values()), np.float64).astype(
                np.float32
            )


def _with_histories(rows: SampleRows, past: Tensor) -> SampleRows:
    """The same rows, each with its own history."""
    each = np.arange(len(past))
    return replace(
        rows,
        params=rows.params[rows.slots],
        slots=torch.from_numpy(each),
        history=past,
        host_params=rows.host_params[rows.host_slots],
        host_slots=each,
    )


class Sampler:
    """Samples tokens with the parameters in the slot table."""

    def __init__(self, table: SlotTable, vocab_size: int, ops: Ops) -> None:
        if vocab_size > MAX_VOCAB:
            raise ValueError(f"{vocab_size} tokens; sampling adds up at most {MAX_VOCAB} weights")
        self._table = table
        self._vocab_size = vocab_size
        self._mask_bytes = -(-vocab_size // 8)
        self._ops = ops
        self._addends_of: dict[int, _SlotAddends] = {}

    def sample(
        self,
        logits: Tensor,
        slots: np.ndarray,
        positions: np.ndarray,
        masks: Mapping[int, bytes],
        where: tuple[Tensor, Tensor] | None = None,
        past: Tensor | None = None,
    ) -> Sampled:
        """Choose one token per row and enter it into the slot table.

        logits: [rows, vocab] fp32, not changed; slots, positions: [rows] int64, where the tokens
        are written; masks: grammar masks by row; where: slots and positions on the device, if they
        are there already; past: [rows, longest] int32 on the host, the tokens before each row, for
        draft trees; None = the slot table has them.
        """
        table, device = self._table, logits.device
        addends = self._addends(slots, positions) if table.edited else None
        kept, failed = self._masks(len(slots), masks) if masks else (None, {})
        if where is None:
            where = copy_to(slots, device), copy_to(positions, device)
        rows = SampleRows(
            params=table.device_params,
            positions=where[1],
            slots=where[0],
            history=table.tokens,
            addends=None if addends is None else addends.to(device),
            masks=None if kept is None else kept.to(device),
            host_params=table.params,
            host_slots=slots,
            longest=int(positions.max()),
        )
        if past is not None:
            rows = _with_histories(rows, past)
        tokens, best = self._ops.sample(logits, rows)
        if past is not None:
            table.enter(*where, tokens)
        return Sampled(tokens, best, failed, (logits, rows))

    def _masks(self, count: int, masks: Mapping[int, bytes]) -> tuple[Masks | None, dict[int, str]]:
        """Valid grammar masks, and why rows failed. An empty mask allows everything."""
        failed: dict[int, str] = {}
        good: dict[int, bytes] = {}
        for i, mask in masks.items():
            if len(mask) >= self._mask_bytes:
                good[i] = mask
            elif mask:
                failed[i] = (
                    f"the grammar mask has {len(mask)} bytes; "
                    f"{self._vocab_size} tokens need {self._mask_bytes}"
                )
        if not good:
            return None, failed
        of_row = np.full(count, -1, np.int32)
        of_row[list(good)] = np.arange(len(good))
        bits = np.empty((len(good), self._mask_bytes), np.uint8)
        for line, mask in zip(bits, good.values(), strict=True):
            line[:] = np.frombuffer(mask, np.uint8, self._mask_bytes)
        return Masks.of(of_row, bits), failed

    def _addends(self, slots: np.ndarray, positions: np.ndarray) -> Addends | None:
        """Biases, and bans of stop tokens for rows below min_new_tokens."""
        params = self._table.params[slots]
        is_short = positions - params["prompt_len"] < params["min_new"]
        touched = np.flatnonzero(is_short | params["biased"])
        if not len(touched):
            return None
        counts = np.zeros(len(slots), np.int64)
        ids, values = [], []
        for i in touched:
            own = self._of_slot(SlotId(int(slots[i])))
            if is_short[i]:
                ids.append(own.stop_ids)
                values.append(own.bans)
            ids.append(own.bias_ids)
            values.append(own.biases)
            counts[i] = is_short[i] * len(own.stop_ids) + len(own.bias_ids)
        offsets = np.concatenate([[0], np.cumsum(counts)])
        return Addends.of(offsets, np.concatenate(ids), np.concatenate(values))

    def _of_slot(self, slot: SlotId) -> _SlotAddends:
        join = self._table.join_of(slot)
        own = self._addends_of.get(slot)
        if own is None or own.join is not join:
            own = self._addends_of[slot] = _SlotAddends(join)
        return own


@dataclass(frozen=True)
class LogitContext:
    """Input of a processor.

    Attributes:
        tokens: [n] int32, prompt and output so far; placeholders if the prompt is embeddings.
        prompt_len: how many of them are the prompt.
        params: the request's `custom_params`.
        seed, temperature: of the request.
    """

    tokens: np.ndarray
    prompt_len: int
    params: Mapping[str, object]
    seed: int = 0
    temperature: float = 1.0


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
        numbers = sampling.seed, sampling.temperature
        context = LogitContext(tokens, join.prompt_len, params, *numbers)
        result = self._loaded[sampling.processor](logits, context)
        if not isinstance(result, Tensor) or result.shape != logits.shape:
            shape = list(result.shape) if isinstance(result, Tensor) else type(result).__name__
            raise ValueError(f"it must return logits of shape {list(logits.shape)}, not {shape}")
        if torch.isnan(result).any():  # sync: the error must name its row
            raise ValueError("it returned NaN")
        return result


def transcript_logits(logits: Tensor, context: LogitContext) -> Tensor:
    """The rules of Whisper's transcripts (arXiv 2212.04356, section 4.5).

    Times come in pairs, do not go back, and come when they are together more likely than any
    text. Of `context.params`, all optional: `only` (ids), `suppress`, `suppress_first` (ids),
    `first_time`, `no_times`, `end`, `last_first` (an id each).
    """
    params = cast(Mapping[str, Any], context.params)
    said = context.tokens[context.prompt_len :]
    if only := params.get("only"):
        kept = torch.full_like(logits, -math.inf)
        kept[only] = logits[only]
        return kept
    logits[params.get("suppress", [])] = -math.inf
    if not len(said):
        logits[params.get("suppress_first", [])] = -math.inf
    first = params.get("first_time")
    if first is None:
        return logits
    logits[params["no_times"]] = -math.inf
    is_last = len(said) >= 1 and said[-1] >= first
    is_one_before = len(said) < 2 or said[-2] >= first
    if is_last and is_one_before:
        logits[first:] = -math.inf
    elif is_last:
        logits[: params["end"]] = -math.inf
    times = said[said >= first]
    if len(times):
        logits[first : int(times[-1]) + (not (is_last and not is_one_before))] = -math.inf
    if not len(said):
        logits[:first] = -math.inf
        logits[params["last_first"] + 1 :] = -math.inf
    if torch.logsumexp(logits[first:], 0) > logits[:first].max():
        logits[:first] = -math.inf
    return logits
