"""What several decode steps in one plan do not go with."""

import pytest

from banyan.base.errors import ConfigError
from banyan.config.cli import parse
from banyan.config.env import Environment
from banyan.config.resolve import resolve
from tests.config.test_resolve import CARD

BURST = ("--num-continuous-decode-steps", "4")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("--speculative-algorithm NGRAM", "--speculative-algorithm do not go together"),
        ("--tp-size 2", "several ranks do not go together"),
        ("--pp-size 2", "several ranks do not go together"),
        ("--disaggregation-mode prefill", "--disaggregation-mode do not go together"),
    ],
)
def test_what_bursts_do_not_go_with_is_refused_by_name(words: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        resolve(parse([*BURST, *words.split()], Environment()), CARD, Environment())


def test_replicas_that_share_nothing_may_burst() -> None:
    config = parse([*BURST, "--dp-size", "2"], Environment())
    assert resolve(config, CARD, Environment()).schedule.burst == 4
