"""StepTensors: the input tensors of one step, made from a plan's rows and the slot table.

One pass over the rows, and one copy to the device.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from banyan.layers.step_inputs import AuxHiddenStates, FeatureRows, OutputTokens, StepInputs
from banyan.messages.plan import SAMPLE
from banyan.ops.host_memory import copy_to
from banyan.ops.lora import AdapterTokens
from banyan.ops.state_api import StateRows
from banyan.platform.base import Platform
from banyan.runner.attention import AttentionBackend, GroupView, StepGeometry
from banyan.runner.batch import Batch, WholeStep
from banyan.runner.kvstore import KVStore
from banyan.runner.slots import SlotTable


@dataclass(frozen=True)
class BoundStates:
    """Satisfies `layers.step_inputs.StepStates`: finds the states of a step's rows.

    A request has one page in a group of states, the first entry of its page table.
    """

    store: KVStore
    step: StepGeometry

    def __call__(self, layer: int) -> tuple[Mapping[str, Tensor], StateRows]:
        view = self.step.groups[self.store.group_of(layer)]
        pages = view.page_tables[:, 0]
        lengths = (self.step.row_starts, self.step.context_lengths)
        rows = StateRows(pages, *lengths, self.step.rollback_checkpoints)
        return self.store.tensors(layer), rows


_FEW = 4
"""Up to so many rows, plain Python is faster than numpy: reading a step's weights evicts numpy's
code from the CPU caches, so each kind of numpy operation then costs about ten microseconds."""


@dataclass(frozen=True)
class StepSizes:
    """
    Attributes:
        max_tokens, max_rows, max_outputs: of the largest step; a row has an output for each
            position that is sampled.
        carried: width of the extra input of each token (hidden states); 0 = none.
        dtype: of that input.
        aux_hidden_layers: layers whose inputs are kept.
        shares: context parallel shares of a step; this rank computes one of them.
        branching: longest path of a draft tree; 0 = drafts are chains.
        has_adapters: the model that reads the inputs may have LoRA adapters.
        takes_features: that model may take features in place of embeddings.
        has_axes: its positions have axes (layers/rotary.py).
        sees_ahead: tokens of a span may see later ones.
    """

    max_tokens: int
    max_rows: int
    max_outputs: int
    carried: int = 0
    dtype: torch.dtype = torch.float32
    aux_hidden_layers: tuple[int, ...] = ()
    shares: int = 1
    branching: int = 0
    has_adapters: bool = True
    takes_features: bool = False
    has_axes: bool = False
    sees_ahead: bool = False


class StepTensors:
    """The inputs of a step in memory that stays in place, so that recorded and captured steps can
    read it too.

    On host devices numpy fills it. On other devices one copy brings slots and counts; positions
    come from the lengths on the device, and tokens and page tables are gathered there, because the
    host does not yet have the tokens of the step before. Both ways give the same numbers.
    """

    def __init__(
        self,
        table: SlotTable,
        store: KVStore,
        platform: Platform,
        device: torch.device,
        sizes: StepSizes,
    ) -> None:
        max_tokens, max_rows, max_outputs = sizes.max_tokens, sizes.max_rows, sizes.max_outputs

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        def lengths(size: int) -> Tensor:
            where = torch.device("cpu") if self._lengths_on_host else device
            return torch.zeros(size, dtype=torch.int32, device=where)

        self._table = table
        self._store = store
        self._groups = store.groups
        self._platform = platform
        self._device = device
        self._lengths_on_host = platform.traits.lengths_on_host
        self.max_tokens, self.max_rows = max_tokens, max_rows
        self.max_outputs = max_outputs
        self.tokens, self.positions = zeros(max_tokens), zeros(max_tokens)
        self.slots = zeros(max_rows)
        self.row_starts, self.context_lengths = lengths(max_rows + 1), lengths(max_rows)
        self.page_tables = [zeros(max_rows, p.shape[1], dtype=torch.int32) for p in table.pages]
        self.locations = [zeros(max_tokens * sizes.shares) for _ in store.groups]
        self.chosen = zeros(max_outputs)
        self.to_slots, self.to_positions = zeros(max_outputs), zeros(max_outputs)
        self.carried = None
        if sizes.carried:
            self.carried = zeros(max_tokens, sizes.carried, dtype=sizes.dtype)
        self._aux_hidden_layers = sizes.aux_hidden_layers
        self.paths = None
        if sizes.branching:
            where = torch.device("cpu") if self._lengths_on_host else device
            shape = (max_tokens, 2 + sizes.branching)
            self.paths = torch.zeros(shape, dtype=torch.int32, device=where)
        self.rollback_checkpoints = (
            zeros(max_rows, 2, dtype=torch.int32) if store.rollback_checkpoints else None
        )
        slots = table.adapters if sizes.has_adapters else None
        self._adapters = None if slots is None else slots.new_step(max_tokens, max_outputs)
        features = table.spans.features if sizes.takes_features else None
        self.feature_rows: FeatureRows | None = None
        self._has_features = False
        """The last batch took features."""
        if features is not None:
            width = features.form.width
            rows = torch.empty(max_tokens, features.form.whole, dtype=sizes.dtype, device=device)
            where = torch.full((max_tokens,), -1, dtype=torch.int32, device=device)
            self.feature_rows = FeatureRows(where, rows, width)
        self.ends = None
        self._sees_ahead = False
        """Tokens of the last batch saw later ones."""
        if sizes.sees_ahead:
            where = torch.device("cpu") if self._lengths_on_host else device
            self.ends = torch.zeros(max_tokens, dtype=torch.int32, device=where)
        self.shifts = None
        if sizes.has_axes and table.spans.later is not None:
            self.shifts = zeros(max_tokens, table.spans.later.shape[1], dtype=torch.int32)
        self._fill = self._gather
        if platform.traits.is_host:
            self._host = _HostViews(self, table)
            self._few = _FewViews(self._host)
            self._fill = self._fill_on_host
        self._is_plain = (
            self._adapters is None
            and self.paths is None
            and self.rollback_checkpoints is None
            and self.shifts is None
        )

    def holds(self, batch: Batch) -> bool:
        """Whether the batch fits; the same on all ranks."""
        tokens, rows = batch.largest
        return (
            tokens <= self.max_tokens
            and rows <= self.max_rows
            and len(batch.last) <= self.max_outputs
        )

    def fill(self, batch: Batch) -> None:
        """Enter a batch. With DP attention a batch without rows still runs the collectives."""
        self._fill(batch)
        self.carry(batch)
        if self.feature_rows is not None:
            self._take_features(batch, self.feature_rows)
        if self.ends is not None:
            self._enter_ends(batch, self.ends)

    def _take_features(self, batch: Batch, given: FeatureRows) -> None:
        """Bring the features of the batch's places to where the step reads them."""
        taken: list[tuple[int, Tensor]] = []
        if self._table.spans.by_slot:
            spans = self._table.spans
            taken = spans.taken(batch.slots, batch.starts, batch.ends, batch.offsets)
        if not taken and not self._has_features:
            return
        where = np.full(len(given.where), -1, np.int32)
        for first, rows in taken:
            last = first + len(rows)
            given.rows[first:last] = rows
            where[first:last] = np.arange(first, last)
        given.where.copy_(torch.from_numpy(where))
        self._has_features = bool(taken)

    def _enter_ends(self, batch: Batch, ends: Tensor) -> None:
        """Enter the `ends` of `paged_attention`."""
        lengths = (batch.starts, batch.ends, batch.offsets)
        found = self._table.spans.mutual(batch.slots, *lengths)
        if not found and not self._sees_ahead:
            return
        values = np.zeros(len(ends), np.int32)
        for first, last, end in found:
            values[first:last] = end
        ends.copy_(torch.from_numpy(values))
        self._sees_ahead = bool(found)

    def carry(self, batch: Batch, rows: int = 0) -> None:
        """Enter the extra inputs of a batch's tokens. rows: of a graph that it is padded to."""
        if self.rollback_checkpoints is not None and not self._platform.traits.is_host:
            values = np.zeros((max(rows, len(batch.slots)), 2), np.int32)
            first = self._store.first_rollback_checkpoint
            values[: len(batch.slots)] = batch.rollback_checkpoints + (first, 0)
            self.rollback_checkpoints[: len(values)] = copy_to(values, self._device)
        if batch.carried is not None and self.carried is not None:
            self.carried[: len(batch.carried)] = batch.carried

    def whole(self, attention: AttentionBackend, prunes: bool = False) -> StepInputs:
        """Inputs of the full size. prunes: keep only output tokens (`StepInputs.output_tokens`)."""
        if self._adapters is not None and self._table.adapters is not None:
            self._table.adapters.use(self._adapters)
            self._table.adapters.use_outputs(self._adapters.outputs)
        views = map(GroupView, self.page_tables, self.locations)
        geometry = StepGeometry(
            self.row_starts,
            self.context_lengths,
            tuple(views),
            paths=self.paths,
            ends=self.ends,
            rollback_checkpoints=self.rollback_checkpoints,
        )
        return StepInputs(
            tokens=self.tokens,
            positions=self.positions,
            attention=attention.bind(geometry),
            states=BoundStates(self._store, geometry),
            feature_rows=self.feature_rows,
            shifts=self.shifts,
            previous_states=self.carried,
            aux_hidden_states=self._new_aux_hidden_states(),
            output_tokens=OutputTokens(self.chosen) if prunes else None,
        )

    def part(self, batch: Batch, attention: AttentionBackend, prunes: bool = False) -> StepInputs:
        """The inputs of the batch that was entered. prunes: as for `whole`."""
        rows, tokens = len(batch.slots), int(batch.offsets[-1])
        longest = max(batch.ends.tolist(), default=0)
        views = tuple(
            GroupView(pages[:rows, : layout.columns(longest)], locations[: batch.written])
            for pages, locations, layout in zip(
                self.page_tables, self.locations, self._groups, strict=True
            )
        )
        # A host's kernels compute recorded steps too, which always have paths.
        has_paths = batch.branches or self._platform.traits.is_host
        paths = self.paths[:tokens] if self.paths is not None and has_paths else None
        rollback_checkpoints = (
            None if self.rollback_checkpoints is None else self.rollback_checkpoints[:rows]
        )
        geometry = StepGeometry(
            self.row_starts[: rows + 1],
            self.context_lengths[:rows],
            views,
            paths=paths,
            ends=self.ends[:tokens] if self.ends is not None and self._sees_ahead else None,
            rollback_checkpoints=rollback_checkpoints,
        )
        return StepInputs(
            tokens=self.tokens[:tokens],
            positions=self.positions[:tokens],
            attention=attention.bind(geometry),
            states=BoundStates(self._store, geometry),
            feature_rows=self._feature_rows_of(tokens),
            cross=self._table.spans.cross_rows(batch.slots, batch.offsets),
            shifts=None if self.shifts is None else self.shifts[:tokens],
            previous_states=None if self.carried is None else self.carried[:tokens],
            aux_hidden_states=self._new_aux_hidden_states(),
            output_tokens=self._output_tokens_of(batch) if prunes else None,
        )

    def sized(
        self, tokens: int, rows: int, attention: AttentionBackend, prunes: bool
    ) -> StepInputs:
        """Inputs of a size, for a graph. prunes: as for `whole`."""
        if self._adapters is not None and self._table.adapters is not None:
            self._table.adapters.use(self._adapters)
        views = tuple(
            GroupView(pages[:rows], locations[:tokens])
            for pages, locations in zip(self.page_tables, self.locations, strict=True)
        )
        lengths = (self.row_starts[: rows + 1], self.context_lengths[:rows])
        kept = self.rollback_checkpoints
        kept = None if kept is None else kept[:rows]
        geometry = StepGeometry(*lengths, views, rollback_checkpoints=kept)
        outputs = OutputTokens(self.chosen[:tokens]) if prunes else None
        return StepInputs(
            tokens=self.tokens[:tokens],
            positions=self.positions[:tokens],
            attention=attention.bind(geometry),
            states=BoundStates(self._store, geometry),
            shifts=None if self.shifts is None else self.shifts[:tokens],
            output_tokens=outputs,
        )

    def _feature_rows_of(self, tokens: int) -> FeatureRows | None:
        given = self.feature_rows
        if given is None or not self._has_features:
            return None
        return replace(given, where=given.where[:tokens])

    def _output_tokens_of(self, batch: Batch) -> OutputTokens:
        """The output tokens. Without outputs the first token: some devices cannot launch work on
        zero rows."""
        count = len(batch.last)
        return OutputTokens(self.chosen[:count] if count else torch.zeros_like(self.chosen[:1]))

    def _new_aux_hidden_states(self) -> AuxHiddenStates | None:
        return AuxHiddenStates(self._aux_hidden_layers) if self._aux_hidden_layers else None

    def choose(self, tokens: np.ndarray) -> None:
        """Prepare the adapters' inputs for logits of these tokens.

        tokens: [n], indices along the step's tokens; in eager steps they may be more than
            `max_outputs`.
        """
        adapters = self._table.adapters
        if adapters is not None and self._adapters is not None and adapters.has_outputs:
            is_more = len(tokens) > self.max_outputs
            outputs = AdapterTokens(len(tokens)) if is_more else self._adapters.outputs
            adapters.fill_outputs(outputs, tokens)

    def choose_of(self, batch: Batch) -> None:
        """Enter the outputs of a batch that was entered before, perhaps not as the last one
        (pipeline parallelism). It has no drafts."""
        count = len(batch.last)
        if self._adapters is not None and self._table.adapters is not None:
            self._table.adapters.select_step(np.repeat(batch.slots, batch.counts))
        self.choose(batch.last)
        self.chosen[:count] = copy_to(batch.last, self._device)
        self.to_slots[:count] = copy_to(batch.to_slots, self._device)
        self.to_positions[:count] = copy_to(batch.to_positions, self._device)

    def targets(self, count: int) -> tuple[Tensor, Tensor]:
        """Slots and positions that the first `count` sampled tokens are written to."""
        return self.to_slots[:count], self.to_positions[:count]

    def _fill_on_host(self, batch: Batch) -> None:
        host = self._host
        num_rows, num_tokens = len(batch.slots), int(batch.offsets[-1])
        if num_tokens == num_rows <= _FEW and self._is_plain and batch.whole_step is None:
            self._fill_few(batch)
            return
        # On the host a step ends before the next is prepared, so the plan's starts are exact.
        if num_tokens == num_rows:
            slot_of, positions = batch.slots, batch.starts
        else:
            slot_of = np.repeat(batch.slots, batch.counts)
            positions = batch.places
        if self._adapters is not None and self._table.adapters is not None:
            of_all = None if batch.whole_step is None else batch.whole_step.slots
            self._table.adapters.fill(self._adapters, slot_of, of_all)
        host.tokens[:num_tokens] = host.known_tokens[slot_of, positions]
        host.positions[:num_tokens] = batch.positions if batch.branches else positions
        if self.shifts is not None:
            lengths = (batch.counts, batch.offsets)
            self._table.spans.fill_shifts(host.shifts, batch.slots, batch.starts, *lengths)
        if self.paths is not None:
            enter_paths(self.paths.numpy(), batch)
        if self.rollback_checkpoints is not None:
            self.rollback_checkpoints.numpy()[:num_rows] = batch.rollback_checkpoints + (
                self._store.first_rollback_checkpoint,
                0,
            )
        host.row_starts[: num_rows + 1] = batch.offsets
        host.context_lengths[:num_rows] = batch.starts
        if batch.whole_step is not None:
            slot_of, positions = batch.whole_step.slots, batch.whole_step.positions
        longest = max(batch.ends.tolist(), default=0)
        for index, layout in enumerate(self._groups):
            known, width = host.known_pages[index], layout.columns(longest)
            host.page_tables[index][:num_rows, :width] = known[batch.slots, :width]
            pages = known[slot_of, layout.column(positions)].astype(np.int64)
            host.locations[index][: len(pages)] = layout.locate(pages, positions)
        count = len(batch.last)
        host.chosen[:count] = batch.last
        self.choose(batch.last)
        host.to_slots[:count] = batch.to_slots
        host.to_positions[:count] = batch.to_positions

    def _fill_few(self, batch: Batch) -> None:
        """As `_fill_on_host`, for a few rows of one token each."""
        few = self._few
        longest, output = max((row.start for row in batch.rows), default=-1) + 1, 0
        for line, row in enumerate(batch.rows):
            slot, position = row.slot, row.start
            few.tokens[line] = few.known_tokens[slot, position]
            few.positions[line] = few.context_lengths[line] = position
            few.row_starts[line + 1] = line + 1
            for group, layout in enumerate(self._groups):
                known, width = few.known_pages[group][slot], layout.columns(longest)
                few.page_tables[group][line][:width] = known[:width]
                page = known[layout.column(position)]
                few.locations[group][line] = layout.locate(page, position)
            if row.want & SAMPLE:
                few.chosen[output], few.to_slots[output] = line, slot
                few.to_positions[output] = position + 1
                output += 1

    def locate_steps(self, batch: Batch, steps: int) -> np.ndarray:
        """Enter the pages of this decode step and the following ones, on the host.

        returns: location of each step's tokens, [groups, steps, rows] int64.
        """
        host, slots = self._host, batch.slots
        positions = batch.starts + np.arange(steps)[:, None]  # [steps, rows]
        longest = int(batch.ends.max()) + steps - 1
        found = np.empty((len(self._groups), *positions.shape), np.int64)
        for index, layout in enumerate(self._groups):
            known, width = host.known_pages[index], layout.columns(longest)
            host.page_tables[index][: len(slots), :width] = known[slots, :width]
            pages = known[slots, layout.column(positions)].astype(np.int64)
            found[index] = layout.locate(pages, positions)
        return found

    def _gather(self, batch: Batch) -> None:
        if batch.whole_step is not None:
            self._gather_share(batch, batch.whole_step)
            return
        rows, count = len(batch.rows), len(batch.last)
        moves = np.array(self._table.moves(batch.rows), np.int64).reshape(-1, 2)
        parts = [
            moves[:, 0],
            moves[:, 1],
            batch.slots,
            batch.counts,
            batch.offsets,
            batch.last,
            batch.sampling,
        ]
        sizes = [len(part) for part in parts]
        packed = self._platform.pinned((sum(sizes),), torch.int64)
        np.concatenate(parts, out=packed.numpy())
        moved, starts, slots, counts, offsets, last, sampling = packed.to(
            self._device, non_blocking=True
        ).split(sizes)
        lengths = self._table.lengths
        if len(moves):
            lengths[moved] = starts
        self.slots[:rows] = slots
        contexts = lengths[slots]
        ends = contexts + counts
        lengths[slots] = ends
        if self._lengths_on_host:
            self._enter_lengths(batch.offsets, batch.starts)
        else:
            self.row_starts[: rows + 1] = offsets
            self.context_lengths[:rows] = contexts
        self.chosen[:count] = last
        self.to_slots[:count] = slots[sampling]
        self.to_positions[:count] = contexts[sampling] + last - offsets[sampling] + 1
        tokens, width = int(batch.offsets[-1]), max(batch.ends.tolist(), default=0)
        row_of = torch.arange(rows, device=self._device).repeat_interleave(
            counts, output_size=tokens
        )
        first = (contexts - offsets[:-1])[row_of]
        if batch.branches:
            self._place_branches(batch, slots, width)
            return
        self.place(slots[row_of], torch.arange(tokens, device=self._device) + first, slots, width)
        self._shift(batch)

    def _place_branches(self, batch: Batch, slots: Tensor, longest: int) -> None:
        """As `place`, for a batch with draft trees. The host has verified the drafts before, so it
        knows positions and places."""
        assert self.paths is not None
        if self._lengths_on_host:
            enter_paths(self.paths.numpy(), batch)
        else:
            paths = np.zeros((int(batch.offsets[-1]), self.paths.shape[1]), np.int32)
            enter_paths(paths, batch)
            self.paths[: len(paths)] = copy_to(paths, self._device)
        parts = (np.repeat(batch.slots, batch.counts), batch.places, batch.positions)
        slot_of, places, positions = copy_to(np.stack(parts), self._device)
        self.place(slot_of, places, slots, longest)
        self.positions[: len(positions)] = positions
        self.to_positions[: len(batch.last)] = copy_to(batch.to_positions, self._device)
        self._shift(batch)

    def _shift(self, batch: Batch) -> None:
        """Correct the shifts of rows that begin before the end of their prompt's last span. The
        plan's starts of those are exact."""
        if self.shifts is None or not self._table.spans.reaches(batch.slots, batch.starts):
            return
        shifts = np.zeros((int(batch.offsets[-1]), self.shifts.shape[1]), np.int32)
        lengths = (batch.counts, batch.offsets)
        self._table.spans.fill_shifts(shifts, batch.slots, batch.starts, *lengths)
        self.shifts[: len(shifts)] = copy_to(torch.from_numpy(shifts), self._device)

    def _gather_share(self, batch: Batch, whole_step: WholeStep) -> None:
        """As `_gather`, for one context parallel share; its rows begin where the plan says."""
        assert self._lengths_on_host, "the device has the lengths of whole rows only"
        rows, count = len(batch.slots), len(batch.last)
        parts = [
            batch.slots,
            np.repeat(batch.slots, batch.counts),
            batch.positions,
            whole_step.slots,
            whole_step.positions,
            batch.last,
            batch.to_slots,
            batch.to_positions,
        ]
        sizes = [len(part) for part in parts]
        packed = self._platform.pinned((sum(sizes),), torch.int64)
        np.concatenate(parts, out=packed.numpy())
        there = packed.to(self._device, non_blocking=True).split(sizes)
        slots, slot_of, positions, all_slots, all_positions = there[:5]
        self.slots[:rows] = slots
        self.chosen[:count], self.to_slots[:count], self.to_positions[:count] = there[5:]
        self._enter_lengths(batch.offsets, batch.starts)
        self.place(slot_of, positions, slots, max(batch.ends.tolist(), default=0))
        self.locate_all(all_slots, all_positions)
        self._shift(batch)

    def _enter_lengths(self, offsets: np.ndarray, starts: np.ndarray) -> None:
        """Lengths that kernels read on the host. Without drafts the plan's starts are exact, and a
        kernel has read them when its launch returns."""
        self.row_starts.numpy()[: len(offsets)] = offsets
        self.context_lengths.numpy()[: len(starts)] = starts

    def place(self, slot_of: Tensor, positions: Tensor, slots: Tensor, longest: int) -> None:
        """Gather tokens, page tables and cache locations on the device.

        slot_of, positions: [tokens] int64; slots: [rows] int64; longest: positions that the page
        tables cover.
        """
        tokens, rows = len(slot_of), len(slots)
        self.tokens[:tokens] = self._table.tokens[slot_of, positions]
        self.positions[:tokens] = positions
        if self._adapters is not None and self._table.adapters is not None:
            self._table.adapters.fill_on_device(self._adapters, slot_of)
        for index, layout in enumerate(self._groups):
            known, width = self._table.pages[index], layout.columns(longest)
            self.page_tables[index][:rows, :width] = known[slots, :width]
        later = self._table.spans.later_on_device
        if self.shifts is not None and later is not None:
            self.shifts[:tokens] = later[slot_of]
        self._locate(slot_of, positions)

    def locate_all(self, slot_of: Tensor, positions: Tensor) -> None:
        """Enter the cache locations of all context parallel shares' tokens."""
        self._locate(slot_of, positions)
        if self._adapters is not None and self._table.adapters is not None:
            self._table.adapters.fill_all_on_device(self._adapters, slot_of)

    def _locate(self, slot_of: Tensor, positions: Tensor) -> None:
        """Enter the cache locations of these positions."""
        for index, layout in enumerate(self._groups):
            pages = self._table.pages[index][slot_of, layout.column(positions)].long()
            self.locations[index][: len(pages)] = layout.locate(pages, positions)


