"""A runner and a device without tensors: executes plans exactly as messages/plan.py prescribes.

Where a real device holds keys and values, this one holds the hash of everything up to a position,
so a page that is stale, foreign or not yet written is noticed by whoever reads it. It knows nothing
of schedulers. Whatever breaks a rule of the border raises BorderError.

A plan takes effect in two moments. `launch` sees what the engine knew: in-flight counts, occupied
slots, gaps. `execute` does the work, in launch order, when the driver decides that the step ends.
"""

from array import array
from collections import Counter, deque
from dataclasses import dataclass, field
from random import Random

from banyan.base.ids import PADDING_PAGE
from banyan.memory.groups import FULL, STATE, WINDOW, CacheGroup
from banyan.messages.plan import (
    POOL,
    SAMPLE,
    SCORE,
    CopyResult,
    Join,
    Mask,
    PageCopy,
    Row,
    RowFailure,
    RowScores,
    StepPlan,
    StepResult,
)
from tests.border import oracle


class BorderError(AssertionError):
    """The engine broke a rule of the border."""


def require(holds: bool, text: str) -> None:
    if not holds:
        raise BorderError(text)


@dataclass(frozen=True)
class Poison:
    """What a fault left behind. Plans launched before the engine heard of it may read it."""

    step: int


Content = int | Poison | None
"""Hash of the sequence up to and with a position; None = never written."""


@dataclass(frozen=True)
class Device:
    """What the engine was told of the runner."""

    groups: tuple[CacheGroup, ...]
    slots: int
    depth: int
    token_gap: int = 0
    drafts: int = 0
    chunk_tokens: int = 1 << 30


@dataclass
class Faults:
    """Probabilities, per opportunity."""

    row: float = 0.0
    step: float = 0.0
    copy: float = 0.0
    good_draft: float = 0.6


@dataclass
class Slot:
    """The device's memory of one slot, from join to leave."""

    join: Join
    life: int
    tokens: list[int]
    hashes: list[int]
    known: int
    """Tokens that the join or `given` brought."""
    masked_state: int
    """Hash of the output, for the masks."""
    drafts: list[int] = field(default_factory=list)
    poison: Poison | None = None
    tables: list[list[int]] = field(default_factory=list)
    flights: list[tuple[int, int]] = field(default_factory=list)
    """(step, drafts) of launched sampling rows whose results have not been delivered."""

    def append(self, token: int) -> None:
        self.tokens.append(token)
        self.hashes.append(oracle.mix(self.hashes[-1], token))
        if len(self.tokens) > self.join.prompt_len:
            self.masked_state = oracle.mix(self.masked_state, token)


@dataclass
class Launched:
    plan: StepPlan
    completed_before: int
    """Newest step whose result the engine had when it launched this plan."""
    open_copies: frozenset[int]
    joined: dict[int, Slot] = field(default_factory=dict)
    rows: list[Slot] = field(default_factory=list)
    slack: list[int] = field(default_factory=list)
    """Per row, drafts in flight: how far `start` may lie above the truth."""


