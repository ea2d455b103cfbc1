"""A runner and a device without tensors: executes plans exactly as messages/plan.py prescribes.

Where a real device holds keys and values, this one holds the hash of everything up to a position,
so a page that is stale, foreign or not yet written is noticed by whoever reads it. It knows nothing
of schedulers. Whatever breaks a rule of the border raises BorderError.

A plan takes effect in two moments: `launch` checks it as far as the engine could know (laws.py),
`execute` does the work, in launch order, when the driver decides that the step ends.
"""

from array import array
from collections import Counter, deque
from collections.abc import Callable
from random import Random

import msgspec

from banyan.kv_cache.sizing import FULL, STATE, WINDOW, common_block_size
from banyan.messages.control_ops import (
    KV_CACHE,
    AttachStore,
    ControlOp,
    ControlOpReply,
    DetachStore,
    ReleaseMemory,
    TakeWeights,
)
from banyan.messages.plan import (
    DEVICE,
    HIDDEN,
    PEER,
    POOL,
    SAMPLE,
    SCORE,
    STORE,
    CopyResult,
    Held,
    Join,
    Lookup,
    Mask,
    PageCopy,
    Row,
    RowFailure,
    RowScores,
    StepPlan,
    StepResult,
)
from banyan.runner.runner_config import Abilities
from banyan.scheduler.spans import ContentLimits
from tests.border import oracle
from tests.border.fake_features import FakeFeatures
from tests.border.fake_memory import Content, Poison, Slot, Stored
from tests.border.faults import Faults
from tests.border.laws import Device, Launched, Laws, require
from tests.border.peer import FakePeer

Answers = Callable[[], list[oracle.Answer]]
"""Of the requests that are alive."""
ABILITIES = Abilities(
    groups=(FULL, WINDOW, STATE),
    copies=True,
    tiers=(DEVICE, STORE, PEER),
    drafts=True,
    goes_back=True,
    peers=True,
    adapters=True,
    text=True,
    vectors=True,
    hidden=True,
    multi_steps=True,
    features=True,
)