class _HostViews:
    """The tensors of a step as numpy arrays."""

    def __init__(self, step: StepTensors, table: SlotTable) -> None:
        self.tokens, self.positions = step.tokens.numpy(), step.positions.numpy()
        self.row_starts = step.row_starts.numpy()
        self.context_lengths = step.context_lengths.numpy()
        self.shifts = np.zeros(0) if step.shifts is None else step.shifts.numpy()
        self.page_tables = [pages.numpy() for pages in step.page_tables]
        self.locations = [locations.numpy() for locations in step.locations]
        self.chosen = step.chosen.numpy()
        self.to_slots, self.to_positions = step.to_slots.numpy(), step.to_positions.numpy()
        self.known_tokens = table.tokens.numpy()
        self.known_pages = [pages.numpy() for pages in table.pages]


class _FewViews:
    """The same memory as Python buffers; page tables by slot and by row."""

    def __init__(self, host: _HostViews) -> None:
        self.tokens, self.positions = host.tokens.data, host.positions.data
        self.row_starts = host.row_starts.data
        self.context_lengths = host.context_lengths.data
        self.page_tables = [[t.data for t in pages[:_FEW]] for pages in host.page_tables]
        self.locations = [locations.data for locations in host.locations]
        self.chosen = host.chosen.data
        self.to_slots, self.to_positions = host.to_slots.data, host.to_positions.data
        self.known_tokens = host.known_tokens.data
        self.known_pages = [[slot.data for slot in pages] for pages in host.known_pages]


def takes_features(batch: Batch, table: SlotTable) -> bool:
    """Whether a row of the batch begins before the end of the last span of its prompt; the same on
    all ranks."""
    where = (batch.slots, batch.starts)
    if batch.whole_step is not None:
        where = (batch.whole_step.slots, batch.whole_step.positions)
    return table.spans.reaches(*where)


def enter_paths(paths: np.ndarray, batch: Batch) -> None:
    """Fill in the `paths` of `paged_attention`; [tokens, 2 + longest path] int32."""
    paths[: batch.offsets[-1], 1] = 0
    for at, branches in batch.branches.items():
        for line, path in enumerate(branches.paths, int(batch.offsets[at])):
            paths[line, :2] = branches.base, len(path)
            paths[line, 2 : 2 + len(path)] = np.add(path, branches.base)