class FakeRunner:
    """Executes plans of one replica.

    Args:
        device: sizes that the engine was told.
        faults: what goes wrong, and how often.
        namespaces: sampling seed -> cache namespace; the border does not carry namespaces.
    """

    def __init__(
        self, device: Device, faults: Faults, random: Random, namespaces: dict[int, bytes]
    ) -> None:
        self.device = device
        self.faults = faults
        self.seen: Counter[str] = Counter()
        """What was exercised."""
        self.failed_seeds: set[int] = set()
        """Sampling seeds of requests that a fault of this runner may have failed."""
        self._random = random
        self._namespaces = namespaces
        self._pages: list[dict[int, list[Content]]] = [{} for _ in device.groups]
        self._users: list[dict[int, dict[int, int]]] = [{} for _ in device.groups]
        """Per group and page, slot life -> newest step that reads or writes the page."""
        self._slots: dict[int, Slot] = {}
        self._occupied: dict[int, Slot] = {}
        """Slots as the launched plans leave them; `_slots` is as executed."""
        self._queue: deque[Launched] = deque()
        self._masks: dict[tuple[int, int], bytes] = {}
        self._copies: dict[int, PageCopy] = {}
        """Copies launched and not yet reported."""
        self._copy_lives: dict[int, int] = {}
        """Copy -> slot life of the row that it is bound to."""
        self._ended: list[tuple[int, bool]] = []
        """Copies done and not yet reported: (id, is good)."""
        self._next_life = 0
        self._launched = self._completed = 0

    # -- what the driver calls ----------------------------------------------------------------

    @property
    def in_flight(self) -> int:
        return len(self._queue)

    @property
    def copies_to_report(self) -> int:
        return len(self._ended)

    @property
    def is_quiet(self) -> bool:
        return not self._queue and not self._copies

    def launch(self, plan: StepPlan) -> None:
        """Take a plan and check what can be seen without executing it."""
        require(plan.step > self._launched, f"step {plan.step} after step {self._launched}")
        counting = sum(bool(x.plan.rows or any(x.plan.peers)) for x in self._queue)
        if plan.rows or any(plan.peers):
            require(counting < self.device.depth, f"{counting} steps in flight, one more launched")
        self._launched = plan.step
        launched = Launched(plan, self._completed, frozenset(self._copies))
        self._queue.append(launched)
        self._change_occupancy(launched)
        self.give_masks(plan.masks)
        self._launch_rows(launched)
        for copy in plan.copies:
            self._launch_copy(copy)
        self.seen["steps"] += 1
        self.seen["idle peer steps"] += not plan.rows and any(plan.peers)
        self.seen["copy-only plans"] += not plan.rows and bool(plan.copies)
        self.seen["overlapped steps"] += len(self._queue) > 1

    def give_masks(self, masks: list[Mask]) -> None:
        for mask in masks:
            self._masks[(mask.step, mask.row)] = mask.bits

    def execute(self) -> StepResult:
        """End the oldest step in flight."""
        launched = self._queue.popleft()
        self._completed = launched.plan.step
        return Execution(self, launched).run()

    def report_copies(self, count: int) -> CopyResult:
        """The end of `count` copies, in any order."""
        self._random.shuffle(self._ended)
        batch, self._ended = self._ended[:count], self._ended[count:]
        for copy_id, _ in batch:
            del self._copies[copy_id]
        return CopyResult([i for i, good in batch if good], [i for i, good in batch if not good])

    def chance(self, kind: str) -> bool:
        """Whether a fault of this kind strikes at this opportunity."""
        odds = {"row": self.faults.row, "step": self.faults.step, "copy": self.faults.copy}
        return self._random.random() < odds[kind]

    # -- what a launched plan says ------------------------------------------------------------

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
            launched.joined[join.slot] = self._occupied[join.slot] = self._enter(join, tokens)

    def _enter(self, join: Join, tokens: list[int]) -> Slot:
        start = oracle.start_of(self._namespaces[join.sampling.seed])
        slot = Slot(join, self._next_life, [], [start], len(tokens), 0)
        slot.tables = [[] for _ in self.device.groups]
        for token in tokens:
            slot.append(token)
        self.seen["rejoins with output"] += len(tokens) > join.prompt_len
        return slot

    def _launch_rows(self, launched: Launched) -> None:
        plan = launched.plan
        slots = [row.slot for row in plan.rows]
        require(len(set(slots)) == len(slots), f"step {plan.step}: two rows of one slot")
        known_tokens = 0
        for index, row in enumerate(plan.rows):
            where = f"step {plan.step} row {index} (slot {row.slot})"
            require(row.slot in self._occupied, f"{where}: nobody has the slot")
            slot = self._occupied[row.slot]
            launched.rows.append(slot)
            slot.flights = [f for f in slot.flights if f[0] > launched.completed_before]
            require(row.count > row.drafts >= 0, f"{where}: count {row.count}")
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

    def _is_flying(self, launched: Launched, slot: Slot) -> bool:
        return any(slot in other.rows for other in self._queue if other is not launched)

    def _launch_copy(self, copy: PageCopy) -> None:
        where = f"copy {copy.id}"
        require(copy.id not in self._copies, f"{where}: the id is in use")
        require(copy.when in ("before", "after"), f"{where}: when {copy.when!r}")
        require(PADDING_PAGE not in (copy.src, copy.dst), f"{where}: padding page")
        for other in self._copies.values():
            if other.group != copy.group:
                continue
            if other.when == "after":
                is_fresh = other.dst not in (copy.src, copy.dst)
                require(is_fresh, f"{where}: page {other.dst} still waits for copy {other.id}")
            else:
                require(copy.dst != other.src, f"{where}: copy {other.id} still reads {copy.dst}")
        self._copies[copy.id] = copy


