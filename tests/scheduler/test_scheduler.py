from array import array

import pytest

from banyan.messages.disaggregation import ReceiveTransfer, TransferFound
from banyan.messages.events import Finished
from banyan.messages.requests import Abort, Generate, RetractAll, StopAt
from banyan.messages.sampling_params import SamplingParams
from tests.scheduler.driver import Driver, asked, continuation, next_token

PROMPT = list(range(10))


def reason(driver, name):
    return driver.ends[name].reason


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("chunk", [3, 16, 1 << 30])
def test_output_is_the_same_at_every_depth_and_chunk(depth, chunk):
    driver = Driver(depth=depth, chunk_tokens=chunk)
    prompts = {f"r{i}": PROMPT[: i + 1] + [i] for i in range(9)}
    for name, prompt in prompts.items():
        driver.submit(name, prompt, new=7)
    driver.run()
    for name, prompt in prompts.items():
        assert driver.outputs[name] == continuation(prompt, 7)
        assert reason(driver, name) == "length"


@pytest.mark.parametrize("flag", ["--chunked-prefill-size", "--max-prefill-tokens"])
def test_a_prompt_is_taken_in_chunks_of_the_budget(flag):
    driver = Driver(spec=asked(flag, "4"))
    driver.submit("a", PROMPT, new=1)
    driver.run()
    assert [(r.start, r.count) for p in driver.plans for r in p.rows] == [(0, 4), (4, 4), (8, 2)]


def lengths_of_rows(driver):
    return [[row.count for row in plan.rows] for plan in driver.plans]


@pytest.mark.parametrize(
    ("most", "steps"), [("3000", [[1400, 1400], [1400]]), ("1", [[1400], [1400], [1400]])]
)
def test_whole_prompts_share_a_step_up_to_the_budget_and_the_longest_fits(most, steps):
    driver = Driver(spec=asked("--chunked-prefill-size", "-1", "--max-prefill-tokens", most))
    for name in "abc":
        driver.submit(name, [ord(name) - 60] * 1400, new=1)
    driver.run()
    assert lengths_of_rows(driver) == steps


def test_a_step_takes_the_prompts_of_so_many_requests():
    driver = Driver(spec=asked("--prefill-max-requests", "2", "--disable-overlap-schedule"))
    for name in "abcde":
        driver.submit(name, [ord(name) - 60] * 3, new=2)
    driver.run()
    assert lengths_of_rows(driver) == [[3, 3], [1, 1, 3, 3], [1, 1, 3], [1]]


def test_whole_prompts_are_never_cut_and_long_ones_go_alone():
    driver = Driver(chunk_tokens=8, whole_prompts=True)
    lengths = {"a": 6, "b": 20, "c": 2, "d": 5, "e": 3}
    for name, length in lengths.items():
        driver.submit(name, [ord(name) - 60] * length, new=1)
    driver.run()
    steps = [[(r.start, r.count) for r in plan.rows] for plan in driver.plans]
    assert steps == [[(0, 6)], [(0, 20)], [(0, 2), (0, 5)], [(0, 3)]]


def test_simultaneous_requests_compute_a_shared_prefix_once():
    prefix = [i % 50 for i in range(1000)]
    driver = Driver(
        pages=600,
        max_running=32,
        chunk_tokens=256,
        depth=2,
        page_tokens=16,
        max_request_tokens=2000,
    )
    for i in range(32):
        driver.submit(f"r{i}", [*prefix, 60 + i], new=2)
    driver.run()
    rows = [r for p in driver.plans for r in p.rows]
    computed = sum(max(0, min(r.start + r.count, 992) - r.start) for r in rows)
    assert computed == 992
    for i in range(32):
        assert driver.outputs[f"r{i}"] == continuation([*prefix, 60 + i], 2)
        assert driver.ends[f"r{i}"].cached_tokens == (992 if i else 0)


def test_running_out_of_pages_retracts_the_youngest_and_loses_nothing():
    driver = Driver(pages=13, conservativeness=0.1, depth=2)
    for i in range(4):
        driver.submit(f"r{i}", [*PROMPT[:6], i], new=24)
    driver.run()
    assert driver.core.stats(0.0).retractions > 0
    assert driver.ends["r0"].retractions == 0
    for i in range(4):
        assert driver.outputs[f"r{i}"] == continuation([*PROMPT[:6], i], 24)


