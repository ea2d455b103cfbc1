"""Hidden states reach the front once per position, in order, whatever happens in between."""

from array import array

import msgspec
import pytest

from banyan.messages.events import Tokens
from banyan.messages.plan import HIDDEN
from banyan.messages.requests import Generate, RetractAll
from banyan.messages.sampling_params import SamplingParams
from tests.scheduler.driver import Driver, continuation

PROMPT = list(range(21))


class HiddenDriver(Driver):
    """The state of a position is its number, so that what arrives is recognised."""

    def __init__(self, **more) -> None:
        self.reported: dict[str, list[float]] = {}
        super().__init__(**more)

    def ask(self, name: str, hidden_from: int, new: int = 6) -> None:
        tokens, sampling = array("i", PROMPT).tobytes(), SamplingParams(max_new_tokens=new)
        self.receive(
            Generate(request=name, tokens=tokens, sampling=sampling, hidden_from=hidden_from)
        )

    def _execute(self, plan):
        result = super()._execute(plan)
        states = [
            array("f", range(max(row.start, row.hidden_from), row.start + row.count)).tobytes()
            if row.want & HIDDEN
            else b""
            for row in plan.rows
        ]
        return result if result.error else msgspec.structs.replace(result, hidden=states)

    def _hear(self, events=None) -> None:
        events = self.core.take_events() if events is None else events
        for event in events:
            if isinstance(event, Tokens) and event.hidden:
                states = array("f", event.hidden).tolist()
                assert states[0] == event.hidden_first
                self.reported.setdefault(event.request, []).extend(states)
        super()._hear(events)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("chunk", [4, 64])
@pytest.mark.parametrize("first", [0, 9, len(PROMPT) - 1])
def test_every_position_from_the_first_wanted_is_reported_once(depth, chunk, first):
    driver = HiddenDriver(depth=depth, chunk_tokens=chunk)
    driver.submit("other", PROMPT[:13], new=9)
    driver.run()  # its prefix is cached
    driver.ask("a", first)
    driver.ask("b", first, new=0)
    driver.run()
    assert driver.outputs["a"] == continuation(PROMPT, 6)
    assert driver.reported["a"] == list(range(first, len(PROMPT) + 5)), "all but the last token's"
    assert driver.reported["b"] == list(range(first, len(PROMPT)))
    assert "other" not in driver.reported


def test_a_prefix_is_taken_from_the_cache_below_the_first_wanted_position_only():
    driver = HiddenDriver()
    driver.submit("other", PROMPT, new=1)
    driver.run()
    for name, first in (("all", 0), ("some", 9), ("last", len(PROMPT) - 1)):
        driver.ask(name, first)
    driver.run()
    cached = {name: driver.ends[name].cached_tokens for name in ("all", "some", "last")}
    assert cached == {"all": 0, "some": 8, "last": 20}


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("steps", range(1, 9))
def test_a_retraction_repeats_and_skips_no_state(depth, steps):
    driver = HiddenDriver(depth=depth, chunk_tokens=8)
    driver.ask("a", 0)
    for _ in range(steps):
        driver.launch()
        if driver.flying and len(driver.flying) == depth:
            driver.complete()
    driver.receive(RetractAll())
    driver.run()
    assert driver.outputs["a"] == continuation(PROMPT, 6)
    assert driver.reported["a"] == list(range(len(PROMPT) + 5))


def test_a_request_for_hidden_states_verifies_no_drafts():
    driver = HiddenDriver(drafts=2)
    driver.ask("a", 0)
    driver.run()
    assert driver.reported["a"] == list(range(len(PROMPT) + 5))
    assert not any(row.drafts for plan in driver.plans for row in plan.rows)
