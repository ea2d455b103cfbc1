"""What several decode steps in one plan do not go with."""

from dataclasses import replace

import pytest

from banyan.base.errors import ConfigError
from banyan.config.cli import parse
from banyan.config.defaults import settle
from banyan.config.env import Environment
from banyan.config.resolve import resolve
from banyan.platform.cpu import CpuPlatform
from tests.support.configs import MODEL_CONFIG

MULTI_STEP = ("--num-continuous-decode-steps", "4")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("--speculative-algorithm NGRAM", "cannot be combined with --speculative-algorithm"),
        ("--tp-size 2", "cannot be combined with several ranks"),
        ("--pp-size 2", "cannot be combined with several ranks"),
        ("--disaggregation-mode prefill", "cannot be combined with --disaggregation-mode"),
        ("--enable-eplb", "cannot be combined with .*--enable-eplb"),
    ],
)
def test_what_bursts_do_not_go_with_is_refused_by_name(words: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        resolve(parse([*MULTI_STEP, *words.split()], Environment()), MODEL_CONFIG, Environment())


@pytest.mark.parametrize(
    ("words", "multi_step"),
    [("", 8), ("--speculative-algorithm NGRAM", 1), ("--tp-size 2", 1), (" ".join(MULTI_STEP), 4)],
)
def test_where_it_is_left_open_there_are_as_many_as_go(words: str, multi_step: int) -> None:
    config = resolve(parse(words.split(), Environment()), MODEL_CONFIG, Environment())
    assert settle(config, CpuPlatform().defaults(MODEL_CONFIG))[0].schedule.multi_step == multi_step


def test_devices_that_say_nothing_plan_step_by_step() -> None:
    config = resolve(parse([], Environment()), MODEL_CONFIG, Environment())
    assert (
        settle(config, replace(CpuPlatform().defaults(MODEL_CONFIG), multi_step=1))[
            0
        ].schedule.multi_step
        == 1
    )


def test_replicas_that_share_nothing_may_burst() -> None:
    config = parse([*MULTI_STEP, "--dp-size", "2"], Environment())
    assert resolve(config, MODEL_CONFIG, Environment()).schedule.multi_step == 4
