"""The rules of messages/plan.py as far as plans alone show them, for every runner of the kit.

`launch` sees what the engine knew: in-flight counts, occupied slots, gaps. `start` makes a plan's
leaves, joins and grants true when the device reaches it; `use` keeps who reads and writes which
page. Knows no content and no schedulers. Whatever breaks a rule raises BorderError.
"""

from array import array
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from banyan.base.ids import PADDING_PAGE
from banyan.kv_cache.sizing import STATE, WINDOW, CacheGroup
from banyan.messages.control_ops import WEIGHTS, ControlOp, ReleaseMemory, ResumeMemory, TakeWeights
from banyan.messages.plan import (
    DEVICE,
    PEER,
    SAMPLE,
    STORE,
    Join,
    Mask,
    PageCopy,
    Row,
    StepPlan,
    StepResult,
)


class BorderError(AssertionError):
    """The engine or the runner broke a rule of the border."""


def require(holds: bool, text: str) -> None:
    if not holds:
        raise BorderError(text)


@dataclass(frozen=True)
class Device:
    """What the runner has reported to the engine."""

    groups: tuple[CacheGroup, ...]
    slots: int
    depth: int
    token_gap: int = 0
    drafts: int = 0
    chunk_tokens: int = 1 << 30
    multi_step: int = 1

    @property
    def are_bounds(self) -> bool:
        """Rows in flight may yield fewer tokens than planned."""
        return self.drafts > 0 or self.multi_step > 1


@dataclass
class Tenancy:
    """One request in one slot, from join to leave."""

    join: Join
    life: int
    known: int
    """Tokens that the join or `given` brought."""
    tables: list[list[int]] = field(default_factory=list)
    flights: list[tuple[int, int]] = field(default_factory=list)
    """(step, drafts) of launched sampling rows whose results have not been delivered."""
    length: int = 0
    """Tokens that the runner has, as far as its results tell; for runners with real rows."""
    drafts: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    """What it has announced to verify next."""
    is_lost: bool = False
    """A row of it has failed, so that nobody knows its length."""


@dataclass
class Launched:
    plan: StepPlan
    completed_before: int
    """Newest step whose result the engine had when it launched this plan."""
    open_copies: frozenset[int]
    joined: dict[int, Tenancy] = field(default_factory=dict)
    rows: list[Tenancy] = field(default_factory=list)
    slack: list[int] = field(default_factory=list)
    """Per row, drafts in flight: how far `start` may lie above the truth."""

    def where(self, index: int) -> str:
        return f"step {self.plan.step} row {index} (slot {self.plan.rows[index].slot})"


def _counts(plan: StepPlan) -> bool:
    """Whether a plan counts towards the depth."""
    return bool(plan.rows or plan.pieces or plan.replica_loads)


