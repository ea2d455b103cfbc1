"""Which adapters run together, which one makes room for another, and who waits for whom."""

from array import array

import msgspec
import pytest

from banyan.engine.journal import Journal
from banyan.lora.scheduling import AdapterRules, FirstAdapter
from banyan.messages.control_ops import DropAdapter, OrderReply, TakeAdapter
from banyan.messages.events import Failed, Finished, Reply
from banyan.messages.plan import StepPlan, StepResult
from banyan.messages.requests import Abort, Generate, LoadAdapter, UnloadAdapter
from banyan.messages.sampling_params import SamplingParams
from banyan.sim.replay import check
from tests.scheduler.driver import Driver, asked


class Rack(Driver):
    """A driver whose runner takes adapters, all but those at `broken` paths."""

    def __init__(self, *names: str, broken: tuple[str, ...] = (), **rules) -> None:
        spec = rules.pop("spec", None)
        super().__init__(**({"spec": spec} if spec else {}))
        self.sizes: dict[str, int] = rules.pop("sizes", {})
        if spec is None:
            first = tuple(
                FirstAdapter(n, f"/{n}", f"digest of {n}", size_bytes=self.sizes.get(n, 0))
                for n in names
            )
            whole = {"max_running": 8, "max_loaded": 8, **rules}
            spec = msgspec.structs.replace(self.spec, adapters=AdapterRules(first=first, **whole))
            self.core = spec.build()
        self.held = {n: f.path for n, f in enumerate(spec.adapters.first, 1)}
        self.broken = broken
        self.replies: list[Reply] = []
        self.joined: dict[int, str] = {}
        """Slot -> the path of its adapter."""
        self.most = self.refused = 0
        """Adapters that slots had at once; loads for which there was no room."""

    def ask(self, name: str, adapter: str, new: int = 4, length: int = 6) -> None:
        tokens = array("i", range(length)).tobytes()
        params = SamplingParams(max_new_tokens=new)
        self.receive(Generate(request=name, tokens=tokens, sampling=params, adapter=adapter))

    def _execute(self, plan: StepPlan) -> StepResult:
        replies = []
        for order in plan.orders:
            if isinstance(order, TakeAdapter) and order.path in self.broken:
                replies.append(OrderReply(False, "no such folder"))
                break
            size = self.sizes.get(getattr(order, "path", "/")[1:], 0)
            if isinstance(order, TakeAdapter) and 0 <= order.room_bytes < size:
                self.refused += 1
                replies.append(OrderReply(False, "no room", size_bytes=size))
                break
            if isinstance(order, TakeAdapter):
                assert order.number not in self.held
                self.held[order.number] = order.path
            elif isinstance(order, DropAdapter):
                running = [self.joined[r.slot] for r in self.core.scheduler.roster.running]
                assert self.held.pop(order.number) not in running
            digest = f"digest of {getattr(order, 'path', '/')[1:]}"
            replies.append(OrderReply(True, "done", digest.encode(), size))
        for slot in plan.leaves:
            self.joined.pop(slot, None)
        for join in plan.joins:
            self.joined[join.slot] = self.held[join.adapter] if join.adapter else ""
        self.most = max(self.most, len(set(self.joined.values()) - {""}))
        result = super()._execute(plan)
        return msgspec.structs.replace(result, replies=replies)

    def _hear(self, events=()) -> None:
        found = [*events, *self.core.take_events()]
        self.replies += [event for event in found if isinstance(event, Reply)]
        super()._hear([event for event in found if not isinstance(event, Reply)])

    @property
    def loaded(self) -> set[str]:
        return {path[1:] for path in self.held.values()}


def spec_of(*flags: str, adapters: tuple[str, ...] = ()):
    """What flags ask for, with adapters of the start in memory."""
    spec = asked("--enable-lora", "--max-lora-rank", "8", *flags)
    first = tuple(FirstAdapter(n, f"/{n}", f"digest of {n}") for n in adapters)
    return msgspec.structs.replace(
        spec, adapters=msgspec.structs.replace(spec.adapters, first=first)
    )


def test_no_more_adapters_run_at_once_than_told() -> None:
    spec = spec_of("--max-loras-per-batch", "2", adapters=tuple("abcd"))
    rack = Rack(spec=spec)
    for number, name in enumerate("abcdabcd"):
        rack.ask(f"{name}{number}", name)
    rack.ask("plain", "")
    rack.run()
    assert rack.most == 2 and len(rack.ends) == 9
    assert all(isinstance(end, Finished) for end in rack.ends.values())


