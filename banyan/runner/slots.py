"""SlotTable: the state of each slot, on the host and on the device.

The device holds tokens, lengths, parameters and page tables, so that a step can be prepared before
the host has the tokens of the step before (overlap scheduling). The host holds everything that
follows from plans alone.
"""

from collections.abc import Iterable

import msgspec
import numpy as np
import torch
from torch import Tensor

from banyan.base.ids import SlotId
from banyan.lora.slots import AdapterSlots
from banyan.messages.plan import Join, PageGrant, Row
from banyan.ops.host_memory import copy_to
from banyan.ops.sampling import PARAMS, params_tensor
from banyan.runner.features import SpanTable
from banyan.runner.kvstore import GroupLayout, zeros

_UNKNOWN = -1
_NO_JOIN = "the slot is empty: no request has joined it"


class RowError(Exception):
    """One row, or the request of one slot, cannot run; the others can."""


class SlotTable:
    """State by slot; slot 0 is padding.

    Args:
        max_slots: slots are numbered 1 … max_slots.
        max_length: longest request in tokens.
        vocab_size: token ids lie in [0, vocab_size).
        is_drafting: rows may bring drafts, so plans have only bounds of starts and counts.
        multi_steps: plans may hold several decode steps, so plans have only bounds of starts.
        adapters: LoRA adapters by slot; None = there are none.
    """

    def __init__(
        self,
        max_slots: int,
        max_length: int,
        vocab_size: int,
        groups: tuple[GroupLayout, ...],
        device: torch.device,
        is_drafting: bool = False,
        adapters: AdapterSlots | None = None,
        multi_steps: bool = False,
    ) -> None:
        slots = max_slots + 1
        self._has_multi_step = multi_steps
        self.adapters = adapters
        self.max_slots = max_slots
        self.max_length = max_length
        self._vocab_size = vocab_size
        self._groups = groups
        self._device = device
        # One extra column: with overlap, a row launched after the (unknown) end samples into it.
        self.tokens = zeros((slots, max_length + 1), torch.int32, device)
        self.pages = [
            zeros((slots, group.columns(max_length)), torch.int32, device) for group in groups
        ]
        self.known = [0] * slots
        """Tokens that have a value on the device, tokens of launched steps included."""
        self.drafts: dict[int, list[int]] = {}
        """Slot -> drafts after its last known token."""
        self.parents: dict[int, list[int]] = {}
        """Slot -> parents of the drafts, if they are a tree (base/draft_tree.py)."""
        self._is_drafting = is_drafting
        self._brought = [0] * slots
        """Tokens that joins and `given` brought; later rows start where the slot really ends."""
        self._granted = [[0] * slots for _ in groups]
        """By group and slot: pages in the table."""
        self.lengths = torch.zeros(slots, dtype=torch.int64, device=device)
        """Positions of each slot that launched steps have run."""
        self._reached = [_UNKNOWN] * slots
        """`lengths` according to the plans; a row that starts elsewhere corrects it."""
        self.params = np.zeros(slots, PARAMS)
        self.params["greedy"][0] = True
        self._params = params_tensor(self.params)
        self.device_params = self._params.to(device)
        """[slots, bytes] uint8: `params` on the device; the same memory on a host device."""
        self.spans = SpanTable(slots, device)
        """Places that take features; ModelRunner replaces it when its model takes any."""
        self.processed: dict[int, str] = {}
        """Slot -> the logit processor that its request names."""
        self.edited: set[int] = set()
        """Slots whose requests have logit biases or min_new_tokens."""
        self._joins: dict[int, Join] = {}
        self._refused: dict[int, str] = {}

    def join_of(self, slot: SlotId) -> Join:
        return self._joins[slot]

    def tokens_of(self, slot: int, length: int) -> np.ndarray:
        """The first `length` tokens of a slot, int32, on the host."""
        return self.tokens[slot, :length].cpu().numpy()  # sync: penalties count on the host

    def leave(self, leaves: list[SlotId]) -> None:
        """Clear these slots. Their page tables point to padding until new grants."""
        if not leaves:
            return
        for slot in leaves:
            self._joins.pop(slot, None)
            self._refused.pop(slot, None)
            if slot in self.spans.by_slot:
                self.spans.leave(slot)
            self.processed.pop(slot, None)
            self.edited.discard(slot)
            self._drop_drafts(slot)
            self.known[slot] = self._brought[slot] = 0
            for granted in self._granted:
                granted[slot] = 0
        gone = copy_to(torch.tensor(leaves), self._device)
        for table in self.pages:
            table.index_fill_(0, gone, 0)

    def join(self, joins: list[Join]) -> None:
        """Requests take slots. An invalid one is remembered, and its rows fail with the reason."""
        for join in joins:
            self._refused.pop(join.slot, None)
            try:
                self._take(join)
            except RowError as error:
                self._joins.pop(join.slot, None)
                self._refused[join.slot] = str(error)

    def _take(self, join: Join) -> None:
        tokens = np.frombuffer(join.tokens, np.int32)
        if not 1 <= join.slot <= self.max_slots:
            raise RowError(f"slot {join.slot} is outside 1 … {self.max_slots}")
        if self.adapters is None and join.adapter:
            raise RowError(f"the request wants adapter {join.adapter}; no adapters are loaded")
        if self.adapters is not None and (problem := self.adapters.problem(join.adapter)):
            raise RowError(problem)
        sampling = join.sampling
        for ids in (join.score_ids, sampling.stop_ids, sampling.logit_bias):
            self._check_ids(ids)
        if join.spans:
            tokens = self.spans.join(join, tokens)
        self._write(join.slot, 0, tokens)
        if self.adapters is not None:
            self.adapters.enter(join.slot, join.adapter)
        if sampling.processor:
            self.processed[join.slot] = sampling.processor
        if sampling.logit_bias or sampling.min_new_tokens:
            self.edited.add(join.slot)
        self._joins[join.slot] = join
        self.known[join.slot] = self._brought[join.slot] = len(tokens)
        self._drop_drafts(join.slot)
        self.params[join.slot] = (
            join.prompt_len,
            1.0 if sampling.is_greedy else sampling.temperature,
            sampling.top_k,
            sampling.top_p,
            sampling.min_p,
            sampling.seed & 0xFFFF_FFFF_FFFF_FFFF,
            sampling.min_new_tokens,
            sampling.frequency_penalty,
            sampling.presence_penalty,
            sampling.repetition_penalty,
            sampling.is_greedy,
            bool(sampling.frequency_penalty or sampling.presence_penalty)
            or sampling.repetition_penalty != 1.0,
            bool(sampling.logit_bias),
        )
        self._reached[join.slot] = _UNKNOWN
        if self.device_params is not self._params:
            self.device_params[join.slot] = copy_to(self._params[join.slot], self._device)

    def grant(self, grants: list[PageGrant]) -> None:
        """Enter pages into the tables, one write per group."""
        for index, table in enumerate(self.pages):
            mine = [g for g in grants if g.group == index and g.pages]
            if not mine:
                continue
            counts = [len(g.pages) for g in mine]
            slots = np.repeat([g.slot for g in mine], counts)
            columns = np.concatenate([np.arange(g.first, g.first + len(g.pages)) for g in mine])
            pages = np.concatenate([np.asarray(g.pages, np.int64) for g in mine])
            entries = copy_to(np.stack([slots, columns, pages]), self._device)
            table.index_put_((entries[0], entries[1]), entries[2].to(torch.int32))
            for grant in mine:
                granted = self._granted[index]
                granted[grant.slot] = max(granted[grant.slot], grant.first + len(grant.pages))

    def holds(self, slot: int) -> bool:
        """Whether a valid request has the slot."""
        return slot in self._joins

    def prepare(self, row: Row, samples: bool) -> Row:
        """Take the tokens and drafts that a row brings, and check that the row can run.

        returns: the row with exact start and count, where the plan has bounds.

        Raises:
            RowError: the slot is empty, or a token or a page of the row is missing.
        """
        slot = row.slot
        if slot not in self._joins:
            raise RowError(self._refused.get(slot, f"slot {slot}: {_NO_JOIN}"))
        if row.drafts and not (self._is_drafting or self._has_multi_step):
            raise RowError(f"the row brings {row.drafts} drafts; no drafter is configured")
        if row.count <= row.drafts or row.start < 0:
            raise RowError(
                f"the row covers {row.count} positions from {row.start}, {row.drafts} of drafts"
            )
        if row.given:
            self._write(slot, row.start, np.frombuffer(row.given, np.int32))
            self.known[slot] = self._brought[slot] = row.start + len(row.given) // 4
            self._drop_drafts(slot)
        if self._is_drafting or self._has_multi_step:
            row = self._exact(row)
        known, end = self.known[slot], row.start + row.count
        if end - row.drafts > known:
            raise RowError(f"the row runs to position {end - 1}; tokens are known below {known}")
        if samples and end - row.drafts != known:
            raise RowError(f"the row would sample position {end}, whose token is known already")
        if slot in self.spans.by_slot and (problem := self.spans.problem(row)) is not None:
            raise RowError(problem)
        if row.drafts and self._is_drafting:
            self._write(slot, known, np.array(self.drafts[slot][: row.drafts], np.int32))
        for group, layout in enumerate(self._groups):
            granted = self._granted[group][slot]
            if layout.columns(end) > granted:
                raise RowError(
                    f"the row runs to position {end - 1} and needs {layout.columns(end)} pages "
                    f"of group {group}; it has {granted}"
                )
        return row

    def _drop_drafts(self, slot: int) -> None:
        self.drafts.pop(slot, None)
        self.parents.pop(slot, None)

    def _exact(self, row: Row) -> Row:
        """The row with the slot's real start and drafts."""
        if row.start + row.count - row.drafts <= self._brought[row.slot]:
            return row
        start = self.known[row.slot] - 1
        if start > row.start:
            raise RowError(f"the row starts at {row.start}, the slot's last token is at {start}")
        drafts = row.drafts
        if self._is_drafting:
            drafts = min(drafts, len(self.drafts.get(row.slot, ())))
        count = row.count - row.drafts + drafts
        return msgspec.structs.replace(row, start=start, count=count, drafts=drafts)

    def _write(self, slot: SlotId, first: int, tokens: np.ndarray) -> None:
        if not len(tokens) or first + len(tokens) > self.max_length:
            raise RowError(
                f"{first + len(tokens)} tokens; a request has 1 to {self.max_length}, "
                "prompt and output together"
            )
        self._check_ids((int(tokens.min()), int(tokens.max())))
        self.tokens[slot, first : first + len(tokens)] = copy_to(tokens.copy(), self._device)

    def _check_ids(self, ids: Iterable[int]) -> None:
        for token in ids:
            if not 0 <= token < self._vocab_size:
                raise RowError(f"token id {token} is outside the vocabulary of {self._vocab_size}")

    def moves(self, rows: list[Row]) -> list[tuple[int, int]]:
        """(slot, start) of rows that do not start where the slot's last row ended. Also records the
        ends of these rows."""
        found = []
        for row in rows:
            if self._reached[row.slot] != row.start:
                found.append((row.slot, row.start))
            self._reached[row.slot] = row.start + row.count
        return found

    def grow(self, slots: np.ndarray, count: int = 1) -> None:
        """Each of these slots has `count` more tokens."""
        for slot in slots.tolist():
            self.known[slot] += count

    def enter(self, slots: Tensor, positions: Tensor, tokens: Tensor) -> None:
        """Write sampled tokens. All [n] int64."""
        self.tokens.index_put_((slots, positions), tokens.to(torch.int32))