def test_a_stop_id_ends_the_request_and_is_part_of_the_output():
    stop = continuation(PROMPT, 3)[-1]
    driver = Driver(depth=2)
    driver.submit("a", PROMPT, new=20, stop_ids=(stop,))
    driver.run()
    assert driver.outputs["a"] == continuation(PROMPT, 3)
    assert (reason(driver, "a"), driver.ends["a"].matched) == ("stop", stop)


def test_a_stop_id_before_the_minimum_length_does_not_end_the_request():
    stop = continuation(PROMPT, 1)[0]
    driver = Driver()
    driver.submit("a", PROMPT, new=3, stop_ids=(stop,), min_new_tokens=1)
    driver.run()
    assert driver.outputs["a"][:2] == continuation(PROMPT, 2)


def test_no_new_tokens_means_the_prompt_is_computed_and_nothing_sampled():
    driver = Driver(chunk_tokens=4)
    driver.submit("a", PROMPT, new=0)
    driver.run()
    assert reason(driver, "a") == "length" and "a" not in driver.outputs
    assert sum(r.count for p in driver.plans for r in p.rows) == len(PROMPT)


def test_the_fronts_verdict_cuts_the_output():
    driver = Driver(depth=2)
    driver.submit("a", PROMPT, new=50)
    for _ in range(6):
        driver.launch()
        driver.complete()
    driver.receive(StopAt("a", 2))
    assert (reason(driver, "a"), driver.ends["a"].output_tokens) == ("stop", 2)
    driver.run()


@pytest.mark.parametrize("moment", ["waiting", "in flight", "between chunks", "decoding"])
def test_an_abort_frees_everything_at_any_moment(moment):
    driver = Driver(depth=2, chunk_tokens=4)
    driver.submit("a", PROMPT, new=50)
    if moment == "in flight":
        driver.launch()
    elif moment == "between chunks":
        driver.launch()
        driver.complete()
    elif moment == "decoding":
        for _ in range(8):
            driver.launch()
            driver.complete()
    driver.receive(Abort("a"))
    assert reason(driver, "a") == "abort"
    driver.run()
    ledger = driver.core.scheduler.cache.ledgers[0]
    assert (ledger.held, ledger.in_flight) == (0, 0)


def test_an_unknown_request_may_be_aborted():
    Driver().receive(Abort("nobody"))


def test_a_failed_row_fails_its_request_alone():
    driver = Driver(depth=2)
    driver.submit("bad", PROMPT, new=5)
    driver.submit("user", [*PROMPT, 1], new=5)
    driver.submit("good", [50, 51], new=5)
    driver.launch()
    driver.launch()
    driver.complete(failed_row=0)
    driver.run()
    assert driver.ends["bad"].text == "broken" and driver.ends["bad"].status == 500
    assert driver.outputs["user"] == continuation([*PROMPT, 1], 5)
    assert driver.outputs["good"] == continuation([50, 51], 5)


class Limited:
    """A constraint that a library follows for some tokens only. Satisfies grammar.base.Grammar."""

    is_ended = False

    def __init__(self, most: int, problem: str) -> None:
        self._left = most
        self._problem = problem

    @property
    def problem(self) -> str:
        return self._problem if self._left < 0 else ""

    def mask(self) -> bytes:
        return b"\xff" * 16

    def forced(self) -> list[int]:
        return []

    def accept(self, token: int) -> bool:
        self._left -= 1
        return self._left >= 0

    def rollback(self, count: int) -> None:
        self._left += count


@pytest.mark.parametrize(
    ("problem", "status", "code"),
    [("too many rows", 400, "invalid_grammar"), ("", 500, "grammar_error")],
)
def test_a_constraint_that_the_library_gives_up_is_the_fault_of_its_sender(problem, status, code):
    driver = Driver(grammars=lambda text: Limited(2, problem))
    driver.submit("free", PROMPT)
    sampling = SamplingParams(max_new_tokens=9)
    tokens = array("i", PROMPT).tobytes()
    driver.receive(Generate(request="bound", tokens=tokens, sampling=sampling, grammar="regex:x"))
    driver.run()
    end = driver.ends["bound"]
    assert (end.status, end.code) == (status, code) and problem in end.text
    assert reason(driver, "free") == "length"


def test_a_failed_step_is_traced_to_the_request_that_breaks_it():
    driver = Driver(depth=2)
    driver.broken_tokens = {90}
    driver.submit("good", PROMPT, new=5)
    driver.submit("bad", [1, 2, 90], new=5)
    driver.submit("other", [3, 4], new=5)
    driver.run()
    assert driver.ends["bad"].text == "device fault"
    assert driver.outputs["good"] == continuation(PROMPT, 5)
    assert driver.outputs["other"] == continuation([3, 4], 5)


