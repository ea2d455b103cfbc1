"""Which adapters run together, which one makes room for another, and who waits for whom."""

from array import array

import msgspec
import pytest

from banyan.engine.journal import Journal
from banyan.lora.scheduling import AdapterRules, FirstAdapter
from banyan.messages.control_ops import ControlOpReply, DropAdapter, TakeAdapter
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
        for order in plan.control_ops:
            if isinstance(order, TakeAdapter) and order.path in self.broken:
                replies.append(ControlOpReply(False, "no such folder"))
                break
            size = self.sizes.get(getattr(order, "path", "/")[1:], 0)
            if isinstance(order, TakeAdapter) and 0 <= order.room_bytes < size:
                self.refused += 1
                replies.append(ControlOpReply(False, "no room", size_bytes=size))
                break
            if isinstance(order, TakeAdapter):
                assert order.number not in self.held
                self.held[order.number] = order.path
            elif isinstance(order, DropAdapter):
                running = [self.joined[r.slot] for r in self.core.scheduler.request_table.running]
                assert self.held.pop(order.number) not in running
            digest = f"digest of {getattr(order, 'path', '/')[1:]}"
            replies.append(ControlOpReply(True, "done", digest.encode(), size))
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


def test_no_more_adapters_run_at_once_than_the_limit() -> None:
    spec = spec_of("--max-loras-per-batch", "2", adapters=tuple("abcd"))
    lora_pool = Rack(spec=spec)
    for number, name in enumerate("abcdabcd"):
        lora_pool.ask(f"{name}{number}", name)
    lora_pool.ask("plain", "")
    lora_pool.run()
    assert lora_pool.most == 2 and len(lora_pool.ends) == 9
    assert all(isinstance(end, Finished) for end in lora_pool.ends.values())


def test_a_request_that_waited_for_a_place_gets_the_next_one() -> None:
    """Others with the adapters that run would keep it out for ever."""
    lora_pool = Rack("a", "b", max_running=1)
    lora_pool.ask("first", "a", new=8)
    lora_pool.step()
    lora_pool.ask("waits", "b")
    for now in range(100):
        if now < 6:
            lora_pool.ask(f"later{now}", "a", new=8)
        plan = lora_pool.core.launch(float(now))
        if plan is not None:
            lora_pool.flying.append(plan)
            lora_pool.complete()
    ended = list(lora_pool.ends)
    assert len(ended) == 8 and ended.index("waits") == 2


def test_an_adapter_that_nobody_uses_makes_room_for_another() -> None:
    lora_pool = Rack(spec=spec_of("--max-loaded-loras", "2", "--max-loras-per-batch", "2"))
    for call, name in enumerate("abc", 1):
        lora_pool.receive(LoadAdapter(call, name, f"/{name}"))
        lora_pool.run()
    assert [reply.ok for reply in lora_pool.replies] == [True] * 3
    assert lora_pool.loaded == {"b", "c"}
    lora_pool.ask("again", "a")
    lora_pool.run()
    assert lora_pool.loaded == {"c", "a"} and isinstance(lora_pool.ends["again"], Finished)


MANY = {name: 10 for name in "abcd"} | {"big": 25, "huge": 41, "e": 6}


def test_adapters_make_room_until_what_the_next_one_needs_is_free() -> None:
    rules = spec_of("--lora-memory-gib", "0.5").adapters
    assert rules is not None and rules.max_bytes == 1 << 29
    lora_pool = Rack(*"abcd", max_bytes=40, sizes=MANY)
    lora_pool.receive(LoadAdapter(1, "big", "/big"))
    lora_pool.run()
    assert lora_pool.replies[-1].ok and lora_pool.loaded == {"d", "big"}
    assert lora_pool.refused == 1, "what it needs is known when it has been tried"
    stats = lora_pool.core.stats(0.0)
    assert (stats.adapters, stats.adapter_bytes) == (2, 35)
    for name in "abc":
        lora_pool.ask(name, name)
        lora_pool.run()
        assert isinstance(lora_pool.ends[name], Finished) and name in lora_pool.loaded
    assert lora_pool.core.stats(0.0).adapter_bytes <= 40