class Execution:
    """One step on the device."""

    def __init__(self, runner: FakeRunner, launched: Launched) -> None:
        self.runner = runner
        self.device = runner.device
        self.launched = launched
        self.plan = launched.plan
        self.poison = Poison(launched.plan.step)
        self.is_broken = runner.chance("step") and bool(self.plan.rows)
        self.broken_rows = {i: "chance" for i in range(len(self.plan.rows)) if runner.chance("row")}
        self.starts: list[int] = []
        self.tainted: list[Poison | None] = []

    def run(self) -> StepResult:
        for slot in self.plan.leaves:
            del self.runner._slots[slot]
        self.runner._slots.update(self.launched.joined)
        self._apply_grants()
        for copy in self.plan.copies:
            if copy.when == "before":
                self._copy(copy)
        pairs = list(zip(self.plan.rows, self.launched.rows, strict=True))
        for index, (row, slot) in enumerate(pairs):
            self._write(index, row, slot)
        self._read_all(pairs)
        result = self._finish(pairs)
        for copy in self.plan.copies:
            if copy.when == "after":
                self._copy(copy)
        return result

    # -- occupancy and pages ------------------------------------------------------------------

    def _apply_grants(self) -> None:
        for grant in self.plan.grants:
            where = f"step {self.plan.step}: grant to slot {grant.slot} group {grant.group}"
            require(grant.slot in self.runner._slots, f"{where}: nobody has the slot")
            table = self.runner._slots[grant.slot].tables[grant.group]
            group = self.device.groups[grant.group]
            require(grant.first <= len(table), f"{where}: leaves a hole at {len(table)}")
            for page in grant.pages:
                is_padding = page == PADDING_PAGE and group.kind == WINDOW
                require(0 < page < group.num_pages or is_padding, f"{where}: page {page}")
            table[grant.first : grant.first + len(grant.pages)] = grant.pages

    def _copy(self, copy: PageCopy) -> None:
        runner = self.runner
        is_good = not self.is_broken and not runner.chance("copy")
        life = self.launched.rows[copy.row].life if copy.row >= 0 else -copy.id
        runner._copy_lives[copy.id] = life
        is_restore = copy.when == "before"
        self._use(copy.group, copy.dst, life if is_restore else -copy.id, is_write=True)
        self._use(copy.group, copy.src, -copy.id, is_write=False)
        pages = runner._pages[copy.group]
        if is_good:
            pages[copy.dst] = list(pages.get(copy.src, [None]))
            runner.seen["restored states" if is_restore else "kept states"] += 1
        else:
            pages[copy.dst] = [self.poison]
            runner.seen["failed copies"] += 1
            if is_restore and copy.row >= 0:
                self.broken_rows[copy.row] = "copy"
        runner._ended.append((copy.id, is_good))

    def _use(self, group: int, page: int, user: int, is_write: bool) -> None:
        """Rule R1: whoever writes a page has no other user in flight."""
        users = self.runner._users[group].setdefault(page, {})
        where = f"step {self.plan.step}: page {page} of group {group}"
        if is_write:
            for other, last in list(users.items()):
                if other == user:
                    continue
                if other < 0:
                    is_own = self.runner._copy_lives.get(-other) == user
                    is_open = -other in self.launched.open_copies and not is_own
                else:
                    is_open = last > self.launched.completed_before
                require(not is_open, f"{where} is rewritten while in use (by {other}, {last})")
                del users[other]
        users[user] = self.plan.step

    # -- rows ---------------------------------------------------------------------------------

    def _true_start(self, where: str, row: Row, slot: Slot, slack: int) -> int:
        if row.start < slot.known and row.start + row.count - row.drafts <= slot.known:
            return row.start
        last = len(slot.tokens) - 1
        if slot.poison is None:
            exact = row.start == last if not self.device.drafts else last <= row.start
            require(exact, f"{where}: starts at {row.start}, the slot's last token is at {last}")
            bound = last + slack
            require(row.start <= bound, f"{where}: starts at {row.start}, at most {bound} is true")
        return last

    def _write(self, index: int, row: Row, slot: Slot) -> None:
        """All rows write before any reads, so rows may hit each other's pages (rule R2)."""
        where = f"step {self.plan.step} row {index} (slot {row.slot})"
        if row.given:
            for position, token in enumerate(array("i", row.given), row.start):
                if position == len(slot.tokens):
                    slot.append(token)
                require(slot.tokens[position] == token, f"{where}: given token {position}")
            slot.known = len(slot.tokens)
            self.runner.seen["jumps"] += 1
        start = self._true_start(where, row, slot, self.launched.slack[index])
        self.starts.append(start)
        self.tainted.append(slot.poison)
        drafts = slot.drafts[: row.drafts]
        hashes = list(slot.hashes[start + 1 : start + 1 + row.count - row.drafts])
        for draft in drafts:
            hashes.append(oracle.mix(hashes[-1], draft))
        is_bad = slot.poison is not None or self.is_broken or index in self.broken_rows
        values: list[Content] = list(hashes)
        if is_bad:
            values = [slot.poison or self.poison] * len(hashes)
        for g, group in enumerate(self.device.groups):
            if group.kind == STATE:
                continue  # the state is read and written in one go
            size = group.page_tokens
            for position in range(start, start + len(values)):
                page = self._page_at(where, slot, g, position // size)
                if position == start or position % size == 0:
                    self._use(g, page, slot.life, is_write=True)
                content = self.runner._pages[g].setdefault(page, [None] * size)
                content[position % size] = values[position - start]

    def _read_all(self, pairs: list[tuple[Row, Slot]]) -> None:
        """Whoever reads spoiled pages spoils its own, also for other rows of the step."""
        while True:
            before = list(self.tainted)
            for index, (row, slot) in enumerate(pairs):
                self._read(index, row, slot)
                if self.tainted[index] is not before[index]:
                    self._spoil(index, row, slot)
            if self.tainted == before:
                return

    def _spoil(self, index: int, row: Row, slot: Slot) -> None:
        self.runner.seen["tainted rows"] += 1
        start = self.starts[index]
        for g, group in enumerate(self.device.groups):
            if group.kind != STATE:
                for position in range(start, start + row.count):
                    page = slot.tables[g][position // group.page_tokens]
                    content = self.runner._pages[g][page]
                    content[position % group.page_tokens] = self.tainted[index]

    def _page_at(self, where: str, slot: Slot, g: int, index: int) -> int:
        table = slot.tables[g]
        require(index < len(table), f"{where}: no page {index} in group {g}")
        page = table[index]
        require(page != PADDING_PAGE, f"{where}: page {index} of group {g} is padding")
        return page

    def _read(self, index: int, row: Row, slot: Slot) -> None:
        where = f"step {self.plan.step} row {index} (slot {row.slot})"
        start = self.starts[index]
        for g, group in enumerate(self.device.groups):
            size = group.page_tokens
            if group.kind == STATE:
                page = self._page_at(where, slot, g, 0)
                self._use(g, page, slot.life, is_write=True)
                if start:
                    content = self.runner._pages[g].get(page, [None])
                    self._expect(index, f"{where} state", content, [slot.hashes[start]])
                continue
            first = 0 if group.kind == FULL else max(0, start - group.window + 1)
            for i in range(first // size, -(-start // size)):
                low, high = max(first, i * size), min(start, (i + 1) * size)
                page = self._page_at(where, slot, g, i)
                self._use(g, page, slot.life, is_write=False)
                content = self.runner._pages[g].get(page, [None] * size)
                got = content[low - i * size : high - i * size]
                what = f"{where} group {g} page {page} positions {low}…{high - 1}"
                self._expect(index, what, got, slot.hashes[low + 1 : high + 1])
                self._note_sharing(g, page, slot)

    def _note_sharing(self, g: int, page: int, slot: Slot) -> None:
        others = [(life, step) for life, step in self.runner._users[g][page].items() if life > 0]
        writers = [step for life, step in others if life < slot.life]
        self.runner.seen["shared page reads"] += bool(writers)
        promised = [step for step in writers if step > self.launched.completed_before]
        self.runner.seen["promised page reads"] += bool(promised)

    def _expect(self, index: int, what: str, got: list[Content], want: list[int]) -> None:
        if got == want:
            return
        if self.tainted[index] is not None:
            return
        for have, right in zip(got, want, strict=True):
            if isinstance(have, Poison):
                known = self.launched.completed_before >= have.step
                require(not known, f"{what}: reads what step {have.step} is known to have spoiled")
                self.tainted[index] = have
                return
            require(have == right, f"{what}: {'never written' if have is None else 'foreign'}")

    # -- results ------------------------------------------------------------------------------

    def _finish(self, pairs: list[tuple[Row, Slot]]) -> StepResult:
        tokens, drafts, vectors = (list[bytes]() for _ in range(3))
        scores: list[RowScores] = []
        failed: list[RowFailure] = []
        for index, (row, slot) in enumerate(pairs):
            start, before = self.starts[index], len(slot.tokens)
            is_bad = self.is_broken or index in self.broken_rows
            if is_bad:
                slot.poison = slot.poison or self.poison
                self._blame(index, slot)
            elif self.tainted[index] is not None:
                slot.poison = slot.poison or self.tainted[index]
            sampled = self._sample(index, row, slot)
            self._keep_state(row, slot, start, before, len(sampled))
            tokens.append(b"" if is_bad else array("i", sampled).tobytes())
            is_pooled = row.want & POOL and not is_bad
            state = slot.hashes[row.start + row.count] if is_pooled else 0
            vectors.append(oracle.vector(state) if is_pooled else b"")
            slot.drafts = self._propose(row, slot)
            drafts.append(array("i", slot.drafts).tobytes())
            if is_bad:
                failed.append(
                    RowFailure(index, f"injected ({self.broken_rows.get(index, 'step')})")
                )
            elif row.want & SCORE:
                scores += self._score(index, row, slot, start)
        if self.is_broken:
            self.runner.seen["failed steps"] += 1
            return StepResult(step=self.plan.step, error="injected")
        return StepResult(
            step=self.plan.step,
            tokens=tokens,
            drafts=drafts if self.device.drafts else [],
            scores=scores,
            failed=failed,
            seconds=0.001,
            vectors=vectors if any(vectors) else [],
        )

    def _blame(self, index: int, slot: Slot) -> None:
        if self.is_broken or self.broken_rows[index] == "chance":
            self.runner.failed_seeds.add(slot.join.sampling.seed)
            self.runner.seen["failed rows"] += not self.is_broken

    def _sample(self, index: int, row: Row, slot: Slot) -> list[int]:
        """Verify the drafts and choose the token after the last accepted one."""
        if not row.want & SAMPLE:
            return []
        drafts = slot.drafts[: row.drafts]
        end = self.starts[index] + row.count - row.drafts
        if slot.poison is None:
            where = f"step {self.plan.step} row {index}"
            require(end == len(slot.tokens), f"{where}: samples after {end} of the known tokens")
        masks = self._masks_of(index, row, slot, len(drafts))
        if slot.poison is not None:
            count = 1 + self.runner._random.randrange(len(drafts) + 1)
            sampled = [self.runner._random.randrange(oracle.VOCAB) for _ in range(count)]
            for token in sampled:
                slot.append(token)
            return sampled
        sampled: list[int] = []
        for i, draft in enumerate([*drafts, -1]):
            mask = masks[i] if row.masked else b""
            if row.masked:
                right = oracle.mask_at(slot.masked_state)
                require(mask == right, f"step {self.plan.step} row {index}: wrong mask {i}")
            token = oracle.next_token(slot.hashes[-1], slot.join.sampling.seed, mask)
            slot.append(token)
            sampled.append(token)
            if token != draft:
                break
        self.runner.seen["accepted drafts"] += len(sampled) - 1
        self.runner.seen["rejected drafts"] += len(drafts) - len(sampled) + 1
        return sampled

    def _masks_of(self, index: int, row: Row, slot: Slot, drafts: int) -> list[bytes]:
        if not row.masked:
            return []
        where = f"step {self.plan.step} row {index}"
        key = (self.plan.step, index)
        require(key in self.runner._masks, f"{where}: no mask came before sampling")
        packed = self.runner._masks.pop(key)
        if not packed:
            slot.poison = slot.poison or Poison(self.plan.step)
            self.runner.seen["void masks"] += 1
            return []
        size = oracle.VOCAB // 8
        if slot.poison is None:
            have, want = len(packed) // size, drafts + 1
            require(have >= want, f"{where}: {have} masks, {want} needed")
        self.runner.seen["masked rows"] += 1
        return [packed[i : i + size] for i in range(0, len(packed), size)]

    def _keep_state(self, row: Row, slot: Slot, start: int, before: int, sampled: int) -> None:
        """A state group holds the state after the last position whose token stands."""
        end = start + row.count - row.drafts + max(0, sampled - 1)
        for g, group in enumerate(self.device.groups):
            if group.kind == STATE:
                kept = slot.hashes[end] if slot.poison is None else self.poison
                self.runner._pages[g][slot.tables[g][0]] = [kept]

    def _propose(self, row: Row, slot: Slot) -> list[int]:
        if not row.want & SAMPLE:
            return slot.drafts
        state, masked_state, drafts = slot.hashes[-1], slot.masked_state, []
        for _ in range(self.device.drafts):
            mask = oracle.mask_at(masked_state) if row.masked else b""
            token = oracle.next_token(state, slot.join.sampling.seed, mask)
            if self.runner._random.random() >= self.runner.faults.good_draft:
                token = self.runner._random.randrange(oracle.VOCAB)
            drafts.append(token)
            state, masked_state = oracle.mix(state, token), oracle.mix(masked_state, token)
        return drafts

    def _score(self, index: int, row: Row, slot: Slot, start: int) -> list[RowScores]:
        first = max(start + 1, row.score_from)
        reach = len(slot.tokens) if row.want & SAMPLE else start + row.count + 1
        scored = range(first, min(reach, len(slot.tokens)))
        if not scored:
            return []
        values = [oracle.logprob(slot.hashes[p], slot.tokens[p]) for p in scored]
        self.runner.seen["scored rows"] += 1
        return [RowScores(index, first, array("f", values).tobytes())]
