"""Features: the rows that take the place of embeddings where a prompt is given by content.

`Features` makes them, in pieces of a plan, and keeps them by the number of their content.
`SpanTable` says which places in each slot take them.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from banyan.base.log import logger
from banyan.layers.rotary import AXES, axis_shifts
from banyan.layers.step_inputs import CrossRow
from banyan.messages.plan import Join, NewContent, PieceFailure, PlacedSpan, Row, StepPlan
from banyan.messages.spans import ContentKind
from banyan.model_config.media import is_cross
from banyan.models.base import NO_TOWERS, Model
from banyan.models.towers.vision import Tower
from banyan.ops.host_memory import copy_to
from banyan.parallel.groups import Group

log = logger(__name__)


class ContentError(Exception):
    """A content cannot become features; only the requests that need it fail."""


@dataclass(frozen=True)
class FeatureForm:
    """What feature rows are.

    Attributes:
        width: of a row that takes the place of an embedding.
        deep: further parts of a row, each of that width, that are added after the first layers.
        scale: factor that brings them to the scale of the model's residual stream.
        placeholder: id that a slot has at the places of spans.
        axes: positions have axes.
        is_cross: all rows of a content are read by cross attention, and none takes the place of
            an embedding.
    """

    width: int
    deep: int = 0
    scale: float = 1.0
    placeholder: int = 0
    axes: bool = False
    is_cross: bool = False

    @property
    def whole(self) -> int:
        return self.width * (1 + self.deep)


def form_of(model: Model) -> FeatureForm:
    """The features that a model takes."""
    facts, media = model.model_config, model.model_config.media
    if is_cross(media) and media is not None and media.sound is not None:
        return FeatureForm(width=media.sound.tower.out, is_cross=True)
    return FeatureForm(
        width=facts.hidden_size,
        deep=0 if media is None else len(media.deep_blocks),
        scale=1 / facts.residual_scale,
        placeholder=next(iter(media.placeholders), 0) if media is not None else 0,
        axes=media is not None and bool(media.axes),
    )


class Features:
    """
    Args:
        stages: pipeline stages; only the first one has features.
        is_alone: one rank runs the model, so that an exception here leaves no other rank waiting.

    Attributes:
        towers: content kind -> what makes features of it; the client gives others.
    """

    def __init__(
        self,
        form: FeatureForm,
        dtype: torch.dtype,
        device: torch.device,
        stages: Group,
        is_alone: bool = True,
    ) -> None:
        self.is_here = stages.rank == 0
        self._has_stages = stages.size > 1
        self.form = form
        self._dtype, self._device = dtype, device
        self.towers: Mapping[str, Tower] = NO_TOWERS
        self._is_alone = is_alone
        self._given: dict[int, NewContent] = {}
        """Contents that are not features yet."""
        self._begun: dict[int, Any] = {}
        """What the tower keeps of them between pieces."""
        self._rows: dict[int, Tensor] = {}
        self._spoilt: dict[int, str] = {}
        """With pipeline stages: why a content has zeros in place of its features."""

    def enter(self, plan: StepPlan) -> list[PieceFailure]:
        """Drop what the plan forgets, take its contents and run its pieces."""
        if not self.is_here:
            return []
        for number in plan.forget:
            for kept in (self._given, self._begun, self._rows, self._spoilt):
                kept.pop(number, None)
        for content in plan.contents:
            self._given[content.content] = content
        failed: dict[int, PieceFailure] = {}
        for piece in plan.pieces:
            number = piece.content
            if number in failed:
                continue
            try:
                self._run(number, piece.first_block, piece.blocks)
            except ContentError as error:
                failed[number] = PieceFailure(number, str(error), 400)
            except Exception as error:
                if not self._is_alone:
                    raise
                log.exception("step=%d content=%d failed", plan.step, number)
                text = f"its content could not be read: {type(error).__name__}: {error}"
                failed[number] = PieceFailure(number, text)
            if number in failed:
                content = self._given.pop(number, None)
                self._begun.pop(number, None)
                if self._has_stages and content is not None:
                    # The other stages run rows over it all the same; their results are dropped.
                    shape = (content.rows, self.form.whole)
                    self._rows[number] = torch.zeros(shape, dtype=self._dtype, device=self._device)
                    self._spoilt[number] = failed[number].text
        return list(failed.values())

    def of(self, content: int) -> Tensor | None:
        """The feature rows of a content, [rows, whole width]; None = they are not there."""
        return self._rows.get(content)

    @property
    def has_faults(self) -> bool:
        return bool(self._spoilt)

    def fault_of(self, content: int) -> str | None:
        """Why the features of a content are zeros; None = they are not."""
        return self._spoilt.get(content)

    def _run(self, number: int, first_block: int, blocks: int) -> None:
        content = self._given.get(number)
        if content is None:
            raise ContentError("its content is not there")
        if content.kind == ContentKind.FEATURES:
            self._keep(number, content, self._as_given(content))
            return
        tower = self.towers.get(content.kind)
        if tower is None:
            raise ContentError(f"this model makes no features of {content.kind}")
        if not first_block:
            self._begun[number] = tower.begin(_values(content), content.grid)
        state = self._begun.get(number)
        if state is None:
            raise ContentError(f"block {first_block} has nothing to go on from")
        tower.run(state, first_block, blocks)
        if first_block + blocks == tower.blocks:
            self._keep(number, content, tower.end(self._begun.pop(number)))

    def _as_given(self, content: NewContent) -> Tensor:
        values = torch.frombuffer(bytearray(content.data), dtype=torch.float32)
        widths = (self.form.width, self.form.whole)
        width = len(values) // content.rows
        if len(values) != content.rows * width or width not in widths:
            raise ContentError(
                f"{len(values)} numbers are not {content.rows} feature rows of {widths[0]}"
                + (f" or {widths[1]}" if self.form.deep else "")
            )
        rows = copy_to(values.view(content.rows, width), self._device)
        if width < self.form.whole:
            rows = torch.nn.functional.pad(rows, (0, self.form.whole - width))
        return rows

    def _keep(self, number: int, content: NewContent, rows: Tensor) -> None:
        if tuple(rows.shape) != (content.rows, self.form.whole):
            raise ContentError(
                f"its content becomes {len(rows)} feature rows, the prompt has {content.rows}"
            )
        self._rows[number] = (rows * self.form.scale).to(self._dtype)
        self._given.pop(number, None)


def _values(content: NewContent) -> Tensor:
    """What a tower reads: uint8 [patches, values], or fp32 [windows, bands, frames]."""
    data = bytearray(content.data)
    if content.kind == ContentKind.MEL:
        windows, bands, _ = content.grid
        values = torch.frombuffer(data, dtype=torch.float16) if len(data) % 2 == 0 else None
        if values is None or not len(values) or len(values) % (windows * bands):
            raise ContentError(f"{len(data)} bytes are not {windows} x {bands} bands of frames")
        return values.view(windows, bands, -1).float()
    patches = int(np.prod(content.grid))
    if not patches or len(data) % patches:
        raise ContentError(f"{len(data)} bytes are not {patches} patches")
    return torch.frombuffer(data, dtype=torch.uint8).view(patches, -1)


class SpanTable:
    """The spans of each slot. Without `features` joins may have none."""

    def __init__(self, slots: int, device: torch.device, features: Features | None = None) -> None:
        self.features = features
        self._device = device
        self.by_slot: dict[int, list[PlacedSpan]] = {}
        self._ends: dict[int, int] = {}
        """Slot -> first place from which on all are ordinary tokens with the shift of `later`."""
        self._shifts: dict[int, np.ndarray] = {}
        """Slot -> int32 [prompt, AXES], of prompts with positions on axes."""
        has_axes = features is not None and features.form.axes
        self.later = np.zeros((slots, AXES), np.int32) if has_axes else None
        """Shift of the places after each prompt; None = positions have no axes."""
        self.later_on_device = None
        if self.later is not None:
            self.later_on_device = torch.zeros(slots, AXES, dtype=torch.int32, device=device)

    def join(self, join: Join, tokens: np.ndarray) -> np.ndarray:
        """Take the spans of a request; returns its tokens with the placeholder in spans."""
        slot, spans = join.slot, join.placed
        if not spans or self.features is None:
            return tokens
        tokens = tokens.copy()
        for span in spans:
            inside = tokens[span.first : span.first + span.count]
            own = self.features.form.placeholder if span.token < 0 else span.token
            inside[inside < 0] = own
        self.by_slot[slot] = spans
        self._ends[slot] = spans[-1].first + spans[-1].count
        if self.later is not None and self.later_on_device is not None:
            self._shifts[slot], self.later[slot] = axis_shifts(spans, join.prompt_len)
            if (self._shifts[slot][-1] != self.later[slot]).any():
                self._ends[slot] = join.prompt_len
            self.later_on_device[slot] = copy_to(torch.from_numpy(self.later[slot]), self._device)
        return tokens

    def leave(self, slot: int) -> None:
        del self.by_slot[slot]
        self._ends.pop(slot)
        if self._shifts.pop(slot, None) is not None:
            assert self.later is not None and self.later_on_device is not None
            self.later[slot] = 0
            self.later_on_device[slot] = 0

    def problem(self, row: Row) -> str | None:
        """Why a row cannot run; None = the features that it needs are there."""
        if self.features is not None and not self.features.is_here:
            return None
        start = row.start
        if self.features is not None and self.features.form.is_cross:
            start = 0
        for span, first, last in self._within(row.slot, start, row.start + row.count):
            rows = None if self.features is None else self.features.of(span.content)
            if rows is None:
                return f"the features of places {first} … {last - 1} are not there"
            if span.offset + span.count > len(rows):
                return f"the content of place {span.first} has only {len(rows)} feature rows"
        return None

    def fault(self, row: Row) -> str | None:
        """Why the result of a row that runs is worthless; None = it is good."""
        if not self.by_slot or self.features is None:
            return None
        spans = self._within(row.slot, row.start, row.start + row.count)
        faults = (self.features.fault_of(span.content) for span, _, _ in spans)
        return next((fault for fault in faults if fault is not None), None)

    def taken(
        self, slots: np.ndarray, starts: np.ndarray, ends: np.ndarray, offsets: np.ndarray
    ) -> list[tuple[int, Tensor]]:
        """Feature rows that the tokens of a batch take: (first token, rows), in any order."""
        assert self.features is not None
        found: list[tuple[int, Tensor]] = []
        for slot, start, end, at in zip(
            *(each.tolist() for each in (slots, starts, ends, offsets[:-1])), strict=True
        ):
            for span, first, last in self._within(slot, start, end):
                rows = self.features.of(span.content)
                assert rows is not None, f"no features at place {first} of slot {slot}"
                offset = span.offset + first - span.first
                found.append((at + first - start, rows[offset : offset + last - first]))
        return found

    def mutual(
        self, slots: np.ndarray, starts: np.ndarray, ends: np.ndarray, offsets: np.ndarray
    ) -> list[tuple[int, int, int]]:
        """Tokens of a batch that see each other: (first token, token after the last, position
        after the last), in any order."""
        if not self.by_slot:
            return []
        return [
            (at + first - start, at + last - start, span.first + span.count)
            for slot, start, end, at in zip(
                *(each.tolist() for each in (slots, starts, ends, offsets[:-1])), strict=True
            )
            for span, first, last in self._within(slot, start, end)
            if span.is_mutual
        ]

    def cross_rows(self, slots: np.ndarray, offsets: np.ndarray) -> list[CrossRow] | None:
        """The contents that the rows of a batch read by cross attention; None = the model has no
        cross attention."""
        features = self.features
        if features is None or not features.form.is_cross:
            return None
        found: list[CrossRow] = []
        bounds = zip(slots.tolist(), offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)
        for slot, first, end in bounds:
            for span in self.by_slot.get(slot, ()):
                rows = features.of(span.content)
                assert rows is not None, f"no features of slot {slot}"
                found.append(CrossRow(first, end, rows))
        return found

    def fill_shifts(
        self,
        out: np.ndarray,
        slots: np.ndarray,
        starts: np.ndarray,
        counts: np.ndarray,
        offsets: np.ndarray,
    ) -> None:
        """Enter the shift of every token of a batch, [tokens, AXES]."""
        assert self.later is not None
        tokens = int(offsets[-1])
        out[:tokens] = np.repeat(self.later[slots], counts, axis=0)
        for slot, start, count, at in zip(
            *(each.tolist() for each in (slots, starts, counts, offsets[:-1])), strict=True
        ):
            known = self._shifts.get(slot)
            if known is not None and start < len(known):
                mine = known[start : start + count]
                out[at : at + len(mine)] = mine

    def reaches(self, slots: np.ndarray, starts: np.ndarray) -> bool:
        """Whether any of these rows begins before the places that are all alike, after the last
        span of its slot."""
        if not self.by_slot:
            return False
        return any(
            start < self._ends.get(slot, 0)
            for slot, start in zip(slots.tolist(), starts.tolist(), strict=True)
        )

    def _within(self, slot: int, start: int, end: int) -> Iterable[tuple[PlacedSpan, int, int]]:
        """The spans of a slot within places start … end - 1, with their part of these."""
        for span in self.by_slot.get(slot, ()):
            first, last = max(start, span.first), min(end, span.first + span.count)
            if first < last:
                yield span, first, last