class FakeRunner:
    """Executes plans of one replica.

    Args:
        device: sizes that the engine was given.
        faults: what goes wrong, and how often.
        namespaces: sampling seed -> cache namespace; the border does not carry namespaces.
        stored: pages in the store.
        has_store: it is attached from the start.
    """

    def __init__(
        self,
        device: Device,
        faults: Faults,
        random: Random,
        namespaces: dict[int, bytes],
        stored: Stored | None = None,
        has_store: bool = True,
    ) -> None:
        self._has_store = has_store
        self._shelves: dict[bytes, Stored] = {}
        """What other stores hold, by the options that they are attached with."""
        self.device = device
        self.faults = faults
        self.failed_seeds: set[int] = set()
        """Sampling seeds of requests that a fault of this runner may have failed."""
        self.laws = Laws(device, self._enter)
        self._random = random
        self._namespaces = namespaces
        self._pages: list[dict[int, list[Content]]] = [{} for _ in device.groups]
        self._ended: list[tuple[int, bool]] = []
        """Copies done and not yet reported: (id, is good)."""
        self._weights = 0
        """What pages are computed with; part of their content."""
        self._stored = self._shelves[b"{}"] = {} if stored is None else stored
        self._moving: list[tuple[PageCopy, list[Content]]] = []
        """Copies to the store with what they bring, and from it with nothing."""
        self._lookups: deque[Lookup] = deque()
        self.features = FakeFeatures(ContentLimits(), lambda: self.chance("row"), self._blame)
        self.answers: Answers = list
        self.peer = FakePeer(common_block_size(device.groups), random, self.failed_seeds, self.seen)

    def _blame(self, digest: bytes) -> None:
        """A content has failed: whoever has it may fail."""
        self.laws.seen["failed contents"] += 1
        for answer in self.answers():
            generate = answer.generate
            if any(content.digest == digest for content in generate.contents):
                self.failed_seeds.add(generate.sampling.seed)

    # -- what the driver calls ----------------------------------------------------------------

    @property
    def seen(self) -> Counter[str]:
        """What was exercised."""
        return self.laws.seen

    @property
    def carried_out(self) -> list[ControlOp]:
        return self.laws.carried_out

    @property
    def copies_to_report(self) -> int:
        return len(self._ended) + len(self._moving)

    @property
    def is_quiet(self) -> bool:
        is_waiting = bool(self._lookups) or not self.peer.is_quiet
        return not (self.laws.queue or self.laws.copies or is_waiting)

    def launch(self, plan: StepPlan) -> None:
        """Take a plan."""
        self.laws.launch(plan)

    def give_masks(self, masks: list[Mask]) -> None:
        self.laws.give_masks(masks)

    def execute(self) -> StepResult:
        """End the oldest step in flight."""
        launched = self.laws.queue.popleft()
        self.laws.completed = launched.plan.step
        return Execution(self, launched).run()

    def report_copies(self, count: int) -> CopyResult:
        """The end of `count` copies, in any order."""
        self._random.shuffle(self._moving)
        while self._moving and len(self._ended) < count:
            self._ended.append(self._move(*self._moving.pop()))
        self._random.shuffle(self._ended)
        batch, self._ended = self._ended[:count], self._ended[count:]
        for copy_id, _ in batch:
            del self.laws.copies[copy_id]
        return CopyResult([i for i, good in batch if good], [i for i, good in batch if not good])

    def look(self, lookups: list[Lookup]) -> None:
        self._lookups += lookups

    def report_held(self) -> Held | None:
        """The answer to the oldest lookup; by the time that it is heard, pages may have gone."""
        if not self._lookups:
            return None
        lookup = self._lookups.popleft()
        groups = range(len(self.device.groups))
        stored = self._stored if self._has_store else {}
        known = [all((g, key) in stored for g in groups) for key in lookup.keys]
        count = [*known, False].index(False)
        self.laws.seen["prefixes found in the store"] += count > 0
        return Held(lookup.id, count)

    def _move(self, copy: PageCopy, content: list[Content]) -> tuple[int, bool]:
        """End a copy to or from the store: (id, is good)."""
        if self._stored and self.chance("copy"):
            del self._stored[self._random.choice(list(self._stored))]
            self.laws.seen["pages evicted from the store"] += 1
        is_good = not self.chance("copy")
        if copy.dst.tier == STORE:
            if is_good:
                self._stored[copy.group, copy.dst.key] = content
            self.laws.seen["stored pages" if is_good else "failed copies"] += 1
            return copy.id, is_good
        found = self._stored.get((copy.group, copy.src.key))
        if copy.src.tier == PEER:
            came = self.peer.page(copy.src.key, self.device.groups[copy.group].page_tokens)
            found = None if came is None else [code ^ self._weights for code in came]
        if found is None or not is_good:
            self.laws.seen["failed loads"] += 1
            return copy.id, False
        self._pages[copy.group][copy.dst.page] = list(found)
        self.laws.seen["loaded pages"] += 1
        return copy.id, True

    def chance(self, kind: str) -> bool:
        """Whether a fault of this kind strikes at this opportunity."""
        odds = {"row": self.faults.row, "step": self.faults.step, "copy": self.faults.copy}
        odds["order"] = self.faults.order
        return self._random.random() < odds[kind]

    def obey(self, orders: list[ControlOp]) -> list[ControlOpReply]:
        """Carry these out, up to one that fails by chance."""
        replies: list[ControlOpReply] = []
        for order in orders:
            if self.chance("order"):
                self.seen["failed orders"] += 1
                return [*replies, ControlOpReply(False, "injected")]
            if isinstance(order, ReleaseMemory) and KV_CACHE in order.tags:
                self._pages = [{} for _ in self.device.groups]
            if isinstance(order, TakeWeights):
                self._weights = oracle.mix(1, int(order.version))
            if isinstance(order, AttachStore | DetachStore) and not order.is_trial:
                self._switch(order)
            self.laws.carry_out(order)
            replies.append(ControlOpReply(True, "done"))
        return replies

    def _switch(self, order: AttachStore | DetachStore) -> None:
        """Another store, or none: copies to the old one are not reported any more."""
        is_new = isinstance(order, AttachStore)
        require(is_new or self._has_store, f"{order}: there is no store")
        require(not (is_new and self._has_store), f"{order}: there is a store")
        self._has_store = is_new
        if isinstance(order, AttachStore):
            self._stored = self._shelves.setdefault(order.options, {})
            return
        for copy, _ in self._moving:
            require(copy.dst.tier == STORE, f"copy {copy.id} waits for a store that goes")
            del self.laws.copies[copy.id]
        self._moving.clear()
        self._lookups.clear()

    def _enter(self, join: Join, life: int, tokens: list[int]) -> Slot:
        start = oracle.start_of(self._namespaces[join.sampling.seed])
        slot = Slot(join, life, len(tokens), hashes=[start])
        for token in tokens:
            slot.append(token)
        return slot