def test_an_adapter_that_cannot_fit_is_refused_with_the_numbers() -> None:
    mib = 1 << 20
    lora_pool = Rack(*"ab", max_bytes=40 * mib, sizes={n: size * mib for n, size in MANY.items()})
    lora_pool.receive(LoadAdapter(1, "huge", "/huge"))
    lora_pool.run()
    why = lora_pool.replies[-1]
    assert not why.ok and lora_pool.loaded == {*"ab"}
    assert "takes 41.0 MiB of memory, and at most 40.0 MiB of the 40.0 MiB" in why.text
    lora_pool.receive(LoadAdapter(2, "c", "/c", True))
    lora_pool.run()
    lora_pool.receive(LoadAdapter(3, "big", "/big"))
    lora_pool.run()
    assert [reply.ok for reply in lora_pool.replies] == [False, True, True]
    lora_pool.receive(LoadAdapter(4, "e", "/e", True))  # then the largest could not come again
    lora_pool.run()
    assert not lora_pool.replies[-1].ok and "at most 5.0 MiB" in lora_pool.replies[-1].text
    for name in ("a", "big", "b", "c"):
        lora_pool.ask(name, name)
        lora_pool.run()
        assert isinstance(lora_pool.ends[name], Finished)


def test_an_adapter_in_use_leaves_no_room_until_its_requests_have_ended() -> None:
    lora_pool = Rack("a", "b", max_bytes=25, sizes=MANY)
    lora_pool.ask("runs", "a", new=6)
    lora_pool.ask("too", "b", new=9)
    lora_pool.step()
    lora_pool.receive(LoadAdapter(1, "big", "/big"))
    lora_pool.run()
    assert lora_pool.replies[-1].ok and lora_pool.loaded == {"big"}
    assert {type(end) for end in lora_pool.ends.values()} == {Finished}


@pytest.mark.parametrize(("policy", "left"), [("lru", {"a", "c"}), ("fifo", {"b", "c"})])
def test_the_policy_says_which_adapter_makes_room(policy: str, left: set[str]) -> None:
    two = ("--max-loaded-loras", "2", "--max-loras-per-batch", "2")
    spec = spec_of(*two, "--lora-eviction-policy", policy, adapters=("a", "b"))
    lora_pool = Rack(spec=spec)
    lora_pool.ask("uses a", "a")
    lora_pool.run()
    lora_pool.receive(LoadAdapter(1, "c", "/c"))
    lora_pool.run()
    assert lora_pool.loaded == left


def test_a_pinned_adapter_stays_and_one_place_is_always_left() -> None:
    lora_pool = Rack("a", "b", max_loaded=2)
    lora_pool.receive(LoadAdapter(1, "c", "/c", True))
    lora_pool.run()
    lora_pool.receive(LoadAdapter(2, "d", "/d", True))
    assert not lora_pool.replies[-1].ok and "pinned" in lora_pool.replies[-1].text
    for name in "ab":
        lora_pool.ask(name, name)
        lora_pool.run()
        assert lora_pool.loaded == {name, "c"}


def test_an_adapter_in_use_makes_room_when_its_requests_have_ended() -> None:
    """Whoever comes for it meanwhile waits, else the other would never be loaded."""
    lora_pool = Rack("a", max_loaded=1, max_running=1)
    lora_pool.ask("runs", "a", new=6)
    lora_pool.step()
    lora_pool.receive(LoadAdapter(1, "b", "/b"))
    lora_pool.ask("b", "b")
    assert isinstance(lora_pool.ends["b"], Failed) and lora_pool.ends["b"].status == 404
    lora_pool.ask("later", "a")
    lora_pool.run()
    assert [reply.ok for reply in lora_pool.replies] == [True]
    assert isinstance(lora_pool.ends["runs"], Finished) and isinstance(
        lora_pool.ends["later"], Finished
    )
    assert lora_pool.loaded == {"a"}


