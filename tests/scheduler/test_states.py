"""Requests that take up a prefix where a state was kept."""

from banyan.kv_cache.sizing import FULL, STATE, CacheGroup
from banyan.messages.events import Failed
from tests.scheduler.driver import Driver, continuation

PROMPT = list(range(20, 31))


class Stateful(Driver):
    """With a group of states."""

    def __init__(self, *, has_pages: bool = True) -> None:
        super().__init__()
        pages = (CacheGroup(FULL, 4, 50),) if has_pages else ()
        groups = (*pages, CacheGroup(STATE, 4, 20))
        self.spec = type(self.spec)(groups=groups, limits=self.spec.limits, order="fcfs")
        self.core = self.spec.build()


def restored(driver: Driver) -> list[int]:
    """Where the rows that begin on a copied state start, plan by plan."""
    return [
        plan.rows[copy.row].start
        for plan in driver.plans
        for copy in plan.copies
        if copy.when == "before"
    ]


def test_a_prompt_goes_on_where_its_last_whole_piece_ended():
    driver = Stateful()
    for name in ("first", "second"):
        driver.submit(name, PROMPT)
        driver.run()
    assert restored(driver) == [8]
    assert driver.outputs["first"] == driver.outputs["second"] == continuation(PROMPT, 4)


def test_a_row_that_fails_on_a_copied_state_is_computed_from_the_start_and_then_fails():
    driver = Stateful()
    driver.submit("first", PROMPT)
    driver.run()
    driver.submit("second", PROMPT)
    driver.launch()
    driver.complete(failed_row=0)
    assert "second" not in driver.ends, "the copied state may have been wrong"

    driver.launch()
    assert (driver.plans[-1].rows[0].start, restored(driver)) == (0, [8])
    driver.complete(failed_row=0)

    assert isinstance(driver.ends["second"], Failed)
    driver.run()


def test_a_state_is_kept_where_prompts_part():
    driver = Stateful()
    shared = list(range(40, 52))
    prompts = [[*shared, *range(k, k + 6)] for k in (1, 11, 21)]
    for k, prompt in enumerate(prompts):
        driver.submit(str(k), prompt)
        driver.run()
    assert restored(driver) == [12], "the second prompt has left a state where it left the first"
    assert [driver.outputs[str(k)] for k in range(3)] == [continuation(p, 4) for p in prompts]


def test_states_alone_leave_no_nodes_that_hold_none():
    driver = Stateful(has_pages=False)
    for name, prompt in (("short", PROMPT[:6]), ("long", PROMPT), ("again", PROMPT)):
        driver.submit(name, prompt, new=7)
        driver.run()
        assert driver.outputs[name] == continuation(prompt, 7)
    assert restored(driver)[-1] == 8
    tree = driver.core.scheduler.cache.tree
    assert all(any(node.pages) or node.children for node in tree.nodes())
