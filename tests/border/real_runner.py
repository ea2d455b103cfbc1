"""The real ModelRunner behind the face of the kit, with the tiny model of page_numbers.py.

Pages are poison from when they are granted until the row that computes them; nothing but the
granted pages of a step's rows may change. Some steps run when they are launched, so that several
results wait, others when their result is asked for. Between steps the kit carries pages away and
back by copies of its own: "after" the step that wrote them, "before" the next one.
"""

from array import array
from collections import Counter, deque
from dataclasses import dataclass, field
from functools import partial
from random import Random

import msgspec
import numpy as np

from banyan.base.errors import RequestError
from banyan.base.ids import PADDING_PAGE, PageId, SlotId, StepId
from banyan.kv_cache.sizing import STATE
from banyan.messages.control_ops import (
    KV_CACHE,
    WEIGHTS,
    AttachStore,
    ControlOp,
    DetachStore,
    ReleaseMemory,
    ResumeMemory,
    StopProfile,
    TakeWeights,
)
from banyan.messages.plan import (
    DEVICE,
    POOL,
    SAMPLE,
    STORE,
    CopyResult,
    Held,
    Join,
    Lookup,
    Mask,
    PageCopy,
    Row,
    StepPlan,
    StepResult,
    device_page,
)
from banyan.messages.sampling_params import SamplingParams
from banyan.models.base import Model
from banyan.platform.base import Platform
from banyan.runner.control_ops import ControlOpExecutor, Finish, RankReply
from banyan.runner.runner import ModelRunner
from banyan.runner.step_outputs import LaunchedStep
from tests.border.faults import Faults, InjectedError, Injector
from tests.border.kit import Interrupt
from tests.border.laws import Device, Launched, Laws, Tenancy, check_result, require
from tests.border.page_features import filled
from tests.border.page_model import bytes_of
from tests.border.page_numbers import LAYERS, VOCAB
from tests.border.real_store import Shelf

SPARE = 3
"""Pages per group that the engine does not know: where pages are carried to."""
FIRST_COPY = 1 << 40
"""Ids of the kit's own copies begin here."""


@dataclass
class Started:
    """A step that the runner has launched."""

    launched: Launched
    pending: LaunchedStep
    rows: list[Row] = field(default_factory=list)
    """As they ran."""