class Execution:
    """One step on the device."""

    def __init__(self, runner: FakeRunner, launched: Launched) -> None:
        self.runner = runner
        self.laws = runner.laws
        self.device = runner.device
        self.launched = launched
        self.plan = launched.plan
        self.poison = Poison(launched.plan.step)
        self.is_broken = runner.chance("step") and bool(self.plan.rows)
        self.broken_rows = {i: "chance" for i in range(len(self.plan.rows)) if runner.chance("row")}
        self.starts: list[int] = []
        self.tainted: list[Poison | None] = []
        self.ran = 1
        """Steps of a burst."""

    def run(self) -> StepResult:
        replies = self.runner.obey(self.plan.control_ops)
        self.laws.start(self.launched)
        for copy in self.plan.copies:
            if not copy.is_on_device:
                self._begin_move(copy)
            elif copy.when == "before":
                self._copy(copy)
        spoilt = self.runner.features.enter(self.plan, self.is_broken)
        pairs = list(zip(self.plan.rows, self._slots(), strict=True))
        if self.plan.steps > 1:
            self._foresee(pairs)
        for index, (row, slot) in enumerate(pairs):
            self._write(index, row, slot)
        self._read_all(pairs)
        result = self._finish(pairs)
        for copy in self.plan.copies:
            if copy.when == "after" and copy.is_on_device:
                self._copy(copy)
        return msgspec.structs.replace(result, replies=replies, spoilt=spoilt)

    def _foresee(self, pairs: list[tuple[Row, Slot]]) -> None:
        """How many steps of the burst will run, and what rows sample in all but the last."""
        most = min(row.count for row, _ in pairs)
        self.ran = self.runner._random.randint(1, most)
        self.laws.seen["bursts" if self.ran > 1 else "bursts of one step"] += 1
        self.laws.seen["bursts that ended early"] += self.ran < most
        for _, slot in pairs:
            state, slot.drafts = slot.hashes[-1], []
            for _ in range(self.ran - 1):
                token = oracle.next_token(state, slot.join.sampling.seed, b"")
                slot.drafts.append(token)
                state = oracle.mix(state, token)

    def _begin_move(self, copy: PageCopy) -> None:
        """To the store go the bytes of this moment; from it they come when the end is reported."""
        where = f"step {self.plan.step} copy {copy.id}"
        size = self.device.groups[copy.group].page_tokens
        pages, content = self.runner._pages[copy.group], list[Content]()
        is_there = self.runner._has_store or PEER in (copy.src.tier, copy.dst.tier)
        require(is_there, f"{where}: there is no store")
        if copy.dst.tier == STORE:
            content = list(pages.get(copy.src.page, [None] * size))
            is_right = all(isinstance(value, int) for value in content)
            require(is_right, f"{where}: page {copy.src.page} is stored, and it holds {content}")
        else:
            self._use(copy.group, copy.dst.page, -copy.id, is_write=True)
            pages[copy.dst.page] = [None] * size
        self.runner._moving.append((copy, content))

    def _slots(self) -> list[Slot]:
        return [slot for slot in self.launched.rows if isinstance(slot, Slot)]

    # -- pages -------------------------------------------------------------------------------

    def _copy(self, copy: PageCopy) -> None:
        runner = self.runner
        is_good = not self.is_broken and not runner.chance("copy")
        life = self.launched.rows[copy.row].life if copy.row >= 0 else -copy.id
        self.laws.copy_lives[copy.id] = life
        is_restore = copy.when == "before"
        self._use(copy.group, copy.dst.page, life if is_restore else -copy.id, is_write=True)
        self._use(copy.group, copy.src.page, -copy.id, is_write=False)
        pages, group = runner._pages[copy.group], self.device.groups[copy.group]
        size = 1 if group.kind == STATE else group.page_tokens
        if is_good:
            pages[copy.dst.page] = list(pages.get(copy.src.page, [None] * size))
            self.laws.note_copy(copy)
        else:
            pages[copy.dst.page] = [self.poison] * size
            self.laws.seen["failed copies"] += 1
            if is_restore and copy.row >= 0:
                self.broken_rows[copy.row] = "copy"
        runner._ended.append((copy.id, is_good))

    def _use(self, group: int, page: int, user: int, is_write: bool) -> None:
        self.laws.use(self.launched, group, page, user, is_write)

    # -- rows ---------------------------------------------------------------------------------

    def _true_start(self, where: str, row: Row, slot: Slot, slack: int) -> int:
        if row.start < slot.known and row.start + row.count - row.drafts <= slot.known:
            return row.start
        last = len(slot.tokens) - 1
        if slot.poison is None:
            exact = last <= row.start if self.device.are_bounds else row.start == last
            require(exact, f"{where}: starts at {row.start}, the slot's last token is at {last}")
            bound = last + slack
            require(row.start <= bound, f"{where}: starts at {row.start}, at most {bound} is true")
        return last

    def _write(self, index: int, row: Row, slot: Slot) -> None:
        """All rows write before any reads, so rows may hit each other's pages (rule R2)."""
        where = f"step {self.plan.step} row {index} (slot {row.slot})"
        if row.given:
            given = list(array("i", row.given))
            require(row.start <= len(slot.tokens), f"{where}: given after a hole")
            known = slot.tokens[row.start : row.start + 1]
            require(known in ([], given[:1]), f"{where}: given token {row.start}")
            slot.cut(row.start)
            slot.poison = None  # what a void row has spoiled lies behind what is given
            for token in given:
                slot.append(token)
            slot.known = len(slot.tokens)
            self.laws.seen["jumps"] += 1
        start = self._true_start(where, row, slot, self.launched.slack[index])
        self.starts.append(start)
        self.tainted.append(slot.poison)
        self._read_features(where, index, row, slot)
        drafts = slot.drafts[: row.drafts]
        hashes = list(slot.hashes[start + 1 : start + 1 + row.count - row.drafts])
        for draft in drafts:
            hashes.append(oracle.mix(hashes[-1], draft))
        is_bad = slot.poison is not None or self.is_broken or index in self.broken_rows
        values: list[Content] = [code ^ self.runner._weights for code in hashes]
        if is_bad:
            values = [slot.poison or self.poison] * len(hashes)
        for g, group in enumerate(self.device.groups):
            if group.kind == STATE:
                continue  # the state is read and written in one go
            size = group.page_tokens
            for position in range(start, start + len(values)):
                page = self.laws.page_at(where, slot, g, position // size)
                if position == start or position % size == 0:
                    self._use(g, page, slot.life, is_write=True)
                content = self.runner._pages[g].setdefault(page, [None] * size)
                content[position % size] = values[position - start]

    def _read_features(self, where: str, index: int, row: Row, slot: Slot) -> None:
        if not slot.join.spans or slot.poison is not None:
            return
        start = self.starts[index]
        found = self.runner.features.read(where, row, start, slot.join.placed)
        self.laws.seen["rows over spans"] += start < slot.join.prompt_len
        if found is None:
            self.broken_rows[index] = "content"
            self.runner.failed_seeds.add(slot.join.sampling.seed)
        elif found:
            known = self.launched.completed_before >= found
            require(not known, f"{where}: reads features that step {found} has spoiled")
            self.tainted[index] = Poison(found)

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
        self.laws.seen["tainted rows"] += 1
        start = self.starts[index]
        for g, group in enumerate(self.device.groups):
            if group.kind != STATE:
                for position in range(start, start + row.count):
                    page = slot.tables[g][position // group.page_tokens]
                    content = self.runner._pages[g][page]
                    content[position % group.page_tokens] = self.tainted[index]

    def _read(self, index: int, row: Row, slot: Slot) -> None:
        where = f"step {self.plan.step} row {index} (slot {row.slot})"
        start = self.starts[index]
        for g, group in enumerate(self.device.groups):
            size = group.page_tokens
            if group.kind == STATE:
                page = self.laws.page_at(where, slot, g, 0)
                self._use(g, page, slot.life, is_write=True)
                if start:
                    content = self.runner._pages[g].get(page, [None])
                    state = slot.hashes[start] ^ self.runner._weights
                    self._expect(index, f"{where} state", content, [state])
                continue
            first = self.laws.first_read(g, start)
            for i in range(first // size, -(-start // size)):
                low, high = max(first, i * size), min(start, (i + 1) * size)
                page = self.laws.page_at(where, slot, g, i)
                self._use(g, page, slot.life, is_write=False)
                content = self.runner._pages[g].get(page, [None] * size)
                got = content[low - i * size : high - i * size]
                what = f"{where} group {g} page {page} positions {low}…{high - 1}"
                want = [code ^ self.runner._weights for code in slot.hashes[low + 1 : high + 1]]
                self._expect(index, what, got, want)
                self.laws.note_sharing(self.launched, g, page, slot)

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
        tokens, drafts, vectors, hidden = (list[bytes]() for _ in range(4))
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
            hidden.append(b"" if is_bad else self._hidden(row, slot))
            slot.drafts = self._propose(row, slot)
            drafts.append(array("i", slot.drafts).tobytes())
            if is_bad:
                failed.append(
                    RowFailure(index, f"injected ({self.broken_rows.get(index, 'step')})")
                )
            elif row.want & SCORE:
                scores += self._score(index, row, slot, start)
        if self.is_broken:
            self.laws.seen["failed steps"] += 1
            return StepResult(step=self.plan.step, error="injected")
        return StepResult(
            step=self.plan.step,
            tokens=tokens,
            drafts=drafts if self.device.drafts else [],
            scores=scores,
            failed=failed,
            seconds=0.001,
            vectors=vectors if any(vectors) else [],
            hidden=hidden if any(hidden) else [],
        )

    def _hidden(self, row: Row, slot: Slot) -> bytes:
        if not row.want & HIDDEN:
            return b""
        wanted = slot.hashes[max(row.start, row.hidden_from) + 1 : row.start + row.count + 1]
        self.laws.seen["rows with hidden states"] += 1
        return b"".join(map(oracle.vector, wanted))

    def _blame(self, index: int, slot: Slot) -> None:
        if self.is_broken or self.broken_rows[index] == "chance":
            self.runner.failed_seeds.add(slot.join.sampling.seed)
            self.laws.seen["failed rows"] += not self.is_broken

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
            count = count if self.plan.steps == 1 else self.ran
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
        if self.plan.steps > 1:
            return sampled
        self.laws.seen["accepted drafts"] += len(sampled) - 1
        self.laws.seen["rejected drafts"] += len(drafts) - len(sampled) + 1
        return sampled

    def _masks_of(self, index: int, row: Row, slot: Slot, drafts: int) -> list[bytes]:
        if not row.masked:
            return []
        where = f"step {self.plan.step} row {index}"
        key = (self.plan.step, index)
        require(key in self.laws.masks, f"{where}: no mask came before sampling")
        packed = self.laws.masks.pop(key)
        if not packed:
            slot.poison = slot.poison or Poison(self.plan.step)
            self.laws.seen["void masks"] += 1
            return []
        size = oracle.VOCAB // 8
        if slot.poison is None:
            have, want = len(packed) // size, drafts + 1
            require(have >= want, f"{where}: {have} masks, {want} needed")
        self.laws.seen["masked rows"] += 1
        return [packed[i : i + size] for i in range(0, len(packed), size)]

    def _keep_state(self, row: Row, slot: Slot, start: int, before: int, sampled: int) -> None:
        """A state group holds the state after the last position whose token stands."""
        end = start + row.count - row.drafts + max(0, sampled - 1)
        for g, group in enumerate(self.device.groups):
            if group.kind == STATE:
                is_good = slot.poison is None
                kept = slot.hashes[end] ^ self.runner._weights if is_good else self.poison
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
        self.laws.seen["scored rows"] += 1
        return [RowScores(index, first, array("f", values).tobytes())]