def test_with_a_token_gap_a_sampled_token_is_needed_only_after_it():
    driver = Driver(depth=3, token_gap=1)
    for i in range(3):
        driver.submit(f"r{i}", [i, i + 1], new=6)
    sampled_at = {}
    while not driver.core.is_idle:
        while (plan := driver.launch()) is not None:
            in_flight = {other.step for other in driver.flying}
            for row in plan.rows:
                since = sampled_at.get(row.slot)
                assert since not in in_flight or plan.step - since > 1
                sampled_at[row.slot] = plan.step
        if driver.flying:
            driver.complete()
    for i in range(3):
        assert driver.outputs[f"r{i}"] == continuation([i, i + 1], 6)


def test_a_full_queue_refuses_with_503():
    driver = Driver(max_queued=1)
    driver.submit("a", PROMPT)
    driver.submit("b", PROMPT)
    assert (driver.ends["b"].status, driver.ends["b"].text) == (503, "The request queue is full.")
    driver.run()


def test_requests_that_can_never_run_are_refused_with_the_numbers():
    driver = Driver(max_request_tokens=20)
    driver.submit("long", PROMPT, new=11)
    driver.submit("empty", [], new=1)
    driver.submit("a", PROMPT, new=1)
    driver.submit("a", PROMPT, new=1)
    assert "20" in driver.ends["long"].text and driver.ends["long"].status == 400
    assert "empty" in driver.ends["empty"].text
    assert "Duplicate request ID" in driver.ends["a"].text


def test_higher_priority_goes_first():
    driver = Driver(max_running=1)
    driver.submit("low", PROMPT, priority=0)
    driver.submit("high", PROMPT, priority=5)
    driver.run()
    assert list(driver.outputs) == ["high", "low"]


def test_longest_prefix_first_serves_cached_prompts_first():
    flags = ("--schedule-policy", "lpm", "--max-running-requests", "1", "--page-size", "4")
    driver = Driver(spec=asked(*flags))
    driver.submit("warm", PROMPT, new=1)
    driver.run()
    driver.submit("cold", [70, 71, 72], new=1)
    driver.submit("hot", [*PROMPT, 5], new=1)
    driver.run()
    assert list(driver.outputs) == ["warm", "hot", "cold"]


def test_the_conservative_admit_fewer_requests():
    """Neither is ever wrong: what was admitted in vain is retracted."""

    def most_running(conservativeness):
        flags = ("--schedule-conservativeness", conservativeness, "--max-total-tokens", "320")
        driver = Driver(spec=asked(*flags, "--max-running-requests", "16"))
        for number in range(16):
            driver.submit(str(number), [number, *PROMPT], new=60)
        driver.run()
        return max(len(plan.rows) for plan in driver.plans)

    assert most_running("0") > most_running("1") >= most_running("10")


def test_flushing_is_refused_while_requests_hold_pages():
    driver = Driver()
    driver.submit("a", PROMPT)
    driver.launch()
    assert not driver.core.scheduler.flush()
    driver.receive(RetractAll())
    assert not driver.core.scheduler.flush()
    driver.run()
    assert driver.outputs["a"] == continuation(PROMPT, 4)
    assert driver.ends["a"].retractions == 1
    assert driver.core.scheduler.cache.ledgers[0].cached > 0
    assert driver.core.scheduler.flush()
    assert driver.core.scheduler.cache.ledgers[0].cached == 0


def test_the_oracle_depends_on_the_whole_history():
    assert next_token([1, 2]) != next_token([2, 1])


@pytest.mark.parametrize("depth", [1, 2])
def test_a_long_prompt_never_holds_up_those_who_decode(depth):
    driver = Driver(chunk_tokens=4, depth=depth)
    driver.submit("short", [1, 2], new=30)
    driver.launch()
    driver.complete()
    driver.submit("long", PROMPT * 6, new=1, priority=1)
    driver.run()
    with_prompt = [p for p in driver.plans if any(r.count == 4 for r in p.rows)]
    assert len(with_prompt) == 15
    assert all(len(p.rows) == 2 for p in with_prompt)
    assert driver.outputs["short"] == continuation([1, 2], 30)