class RealRunner:
    """
    Args:
        runner: fresh, with SPARE pages more per group than `device` says.
        model: that the runner has.
        injector: wired into it and into the runner's ops.
        poison: what pages hold that nobody has written.
        hurry: lets the driver go on while a step waits for a mask.
        shelf: the store of the runner's mover; None without one.
        platform: of a device whose memory is not the host's; None = the host's.
    """

    def __init__(
        self,
        runner: ModelRunner,
        model: Model,
        device: Device,
        faults: Faults,
        injector: Injector,
        poison: float,
        random: Random,
        interrupt: Interrupt,
        shelf: Shelf | None = None,
        platform: Platform | None = None,
    ) -> None:
        self._shelf = shelf
        self._platform = platform
        self.laws = Laws(device, self._enter)
        self.failed_seeds: set[int] = set()
        self._runner = runner
        self._model = model
        self._is_recorded = runner.forward.is_recorded
        carriers = dict.fromkeys((TakeWeights, ReleaseMemory, ResumeMemory), self._prepare)
        if shelf is not None:
            switch = shelf.switch
            self._switches = {
                AttachStore: switch.prepare_attach,
                DetachStore: switch.prepare_detach,
            }
            carriers |= dict.fromkeys(self._switches, self._prepare_switch)
        self._taker = ControlOpExecutor(runner, carriers | {StopProfile: self._prepare})
        self._device = device
        self._faults = faults
        self._injector = injector
        self._poison = poison
        self._random = random
        self._interrupt = interrupt
        self._started: deque[Started] = deque()
        self._away: list[tuple[int, int, int]] = []
        """(group, page, spare page): what has to come back before the next step."""
        self._ended: list[tuple[PageCopy, bool]] = []
        """Copies of plans within the device that have ended, well or not, and are not reported."""
        self._next_copy = FIRST_COPY
        self._rows: list[Row] = []
        """Of the step that is being started, as they run."""
        self._broken: Exception | None = None
        self._unread: dict[int, int] = {}
        """By life of a slot: the first position that a model which drafts may have yet to read."""
        self._has_draft_model = runner.store.num_layers > LAYERS
        for group in range(len(device.groups)):
            for pages in self._pages(group):
                pages.fill_(poison)

    # -- what the driver calls ----------------------------------------------------------------

    @property
    def seen(self) -> Counter[str]:
        return self.laws.seen

    @property
    def carried_out(self) -> list[ControlOp]:
        return self.laws.carried_out

    @property
    def copies_to_report(self) -> int:
        return len(self._ended) + (0 if self._shelf is None else self._shelf.copies)

    @property
    def is_quiet(self) -> bool:
        is_idle = self._shelf is None or not self._shelf.is_busy
        return not self.laws.queue and not self._ended and is_idle

    def launch(self, plan: StepPlan) -> None:
        states = [g for g, group in enumerate(self._device.groups) if group.kind == STATE]
        are_right = all(
            not copy.is_on_device or copy.group in states or copy.when == "before"
            for copy in plan.copies
        )
        require(are_right, f"step {plan.step} keeps pages of groups without states")
        self.laws.launch(plan)
        if self._random.random() < 0.6:
            self._start_all()

    def give_masks(self, masks: list[Mask]) -> None:
        self.laws.give_masks(masks)

    def execute(self) -> StepResult:
        if not self._started:
            self._start(self.laws.queue[0])
        started = self._started.popleft()
        launched = self.laws.queue.popleft()
        assert started.launched is launched
        result = started.pending.result()
        self.laws.completed = launched.plan.step
        check_result(launched, started.rows, result, self.seen)
        return result

    def report_copies(self, count: int) -> CopyResult:
        if self._ended:
            return self._report_states(count)
        assert self._shelf is not None
        result = self._shelf.copy(count)
        for copy_id in (*result.ids, *result.failed):
            copy = self.laws.copies.pop(copy_id)
            kind = "stored" if copy.dst.tier == STORE else "loaded"
            what = "failed loads" if kind == "loaded" else "failed writes"
            self.seen[f"{kind} pages" if copy_id in result.ids else what] += 1
        return result

    def _report_states(self, count: int) -> CopyResult:
        self._random.shuffle(self._ended)
        batch, self._ended = self._ended[:count], self._ended[count:]
        for copy, is_good in batch:
            del self.laws.copies[copy.id]
            if is_good:
                self.laws.note_copy(copy)
        return CopyResult(
            [c.id for c, good in batch if good], [c.id for c, good in batch if not good]
        )

    def look(self, lookups: list[Lookup]) -> None:
        require(not lookups or self._shelf is not None, "there is no store to look in")
        if self._shelf is not None and lookups:
            self._shelf.look(lookups)

    def report_held(self) -> Held | None:
        held = None if self._shelf is None else self._shelf.held()
        self.seen["prefixes found in the store"] += held is not None and held.count > 0
        return held

    def _enter(self, join: Join, life: int, tokens: list[int]) -> Tenancy:
        if max(tokens) >= VOCAB:
            self.failed_seeds.add(join.sampling.seed)
            self.seen["refused joins"] += 1
        return Tenancy(join, life, len(tokens), length=len(tokens))

    # -- one step -----------------------------------------------------------------------------

    def _start_all(self) -> None:
        """Run every step that is launched; their results wait."""
        for launched in list(self.laws.queue)[len(self._started) :]:
            self._start(launched)
        self.seen["late results"] += len(self._started) > 1

    def _start(self, launched: Launched) -> None:
        plan = launched.plan
        if self._random.random() < 0.1 and not self.laws.released:
            self._trespass(plan.step)
        self.laws.start(launched)
        rows = self._rows = self._true_rows(launched)
        self._spoil_fresh(launched)
        copies = self._bring_back()
        for copy in plan.copies:
            if copy.is_on_device:
                self._note_state(launched, copy)
            elif copy.dst.tier != STORE:  # what comes from the store comes later
                self._spoil(copy.group, [copy.dst.page])
                self.laws.use(launched, copy.group, copy.dst.page, -copy.id, is_write=True)
        self._note_uses(launched)
        is_carried = self._random.random() < 0.3 and self._shelf is None  # it takes pages too
        out = self._carry_away(launched) if is_carried else []
        self._arm(launched)
        is_checked = self._random.random() < 0.25 and not plan.control_ops
        before = self._snapshot() if is_checked else None
        builder = msgspec.structs.replace(filled(plan), copies=[*copies, *plan.copies, *out])
        self.seen["pieces"] += len(plan.pieces)
        self._wait_for_device()
        pending = self._taker.launch(builder, partial(self._mask_of, launched))
        if self._broken is not None:
            raise self._broken
        self._started.append(Started(launched, pending, rows))
        if self._device.are_bounds:
            self._follow(launched, rows, pending.result())
        if before is not None:
            self._check_writes(launched, before, builder.copies)
        for row, slot in zip(self._rows, launched.rows, strict=True):
            self._unread.setdefault(slot.life, row.start)
            if row.propose or not self._has_draft_model:
                del self._unread[slot.life]
        self._injector.step, self._injector.nan_tokens = "", ()
        self._settle_copies(pending, copies, out, [c for c in plan.copies if c.is_on_device])

    def _note_state(self, launched: Launched, copy: PageCopy) -> None:
        """A state on its way into the tree, or out of it: its target holds nothing before."""
        life = launched.rows[copy.row].life if copy.row >= 0 else -copy.id
        self.laws.copy_lives[copy.id] = life
        writer = life if copy.when == "before" else -copy.id
        self.laws.use(launched, copy.group, copy.dst.page, writer, is_write=True)
        self.laws.use(launched, copy.group, copy.src.page, -copy.id, is_write=False)
        self._spoil(copy.group, [copy.dst.page])

    def _mask_of(self, launched: Launched, index: int) -> bytes:
        """A mask that came with no plan; the runner waits for it here, in the middle of a step."""
        key = (launched.plan.step, index)
        self.seen["late masks"] += 1
        try:
            while key not in self.laws.masks:
                is_hurried = self._interrupt(bool(self._started))
                require(is_hurried, f"{launched.where(index)}: no mask came before sampling")
        except Exception as error:  # the runner would make a failed row of it
            self._broken = self._broken or error
            raise
        if self._random.random() < self._faults.row:
            self._blame(launched, index, "failed masks")
            raise InjectedError("injected into a mask")
        return self.laws.masks[key]

    # -- orders -------------------------------------------------------------------------------

    def _prepare(self, order: ControlOp) -> Finish:
        self._may_fail()
        gives = order.tags if isinstance(order, ReleaseMemory) else []
        if self._platform is not None and KV_CACHE in gives:
            self.seen["refused orders"] += 1
            raise RequestError("the pages of this device stay")
        return partial(self._obey, order)

    def _may_fail(self) -> None:
        if self._random.random() < self._faults.order:
            self.seen["failed orders"] += 1
            raise RequestError("injected")

    def _prepare_switch(self, order: ControlOp) -> Finish:
        """Another rank may fail once this one is ready."""
        finish = self._switches[type(order)](order)
        self._may_fail()

        def switch() -> RankReply:
            said = finish()
            self.laws.carry_out(order)
            return said

        return switch

    def _obey(self, order: ControlOp) -> RankReply:
        """After other weights, or without memory, no page holds what it held."""
        tags = order.tags if isinstance(order, ReleaseMemory | ResumeMemory) else []
        if isinstance(order, ReleaseMemory):
            if KV_CACHE in tags:
                self._runner.store.release()
                for group in range(len(self._device.groups)):
                    is_empty = not any(pages.any() for pages in self._pages(group))
                    require(is_empty, f"group {group} holds something without its memory")
            if WEIGHTS in tags and WEIGHTS not in self.laws.released:
                self._runner.drop_model()
        elif isinstance(order, TakeWeights) or WEIGHTS in self.laws.released & set(tags):
            self._runner.take_model(self._model)
        if isinstance(order, TakeWeights | ReleaseMemory) and tags != [WEIGHTS]:
            for group in range(len(self._device.groups)):
                for pages in self._pages(group):
                    pages.fill_(self._poison)
        self._wait_for_device()
        self.laws.carry_out(order)
        return RankReply("done")

    # -- drafts -------------------------------------------------------------------------------

    def _true_rows(self, launched: Launched) -> list[Row]:
        """What the rows really run: of drafts in flight a plan knows bounds only."""
        found = list[Row]()
        for row, slot in zip(launched.plan.rows, launched.rows, strict=True):
            if row.given:
                slot.known = slot.length = row.start + len(row.given) // 4
                slot.drafts, slot.parents = [], []
            is_said = slot.is_lost or not self._device.are_bounds
            if is_said or row.start + row.count - row.drafts <= slot.known:
                found.append(row)
                continue
            most = row.drafts if launched.plan.steps > 1 else len(slot.drafts)
            start, drafts = slot.length - 1, min(row.drafts, most)
            require(start <= row.start, f"slot {row.slot}: starts at {row.start}, not {start}")
            count = row.count - row.drafts + drafts
            found.append(msgspec.structs.replace(row, start=start, count=count, drafts=drafts))
        return found

    def _follow(self, launched: Launched, rows: list[Row], result: StepResult) -> None:
        """Learn how long the slots are now. What stands of a row are the drafts that the
        model chooses, one behind another, and what it chooses where none foresaw it."""
        failed = {failure.row for failure in result.failed}
        for index, (row, slot) in enumerate(zip(rows, launched.rows, strict=True)):
            slot.is_lost = slot.is_lost or bool(result.error) or index in failed
            if row.want & SAMPLE and not slot.is_lost:
                tokens = list(array("i", result.tokens[index]))
                if launched.plan.steps > 1:
                    require(0 < len(tokens) <= row.count, f"{launched.where(index)}: {tokens}")
                    self.seen["bursts"] += len(tokens) > 1
                    slot.length += len(tokens)
                    continue
                drafts, parents = slot.drafts[: row.drafts], slot.parents[: row.drafts]
                where, here = launched.where(index), -1
                for at, token in enumerate(tokens):
                    ways = {drafts[n]: n for n, parent in enumerate(parents) if parent == here}
                    is_right = (token in ways) == (at < len(tokens) - 1)
                    reported = f"{drafts} behind {parents}"
                    require(is_right, f"{where}: {tokens} stand of drafts {reported}")
                    self.seen["moved drafts"] += token in ways and ways[token] != at
                    here = ways.get(token, here)
                slot.length += len(tokens)
                slot.drafts = list(array("i", result.drafts[index])) if result.drafts else []
                follows = list(array("i", result.parents[index])) if result.parents else []
                slot.parents = follows or list(range(-1, len(slot.drafts) - 1))

    # -- faults -------------------------------------------------------------------------------

    def _arm(self, launched: Launched) -> None:
        plan = launched.plan
        if plan.rows and self._random.random() < self._faults.step:
            self._injector.step = self._random.choice(("before", "after"))
            self.seen["failed steps"] += 1
            for index in range(len(plan.rows)):
                self._blame(launched, index, "rows of failed steps")
            return
        if self._is_recorded:
            return
        spoiled, first = list[int](), 0
        for index, (row, slot) in enumerate(zip(self._rows, launched.rows, strict=True)):
            if max(array("i", slot.join.tokens)) >= VOCAB:
                continue  # the runner leaves it out
            first += row.count
            if slot.is_lost:
                return  # how many tokens it runs is not known
            if row.want & SAMPLE and self._random.random() < self._faults.row:
                spoiled.append(first - 1 - row.drafts)
                self._blame(launched, index, "rows of no numbers")
        self._injector.nan_tokens = tuple(spoiled)

    def _blame(self, launched: Launched, index: int, what: str) -> None:
        self.failed_seeds.add(launched.rows[index].join.sampling.seed)
        self.seen[what] += 1

    # -- pages --------------------------------------------------------------------------------

    def _pages(self, group: int) -> list:
        """The page tensors of one group's layers, of which no step has more to write."""
        self._wait_for_device()
        store = self._runner.store
        layers = [layer for layer in range(store.num_layers) if store.group_of(layer) == group]
        return [pages for layer in layers for pages in store.tensors(layer).values()]

    def _wait_for_device(self) -> None:
        """Between what the kit does with pages and what steps do, which has a stream of its own."""
        if self._platform is not None:
            self._platform.synchronize()

    def _spoil(self, group: int, pages: list[int]) -> None:
        if pages:
            for tensor in self._pages(group):
                tensor[pages] = self._poison

    def _spoil_fresh(self, launched: Launched) -> None:
        """Pages that no row has computed hold nothing, whatever lay there before; those that the
        step carries away first still hold it."""
        starts = {row.slot: row.start for row in self._rows}
        leaving = {
            (copy.group, copy.src.page)
            for copy in launched.plan.copies
            if copy.src.tier == DEVICE and copy.when == "before"
        }
        for grant in launched.plan.grants:
            require(grant.slot in starts, f"step {launched.plan.step}: a grant without a row")
            size = self._device.groups[grant.group].page_tokens
            fresh = [
                page
                for index, page in enumerate(grant.pages, grant.first)
                if index * size >= starts[grant.slot] and page != PADDING_PAGE
            ]
            kept = [page for page in fresh if (grant.group, page) in leaving]
            self._spoil(grant.group, [page for page in fresh if page not in kept])
            self.seen["fresh pages that are carried away first"] += len(kept)
            self.seen["fresh pages"] += len(fresh)

    def _note_uses(self, launched: Launched) -> None:
        """Which pages the rows write and read, for rule R1."""
        for index, (row, slot) in enumerate(zip(self._rows, launched.rows, strict=True)):
            where = launched.where(index)
            for g in range(len(self._device.groups)):
                for at in self._indices(g, row.start, self._end(row)):
                    page = self.laws.page_at(where, slot, g, at)
                    self.laws.use(launched, g, page, slot.life, is_write=True)
        for index, (row, slot) in enumerate(zip(self._rows, launched.rows, strict=True)):
            where = launched.where(index)
            for g in range(len(self._device.groups)):
                first = self.laws.first_read(g, row.start)
                for at in self._indices(g, first, row.start):
                    page = self.laws.page_at(where, slot, g, at)
                    self.laws.use(launched, g, page, slot.life, is_write=False)
                    self.laws.note_sharing(launched, g, page, slot)

    def _touched(self, launched: Launched, g: int, reads: bool) -> set[int]:
        """Pages of a group that the step's rows may write, or may read as well."""
        return {
            slot.tables[g][at]
            for row, slot in zip(self._rows, launched.rows, strict=True)
            for at in self._indices(
                *(g, self.laws.first_read(g, row.start) if reads else self._lowest(row, slot)),
                self._end(row),
            )
        }

    def _indices(self, g: int, first: int, end: int) -> range:
        """Where a request's page table has the positions first … end − 1."""
        group = self._device.groups[g]
        if group.kind == STATE:
            return range(first < end)
        return range(first // group.page_tokens, -(-end // group.page_tokens))

    def _lowest(self, row: Row, slot: Tenancy) -> int:
        """The first position that the row may write; of a lost slot, any of its output."""
        first = min(row.start, slot.known - 1) if slot.is_lost else row.start
        return min(first, self._unread.get(slot.life, first))

    def _end(self, row: Row) -> int:
        """Behind all positions that a row writes, with those of what a model drafts behind it."""
        return row.start + row.count + row.propose * self._has_draft_model

    def _trespass(self, step: StepId) -> None:
        """A request that takes a free slot has no pages, whoever held the slot before."""
        free = [slot for slot in range(1, self._device.slots + 1) if slot not in self.laws.slots]
        if not free:
            return
        slot = SlotId(self._random.choice(free))
        join = Join(slot, array("i", [1, 2]).tobytes(), 2, SamplingParams(max_new_tokens=1))
        row, before = Row(slot, 0, 2, want=POOL * self._runner.abilities.vectors), self._snapshot()
        self._wait_for_device()
        result = self._runner.launch(StepPlan(step=step, joins=[join], rows=[row])).result()
        where = f"step {step}: slot {slot}"
        require(len(result.failed) == 1, f"{where}: a row without pages does not fail")
        self._require_same(where, before, [{PADDING_PAGE}] * len(before))
        result = self._runner.launch(StepPlan(step=step, leaves=[slot], rows=[row])).result()
        require(len(result.failed) == 1, f"{where}: a row of an empty slot does not fail")
        self.seen["trespassing rows"] += 2

    # -- copies of the kit's own --------------------------------------------------------------

    def _carry_away(self, launched: Launched) -> list[PageCopy]:
        """Take pages that this step reads and writes to the spare ones, once it has run."""
        copies = list[PageCopy]()
        for g, group in enumerate(self._device.groups):
            touched = sorted(self._touched(launched, g, reads=True))
            chosen = self._random.sample(touched, min(SPARE, len(touched)))
            for spare, page in enumerate(chosen, group.num_pages):
                copies.append(self._copy(g, page, spare, "after"))
        return copies

    def _bring_back(self) -> list[PageCopy]:
        return [self._copy(g, spare, page, "before") for g, page, spare in self._away]

    def _copy(self, group: int, src: int, dst: int, when: str) -> PageCopy:
        self._next_copy += 1
        pages = device_page(PageId(src)), device_page(PageId(dst))
        return PageCopy(self._next_copy, group, *pages, when)

    def _settle_copies(
        self,
        pending: LaunchedStep,
        back: list[PageCopy],
        out: list[PageCopy],
        states: list[PageCopy],
    ) -> None:
        """Believe what the runner says of its copies: what it has carried away is spoiled."""
        reported = pending.copies()
        done = set() if reported is None else set(reported.ids)
        failed = set() if reported is None else set(reported.failed)
        asked = {copy.id for copy in back + out + states}
        for copy in states:
            self._ended.append((copy, copy.id in done))
            if copy.id in failed:
                self._spoil(copy.group, [copy.dst.page])
        require(done | failed == asked and not done & failed, f"copies {reported} of {asked}")
        self.seen["failed copies"] += len(failed)
        self.seen["copies before"] += sum(copy.id in done for copy in back)
        self.seen["copies after"] += sum(copy.id in done for copy in out)
        for copy in back:
            if copy.id in failed:
                for tensor in self._pages(copy.group):
                    tensor[copy.dst.page] = tensor[copy.src.page]
        self._away = [(c.group, c.src.page, c.dst.page) for c in out if c.id in done]
        for group in range(len(self._device.groups)):
            self._spoil(group, [page for g, page, _ in self._away if g == group])

    # -- judging ------------------------------------------------------------------------------

    def _snapshot(self) -> list[list[np.ndarray]]:
        """The bytes of all pages."""
        return [
            [bytes_of(tensor).copy() for tensor in self._pages(group)]
            for group in range(len(self._device.groups))
        ]

    def _check_writes(
        self, launched: Launched, before: list[list[np.ndarray]], copies: list[PageCopy]
    ) -> None:
        """A step writes the pages of its own rows, those it copies to, and padding."""
        self.seen["checked writes"] += 1
        allowed = [
            self._touched(launched, g, reads=False)
            | {PADDING_PAGE}
            | {copy.dst.page for copy in copies if copy.group == g}
            for g in range(len(before))
        ]
        self._require_same(f"step {launched.plan.step}", before, allowed)

    def _require_same(
        self, where: str, before: list[list[np.ndarray]], allowed: list[set[int]]
    ) -> None:
        for g, old in enumerate(before):
            for tensor, then in zip(self._pages(g), old, strict=True):
                differ = bytes_of(tensor) != then
                changed = set(np.flatnonzero(differ.reshape(len(then), -1).any(1)).tolist())
                stray = sorted(changed - allowed[g])
                require(not stray, f"{where} writes pages {stray} of group {g}")