def test_a_request_that_waited_for_a_place_gets_the_next_one() -> None:
    """Others with the adapters that run would keep it out for ever."""
    rack = Rack("a", "b", max_running=1)
    rack.ask("first", "a", new=8)
    rack.step()
    rack.ask("waits", "b")
    for now in range(100):
        if now < 6:
            rack.ask(f"later{now}", "a", new=8)
        plan = rack.core.launch(float(now))
        if plan is not None:
            rack.flying.append(plan)
            rack.complete()
    ended = list(rack.ends)
    assert len(ended) == 8 and ended.index("waits") == 2


def test_an_adapter_that_nobody_uses_makes_room_for_another() -> None:
    rack = Rack(spec=spec_of("--max-loaded-loras", "2", "--max-loras-per-batch", "2"))
    for call, name in enumerate("abc", 1):
        rack.receive(LoadAdapter(call, name, f"/{name}"))
        rack.run()
    assert [reply.ok for reply in rack.replies] == [True] * 3
    assert rack.loaded == {"b", "c"}
    rack.ask("again", "a")
    rack.run()
    assert rack.loaded == {"c", "a"} and isinstance(rack.ends["again"], Finished)


MANY = {name: 10 for name in "abcd"} | {"big": 25, "huge": 41, "e": 6}


def test_adapters_make_room_until_what_the_next_one_needs_is_free() -> None:
    rules = spec_of("--lora-memory-gib", "0.5").adapters
    assert rules is not None and rules.max_bytes == 1 << 29
    rack = Rack(*"abcd", max_bytes=40, sizes=MANY)
    rack.receive(LoadAdapter(1, "big", "/big"))
    rack.run()
    assert rack.replies[-1].ok and rack.loaded == {"d", "big"}
    assert rack.refused == 1, "what it needs is known when it has been tried"
    stats = rack.core.stats(0.0)
    assert (stats.adapters, stats.adapter_bytes) == (2, 35)
    for name in "abc":
        rack.ask(name, name)
        rack.run()
        assert isinstance(rack.ends[name], Finished) and name in rack.loaded
    assert rack.core.stats(0.0).adapter_bytes <= 40


def test_an_adapter_that_cannot_fit_is_refused_with_the_numbers() -> None:
    mib = 1 << 20
    rack = Rack(*"ab", max_bytes=40 * mib, sizes={n: size * mib for n, size in MANY.items()})
    rack.receive(LoadAdapter(1, "huge", "/huge"))
    rack.run()
    why = rack.replies[-1]
    assert not why.ok and rack.loaded == {*"ab"}
    assert "takes 41.0 MiB of memory, and at most 40.0 MiB of the 40.0 MiB" in why.text
    rack.receive(LoadAdapter(2, "c", "/c", True))
    rack.run()
    rack.receive(LoadAdapter(3, "big", "/big"))
    rack.run()
    assert [reply.ok for reply in rack.replies] == [False, True, True]
    rack.receive(LoadAdapter(4, "e", "/e", True))  # then the largest could not come again
    rack.run()
    assert not rack.replies[-1].ok and "at most 5.0 MiB" in rack.replies[-1].text
    for name in ("a", "big", "b", "c"):
        rack.ask(name, name)
        rack.run()
        assert isinstance(rack.ends[name], Finished)


def test_an_adapter_in_use_leaves_no_room_until_its_requests_have_ended() -> None:
    rack = Rack("a", "b", max_bytes=25, sizes=MANY)
    rack.ask("runs", "a", new=6)
    rack.ask("too", "b", new=9)
    rack.step()
    rack.receive(LoadAdapter(1, "big", "/big"))
    rack.run()
    assert rack.replies[-1].ok and rack.loaded == {"big"}
    assert {type(end) for end in rack.ends.values()} == {Finished}


@pytest.mark.parametrize(("policy", "left"), [("lru", {"a", "c"}), ("fifo", {"b", "c"})])
def test_the_policy_says_which_adapter_makes_room(policy: str, left: set[str]) -> None:
    two = ("--max-loaded-loras", "2", "--max-loras-per-batch", "2")
    spec = spec_of(*two, "--lora-eviction-policy", policy, adapters=("a", "b"))
    rack = Rack(spec=spec)
    rack.ask("uses a", "a")
    rack.run()
    rack.receive(LoadAdapter(1, "c", "/c"))
    rack.run()
    assert rack.loaded == left


def test_a_pinned_adapter_stays_and_one_place_is_always_left() -> None:
    rack = Rack("a", "b", max_loaded=2)
    rack.receive(LoadAdapter(1, "c", "/c", True))
    rack.run()
    rack.receive(LoadAdapter(2, "d", "/d", True))
    assert not rack.replies[-1].ok and "pinned" in rack.replies[-1].text
    for name in "ab":
        rack.ask(name, name)
        rack.run()
        assert rack.loaded == {name, "c"}