class Laws:
    """
    Args:
        enter: what the runner remembers of a request that takes a slot, given its join, the
            number of this tenancy, and its tokens.
    """

    def __init__(self, device: Device, enter: Callable[[Join, int, list[int]], Tenancy]) -> None:
        self.device = device
        self.seen: Counter[str] = Counter()
        """What was exercised."""
        self.slots: dict[int, Tenancy] = {}
        self.queue: deque[Launched] = deque()
        self.masks: dict[tuple[int, int], bytes] = {}
        self.copies: dict[int, PageCopy] = {}
        """Copies launched and not yet reported."""
        self.copy_lives: dict[int, int] = {}
        """Copy -> slot life of the row that it is bound to."""
        self.users: list[dict[int, dict[int, int]]] = [{} for _ in device.groups]
        """Per group and page, slot life -> newest step that reads or writes the page."""
        self.completed = 0
        self.carried_out: list[ControlOp] = []
        self.released: set[str] = set()
        """Memory that orders have given back to the system."""
        self._enter = enter
        self._occupied: dict[int, Tenancy] = {}
        """Slots as the launched plans leave them; `slots` is as executed."""
        self._next_life = self._launched = 0

    # -- what a launched plan says ------------------------------------------------------------

    def launch(self, plan: StepPlan) -> Launched:
        """Take a plan and check what can be seen without executing it."""
        require(plan.step > self._launched, f"step {plan.step} after step {self._launched}")
        counting = sum(_counts(x.plan) for x in self.queue)
        if _counts(plan):
            require(counting < self.device.depth, f"{counting} steps in flight, one more launched")
        self._launch_orders(plan)
        self._launched = plan.step
        launched = Launched(plan, self.completed, frozenset(self.copies))
        self.queue.append(launched)
        self._change_occupancy(launched)
        self.give_masks(plan.masks)
        self._launch_rows(launched)
        for copy in plan.copies:
            self._launch_copy(copy)
        self.seen["steps"] += 1
        self.seen["idle peer steps"] += not plan.rows and bool(plan.replica_loads)
        self.seen["copy-only plans"] += not plan.rows and bool(plan.copies)
        self.seen["overlapped steps"] += len(self.queue) > 1
        return launched

    def give_masks(self, masks: list[Mask]) -> None:
        for mask in masks:
            self.masks[(mask.step, mask.row)] = mask.bits

    def _launch_orders(self, plan: StepPlan) -> None:
        """A plan with orders is alone in flight."""
        if plan.control_ops:
            where = f"step {plan.step} has orders"
            require(not self.queue, f"{where} while {len(self.queue)} steps are in flight")
            using = [copy for copy in self.copies.values() if copy.dst.tier != STORE]
            require(not using, f"{where} while {len(using)} copies are")
            require(not plan.rows, f"{where} and rows")
        ordered = [x.plan.step for x in self.queue if x.plan.control_ops]
        require(not ordered, f"step {plan.step} is launched before the orders of {ordered} ended")

    def _change_occupancy(self, launched: Launched) -> None:
        plan = launched.plan
        for slot in plan.leaves:
            require(slot in self._occupied, f"step {plan.step}: slot {slot} leaves but is empty")
            del self._occupied[slot]
        for join in plan.joins:
            where = f"step {plan.step}: join of slot {join.slot}"
            require(0 < join.slot <= self.device.slots, f"{where}: no such slot")
            require(join.slot not in self._occupied, f"{where}: it is occupied")
            tokens = list(array("i", join.tokens))
            require(0 < join.prompt_len <= len(tokens), f"{where}: prompt of {join.prompt_len}")
            self._next_life += 1
            tenancy = self._enter(join, self._next_life, tokens)
            tenancy.tables = [[] for _ in self.device.groups]
            launched.joined[join.slot] = self._occupied[join.slot] = tenancy
            self.seen["rejoins with output"] += len(tokens) > join.prompt_len

    def _launch_rows(self, launched: Launched) -> None:
        plan = launched.plan
        slots = [row.slot for row in plan.rows]
        require(len(set(slots)) == len(slots), f"step {plan.step}: two rows of one slot")
        known_tokens = 0
        require(1 <= plan.steps <= self.device.multi_step, f"step {plan.step}: {plan.steps} steps")
        for index, row in enumerate(plan.rows):
            where = launched.where(index)
            require(row.slot in self._occupied, f"{where}: nobody has the slot")
            slot = self._occupied[row.slot]
            launched.rows.append(slot)
            slot.flights = [f for f in slot.flights if f[0] > launched.completed_before]
            require(row.count > row.drafts >= 0, f"{where}: count {row.count}")
            if plan.steps > 1:
                is_plain = row.want == SAMPLE and not row.masked and not row.given
                require(is_plain and row.count == 1 + row.drafts <= plan.steps, f"{where}: {row}")
            else:
                require(row.drafts <= self.device.drafts, f"{where}: {row.drafts} drafts")
            if row.given:
                require(not self._is_flying(launched, slot), f"{where}: given while in flight")
            if slot.flights:
                gap = plan.step - slot.flights[-1][0]
                require(gap > self.device.token_gap, f"{where}: needs a token of {gap} steps ago")
                require(row.count == 1 + row.drafts, f"{where}: more than the last token")
            elif row.start < slot.known:
                known_tokens += row.count - row.drafts
            launched.slack.append(sum(drafts for _, drafts in slot.flights))
            if row.want & SAMPLE:
                slot.flights.append((plan.step, row.drafts))
        budget = self.device.chunk_tokens
        require(known_tokens <= budget, f"step {plan.step}: {known_tokens} of {budget} tokens")

    def _is_flying(self, launched: Launched, slot: Tenancy) -> bool:
        return any(slot in other.rows for other in self.queue if other is not launched)

    def _launch_copy(self, copy: PageCopy) -> None:
        where = f"copy {copy.id}"
        require(copy.id not in self.copies, f"{where}: the id is in use")
        require(copy.when in ("before", "after"), f"{where}: when {copy.when!r}")
        src, dst = copy.src.page, copy.dst.page
        for end in (copy.src, copy.dst):
            is_known = (
                end.tier == DEVICE
                and end.page != PADDING_PAGE
                or end.tier in (STORE, PEER)
                and end.key
            )
            require(bool(is_known), f"{where}: {end}")
        is_move = not copy.is_on_device
        require(not is_move or (copy.when, copy.row) == ("before", -1), f"{where}: {copy}")
        for other in self.copies.values():
            if other.group != copy.group or other.dst.tier == STORE:
                continue
            if other.when == "after" or other.src.tier in (STORE, PEER):
                is_fresh = other.dst.page not in (src, dst)
                require(is_fresh, f"{where}: {other.dst} still waits for copy {other.id}")
            else:
                require(dst != other.src.page, f"{where}: copy {other.id} still reads {dst}")
        self.copies[copy.id] = copy

    # -- when the device reaches a plan -------------------------------------------------------

    def start(self, launched: Launched) -> None:
        """Leaves, joins and grants."""
        plan = launched.plan
        is_there = not plan.rows or not self.released
        require(is_there, f"step {plan.step} has rows while there is no {self.released}")
        for slot in plan.leaves:
            del self.slots[slot]
        self.slots.update(launched.joined)
        for grant in plan.grants:
            where = f"step {plan.step}: grant to slot {grant.slot} group {grant.group}"
            require(grant.slot in self.slots, f"{where}: nobody has the slot")
            table = self.slots[grant.slot].tables[grant.group]
            group = self.device.groups[grant.group]
            require(grant.first <= len(table), f"{where}: leaves a hole at {len(table)}")
            for page in grant.pages:
                is_padding = page == PADDING_PAGE and group.kind == WINDOW
                require(0 < page < group.num_pages or is_padding, f"{where}: page {page}")
            table[grant.first : grant.first + len(grant.pages)] = grant.pages

    def carry_out(self, order: ControlOp) -> None:
        """An order has been carried out."""
        self.carried_out.append(order)
        self.seen[type(order).__name__] += 1
        if isinstance(order, ReleaseMemory):
            self.released |= set(order.tags)
        if isinstance(order, ResumeMemory):
            self.released -= set(order.tags)
        if isinstance(order, TakeWeights):
            self.released -= {WEIGHTS}

    def note_copy(self, copy: PageCopy) -> None:
        """A copy within the device has been carried out."""
        if self.device.groups[copy.group].kind != STATE:
            self.seen["copied parts"] += 1
        else:
            self.seen["restored states" if copy.when == "before" else "kept states"] += 1

    def page_at(self, where: str, slot: Tenancy, g: int, index: int) -> int:
        table = slot.tables[g]
        require(index < len(table), f"{where}: no page {index} in group {g}")
        page = table[index]
        require(page != PADDING_PAGE, f"{where}: page {index} of group {g} is padding")
        return page

    def first_read(self, g: int, start: int) -> int:
        """Lowest position that a row starting at `start` reads of a group with K and V."""
        group = self.device.groups[g]
        return max(0, start - group.window + 1) if group.kind == WINDOW else 0

    def use(self, launched: Launched, group: int, page: int, user: int, is_write: bool) -> None:
        """Rule R1: whoever writes a page has no other user in flight."""
        users = self.users[group].setdefault(page, {})
        where = f"step {launched.plan.step}: page {page} of group {group}"
        if is_write:
            for other, last in list(users.items()):
                if other == user:
                    continue
                if other < 0:
                    is_own = self.copy_lives.get(-other) == user
                    is_open = -other in launched.open_copies and not is_own
                else:
                    is_open = last > launched.completed_before
                require(not is_open, f"{where} is rewritten while in use (by {other}, {last})")
                del users[other]
        users[user] = launched.plan.step

    def note_sharing(self, launched: Launched, g: int, page: int, slot: Tenancy) -> None:
        others = [(life, step) for life, step in self.users[g][page].items() if life > 0]
        writers = [step for life, step in others if life < slot.life]
        self.seen["shared page reads"] += bool(writers)
        promised = [step for step in writers if step > launched.completed_before]
        self.seen["promised page reads"] += bool(promised)


def check_result(
    launched: Launched, rows: list[Row], result: StepResult, seen: Counter[str]
) -> None:
    """Whether a result is one of a plan whose rows ran as `rows`."""
    plan = launched.plan
    require(result.step == plan.step, f"step {plan.step} answers as {result.step}")
    if result.error:
        require("Injected" in result.error, f"step {plan.step} fails: {result.error}")
        return
    failed = {failure.row for failure in result.failed}
    for index, row in enumerate(rows):
        count = len(result.tokens[index]) // 4
        right = int(bool(row.want & SAMPLE) and index not in failed)
        most = right * (1 + row.drafts)
        where = launched.where(index)
        require(right <= count <= most, f"{where}: {count} tokens, not {right} to {most}")
        seen["accepted drafts"] += max(0, count - 1)
        seen["rejected drafts"] += most - count
    seen["failed rows"] += len(failed)
    seen["masked rows"] += sum(row.masked for row in plan.rows)
    seen["jumps"] += sum(bool(row.given) for row in plan.rows)
