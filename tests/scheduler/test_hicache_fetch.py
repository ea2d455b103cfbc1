"""Who waits for the store, for how long, and when reading is not worth it."""

from array import array

import pytest

from banyan.engine.core_spec import CoreSpec
from banyan.kv_cache import misses
from banyan.kv_cache.hierarchical_cache import (
    WRITE_BACK,
    WRITE_SELECTIVE,
    WRITE_THROUGH,
    StoreRules,
)
from banyan.kv_cache.sizing import FULL, CacheGroup
from banyan.messages.control_ops import AttachStore, ControlOp, ControlOpReply, DetachStore
from banyan.messages.events import Reply
from banyan.messages.plan import STORE, CopyResult, Held, StepPlan, StepResult
from banyan.messages.requests import Abort, Generate, RunControlOps
from banyan.messages.sampling_params import SamplingParams
from banyan.scheduler.budget import SchedulerLimits
from banyan.scheduler.hicache_fetch import BEST_EFFORT, TIMEOUT, WAIT_COMPLETE

PAGE = 4
LONG = list(range(41))
"""Ten whole pages, and a token."""


class Desk:
    """A core whose steps and copies end when the test says so."""

    def __init__(self, pages: int = 100, **rules: object) -> None:
        known = {"prefetch": WAIT_COMPLETE, "threshold": 2 * PAGE}
        self.core = CoreSpec(
            groups=(CacheGroup(FULL, PAGE, pages),),
            limits=SchedulerLimits(max_running=4, chunk_tokens=64, max_request_tokens=80),
            store=StoreRules(**{**known, **rules}),
        ).build()
        self.now = 0.0

    def submit(self, name: str, prompt: list[int], new: int = 1) -> None:
        tokens, sampling = array("i", prompt).tobytes(), SamplingParams(max_new_tokens=new)
        self.core.receive(Generate(request=name, tokens=tokens, sampling=sampling), self.now)

    def hold(self, count: int) -> int:
        """Answer the one lookup; how many keys it asked for."""
        (lookup,) = self.core.scheduler.store_fetcher.take_lookups()
        self.core.receive(Held(lookup.id, min(count, len(lookup.keys))), self.now)
        return len(lookup.keys)

    def launch(self) -> StepPlan | None:
        plan = self.core.launch(self.now)
        self.core.check()
        return plan

    def complete(self, plan: StepPlan, seconds: float = 0.0) -> list[str]:
        """End a step; names of the requests that have ended with it."""
        tokens = [array("i", [7]).tobytes() if row.want else b"" for row in plan.rows]
        result = StepResult(step=plan.step, tokens=tokens, seconds=seconds)
        events, _ = self.core.complete(result, self.now)
        self.core.check()
        return [e.request for e in events if hasattr(e, "reason")]

    def end(self, plan: StepPlan, failed: int = 0, seconds: float = 0.0) -> None:
        """End the copies of a plan, the last `failed` of them badly."""
        ids = [copy.id for copy in plan.copies]
        cut = len(ids) - failed
        self.core.receive(CopyResult(ids[:cut], ids[cut:], seconds), self.now)
        self.core.check()

    def run(self, name: str, prompt: list[int], seconds: float = 0.0) -> None:
        """A request from its first step to its end, without the store."""
        self.submit(name, prompt)
        self.core.scheduler.store_fetcher.take_lookups()
        request = self.core.scheduler.request_table.find(name)
        if request.fetch is not None:
            request.fetch.is_over = True
        while request.state != "finished":
            plan = self.launch()
            self.complete(plan, seconds)
            self.end(plan)

    def drain(self) -> list[StepPlan]:
        """Plans of copies alone, until there is none."""
        plans = []
        while (plan := self.launch()) is not None:
            plans.append(plan)
            self.complete(plan)
            self.end(plan)
        return plans


def loads(plan: StepPlan) -> int:
    return sum(copy.src.tier == STORE for copy in plan.copies)


def writes(plans: list[StepPlan]) -> int:
    return sum(copy.dst.tier == STORE for plan in plans for copy in plan.copies)


def starts(plan: StepPlan) -> list[int]:
    return [row.start for row in plan.rows]


def test_a_request_begins_behind_what_has_come_from_the_store() -> None:
    desk = Desk()
    desk.submit("a", LONG)
    assert desk.launch() is None
    assert desk.hold(99) == 10
    plan = desk.launch()
    assert loads(plan) == 10 and not plan.rows
    desk.complete(plan)
    assert desk.launch() is None, "it does not wait for its pages"
    desk.end(plan)
    assert starts(desk.launch()) == [40]


def test_others_run_while_one_waits() -> None:
    desk = Desk()
    desk.submit("a", LONG)
    desk.hold(99)
    desk.submit("b", [90, 91, 92])
    plan = desk.launch()
    assert loads(plan) == 10 and starts(plan) == [0]
    assert "b" in desk.complete(plan)


def test_what_fails_ends_the_prefix_and_the_rest_is_computed() -> None:
    desk = Desk()
    desk.submit("a", LONG)
    desk.hold(99)
    plan = desk.launch()
    desk.complete(plan)
    desk.end(plan, failed=4)
    assert starts(desk.launch()) == [24]


