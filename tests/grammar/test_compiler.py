"""The compiler process and its cache: limits, failures, and that nothing but the culprit pays."""

import io
import json
import re
import struct
import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import cast

import msgspec
import pytest

from banyan.base.errors import ModelError, RequestError
from banyan.base.ids import RequestId
from banyan.engine.grammar_queue import GrammarQueue
from banyan.grammar.compiler import CompileThread, GrammarCompiler, Shares
from banyan.grammar.vocabulary import longest_first
from banyan.grammar.worker import CompileOutcome, read_frame
from banyan.grammar.worker_pool import GrammarLimits, GrammarWorkerPool
from banyan.messages.events import Event, Failed, Finished
from banyan.messages.requests import Abort, Constraint, Control, Generate
from banyan.messages.sampling_params import SamplingParams
from tests.grammar.play import END, VOCABULARY, allowed, write
from tests.support.flags import config_of

pytest.importorskip("llguidance")

DIGITS = "regex:[0-9]+"


class Bell:
    """Rings when the compiler has something."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def ring(self) -> None:
        self._event.set()

    def wait(self) -> None:
        assert self._event.wait(60)
        self._event.clear()


Open = Callable[..., tuple[GrammarCompiler, Bell]]


@pytest.fixture
def opened() -> Iterator[Open]:
    """Makes compilers; every process is ended afterwards."""
    made: list[GrammarCompiler] = []

    def make(limits: GrammarLimits | None = None, *backends: str) -> tuple[GrammarCompiler, Bell]:
        bell = Bell()
        compiler = GrammarCompiler(
            backends or ("llguidance",),
            lambda: (VOCABULARY, longest_first(VOCABULARY)),
            limits=limits,
            wake=bell.ring,
        )
        made.append(compiler)
        return compiler, bell

    yield make
    for compiler in made:
        compiler.close()


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    """One for the tests that have no limits of their own."""
    made = GrammarCompiler(("llguidance",), lambda: (VOCABULARY, longest_first(VOCABULARY)))
    yield made
    made.close()


def regex(pattern: str) -> str:
    return Constraint("regex", pattern).encode()


def prepared(compiler: GrammarCompiler, bell: Bell, grammar: str) -> None:
    compiler.prepare(grammar)
    bell.wait()
    assert compiler.collect()


def reason(compiler: GrammarCompiler, grammar: str) -> RequestError:
    with pytest.raises(RequestError) as caught:
        compiler(grammar)
    return caught.value


def test_a_constraint_is_compiled_in_the_background_and_shared(opened: Open):
    compiler, bell = opened()
    assert not compiler.has(DIGITS)
    prepared(compiler, bell, DIGITS)
    first, second = compiler(DIGITS), compiler(DIGITS)
    assert write(first, "42") and first.accept(END)
    assert END not in allowed(second), "each has a position of its own"


def test_where_a_constraint_begins_does_not_change_how_it_is_compiled(opened: Open):
    compiler, bell = opened()
    prepared(compiler, bell, DIGITS)
    assert compiler.has("regex@7:[0-9]+")
    assert ord("x") in allowed(compiler("regex@7:[0-9]+"))


def test_a_model_without_a_tokenizer_takes_no_constraint_and_that_is_no_failure_of_the_server():
    """Served by token ids alone, nobody has looked for one at the start."""

    def read():
        raise ModelError("'/models/secret' has no tokenizer.json")

    compiler = GrammarCompiler(("llguidance", "xgrammar"), read)
    try:
        error = reason(compiler, DIGITS)
    finally:
        compiler.close()
    assert error.status == 400 and "no tokenizer that can be read" in error.text
    assert "secret" not in error.text and error.text.count("tokenizer") == 1


def test_what_cannot_be_compiled_is_a_400_with_the_reason(opened: Open):
    compiler, bell = opened()
    prepared(compiler, bell, regex("["))
    error = reason(compiler, regex("["))
    assert error.status == 400 and "unclosed" in error.text and "llguidance" in error.text
    assert "\n" not in error.text and len(error.text) < 500


@pytest.mark.parametrize(
    ("grammar", "text"),
    [
        ('json_schema:{"type":"string","not":{}}', "not"),
        ('json_schema:{"$ref":"http://x/y"}', "only references within"),
        ('json_schema:{"$ref":"#"}', "refers to itself alone"),
        ("ebnf:root ::= root", "Compiled|refers to itself alone|no output"),
        ("ebnf:root = 3", "Expected"),
        ('structural_tag:{"format":{"type":"token","token":3}}', "no counterpart"),
        ('structural_tag:{"format":{"type":"tag"}}', "text"),
        (regex(r"(a)\1"), "backreferences"),
        (regex("(?=a)b"), "look-ahead"),
        (regex("foo["), "unclosed"),
    ],
)
def test_hostile_constraints_are_refused_and_the_compiler_lives(
    compiler: GrammarCompiler, grammar: str, text: str
):
    assert re.search(text, reason(compiler, grammar).text)
    assert write(compiler(DIGITS), "7")


@pytest.mark.parametrize("pattern", ["(a+)+$", "a{1,100000000}", "a|" * 8000, "(.*a){30}b"])
def test_large_patterns_neither_hang_nor_break_the_compiler(
    compiler: GrammarCompiler, pattern: str
):
    try:
        assert allowed(compiler(regex(pattern)))
    except RequestError as error:
        assert error.status == 400
    assert write(compiler(DIGITS), "7")


def test_what_takes_too_long_is_refused_alone(opened: Open):
    pytest.importorskip("outlines_core")
    limits = GrammarLimits(time_s=config_of("--grammar-timeout", "1").grammar.timeout_s)
    compiler, _ = opened(limits, "outlines")
    error = reason(compiler, regex("(a|b)*a(a|b){18}"))
    assert error.status == 400 and error.code == "grammar_limit" and "1 s" in error.text
    assert write(compiler(DIGITS), "7"), "a new process compiles the next one"


def test_what_takes_too_much_memory_is_refused_alone(opened: Open):
    pytest.importorskip("outlines_core")
    compiler, _ = opened(GrammarLimits(memory_bytes=16 << 20), "outlines")
    error = reason(compiler, regex("(a|b)*a(a|b){18}"))
    assert error.status == 400 and "memory" in error.text
    assert write(compiler(DIGITS), "7")


def test_what_one_library_refuses_another_compiles(opened: Open):
    pytest.importorskip("xgrammar")
    compiler, _ = opened(None, "xgrammar", "llguidance")
    schema = '{"type":"integer","multipleOf":3,"enum":[1,3]}'
    assert write(compiler(f"json_schema:{schema}"), "3")
    error = reason(compiler, 'json_schema:{"type":"string","not":{"const":"a"}}')
    assert error.status == 400 and "xgrammar would not" in error.text
    assert "(llguidance)" in error.text, "each says why"


def test_a_library_that_takes_too_long_is_stood_in_for(opened: Open):
    pytest.importorskip("outlines_core")
    compiler, _ = opened(GrammarLimits(time_s=0.5), "outlines", "llguidance")
    assert write(compiler(regex("(a|b)*a(a|b){18}")), "ab")


def test_the_cache_stays_under_its_bound(opened: Open):
    compiler, _ = opened(GrammarLimits(cache_bytes=64 << 10))
    for i in range(40):
        compiler(regex(f"x{i}"))
        assert compiler._cache.size_bytes <= 64 << 10
    assert compiler.has(regex("x39")) and not compiler.has(regex("x0"))


def test_a_model_without_an_end_token_cannot_be_constrained(opened: Open):
    endless = msgspec.structs.replace(VOCABULARY, end_ids=())
    compiler = GrammarCompiler(("llguidance",), lambda: (endless, longest_first(endless)))
    assert "end-of-sequence" in reason(compiler, DIGITS).text


# -- the queue ---------------------------------------------------------------------------------


def generate(name: str, grammar: str = DIGITS) -> Generate:
    sampling = SamplingParams(max_new_tokens=4)
    return Generate(request=RequestId(name), tokens=b"\1\0\0\0", sampling=sampling, grammar=grammar)


def test_only_requests_whose_constraint_is_not_at_hand_wait(opened: Open):
    compiler, bell = opened()
    queue, events, got = GrammarQueue(compiler), list[Event](), list[Generate]()
    assert not queue.holds(generate("free", ""), events)
    assert queue.holds(generate("a"), events) and queue.holds(generate("b"), events)
    bell.wait()
    queue.release(got.append)
    assert [g.request for g in got] == ["a", "b"] and not queue.waiting and not events
    assert not queue.holds(generate("c"), events), "it is at hand"


def test_a_waiting_request_can_be_aborted(opened: Open):
    compiler, bell = opened()
    queue, events, got = GrammarQueue(compiler), list[Event](), list[Generate]()
    assert queue.holds(generate("a"), events) and queue.holds(generate("b"), events)
    assert queue.holds(Abort(RequestId("a")), events)
    assert not queue.holds(Abort(RequestId("unknown")), events)
    assert not queue.holds(Control(1, "abort_all"), events), "the core hears of it too"
    assert [(e.request, e.reason) for e in events if isinstance(e, Finished)] == [
        ("a", "abort"),
        ("b", "abort"),
    ]
    queue.holds(generate("c", regex("x")), events)
    while not got:
        bell.wait()
        queue.release(got.append)
    assert [g.request for g in got] == ["c"]


class Slow:
    """A worker pool whose first constraint takes until it is released."""

    def __init__(self) -> None:
        self.has_begun, self.may_end = threading.Event(), threading.Event()
        self.made: list[str] = []

    def make(self, grammar: str) -> RequestError:
        self.made.append(grammar)
        self.has_begun.set()
        assert self.may_end.wait(60)
        return RequestError(grammar)

    def close(self) -> None:
        pass


def test_a_lane_makes_the_shortest_first_and_nothing_that_nobody_waits_for():
    slow, done = Slow(), SimpleQueue[str]()
    lane = CompileThread(cast(GrammarWorkerPool, slow), lambda job, outcome: done.put(job.bare))
    lane.put("first")
    assert slow.has_begun.wait(60)
    for bare in ("longest", "gone", "abc", "ab", "again"):
        lane.put(bare)
    for bare in ("gone", "again", "first", "unknown"):
        lane.drop(bare)
    lane.put("again")
    slow.may_end.set()
    assert [done.get(timeout=60) for _ in range(5)] == ["first", "ab", "abc", "again", "longest"]
    lane.close()
    assert done.empty() and "gone" not in slow.made


def test_what_one_caller_asks_for_does_not_hold_up_another():
    slow, done = Slow(), SimpleQueue[str]()
    lane = CompileThread(cast(GrammarWorkerPool, slow), lambda job, outcome: done.put(job.bare))
    lane.put("first", (b"many",))
    assert slow.has_begun.wait(60)
    for number in range(20):
        lane.put(f"m{number:02}", (b"many",))
    for bare in ("a long one", "a longer one"):
        lane.put(bare, (b"few",))
    lane.join("m19", b"third")
    slow.may_end.set()
    made = [done.get(timeout=60) for _ in range(23)]
    lane.close()
    assert made[0] == "first" and set(made[1:3]) == {"a long one", "m19"}, made
    assert made.index("a longer one") < 6, made


def test_callers_have_equal_shares_of_the_time_that_constraints_take():
    shares = Shares()
    had = {b"slow": 0, b"fast": 0}
    for caller in had:
        shares.enter(caller)
    for _ in range(300):
        caller = min(had, key=lambda c: shares.turn_s((c,)))
        shares.begin((caller,), had)
        shares.charge({caller}, 2.0 if caller == b"slow" else 0.1)
        had[caller] += 1
    assert 15 <= had[b"fast"] / had[b"slow"] <= 25
    shares.enter(b"new")
    level_s = min(shares.turn_s((c,)) for c in had)
    assert abs(shares.turn_s((b"new",)) - level_s) <= 2.0, "who comes late has no more than others"


def test_a_caller_that_fills_his_queue_leaves_room_for_others(opened: Open):
    compiler, _ = opened(GrammarLimits(max_waiting=3))
    for number in range(2):
        compiler.prepare(regex(f"a{number}"), b"one")
    with pytest.raises(RequestError, match="2 of them of this caller") as caught:
        compiler.prepare(regex("a2"), b"one")
    assert caught.value.status == 503
    compiler.prepare(regex("a1"), b"two")
    compiler.prepare(regex("a2"), b"two")
    with pytest.raises(RequestError, match="3 constraints are waiting"):
        compiler.prepare(regex("a3"), b"three")


def test_short_constraints_pass_by_long_ones(opened: Open):
    compiler, bell = opened()
    properties = {f"property_{i}": {"type": "string"} for i in range(5_000)}
    long = Constraint("json_schema", json.dumps({"type": "object", "properties": properties}))
    for number in range(3):
        compiler.prepare(Constraint(long.kind, long.text + " " * number).encode())
    for grammar in (DIGITS, regex("[a-z]"), regex("[A-Z]")):
        compiler.prepare(grammar)
        while not compiler.has(grammar):
            bell.wait()
            while compiler.collect():
                pass
    assert not compiler.has(Constraint(long.kind, long.text + "  ").encode())


def test_what_is_not_made_in_a_moment_is_made_next_to_the_others(opened: Open):
    compiler, bell = opened(GrammarLimits(quick_s=0.0))
    prepared(compiler, bell, DIGITS)
    assert allowed(compiler(DIGITS))


def test_a_frame_without_end_from_the_compiler_is_not_awaited():
    stream = io.BytesIO(struct.pack("<Q", 1 << 40) + b"x")
    with pytest.raises(ValueError, match="are legal"):
        read_frame(stream.read, CompileOutcome)


def test_a_name_that_waits_already_and_a_full_desk_are_refused(opened: Open):
    compiler, _ = opened(GrammarLimits(max_waiting=1))
    queue, events = GrammarQueue(compiler), list[Event]()
    assert queue.holds(generate("a"), events)
    assert queue.holds(generate("a"), events)
    assert queue.holds(generate("b", regex("x")), events)
    assert [e.status for e in events if isinstance(e, Failed)] == [400, 503]
