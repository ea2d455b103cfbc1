"""Policies of eviction, as flags ask for them: what is still in the cache when room was needed."""

from array import array

import pytest

from tests.scheduler.driver import Driver, asked

OFTEN, EARLY, LATE = [1] * 17, [2] * 17, [3] * 17
USES = (OFTEN, EARLY, OFTEN, OFTEN, LATE)


def kept(driver: Driver, *prompts: list[int]) -> list[int]:
    cache = driver.core.scheduler.cache
    return [cache.probe(b"", array("i", p).tobytes(), 16).tokens for p in prompts]


@pytest.mark.parametrize(
    ("policy", "gone"),
    [
        ("lru", EARLY),
        ("mru", LATE),
        ("lfu", EARLY),
        ("slru", EARLY),
        ("fifo", OFTEN),
        ("filo", LATE),
    ],
)
def test_the_eviction_policy_decides_what_stays_in_the_cache(policy, gone):
    """Three prompts of a page each: one was used first, and often; then another makes room."""
    flags = ("--max-total-tokens", "80", "--radix-eviction-policy", policy)
    driver = Driver(spec=asked(*flags))
    for number, prompt in enumerate((*USES, [4] * 17)):
        driver.submit(str(number), prompt, new=1)
        driver.run()
    prompts = (OFTEN, EARLY, LATE)
    assert kept(driver, *prompts) == [0 if prompt is gone else 16 for prompt in prompts]


@pytest.mark.parametrize(
    ("numbers", "stays"), [("", [16, 0]), ('{"protected_threshold": 3}', [0, 16])]
)
def test_the_numbers_of_a_policy_decide_what_stays_in_the_cache(numbers, stays):
    """A prompt that was hit twice, and one that is newer."""
    given = ("--radix-eviction-policy-config", numbers) if numbers else ()
    flags = ("--max-total-tokens", "64", "--radix-eviction-policy", "slru", *given)
    driver = Driver(spec=asked(*flags))
    for number, prompt in enumerate((OFTEN, OFTEN, OFTEN, LATE, [4] * 33)):
        driver.submit(str(number), prompt, new=1)
        driver.run()
    assert kept(driver, OFTEN, LATE) == stays


@pytest.mark.parametrize(("spare", "stays"), [(17, [16, 32]), (1, [0, 48])])
def test_a_long_prompt_lends_what_it_can_compute_again(spare, stays):
    """An older prompt of two pages, and a newer one of three; another takes two of the five."""
    numbers = f'{{"threshold": {8 + spare}, "next_prompt_estimate": 8}}'
    flags = ("--max-total-tokens", "96", "--radix-eviction-policy", "tlru")
    driver = Driver(spec=asked(*flags, "--radix-eviction-policy-config", numbers))
    short, long = [1] * 32, [2] * 48
    for number, prompt in enumerate((short, long, [4] * 48)):
        driver.submit(str(number), prompt, new=1)
        driver.run()
    cache = driver.core.scheduler.cache
    found = [cache.probe(b"", array("i", p).tobytes(), len(p)).tokens for p in (short, long)]
    assert found == stays


@pytest.mark.parametrize(("policy", "stays"), [("lru", [0, 16]), ("priority", [16, 0])])
def test_prefixes_of_important_requests_stay_when_priorities_decide(policy, stays):
    flags = ("--enable-priority-scheduling", "--max-total-tokens", "64")
    driver = Driver(spec=asked(*flags, "--radix-eviction-policy", policy))
    for number, (prompt, priority) in enumerate(((OFTEN, 5), (LATE, 0), ([4] * 33, 0))):
        driver.submit(str(number), prompt, new=1, priority=priority)
        driver.run()
    assert kept(driver, OFTEN, LATE) == stays