@pytest.mark.parametrize(
    "policy, waits_s", [(BEST_EFFORT, 0.0), (TIMEOUT, 1.5), (WAIT_COMPLETE, 9)]
)
def test_the_policy_says_how_long_a_request_waits(policy: str, waits_s: float) -> None:
    desk = Desk(prefetch=policy, timeout_s=1.49, timeout_per_ki_s=0.25)
    desk.submit("a", LONG)
    desk.now = waits_s - 0.01
    assert waits_s == 0.0 or desk.launch() is None
    desk.now = waits_s
    plan = desk.launch()
    assert (plan is None) == (policy == WAIT_COMPLETE)


def test_a_request_that_waited_long_enough_takes_what_has_come() -> None:
    desk = Desk(prefetch=TIMEOUT, timeout_s=1.0, timeout_per_ki_s=0.0)
    desk.submit("a", LONG)
    desk.hold(99)
    plan = desk.launch()
    desk.complete(plan)
    desk.core.receive(CopyResult([copy.id for copy in plan.copies[:3]]), 0.5)
    desk.now = 1.0
    late = desk.launch()
    assert starts(late) == [12]
    desk.core.receive(CopyResult([copy.id for copy in plan.copies[3:]]), 1.1)
    desk.core.check()
    assert desk.complete(late) == ["a"]


def test_a_prompt_that_is_not_there_costs_one_lookup() -> None:
    desk = Desk()
    desk.submit("a", LONG)
    desk.hold(0)
    assert starts(desk.launch()) == [0]
    desk.submit("b", LONG[:7])
    assert not desk.core.scheduler.store_fetcher.take_lookups(), "fewer tokens than the threshold"


def test_requests_for_one_prefix_share_its_load() -> None:
    desk = Desk()
    for name in "abc":
        desk.submit(name, LONG)
    for lookup in desk.core.scheduler.store_fetcher.take_lookups():
        desk.core.receive(Held(lookup.id, len(lookup.keys)), 0.0)
    plan = desk.launch()
    assert loads(plan) == 10
    desk.complete(plan)
    desk.end(plan)
    rows = desk.launch()
    assert starts(rows) == [40, 40, 40] and not loads(rows)


def test_what_is_read_slower_than_computed_is_computed() -> None:
    desk = Desk()
    desk.run("fast", [60 + i for i in range(35)], seconds=0.035)  # 1 ms a token
    desk.drain()
    desk.submit("a", LONG)
    desk.hold(99)
    plan = desk.launch()
    assert loads(plan) == 10, "how fast the store is, is not known yet"
    desk.complete(plan)
    desk.end(plan, seconds=1.0)  # 100 ms a page
    desk.complete(desk.launch())
    desk.drain()
    tries = 0
    while True:  # slow once is not slow for ever
        desk.submit(f"b{tries}", [i + 100 * (tries + 1) for i in range(41)])
        desk.hold(99)
        plan = desk.launch()
        if loads(plan):
            break
        assert starts(plan) == [0]
        desk.complete(plan)
        desk.end(plan)
        desk.drain()
        tries += 1
        assert tries < 100
    assert tries > 10


def test_a_request_that_goes_while_it_waits_leaves_its_pages_to_others() -> None:
    desk = Desk()
    desk.submit("a", LONG)
    desk.hold(99)
    plan = desk.launch()
    desk.complete(plan)
    desk.core.receive(Abort("a"), 0.0)
    desk.end(plan)
    desk.submit("b", LONG)
    assert starts(desk.launch()) == [40]


def test_loads_take_no_more_than_a_part_of_the_cache() -> None:
    desk = Desk(pages=25)
    desk.submit("a", LONG)
    desk.hold(99)
    counts = []
    while not (plan := desk.launch()).rows:
        counts.append(loads(plan))
        desk.complete(plan)
        desk.end(plan)
    assert counts == [6, 4] and starts(plan) == [40]


@pytest.mark.parametrize(
    "policy, once, twice, evicted",
    [(WRITE_THROUGH, 10, 10, 10), (WRITE_SELECTIVE, 0, 10, 10), (WRITE_BACK, 0, 0, 10)],
)
def test_the_write_policy_says_when_pages_go(policy, once, twice, evicted) -> None:
    desk = Desk(pages=15, write=policy)
    seen: list[StepPlan] = []
    launch = desk.launch

    def watched() -> StepPlan | None:
        plan = launch()
        seen.extend([plan] if plan is not None else [])
        return plan

    desk.launch = watched
    desk.run("a", LONG)
    desk.drain()
    assert writes(seen) == once
    desk.run("b", LONG)
    desk.drain()
    assert writes(seen) == twice
    desk.run("c", [i + 500 for i in LONG])
    desk.drain()
    mine = {copy.dst.key for plan in seen for copy in plan.copies if copy.dst.tier == STORE}
    assert len(mine) >= evicted if policy != WRITE_BACK else writes(seen) > 0


