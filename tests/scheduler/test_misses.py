"""Every answer tells why no more of its prompt came from the prefix cache."""

from array import array

import pytest

from banyan.engine.core_spec import CoreSpec
from banyan.kv_cache import misses
from banyan.kv_cache.sizing import FULL, STATE, WINDOW, CacheGroup
from banyan.messages.requests import Generate
from banyan.messages.sampling_params import SamplingParams
from banyan.scheduler.budget import SchedulerLimits
from tests.scheduler.driver import Driver

PROMPT = list(range(20, 32))


def ask(driver: Driver, name: str, prompt: list[int], **fields: object) -> tuple[int, str]:
    """Cached tokens of a request, and why there are no more."""
    sampling = SamplingParams(max_new_tokens=2, ignore_eos=True)
    tokens = array("i", prompt).tobytes()
    driver.receive(Generate(request=name, tokens=tokens, sampling=sampling, **fields))
    driver.run()
    end = driver.ends[name]
    return end.cached_tokens, end.cache_miss


def test_what_nobody_has_sent_and_what_all_comes_from_the_cache() -> None:
    driver = Driver()
    assert ask(driver, "first", PROMPT) == (0, misses.UNSEEN)
    assert ask(driver, "same", PROMPT) == (11, "")
    assert ask(driver, "other end", [*PROMPT[:9], 1, 2, 3]) == (9, misses.UNSEEN)
    assert ask(driver, "one token", [5]) == (0, "")


def test_what_was_evicted_is_distinguished_from_what_was_never_there() -> None:
    driver = Driver(pages=9)
    ask(driver, "first", PROMPT)
    ask(driver, "large", list(range(40, 68)))
    cached, why = ask(driver, "first again", PROMPT)
    assert cached < 11 and why == misses.EVICTED
    assert ask(driver, "now it is there", PROMPT) == (11, "")
    ask(driver, "large again", list(range(40, 68)))
    assert ask(driver, "another", [90, 91, 92, 93, 94])[1] == misses.UNSEEN


def test_nobody_learns_what_another_namespace_had() -> None:
    driver = Driver(pages=9)
    ask(driver, "mine", PROMPT, namespace=b"me")
    assert ask(driver, "there", PROMPT, namespace=b"you") == (0, misses.UNSEEN)
    ask(driver, "large", list(range(40, 68)))
    assert ask(driver, "gone", PROMPT, namespace=b"they") == (0, misses.UNSEEN)


def test_positions_that_are_asked_for_are_computed() -> None:
    driver = Driver()
    ask(driver, "first", PROMPT)
    assert ask(driver, "scored", PROMPT, score_from=5) == (4, misses.ASKED)


@pytest.mark.parametrize(
    ("groups", "share", "why"),
    [
        ((CacheGroup(FULL, 4, 40),), False, misses.OFF),
        ((CacheGroup(FULL, 4, 40), CacheGroup(STATE, 4, 6)), True, misses.APART),
        ((CacheGroup(FULL, 4, 40), CacheGroup(WINDOW, 4, 40, 4)), True, ""),
    ],
)
def test_the_cache_itself_may_be_why(groups: tuple[CacheGroup, ...], share: bool, why: str) -> None:
    limits = SchedulerLimits(max_running=4, chunk_tokens=64, max_request_tokens=200)
    driver = Driver(spec=CoreSpec(groups=groups, limits=limits, share=share))
    ask(driver, "first", PROMPT)
    assert ask(driver, "again", PROMPT)[1] == why


def test_a_part_of_a_page_is_not_shared_next_to_states() -> None:
    groups = (CacheGroup(FULL, 4, 40), CacheGroup(STATE, 4, 6))
    limits = SchedulerLimits(max_running=4, chunk_tokens=64, max_request_tokens=200)
    driver = Driver(spec=CoreSpec(groups=groups, limits=limits))
    ask(driver, "first", PROMPT)
    assert ask(driver, "part", [*PROMPT[:2], 1, 2, 3])[1] == misses.PAGE


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(misses, "_MOST", 6)
    driver = Driver(pages=9)
    for first in range(12):
        ask(driver, str(first), [first] * 20)
    known = driver.core.scheduler.cache.misses
    assert len(known._order) == 6 and sum(map(len, known._gone.values())) <= 6
    assert ask(driver, "long ago", [0] * 20) == (0, misses.UNSEEN)
    assert ask(driver, "of late", [10] * 20)[1] == misses.EVICTED
