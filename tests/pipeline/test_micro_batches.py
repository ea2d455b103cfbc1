"""Steps that follow each other through stages: how many there are, and which requests they take."""

from banyan.messages.requests import Abort
from tests.scheduler.driver import Driver, asked, continuation

STAGED = ("--pipeline-parallel-size", "2")


def launched(driver: Driver) -> int:
    """How many steps are in flight when no more may be."""
    while driver.launch() is not None:
        pass
    return len(driver.flying)


def test_each_stage_has_a_step_and_some_wait_behind() -> None:
    def most_in_flight(*flags: str) -> int:
        driver = Driver(spec=asked("--chunked-prefill-size", "16", *flags))
        for name in "abcdefgh":
            driver.submit(name, [ord(name), *range(63)], new=6)
        return launched(driver)

    assert most_in_flight(*STAGED) == 3
    assert most_in_flight(*STAGED, "--pp-async-batch-depth", "0") == 2
    assert most_in_flight(*STAGED, "--pp-async-batch-depth", "3") == 5
    assert most_in_flight(*STAGED, "--disable-overlap-schedule") == 1


def test_pieces_of_one_prompt_follow_each_other_through_the_stages() -> None:
    driver = Driver(spec=asked(*STAGED, "--chunked-prefill-size", "16"))
    driver.submit("a", list(range(48)), new=2)
    assert launched(driver) == 3
    assert [[row.start for row in plan.rows] for plan in driver.plans] == [[0], [16], [32]]


def test_a_request_is_in_one_step_at_a_time_and_the_stages_share_them_evenly() -> None:
    driver = Driver(spec=asked(*STAGED, "--chunked-prefill-size", "512"))
    names = [f"r{number}" for number in range(22)]
    prompts = {name: [number, *range(9)] for number, name in enumerate(names)}
    for name, prompt in prompts.items():
        driver.submit(name, prompt, new=12)
    driver.run()
    for name, prompt in prompts.items():
        assert driver.outputs[name] == continuation(prompt, 12)
    slots = [{row.slot for row in plan.rows} for plan in driver.plans[1:]]
    assert all(not now & after for now, after in zip(slots, slots[1:], strict=False))
    assert sorted(map(len, slots[2:10])) == [11] * 8


def test_a_step_has_no_more_requests_than_a_micro_batch() -> None:
    driver = Driver(spec=asked(*STAGED, "--pp-max-micro-batch-size", "3"))
    for name in "abcdefgh":
        driver.submit(name, [ord(name) % 97, *range(9)], new=8)
    driver.run()
    assert max(len(plan.rows) for plan in driver.plans) == 3
    assert max(slot for plan in driver.plans for slot in (row.slot for row in plan.rows)) == 6


def test_a_slot_is_not_left_while_a_stage_may_still_run_a_row_of_it() -> None:
    driver = Driver(spec=asked(*STAGED, "--max-running-requests", "1"))
    driver.submit("a", list(range(8)), new=6)
    driver.launch()
    driver.receive(Abort("a"))
    driver.submit("b", list(range(8, 16)), new=1)
    assert driver.launch() is None
    driver.complete()
    plan = driver.launch()
    assert plan is not None
    assert (plan.leaves, [join.slot for join in plan.joins]) == ([1], [1])