def test_a_request_for_an_adapter_that_is_not_loaded_is_refused_by_its_name():
    driver = Driver()
    tokens = array("i", PROMPT).tobytes()
    sampling = SamplingParams(max_new_tokens=1)
    driver.receive(Generate(request="a", tokens=tokens, sampling=sampling, adapter="poet"))
    assert driver.ends["a"].status == 404 and "'poet'" in driver.ends["a"].text


def test_one_plan_is_in_flight_when_overlap_is_switched_off() -> None:
    def most_in_flight(*flags: str) -> int:
        driver = Driver(spec=asked(*flags))
        driver.submit("a", list(range(8)), new=6)
        while driver.launch() is not None:
            pass
        return len(driver.flying)

    assert (most_in_flight("--disable-overlap-schedule"), most_in_flight()) == (1, 2)


def test_no_more_requests_run_at_once_than_allowed():
    driver = Driver(spec=asked("--max-running-requests", "2"))
    for name in "abcde":
        driver.submit(name, [ord(name), *PROMPT], new=3)
    driver.run()
    assert max(len(plan.rows) for plan in driver.plans) == 2


def test_no_more_requests_wait_than_allowed():
    driver = Driver(spec=asked("--max-running-requests", "1", "--max-queued-requests", "2"))
    driver.submit("runs", PROMPT)
    driver.step()
    for name in "abc":
        driver.submit(name, PROMPT)
    driver.run()
    assert [driver.ends[name].request for name in ("runs", "a", "b")] == ["runs", "a", "b"]
    assert driver.ends["c"].status == 503


def test_no_more_tokens_wait_than_allowed():
    driver = Driver(spec=asked("--max-running-requests", "1", "--max-queued-tokens", "8"))
    driver.submit("runs", [1, 2])
    driver.step()
    for name, length in (("a", 5), ("b", 4), ("c", 3)):
        driver.submit(name, [ord(name)] * length)
    driver.run()
    assert driver.ends["b"].status == 503
    assert [driver.ends[name].request for name in ("runs", "a", "c")] == ["runs", "a", "c"]
    driver.submit("long", [3] * 12)  # nobody waits
    driver.run()
    assert isinstance(driver.ends["long"], Finished)


def test_later_chunks_take_as_long_as_the_first():
    ratio = 1 / 4096
    driver = Driver(
        pages=1100,
        page_tokens=16,
        chunk_tokens=1024,
        max_request_tokens=17_000,
        attention_ratio=ratio,
    )
    driver.submit("a", [1] * 16384, new=1)
    driver.run()
    rows = [(r.start, r.count) for p in driver.plans for r in p.rows]
    assert sum(count for _, count in rows) == 16384
    whole = [count + ratio * count * (start + count / 2) for start, count in rows[:-1]]
    assert max(whole) < 1.1 * min(whole)
    assert rows[0] == (0, 1024) and rows[-2][1] < 400
    even = [1024 + ratio * 1024 * (start + 512) for start in range(0, 16384, 1024)]
    assert max(even) > 4 * min(even)


@pytest.mark.parametrize(
    ("flags", "shrinks"),
    [
        (("--pp", "2", "--enable-dynamic-chunking"), True),
        (("--pp", "2"), False),
        (("--enable-dynamic-chunking",), False),
        (("--pp", "2", "--enable-dynamic-chunking", "--chunked-prefill-size", "-1"), False),
    ],
)
def test_chunks_shrink_on_demand_with_stages_alone(flags, shrinks):
    assert (asked(*flags).limits.attention_ratio > 0) == shrinks


@pytest.mark.parametrize("interval", [1, 4])
def test_a_decode_server_looks_for_prompts_after_so_many_steps(interval):
    """While others run; the pages of a prompt that was found are fetched then."""
    flags = ("--disaggregation-mode", "decode", "--disaggregation-decode-polling-interval")
    driver = Driver(spec=asked(*flags, str(interval)))
    driver.submit("running", [1, 2, 3], new=40)
    driver.step()
    generate = Generate(
        request="sent",
        tokens=array("i", range(40)).tobytes(),
        sampling=SamplingParams(max_new_tokens=3),
        transfer_id=bytes(16),
        prefill_address="127.0.0.1:1",
    )
    driver.receive(generate)
    driver.receive(TransferFound(bytes(16), 32))
    ops, steps = driver.core.scheduler.disaggregation.ops, 0
    while not any(isinstance(op, ReceiveTransfer) for op in ops):
        driver.step()
        steps += 1
    assert steps == {1: 1, 4: 3}[interval]  # a step came before