def test_tenants_have_keys_of_their_own() -> None:
    desk = Desk()
    keys = []
    for number, namespace in enumerate((b"", b"a", b"b", b"a")):
        tokens = array("i", LONG).tobytes()
        sampling = SamplingParams(max_new_tokens=1)
        desk.core.receive(
            Generate(request=f"{number}", tokens=tokens, sampling=sampling, namespace=namespace),
            0.0,
        )
        keys += [lookup.keys for lookup in desk.core.scheduler.store_fetcher.take_lookups()]
    assert keys[1] == keys[3] and not set(keys[0]) & set(keys[1]) & set(keys[2])
    assert all(len(key) == 32 for each in keys for key in each)
    assert len({key for each in keys for key in each}) == 30


def test_a_store_that_comes_gets_what_the_device_holds_and_one_that_goes_is_asked_nothing() -> None:
    desk = Desk(is_attached=False)
    desk.run("a", LONG)
    assert not desk.drain()
    given = order(desk, attach(write=WRITE_THROUGH))
    plans = desk.drain()
    assert given.ok and writes(plans) == 10
    keys = {copy.dst.key for plan in plans for copy in plan.copies}
    desk.core.flush(0.0)
    desk.submit("b", LONG)
    assert desk.hold(99) == 10
    plan = desk.launch()
    assert loads(plan) == 10 and {copy.src.key for copy in plan.copies} == keys
    desk.complete(plan)
    desk.end(plan)
    desk.run("c", LONG)
    assert order(desk, DetachStore()).ok
    desk.run("d", [*LONG[:20], *LONG[::-1]])
    assert not desk.core.scheduler.store_fetcher.take_lookups() and not desk.drain()
    assert order(desk, attach(write=WRITE_THROUGH)).ok
    assert writes(desk.drain()) == 20, "another store has nothing of what the last one had"


def test_an_order_that_failed_leaves_things_as_they_were() -> None:
    desk = Desk(is_attached=False)
    assert not order(desk, attach(), ok=False).ok
    desk.run("a", LONG)
    assert not desk.drain() and not desk.core.scheduler.store_fetcher.take_lookups()


def test_a_copy_that_ends_after_its_store_has_gone_changes_nothing() -> None:
    desk = Desk(threshold=99)
    desk.submit("a", LONG)
    desk.complete(desk.launch())
    late = desk.launch()
    assert writes([late]) == 10
    desk.complete(late)
    assert order(desk, DetachStore()).ok
    desk.end(late)
    assert order(desk, attach(write=WRITE_THROUGH)).ok
    assert writes(desk.drain()) == 10


def attach(write: str = WRITE_THROUGH) -> AttachStore:
    return AttachStore("file", b"{}", write, WAIT_COMPLETE, 2 * PAGE, 1.0, 0.25)


def order(desk: Desk, given: ControlOp, ok: bool = True) -> Reply:
    """Give an order that the ranks carry out, or do not."""
    desk.core.receive(RunControlOps(1, [given]), desk.now)
    plan = desk.launch()
    assert plan.control_ops == [given] and not plan.rows
    result = StepResult(step=plan.step, replies=[ControlOpReply(ok)])
    ((reply,), _) = desk.core.complete(result, desk.now)
    desk.core.check()
    return reply


def miss(desk: Desk, name: str = "a") -> tuple[str, int]:
    """Why no more of a request came from the cache, and where its first row starts."""
    (start,) = starts(desk.launch())
    return desk.core.scheduler.request_table.find(name).stats.cache_miss, start


def test_a_request_that_waits_no_longer_says_that_its_pages_were_on_their_way() -> None:
    desk = Desk(prefetch=TIMEOUT, timeout_s=1.0)
    desk.submit("a", LONG)
    desk.hold(99)
    assert loads(desk.launch()) == 10
    desk.now = 9.0
    assert miss(desk) == (misses.LOADING, 0)


def loaded(held: int, **failed: int) -> Desk:
    """After what a store has of a request has been loaded."""
    desk = Desk()
    desk.submit("a", LONG)
    desk.hold(held)
    plan = desk.launch()
    desk.complete(plan)
    desk.end(plan, **failed)
    return desk


def test_a_store_that_has_not_answered_is_distinguished_from_one_that_has_nothing() -> None:
    desk = Desk(prefetch=TIMEOUT, timeout_s=1.0)
    desk.submit("a", LONG)
    desk.now = 9.0
    assert miss(desk) == (misses.LOADING, 0)
    desk = Desk()
    desk.submit("a", LONG)
    desk.hold(0)
    assert miss(desk) == (misses.UNSEEN, 0)


def test_pages_that_could_not_be_read_are_reported() -> None:
    assert miss(loaded(held=99, failed=4)) == (misses.UNREADABLE, 24)


def test_pages_that_are_read_more_slowly_than_computed_are_reported() -> None:
    desk = Desk()
    desk.run("first", list(range(50, 90)), seconds=40e-6)
    desk.core.scheduler.store_fetcher.note_read(1, 1.0)
    desk.submit("a", LONG)
    desk.hold(99)
    assert miss(desk) == (misses.STORED, 0)


def test_all_that_a_store_has_is_no_miss_of_its_own() -> None:
    assert miss(loaded(held=6)) == (misses.UNSEEN, 24)
