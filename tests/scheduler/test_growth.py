"""What running requests are expected to add, under the variables that say so."""

import pytest

from banyan.config.cli import parse
from banyan.config.defaults import settle
from banyan.config.env import Environment, read_environment
from banyan.config.resolve import resolve
from banyan.engine.core_spec import core_spec
from banyan.kv_cache.sizing import FULL, GroupBytes, plan_memory
from banyan.messages.requests import Generate
from banyan.messages.sampling_params import SamplingParams
from banyan.scheduler.budget import NewTokenRatio
from banyan.scheduler.request import Request
from tests.scheduler.driver import TASTE, Driver
from tests.support.configs import MODEL_CONFIG


def spec_under(*flags, **variables):
    named = {f"SGLANG_{name}": text for name, text in variables.items()}
    asked = resolve(parse(flags, read_environment(named)), MODEL_CONFIG, Environment())
    config, _ = settle(asked, TASTE)
    memory = plan_memory(
        config.cache,
        config.schedule,
        context_length=MODEL_CONFIG.context_length,
        groups=(GroupBytes(FULL, 1 << 10),),
        process_bytes=0,
        total_bytes=1 << 30,
        free_bytes=1 << 30,
    )
    return core_spec(config, MODEL_CONFIG, memory)


def ratio_under(*flags, **variables):
    limits = spec_under(*flags, **variables).limits
    return NewTokenRatio(limits.conservativeness, limits.growth)


def request(new, **sampling):
    params = SamplingParams(max_new_tokens=new, **sampling)
    return Request(Generate(request="r", tokens=b"\0" * 4, sampling=params), None, 0, 0.0, 1)


def after(steps, ratio):
    for _ in range(steps):
        ratio.decay()
    return ratio.value


def test_the_first_expectation_is_the_one_given():
    assert ratio_under().value == pytest.approx(0.7)
    assert ratio_under(INIT_NEW_TOKEN_RATIO="0.25").value == pytest.approx(0.25)
    ratio = ratio_under("--schedule-conservativeness", "2", INIT_NEW_TOKEN_RATIO="0.25")
    assert ratio.value == pytest.approx(0.5)


def test_the_expectation_falls_to_the_floor_given():
    assert after(10_000, ratio_under()) == pytest.approx(0.7 * 0.14)
    ratio = ratio_under(MIN_NEW_TOKEN_RATIO_FACTOR="0.5")
    assert after(10_000, ratio) == pytest.approx(0.35)


def test_the_expectation_falls_in_the_steps_given():
    assert after(10, ratio_under()) > 0.68
    ratio = ratio_under(NEW_TOKEN_RATIO_DECAY_STEPS="10")
    assert after(9, ratio) > 0.7 * 0.14
    assert after(1, ratio) == pytest.approx(0.7 * 0.14)


def test_a_retraction_makes_the_room_given():
    ratio, roomy = ratio_under(), ratio_under(RETRACT_DECODE_STEPS="60")
    for each in (ratio, roomy):
        each.on_retraction([request(99), request(100)])
    assert (ratio.value, roomy.value) == (pytest.approx(40 / 200), pytest.approx(120 / 200))


def test_longer_outputs_are_counted_as_those_given():
    ratio = ratio_under(INIT_NEW_TOKEN_RATIO="1", CLIP_MAX_NEW_TOKENS_ESTIMATION="50")
    assert (ratio.expected_tokens(request(20)), ratio.expected_tokens(request(2000))) == (20, 50)
    assert ratio_under(INIT_NEW_TOKEN_RATIO="1").expected_tokens(request(2000)) == 2000


def test_a_lower_expectation_admits_more_requests():
    def most_running(**variables):
        flags = ("--max-total-tokens", "320", "--max-running-requests", "16")
        driver = Driver(spec=spec_under(*flags, **variables))
        for number in range(16):
            driver.submit(str(number), [number, *range(20, 28)], new=60)
        driver.run()
        return max(len(plan.rows) for plan in driver.plans)

    assert most_running(INIT_NEW_TOKEN_RATIO="0") > most_running(INIT_NEW_TOKEN_RATIO="1")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("INIT_NEW_TOKEN_RATIO", "1.5"),
        ("NEW_TOKEN_RATIO_DECAY_STEPS", "0"),
        ("TIMEOUT_KEEP_ALIVE", "x"),
    ],
)
def test_a_value_that_is_not_legal_ends_the_start_by_name(name, text):
    with pytest.raises(Exception, match=f"SGLANG_{name} must be"):
        spec_under(**{name: text})


def test_a_decode_server_keeps_the_tokens_given():
    flags = ("--disaggregation-mode", "decode", "--num-reserved-decode-tokens", "80")
    ratio = ratio_under(*flags, INIT_NEW_TOKEN_RATIO="0.25")
    assert [ratio.expected_tokens(request(new)) for new in (40, 100, 2000)] == [40, 80, 500]
    ratio = ratio_under(*flags[2:], INIT_NEW_TOKEN_RATIO="0.25")
    assert ratio.expected_tokens(request(100)) == 25