def test_unloading_waits_for_the_requests_that_run_and_takes_no_more() -> None:
    lora_pool = Rack("a")
    lora_pool.ask("runs", "a", new=6)
    lora_pool.ask("waits", "a", new=6)
    lora_pool.step()
    lora_pool.receive(UnloadAdapter(5, "a"))
    lora_pool.ask("late", "a")
    assert lora_pool.ends["late"].status == 404 and not lora_pool.replies
    lora_pool.run()
    assert lora_pool.replies == [Reply(5, True, "done", lora_pool.replies[0].body)]
    assert isinstance(lora_pool.ends["runs"], Finished) and isinstance(
        lora_pool.ends["waits"], Finished
    )
    assert lora_pool.loaded == set()
    lora_pool.receive(UnloadAdapter(6, "a"))
    assert not lora_pool.replies[-1].ok and "There is no adapter 'a'" in lora_pool.replies[-1].text


def test_an_adapter_that_made_room_is_forgotten_at_once() -> None:
    lora_pool = Rack("a", max_loaded=1, max_running=1)
    lora_pool.receive(LoadAdapter(1, "b", "/b"))
    lora_pool.run()
    lora_pool.receive(UnloadAdapter(2, "a"))
    assert lora_pool.replies[-1].ok and lora_pool.loaded == {"b"}


def test_a_load_that_fails_tells_who_asked_and_changes_nothing() -> None:
    lora_pool = Rack("a", broken=("/bad",))
    lora_pool.receive(LoadAdapter(1, "bad", "/bad"))
    lora_pool.receive(LoadAdapter(2, "a", "/a"))
    lora_pool.run()
    assert {r.call: r.ok for r in lora_pool.replies} == {1: False, 2: False}
    assert lora_pool.loaded == {"a"}
    lora_pool.ask("x", "bad")
    assert "There are: a." in lora_pool.ends["x"].text


def test_requests_of_an_adapter_that_cannot_come_back_fail_alone() -> None:
    lora_pool = Rack("a", max_loaded=1, max_running=1)
    lora_pool.receive(LoadAdapter(1, "b", "/b"))
    lora_pool.run()
    lora_pool.broken = ("/a",)
    lora_pool.ask("lost", "a")
    lora_pool.ask("fine", "b")
    lora_pool.run()
    assert "cannot be loaded: no such folder" in lora_pool.ends["lost"].text
    assert isinstance(lora_pool.ends["fine"], Finished)


def test_pages_are_shared_within_one_adapter_and_its_files_only() -> None:
    lora_pool = Rack("a", "b")
    for name, adapter in (("one", "a"), ("other", "b"), ("none", ""), ("again", "a")):
        lora_pool.ask(name, adapter, length=20)
        lora_pool.run()
    cached = {name: end.cached_tokens for name, end in lora_pool.ends.items()}
    assert cached == {"one": 0, "other": 0, "none": 0, "again": 19}


def test_an_aborted_request_frees_the_place_that_it_waited_for() -> None:
    lora_pool = Rack("a", "b", max_running=1)
    lora_pool.ask("runs", "a", new=30)
    lora_pool.step()
    lora_pool.ask("waits", "b")
    lora_pool.step()
    lora_pool.receive(Abort("waits"))
    lora_pool.ask("next", "a")
    lora_pool.run()
    assert lora_pool.ends["next"].reason == "length"


def test_a_journal_makes_the_same_plans_again(tmp_path) -> None:
    path = tmp_path / "journal"
    first = tuple(FirstAdapter(n, f"/{n}", f"digest of {n}") for n in "ab")
    rules = AdapterRules(max_running=1, max_loaded=2, first=first)
    lora_pool = Rack(spec=msgspec.structs.replace(Driver().spec, adapters=rules))
    journal = Journal(str(path), lora_pool.spec, 1 << 20)
    lora_pool.core = lora_pool.spec.build(recorder=journal)
    lora_pool.receive(LoadAdapter(1, "c", "/c"))
    for number, name in enumerate("abcabc"):
        lora_pool.ask(f"{name}{number}", name)
        if number % 2:
            lora_pool.launch()
    lora_pool.receive(UnloadAdapter(2, "b"))
    lora_pool.run()
    journal.close()
    report = check(str(path))
    assert report.ok, report