def test_an_adapter_in_use_makes_room_when_its_requests_have_ended() -> None:
    """Whoever comes for it meanwhile waits, else the other would never be loaded."""
    rack = Rack("a", max_loaded=1, max_running=1)
    rack.ask("runs", "a", new=6)
    rack.step()
    rack.receive(LoadAdapter(1, "b", "/b"))
    rack.ask("b", "b")
    assert isinstance(rack.ends["b"], Failed) and rack.ends["b"].status == 404
    rack.ask("later", "a")
    rack.run()
    assert [reply.ok for reply in rack.replies] == [True]
    assert isinstance(rack.ends["runs"], Finished) and isinstance(rack.ends["later"], Finished)
    assert rack.loaded == {"a"}


def test_unloading_waits_for_the_requests_that_run_and_takes_no_more() -> None:
    rack = Rack("a")
    rack.ask("runs", "a", new=6)
    rack.ask("waits", "a", new=6)
    rack.step()
    rack.receive(UnloadAdapter(5, "a"))
    rack.ask("late", "a")
    assert rack.ends["late"].status == 404 and not rack.replies
    rack.run()
    assert rack.replies == [Reply(5, True, "done", rack.replies[0].body)]
    assert isinstance(rack.ends["runs"], Finished) and isinstance(rack.ends["waits"], Finished)
    assert rack.loaded == set()
    rack.receive(UnloadAdapter(6, "a"))
    assert not rack.replies[-1].ok and "There is no adapter 'a'" in rack.replies[-1].text


def test_an_adapter_that_made_room_is_forgotten_at_once() -> None:
    rack = Rack("a", max_loaded=1, max_running=1)
    rack.receive(LoadAdapter(1, "b", "/b"))
    rack.run()
    rack.receive(UnloadAdapter(2, "a"))
    assert rack.replies[-1].ok and rack.loaded == {"b"}


def test_a_load_that_fails_tells_whoever_asked_and_changes_nothing() -> None:
    rack = Rack("a", broken=("/bad",))
    rack.receive(LoadAdapter(1, "bad", "/bad"))
    rack.receive(LoadAdapter(2, "a", "/a"))
    rack.run()
    assert {r.call: r.ok for r in rack.replies} == {1: False, 2: False}
    assert rack.loaded == {"a"}
    rack.ask("x", "bad")
    assert "There are: a." in rack.ends["x"].text


def test_requests_of_an_adapter_that_cannot_come_back_fail_alone() -> None:
    rack = Rack("a", max_loaded=1, max_running=1)
    rack.receive(LoadAdapter(1, "b", "/b"))
    rack.run()
    rack.broken = ("/a",)
    rack.ask("lost", "a")
    rack.ask("fine", "b")
    rack.run()
    assert "cannot be loaded: no such folder" in rack.ends["lost"].text
    assert isinstance(rack.ends["fine"], Finished)


def test_pages_are_shared_within_one_adapter_and_its_files_only() -> None:
    rack = Rack("a", "b")
    for name, adapter in (("one", "a"), ("other", "b"), ("none", ""), ("again", "a")):
        rack.ask(name, adapter, length=20)
        rack.run()
    cached = {name: end.cached_tokens for name, end in rack.ends.items()}
    assert cached == {"one": 0, "other": 0, "none": 0, "again": 19}


def test_an_aborted_request_frees_the_place_that_it_waited_for() -> None:
    rack = Rack("a", "b", max_running=1)
    rack.ask("runs", "a", new=30)
    rack.step()
    rack.ask("waits", "b")
    rack.step()
    rack.receive(Abort("waits"))
    rack.ask("next", "a")
    rack.run()
    assert rack.ends["next"].reason == "length"


def test_a_journal_makes_the_same_plans_again(tmp_path) -> None:
    path = tmp_path / "journal"
    first = tuple(FirstAdapter(n, f"/{n}", f"digest of {n}") for n in "ab")
    rules = AdapterRules(max_running=1, max_loaded=2, first=first)
    rack = Rack(spec=msgspec.structs.replace(Driver().spec, adapters=rules))
    journal = Journal(str(path), rack.spec, 1 << 20)
    rack.core = rack.spec.build(recorder=journal)
    rack.receive(LoadAdapter(1, "c", "/c"))
    for number, name in enumerate("abcabc"):
        rack.ask(f"{name}{number}", name)
        if number % 2:
            rack.launch()
    rack.receive(UnloadAdapter(2, "b"))
    rack.run()
    journal.close()
    report = check(str(path))
    assert report.ok, report
