"""Prompts whose pages stay: under pressure, for their time, and no more of them than may be."""

from array import array

from banyan.kv_cache.sizing import FULL, STATE, WINDOW, CacheGroup
from banyan.messages.events import Failed, Finished
from banyan.messages.requests import Generate, Unpin
from banyan.messages.sampling_params import SamplingParams
from tests.scheduler.driver import Driver


def pin(
    driver: Driver, name: str, prompt: list[int], seconds: float = 100.0, priority: int = 0
) -> None:
    tokens, params = array("i", prompt).tobytes(), SamplingParams(max_new_tokens=1)
    kept = {"pin_s": seconds, "pin_priority": priority}
    driver.receive(Generate(request=name, tokens=tokens, sampling=params, **kept))
    driver.run()


def press(driver: Driver) -> None:
    """Requests enough to evict whatever may go."""
    for number in range(8):
        driver.submit(f"p{len(driver.ends)}.{number}", [50 + number] * 30, new=8)
    driver.run()


def cached(driver: Driver, prompt: list[int]) -> int:
    name = f"again{len(driver.ends)}"
    driver.submit(name, prompt, new=1)
    driver.run()
    return driver.ends[name].cached_tokens


def test_a_pinned_prompt_outlives_what_evicts_everything_else() -> None:
    driver, prompt = Driver(pages=40), list(range(20, 40))
    pin(driver, "kept", prompt)
    driver.submit("not kept", [5, *prompt], new=1)
    driver.run()
    press(driver)
    assert driver.core.stats(0.0).pinned_pages == 5
    assert cached(driver, [5, *prompt]) == 0
    assert cached(driver, prompt) == 19
    driver.receive(Unpin("kept"))
    press(driver)
    assert driver.core.stats(0.0).pinned_pages == 0 and cached(driver, prompt) == 0


def test_a_pin_ends_with_its_time() -> None:
    driver, prompt = Driver(pages=40), list(range(20, 40))
    pin(driver, "kept", prompt, seconds=5.0)
    driver.now = 4.0
    press(driver)
    assert cached(driver, prompt) == 19
    driver.now = 6.0
    press(driver)
    assert cached(driver, prompt) == 0


def test_flushing_keeps_what_is_pinned_unless_it_is_let_go() -> None:
    driver, prompt = Driver(), list(range(20, 40))
    pin(driver, "kept", prompt)
    assert driver.core.flush(0.0) and cached(driver, prompt) >= 16
    driver.receive(Unpin())
    assert driver.core.flush(0.0) and cached(driver, prompt) == 0


def test_no_more_than_a_quarter_of_the_pages_is_pinned() -> None:
    driver = Driver(pages=41)
    pin(driver, "kept", list(range(20, 48)))
    pin(driver, "again", list(range(20, 48)))
    pin(driver, "too much", list(range(30, 58)))
    assert isinstance(driver.ends["again"], Finished), "the same pages count once"
    assert isinstance(driver.ends["too much"], Failed)
    assert "14 pages would be, and 10 may" in driver.ends["too much"].text
    pin(driver, "short", [1, 2, 3])
    assert "no whole page" in driver.ends["short"].text
    driver.receive(Unpin("kept"))
    assert driver.core.stats(0.0).pinned_pages == 7, "the other still holds them"


def test_a_request_that_needs_the_whole_cache_runs_all_the_same() -> None:
    driver = Driver(pages=21, max_request_tokens=80)
    pin(driver, "kept", list(range(20, 40)))
    driver.submit("large", [7] * 60, new=20)
    driver.run()
    assert isinstance(driver.ends["large"], Finished)
    assert driver.core.stats(0.0).pinned_pages == 0


def test_the_lowest_priority_gives_way_first_and_then_the_earliest_end() -> None:
    """22 pages of 25 are wanted, and three prompts of two pages each are pinned."""
    driver = Driver(pages=26, max_request_tokens=88)
    pins = driver.core.scheduler.cache.pins
    for name, seconds, priority in (("late", 90.0, 0), ("early", 50.0, 0), ("high", 9.0, 7)):
        pin(driver, name, [len(name) * 9 + at for at in range(8)], seconds, priority)
    assert [one.name for one in pins.alive(0.0)] == [
        "late",
        "early",
        "high",
    ]
    driver.submit("large", [7] * 72, new=16)
    driver.run()
    assert isinstance(driver.ends["large"], Finished)
    assert [one.name for one in pins.alive(0.0)] == ["late", "high"]


def test_prompts_with_windows_are_pinned_where_they_can_be_taken_up() -> None:
    driver, prompt = Driver(), list(range(20, 60))
    groups = (CacheGroup(FULL, 4, 60), CacheGroup(WINDOW, 4, 60, window=6))
    driver.spec = type(driver.spec)(groups=groups, limits=driver.spec.limits)
    driver.core = driver.spec.build()
    pin(driver, "kept", prompt)
    press(driver)
    press(driver)
    assert driver.core.stats(0.0).pinned_pages == 12
    assert cached(driver, [*prompt, 3]) >= 40


def test_a_window_that_has_gone_on_is_not_pinned_in_vain() -> None:
    driver, prompt = Driver(), list(range(20, 60))
    groups = (CacheGroup(FULL, 4, 60), CacheGroup(WINDOW, 4, 60, window=6))
    driver.spec = type(driver.spec)(groups=groups, limits=driver.spec.limits)
    driver.core = driver.spec.build()
    tokens, params = array("i", prompt).tobytes(), SamplingParams(max_new_tokens=30)
    driver.receive(Generate(request="long", tokens=tokens, sampling=params, pin_s=9.0))
    driver.run()
    cache = driver.core.scheduler.cache
    is_usable = cache.probe(b"", tokens, 40).tokens == 40
    assert isinstance(driver.ends["long"], Finished if is_usable else Failed)


def test_with_a_state_a_pin_ends_where_one_was_kept() -> None:
    driver, prompt = Driver(), list(range(20, 33))
    groups = (CacheGroup(FULL, 4, 60), CacheGroup(STATE, 4, 40))
    driver.spec = type(driver.spec)(groups=groups, limits=driver.spec.limits)
    driver.core = driver.spec.build()
    pin(driver, "kept", prompt)
    (one,) = driver.core.scheduler.cache.pins.alive(0.0)
    assert one.tokens == 12 and [len(nodes) for nodes in one.nodes] == [3, 1]
    press(driver)
    press(driver)
    assert cached(driver, [*prompt[:12], 1, 2]) == 12
